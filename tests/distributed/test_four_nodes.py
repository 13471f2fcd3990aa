"""The shipped trainer on four nodes with slow links, torchrun on each: it leaves a layout that the
links make wrong, and trains as if nothing had been. Needs root."""

from __future__ import annotations

from pathlib import Path

import pytest

from copus_ext.commands import replay
from copus_ext.controller.decision_log import NAME, read_journal
from tests.helpers.jobs import TINY, losses_of, steps_of, train
from tests.helpers.launch import ROOT, run_ranks
from tests.helpers.network_namespaces import star, why_not

# Links of 8 Mbit take most of a step: other work beside it leaves the decision the same.
pytestmark = pytest.mark.waits

STEPS = 16
LENGTH = ["--train-iters", str(STEPS)]
COPUS = ["--copus", "--copus-policy", "static", "--copus-layouts", "all"]


def test_a_live_job_on_four_nodes_moves_and_trains_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if problem := why_not():
        pytest.skip(problem)
    with star(4, usual_mbit=8.0) as names:
        worker = [ROOT / "tests" / "distributed" / "worker_on_node.py", ",".join(names)]
        flags = [*TINY.split(), *LENGTH, *COPUS, "--run-dir", tmp_path / "moved"]
        run_ranks([*worker, ROOT / "pretrain_gpt.py", *flags], len(names), timeout_s=480).check()
    train(LENGTH, len(names), tmp_path / "plain").check()
    moves = [r for r in read_journal(tmp_path / "moved" / NAME) if r["kind"] == "relayout"]
    assert moves and moves[0]["start"] == "tp1.pp1.dp4", "the links are slow for data parallelism"
    assert all(move["outcome"]["kind"] == "moved" for move in moves)
    seen = [step["consumed_samples"] for step in steps_of(tmp_path / "moved")]
    assert seen == [8 * n for n in range(1, STEPS + 1)]
    moved, plain = losses_of(tmp_path / "moved"), losses_of(tmp_path / "plain")
    assert moved == pytest.approx(plain, rel=1e-4)
    assert replay.main([str(tmp_path / "moved")]) == 0
    assert "0 different" in capsys.readouterr().out
