"""The first of the README's two commands, shortened."""

from __future__ import annotations

import ast
import importlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from copus_ext.commands.main import module_of
from megatron.trainer.logging.metrics import read_metrics
from tests.helpers.launch import ROOT
from tests.helpers.of_extras import needs_extra, of_extra


def quickstart(
    folder: Path, steps: int, *words: str, batch: int = 16
) -> subprocess.CompletedProcess[str]:
    """Runs the script with this test's own environment of Python."""
    venv = Path(sys.prefix)
    extra = {"QUICKSTART_STEPS": str(steps), "QUICKSTART_DIR": str(folder)}
    extra |= {"QUICKSTART_BATCH": str(batch)}
    return subprocess.run(
        ["bash", "scripts/quickstart.sh", *words],
        cwd=ROOT,
        env={**os.environ, **extra, "COPUS_VENV": str(venv)},
        capture_output=True,
        text=True,
        timeout=500,
    )


def _relayouts(run: Path) -> list[dict[str, Any]]:
    return [r for r in read_metrics(run) if r["kind"] == "relayout"]


@needs_extra("generate", "inspect_checkpoint")
def test_it_does_what_its_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = quickstart(tmp_path / "run", 12)
    assert done.returncode == 0, done.stdout + done.stderr
    end = done.stdout.splitlines()[-3:]
    line = r"held-out loss [\d.]+ with --copus after \d+ s, [\d.]+ without after \d+ s; .+"
    assert re.fullmatch(line, end[0]) and "why: file://" in end[1], end
    assert re.search(r"^   copus: (\d+ change|nothing was changed)", done.stdout, re.M), done.stdout
    shown, log = done.stdout.splitlines(), (tmp_path / "run/log.txt").read_text()
    assert (
        len(shown) <= 60
        and "   the layout is tp1.pp2.dp1, as --layout-schedule says, after " in done.stdout
    )
    losses = re.findall(r"^   held-out loss:((?: \d\.\d\d)+)$", done.stdout, re.MULTILINE)
    assert len(" ".join(losses).split()) == log.count(" validation loss at ") - 2 > 10
    assert all(line.strip() in log for line in shown if line.startswith("   copus: "))
    assert log.count(" iteration        1/") == log.count("end of arguments") == 2
    page = Path(re.findall(r"file://(\S+)", end[1])[0])
    journal = page.read_text().partition('id="h-journal"')[2]
    assert journal.count("Change of layout tp1.pp1.dp2 to tp1.pp2.dp1") == 1
    assert "Phase 1 of the schedule begins" in journal
    assert not re.search(r"Relayout|Segment|Phase<", journal), "words of the program"
    assert page.read_text().count("<svg") == 8, "four, each for a desk and a phone"
    texts = done.stdout.partition("== 4.")[2].partition("== 5.")[0].splitlines()[-3:]
    assert [ast.literal_eval(t).split(" ", 1)[0] for t in texts] == ["def", "class", "import"]
    rows = [r for r in read_metrics(tmp_path / "run") if r["kind"] == "step"]
    plain = [r for r in read_metrics(tmp_path / "run/plain") if r["kind"] == "step"]
    assert len(plain) == 12 and {r["global_batch_size"] for r in plain} == {16}
    assert rows[-1]["consumed_samples"] == plain[-1]["consumed_samples"] == 192, "the same samples"
    moved = _relayouts(tmp_path / "run")
    assert [(r["to"], r["outcome"]["kind"]) for r in moved] == [("tp1.pp2.dp1", "moved")]
    assert 0.9 * 192 <= moved[0]["consumed_samples"] < 192
    # The batch falls early, so that the samples of 12 steps take more of them.
    latest = (tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt").read_text()
    assert int(latest) >= 12
    told_of = (ROOT / "docs/quickstart.md").read_text()
    table = told_of.partition("## What it leaves")[2].partition("Show the state")[0]
    names = re.findall(r"^\| `([\w.]+)` \|", table, re.MULTILINE)
    assert len(names) == 8 and [n for n in names if not (tmp_path / "run" / n).exists()] == []
    # The commands that the page gives, and the one that the script names, on what it has left.
    (tmp_path / "runs").mkdir()
    (tmp_path / "run").rename(tmp_path / "runs/quickstart")
    monkeypatch.chdir(tmp_path)
    ran = []
    for line in re.findall(r"^copus (.+)$", told_of, re.MULTILINE):
        name, *words = shlex.split(line)
        if name not in ("report", "generate"):  # which the script has called
            tool = importlib.import_module(module_of(name))
            ran.append(name)
            assert tool.main(words) == 0, line
    assert ran == ["status", "replay", "replay", "inspect-checkpoint"]
    told = capsys.readouterr().out
    first = re.search(r"(\d+) decisions the same, 0 different", told)
    assert first and int(first[1]) > 0
    inspect_checkpoint = of_extra("megatron.trainer.extras.inspect_checkpoint.command")
    inspect_checkpoint.main(["runs/quickstart/checkpoints", "--json"])
    stored = json.loads(capsys.readouterr().out)["tensors"]
    weights = [t["shape"] for t in stored if not t["key"].startswith("optimizer.")]
    assert 0.8e6 < sum(map(math.prod, weights)) < 1.25e6, "about 1M parameters"
    command = re.search(r"or: (\S+) status", end[1])
    assert command and shutil.which(command[1])


@pytest.mark.nightly
def test_a_mixture_of_experts_trains_and_shares_its_experts_out(tmp_path: Path) -> None:
    done = quickstart(tmp_path / "run", 12, "--moe")
    assert done.returncode == 0, done.stdout + done.stderr
    moved = _relayouts(tmp_path / "run")
    assert [(r["to"], r["outcome"]["kind"]) for r in moved] == [("tp1.pp1.ep2.dp2", "moved")]
    assert ">tp1.pp1.ep2.dp2</text>" in (tmp_path / "run/report.html").read_text()
    steps = [r for r in read_metrics(tmp_path / "run") if r["kind"] == "step"]
    assert steps and all(s["extra"]["max-expert-load"] == s["max_expert_load"] for s in steps)
    assert quickstart(tmp_path / "other", 12, "--dense").returncode == 2


def test_it_touches_no_folder_that_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "keep").write_text("mine")
    done = quickstart(tmp_path, 12)
    assert done.returncode == 2
    assert "QUICKSTART_DIR" in done.stderr
    assert "multiple of 4" in quickstart(tmp_path, 12, batch=6).stderr
    assert (tmp_path / "keep").read_text() == "mine"
