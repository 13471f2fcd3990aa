"""What `python -m copus_ext.megatron_lm` takes off a command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from copus_ext.megatron_lm.__main__ import main, split
from megatron.trainer.common.errors import UsageError
from tests.helpers.examples import names_a_way_on
from tests.helpers.launch import ROOT

THEIRS = ["--num-layers", "2", "--data-path", "a", "b", "--copuscope", "-x"]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "pretrain_gpt.py"
    path.write_text("import sys\nprint(sys.argv)\n")
    return str(path)


def test_its_flags_go_and_all_others_stay(script: str) -> None:
    own = ["--copus", "--copus-policy", "doubling", "--copus-max-global-batch-size=64"]
    path, flags, rest = split([script, *THEIRS[:2], *own, *THEIRS[2:]])
    assert (str(path), rest) == (script, THEIRS)
    assert flags.copus_policy == "doubling" and flags.copus_max_global_batch_size == 64


@pytest.mark.parametrize("words", [[], ["--copus", "--copus-mode", "off"]])
def test_without_the_controller_the_script_runs_as_it_is(
    script: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert split([script, *words, *THEIRS])[1] is None
    assert main([script, *words, *THEIRS]) == 0
    assert capsys.readouterr().out.strip() == str([script, *THEIRS])


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--copus", "pretrain_gpt.py"],
        ["nowhere/pretrain_gpt.py", "--copus"],
        ["SCRIPT", "--copus-policy", "doubling"],
        ["SCRIPT", "--copus", "--copus-policy", "tripling"],
        ["SCRIPT", "--copus", "--global-batch-size", "auto"],
        ["SCRIPT", "--global-batch-size=auto"],
    ],
)
def test_wrong_usage_is_one_line_with_a_way_on(
    script: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [script if word == "SCRIPT" else word for word in words]
    with pytest.raises(UsageError) as found:
        split(words)
    assert names_a_way_on(str(found.value)), found.value
    assert main(words) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_help_lists_the_flags_of_the_controller(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "--copus-layouts" in out and "pretrain_gpt.py" in out


def test_help_needs_nothing_that_a_checkout_imports() -> None:
    # Where triton is missing, all of a newer core is.
    absent = (
        "import runpy, sys; sys.modules['megatron.core'] = sys.modules['torch'] = None; "
        "sys.argv[1:] = ['--help']; runpy.run_module('copus_ext.megatron_lm', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", absent], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "--copus-mode" in done.stdout, done.stderr


def test_a_misspelt_flag_of_the_controller_is_met_before_the_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.touch()
    with pytest.raises(UsageError, match="did you mean --copus-mode"):
        split([str(script), "--bf16", "--copus-moed=act", "--copus"])
