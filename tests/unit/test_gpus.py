"""GPUs that this process may use, and a torch that cannot use them: refused, not trained on CPU."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from copus_ext.commands.main import module_of, names
from copus_ext.launch import supervisor
from copus_ext.launch.options import read_options
from megatron.trainer.common import gpus
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.gpus import check_torch_build, visible_gpus
from tests.helpers.launch import ROOT
from tests.helpers.of_extras import needs_extra

GPUS = "CUDA_VISIBLE_DEVICES"
FIX = "COPUS_TORCH=cuda bash scripts/setup_env.sh run"


@pytest.fixture
def cpu_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, and a torch that cannot use them."""
    monkeypatch.setenv(GPUS, "0,1")
    monkeypatch.setattr(gpus, "torch_uses_gpus", lambda: False)
    monkeypatch.setattr(gpus, "_has_gpu_nodes", lambda: True)


def test_visible_gpus_are_counted_as_cuda_does() -> None:
    listed = {"": 0, "0": 1, "0,1,2,3": 4, "-1": 0, "0,-1,1": 1, "GPU-a,GPU-b": 2, "NoDevFiles": 0}
    for text, number in listed.items():
        assert visible_gpus({GPUS: text}) == number, text


@pytest.mark.parametrize(
    ("text", "uses_gpus"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None", False),
        ("cuda = '13.0'\nhip = None", True),
        ("cuda = None\nhip = '7.0'", True),
        ("cuda", True),  # whoever built it knows
        (None, True),
    ],
)
def test_torch_says_what_it_was_built_for(
    text: str | None, uses_gpus: bool, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "version.py").write_text(f"from typing import Optional\n{text}\n")
    assert gpus.build_uses_gpus(tmp_path) == uses_gpus


def test_the_installed_torch_is_read_without_import() -> None:
    assert gpus.torch_uses_gpus() == bool(torch.version.cuda or torch.version.hip)


@pytest.mark.usefixtures("cpu_torch")
def test_only_a_cpu_run_goes_on_with_a_cpu_build_beside_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for device in ("auto", "cuda"):
        with pytest.raises(UsageError, match=r"2 GPUs .* --device cpu") as caught:
            check_torch_build(device)
        assert FIX in str(caught.value) and "\n" not in str(caught.value)
    check_torch_build("cpu")
    check_torch_build("auto", {GPUS: ""})
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(gpus, "_has_gpu_nodes", lambda: False)
        check_torch_build("auto")


@pytest.mark.usefixtures("cpu_torch")
def test_a_driver_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpus, "torch_uses_gpus", lambda: True)
    (tmp_path / "version").write_text("535.129.03\n")
    assert gpus.driver_version(tmp_path / "version") == "535.129.03"
    assert gpus.driver_version(tmp_path / "none") is None
    for driver, named in (("535.129.03", "driver 535.129.03 is too old"), (None, "no driver")):
        monkeypatch.setattr(gpus, "driver_version", lambda driver=driver: driver)
        for device in ("auto", "cuda"):
            with monkeypatch.context() as here:
                here.setattr(torch.cuda, "is_available", lambda: False)
                with pytest.raises(UsageError, match=rf"2 GPUs .*{named}.* --device cpu") as caught:
                    check_torch_build(device)
            assert "\n" not in str(caught.value)
    check_torch_build("cpu", found=0)
    check_torch_build("auto", {GPUS: ""}, found=0)
    check_torch_build("auto", found=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_torch_build("auto")
    # A supervisor does not import torch, and leaves it to the ranks.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delitem(sys.modules, "torch")
    check_torch_build("auto")


@pytest.mark.usefixtures("cpu_torch")
@pytest.mark.parametrize("is_cpu_run", [False, True])
@pytest.mark.parametrize(
    ("name", "words", "said_later"),
    [
        ("pretrain", [], "--num-layers is required"),
        pytest.param(
            *("profile-layouts", ["--store", "times.jsonl", "--"], "--num-layers is required"),
            marks=needs_extra("profile_layouts"),
        ),
        pytest.param(
            *("generate", ["--prompt", "a", "--load", "."], "--load . holds no checkpoint"),
            marks=needs_extra("generate"),
        ),
    ],
)
def test_a_command_says_it_before_anything_else(
    name: str,
    words: list[str],
    said_later: str,
    is_cpu_run: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if name not in names():
        pytest.skip("a command of an extra that is not there")
    command: Any = importlib.import_module(module_of(name))
    monkeypatch.chdir(tmp_path)
    device = ["--device", "cpu"] if is_cpu_run else []
    assert command.main([*words, *device]) == 2
    said = capsys.readouterr().err
    assert (said_later in said, FIX in said) == (is_cpu_run, not is_cpu_run), said


@pytest.mark.usefixtures("cpu_torch")
def test_the_supervisor_says_it_once_and_starts_no_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--", str(ROOT / "pretrain_gpt.py"), "--save", str(tmp_path / "s")]
    assert supervisor.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert FIX in line and list(tmp_path.iterdir()) == []
    on_cpu = read_options([*words, "--device=cpu"])
    assert (on_cpu.nproc_per_node, on_cpu.has_gpu) == (2, False)
    (tmp_path / "other.py").touch()
    other = read_options(["--", str(tmp_path / "other.py")])
    assert other.has_gpu, "a program of the user's may want anything"
