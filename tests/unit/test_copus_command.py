"""`copus NAME`, and the scripts of a checkout: the same commands under two names."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from copus_ext import __version__
from copus_ext.commands.main import COMMANDS, first_line, main, module_of, names, run_tool
from copus_ext.controller.decision_log import VERSION
from megatron.trainer.common import program
from megatron.trainer.common.program import (
    ending_at_interrupts,
    held_back,
    other_command,
    program_name,
    running_as,
    tell,
)
from tests.helpers.launch import ROOT
from tests.helpers.of_extras import needs_extra

SCRIPTS = sorted((ROOT / "tools").glob("*.py"))
OTHERS = {"launch": "python -m copus_ext.launch.supervisor", "pretrain": "pretrain_gpt.py"}


def usage_of(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.split("\n", 1)[0]


@pytest.mark.parametrize("name", names())
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


def test_ctrl_c_that_comes_twice_leaves_time_to_clear_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cleared: list[int] = []

    def run() -> int:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            cleared.append(1)
        return 0

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert ending_at_interrupts("copus", run, sigterm=True) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert cleared == [1] and capsys.readouterr().err == "copus: interrupted\n"


def test_every_command_has_a_script_and_a_module() -> None:
    scripts = {script.stem.replace("_", "-") for script in SCRIPTS}
    assert set(COMMANDS) <= scripts | set(OTHERS) <= set(names())
    modules = {path.stem for path in (ROOT / "copus_ext" / "commands").glob("*.py")}
    assert {name.replace("-", "_") for name in COMMANDS} - {"launch"} == modules - {
        "__init__",
        "main",
        "plan_run",  # a part of plan
        "plan_answer",  # the same
        "plan_jobs",  # the same
    }


def test_a_script_whose_extra_is_gone_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tools/of_no_extra.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        run_tool("tools/of_no_extra.py")
    assert ended.value.code == 2
    assert "there is no command of-no-extra" in capsys.readouterr().err


def test_errors_bear_the_name_that_was_called(capsys: pytest.CaptureFixture[str]) -> None:
    for words, line in (
        (["replay", "/nowhere"], "copus replay: error: RUN /nowhere"),
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "usage: copus COMMAND"),
        (["--save", "x"], "copus: error: "),
        (["replai"], "there is no command replai; did you mean replay?"),
        (["preprocess_data"], "did you mean preprocess-data?"),
        (["xyzzy"], "there is no command xyzzy; `copus --help` lists them"),
        (["status", "run", "--folow"], "did you mean --follow?"),
        (["plan", "--fromat", "json", "--global-batch-size", "8"], "did you mean --format?"),
        (["plan", "explian", "tp=2"], "there is no command explian; did you mean explain?"),
        (["launch", "--nproc-per-nod", "2", "--", "--lr", "1"], "did you mean --nproc-per-node?"),
        (["pretrain", "--num-layer", "2"], "did you mean --num-layers?"),
    ],
)
def test_what_is_no_command_or_flag_is_refused_with_the_nearest(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(words)
    except SystemExit as left:
        code = left.code
    assert code == 2 and said in capsys.readouterr().err


def test_every_command_says_the_same_of_what_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.txt").write_text("x\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    commands = {"status": [], "report": ["-o", str(tmp_path / "x.html")], "replay": []}
    for name, says in (
        ("nowhere", "does not exist"),
        ("empty", "holds no record of a run"),
        ("foreign", "holds no record of a run"),
        ("model", "holds no record of a run"),
    ):
        run = tmp_path / name
        want = f"error: RUN {run} {says}; give the --run-dir (or --save) of a run\n"
        for command, more in commands.items():
            assert main([command, str(run), *more]) == 5
            told = capsys.readouterr()
            assert (told.out, told.err) == ("", f"copus {command}: {want}")
    there = ["config.json", "config.txt", "empty", "foreign", "model"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == there
    # What is left of a run is one where a command can use it.
    journal = tmp_path / "journal.jsonl"
    journal.write_text(f'{{"kind": "start", "version": {VERSION}}}\n')
    assert main(["report", str(journal), "-o", str(tmp_path / "x.html")]) == 0
    assert main(["replay", str(journal)]) == 0
    assert main(["status", str(journal)]) == 5
    assert f"RUN {journal} is not a directory" in capsys.readouterr().err
    # So is one that has only begun.
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "config.json").write_text('{"micro_batch_size": 2}')
    assert main(["status", str(begun)]) == 0
    capsys.readouterr()
    metrics = tmp_path / "plain"
    metrics.mkdir()
    (metrics / "metrics.jsonl").touch()
    assert main(["replay", str(metrics)]) == 5
    assert "has no journal.jsonl: it ran without --copus" in capsys.readouterr().err


def at(name: str, words: str, extra: str) -> Any:
    """Where a command of an extra imports a module."""
    return pytest.param(name, words, marks=needs_extra(extra))


AT_AN_IMPORT = """
import signal, sys
name, swallows, *words = sys.argv[1:]

