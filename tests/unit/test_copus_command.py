"""`copus NAME`, and the scripts of a checkout: the same commands under two names."""

from __future__ import annotations

import importlib
import re
import runpy
import subprocess
import sys

import pytest

from copus_ext import __version__
from copus_ext.commands.main import COMMANDS, first_line, main, module_of
from megatron.training.common.program import other_command, program_name, running_as, tell
from tests.helpers.launch import ROOT

SCRIPTS = sorted((ROOT / "tools").glob("*.py"))
OTHERS = {"launch": "python -m copus_ext.launch.supervisor", "pretrain": "pretrain_gpt.py"}


def usage_of(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.split("\n", 1)[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_there_under_the_name_of_copus(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    assert re.match(rf"usage: copus {name}( |$)", usage_of(capsys))
    module = importlib.import_module(module_of(name))
    what = (module.__doc__ or "").splitlines()[0]
    assert what == first_line(name) and what.endswith(".")


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / "pretrain_gpt.py"], ids=lambda p: p.name)
def test_a_script_is_the_command_under_its_own_name(
    script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(script), run_name="__main__")
    assert left.value.code == 0
    assert usage_of(capsys).startswith(f"usage: {script.name} ")


def test_every_command_has_a_script_and_a_module() -> None:
    scripts = {script.stem.replace("_", "-") for script in SCRIPTS}
    assert scripts | set(OTHERS) == set(COMMANDS)
    modules = {path.stem for path in (ROOT / "copus_ext" / "commands").glob("*.py")}
    assert {name.replace("-", "_") for name in COMMANDS} - {"launch"} == modules - {
        "__init__",
        "main",
    }


def test_errors_bear_the_name_that_was_called(capsys: pytest.CaptureFixture[str]) -> None:
    for words, line in (
        (["replay", "/nowhere"], "copus replay: error: /nowhere"),
        (["pretrain", "--num-layers", "2"], "copus pretrain: error: --hidden-size is required"),
    ):
        assert main(words) != 0
        assert capsys.readouterr().err.startswith(line)
    assert main(["launch", "--nnodes", "0", "--", "--lr", "1"]) == 2
    assert "--nnodes 0" in capsys.readouterr().err
    with running_as("copus x"):
        assert program_name("x.py") == "copus x"
    tell("x.py", "note: y")
    assert capsys.readouterr().err == "x.py: note: y\n"


@pytest.mark.parametrize("words", [[], ["plna"], ["--save", "x"]])
def test_what_is_no_command_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("usage: copus COMMAND") and "copus: error: " in error


def test_help_and_version_import_nothing_heavy(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys; from copus_ext.commands.main import main\n"
        "try: main([sys.argv[1]])\n"
        "finally: assert not {'torch', 'numpy', 'rich', 'megatron.core'} & set(sys.modules)"
    )
    for word, said in (("--help", "preprocess-data"), ("--version", f"copus {__version__}")):
        done = subprocess.run(
            [sys.executable, "-c", code, word], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert said in done.stdout


def test_another_command_is_named_as_this_one_was_called() -> None:
    assert other_command("plan.py") == "python tools/plan.py"
    assert other_command("of_no_checkout.py") == "copus of-no-checkout"
    with running_as("copus status"):
        assert other_command("profile_layouts.py") == "copus profile-layouts"
