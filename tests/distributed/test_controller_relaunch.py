"""The controller changes the layout through a checkpoint and new processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from copus_ext.controller.decision_log import NAME, read_journal
from megatron.trainer.logging.metrics import read_metrics
from tests.distributed.worker_controller_layouts import BASE, TRACED, write_profile
from tests.helpers.jobs import TINY, losses_of, steps_of, train
from tests.helpers.launch import ROOT
from tests.helpers.of_extras import of_extra

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="needs a virtual environment"),
]
COPUS = """--copus --copus-layouts all --copus-relayout relaunch --copus-policy static"""
SETTINGS = "relayout_cost_s: 0.2\nmax_micro_batch_size: 1\n"

SAVE_INTERVAL = 8
"""The first decision comes where a checkpoint is saved anyway."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("relaunch")
    write_profile(folder / "profile.jsonl", 2)
    (folder / "copus.yaml").write_text(SETTINGS)
    flags = [*TINY.split(), *BASE, *COPUS.split(), "--copus-config", str(folder / "copus.yaml")]
    flags += ["--copus-profile", str(folder / "profile.jsonl")]
    flags += ["--save", str(folder / "saved"), "--run-dir", str(folder / "run")]
    flags += ["--save-interval", str(SAVE_INTERVAL), *TRACED]
    done = subprocess.run(
        ["bash", "scripts/local_cpu.sh", "-n", "2", *flags],
        cwd=ROOT,
        env={**os.environ, "COPUS_VENV": sys.prefix},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (folder / "told").write_text(done.stdout)
    return folder


def journal(run: Path, kind: str) -> list[dict[str, Any]]:
    return [r for r in read_journal(run / "run" / NAME) if r["kind"] == kind]


def test_the_run_goes_on_in_new_processes_under_the_better_layout(run: Path) -> None:
    starts = journal(run, "start")
    assert len(starts) == 2 and starts[0]["layout"] == "tp1.pp1.dp2"
    (relayout,) = journal(run, "relayout")
    assert relayout["start"] == "tp1.pp1.dp2" and relayout["to"] == starts[1]["layout"]
    assert ".pp2." in relayout["to"]
    assert relayout["outcome"]["kind"] == "moved" and relayout["outcome"]["pause_s"] > 0
    pause_s = relayout["outcome"]["pause_s"]
    later = [d for d in journal(run, "decision") if d["iteration"] > relayout["iteration"]]
    assert later and all(d["situation"]["elapsed_s"] > pause_s for d in later)
    (outcome,) = journal(run, "outcome")
    assert outcome["to_layout"] == relayout["to"] and outcome["decision"] == relayout["number"]


def test_every_launch_lists_its_changes_and_none_is_listed_twice(run: Path) -> None:
    (outcome,) = journal(run, "outcome")
    told = (run / "told").read_text().splitlines()
    assert [s for s in told if s.startswith("copus: nothing was changed")] != []
    listed = [s for s in told if s.startswith(f"  step {outcome['iteration']}: ")]
    assert len(listed) == 1 and f"-> {outcome['to_layout']}" in listed[0]


def test_no_checkpoint_is_removed_to_be_saved_again(run: Path) -> None:
    saves = [r["iteration"] for r in read_metrics(run / "run") if r["kind"] == "checkpoint.begin"]
    (relayout,) = journal(run, "relayout")
    assert relayout["iteration"] % SAVE_INTERVAL == 0 and relayout["iteration"] in saves
    assert len(set(saves)) == len(saves)


def test_no_sample_is_lost_and_the_losses_are_those_of_a_run_without_it(
    run: Path, tmp_path: Path
) -> None:
    train(BASE, 2, tmp_path / "plain").check()
    moved, plain = steps_of(run / "run"), steps_of(tmp_path / "plain")
    assert [s["consumed_samples"] for s in moved] == [s["consumed_samples"] for s in plain]
    assert losses_of(run / "run") == pytest.approx(losses_of(tmp_path / "plain"), rel=1e-5)
    assert [s["learning_rate"] for s in moved] == [s["learning_rate"] for s in plain]


def test_each_launch_traces_its_steps_and_one_command_all_decisions(run: Path) -> None:
    traces = run / "run" / "traces"
    names = sorted(path.name.split(".", 3)[-1] for path in traces.iterdir())
    assert [n for n in names if "rank" in n] == [
        "rank0.steps7-8.json.gz",
        "rank0.steps9-10.json.gz",
    ]
    trace = of_extra("copus_ext.extras.trace.command")
    assert trace.main([str(run / "run")]) == 0
    events = json.loads((traces / "decisions.json").read_text())["traceEvents"]
    told = [e["args"] for e in events if e.get("ph") == "i" and e["tid"] == 0]
    decided = journal(run, "decision")
    assert [about["step"] for about in told] == [d["iteration"] for d in decided]
    # The headline of a change has its sizes; the rest of its reason stands below.
    for about, d in zip(told, decided):
        assert about["reason"] and d["decision"]["reason"].endswith(about["reason"])