class Finder:
    def find_spec(self, found, path=None, target=None):
        if found == name:
            sys.meta_path.remove(self)
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                if swallows == "1":
                    raise ImportError("cannot import name") from None
                raise

from copus_ext.commands.main import main
sys.meta_path.insert(0, Finder())
sys.exit(main(words))
"""


@pytest.mark.parametrize("swallows", ["0", "1"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torch", "preprocess-data --python-stdlib --output-prefix nothing"),
        at("torch", "inspect-checkpoint .", "inspect_checkpoint"),
        at("torch", "convert-checkpoint . nothing", "convert"),
        at("torch", "generate --load . --prompt a", "generate"),
        ("rich", "status ."),
        ("copus_ext.monitor", "report . -o nothing"),
        ("copus_ext.monitor.run_files", "replay ."),
        ("copus_ext.planner.request", "plan --model gpt3-175b --global-batch-size 64"),
    ],
)
def test_ctrl_c_while_a_command_imports_ends_it_with_one_line(
    tmp_path: Path, name: str, words: str, swallows: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_AN_IMPORT, name, swallows, *words.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    line = f"copus {words.split()[0]}: interrupted\n"
    assert (done.returncode, done.stdout, done.stderr) == (130, "", line)
    assert list(tmp_path.iterdir()) == []


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


def test_another_command_is_named_as_this_one_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who copies the words gets this Python and this checkout, wherever they stand."""
    here = Path(sys.executable).parent
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", f"{here}:/usr/bin")
    assert other_command("plan.py") == "python tools/plan.py"
    monkeypatch.setenv("PATH", "/usr/bin")
    assert other_command("plan.py") == f"{sys.executable} tools/plan.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(here))
    assert other_command("plan.py") == f"python {ROOT}/tools/plan.py"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert other_command("of_no_checkout.py") == "copus of-no-checkout"
    with running_as("copus status"):
        assert other_command("profile_layouts.py") == "copus profile-layouts"
        (tmp_path / "copus").touch(mode=0o755)
        assert other_command("profile_layouts.py") == f"{tmp_path}/copus profile-layouts"
        monkeypatch.setenv("PATH", str(tmp_path))
        assert other_command("profile_layouts.py") == "copus profile-layouts"


def test_what_is_printed_before_a_refusal_is_dropped_and_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = sys.stdout
    with held_back(KeyError) as let_go:
        print("arguments", flush=True)
        assert capsys.readouterr().out == ""
        let_go()
        print("steps")
        assert capsys.readouterr().out == "arguments\nsteps\n"
    for error, shown in ((KeyError, ""), (RuntimeError, "arguments\n")):
        with pytest.raises(error), held_back(KeyError):
            print("arguments")
            raise error
        assert capsys.readouterr().out == shown
    with pytest.raises(KeyError), held_back(KeyError) as let_go:
        print("arguments")
        let_go()
        raise KeyError
    assert capsys.readouterr().out == "arguments\n" and sys.stdout is out


def test_what_is_held_back_is_shown_before_a_long_start_looks_dead(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert program._HELD_S <= 10.0
    monkeypatch.setattr(program, "_HELD_S", 0.05)
    shown = ""
    with pytest.raises(KeyError), held_back(KeyError):
        print("arguments")
        for _ in range(200):
            time.sleep(0.05)
            if shown := capfd.readouterr().out:
                break
        print("loaded")
        raise KeyError
    assert shown == "arguments\n" and capfd.readouterr().out == "loaded\n"


def test_a_forked_process_prints_while_its_parent_holds_back(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with held_back(KeyError):
        print("arguments")
        if (child := os.fork()) == 0:
            print("of a data worker", flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        assert capfd.readouterr().out == "of a data worker\n"
    assert capfd.readouterr().out == "arguments\n"
