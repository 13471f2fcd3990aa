"""Without a C compiler, or Python's header, a run on GPUs does without torch's, and says so."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from megatron.trainer.resilience.env_checks import lacking_for_triton
from tests.helpers.launch import ROOT

START = """
import logging, sys, sysconfig, torch
logging.basicConfig()
torch.cuda.is_available = lambda: True
paths = sysconfig.get_paths
sysconfig.get_paths = lambda *a, **b: {**paths(*a, **b), "include": sys.argv[1]}
from megatron.trainer.resilience.env_checks import check_environment
check_environment()
from megatron.core.jit import jit_fuser
print(jit_fuser is torch.compile)
"""


def test_a_compiler_is_looked_for_as_triton_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    env = {"PATH": str(tmp_path)}
    for none in (env, {}):
        assert "the package gcc" in str(lacking_for_triton(none))
    assert lacking_for_triton({**env, "TORCHDYNAMO_DISABLE": "1"}) is None
    (tmp_path / "clang").touch(mode=0o755)
    for some in (env, {"CC": "/opt/cc"}):
        assert "Python.h is missing; install the package python3-dev" in str(
            lacking_for_triton(some)
        )
    (tmp_path / "Python.h").touch()
    for some in (env, {"CC": "/opt/cc"}):
        assert lacking_for_triton(some) is None


@pytest.mark.parametrize(
    ("has_compiler", "has_header", "said"),
    [
        (False, True, "no C compiler is found"),
        (True, False, "Python.h is missing"),
        (True, True, ""),
    ],
)
def test_a_start_without_a_compiler_fuses_nothing(
    has_compiler: bool, has_header: bool, said: str, tmp_path: Path
) -> None:
    if has_compiler:
        (tmp_path / "gcc").touch(mode=0o755)
    if has_header:
        (tmp_path / "Python.h").touch()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", START, str(tmp_path)],
        env={"PATH": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(not said)]
    assert ("does not fuse kernels" in done.stderr) == bool(said) and said in done.stderr
