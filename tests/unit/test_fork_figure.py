"""The picture of fork tests in a report, and what is said of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from copus_ext.controller.decision_log import DecisionLog
from copus_ext.goodput.fork_result import Branch, BranchResult, ForkResult
from copus_ext.goodput.fork_rule import LOSS_SD
from copus_ext.monitor.forks import fork_record
from copus_ext.monitor.report import script_json
from tests.helpers.written_runs import usual_run
from tests.unit.test_report import payload_of
from tests.unit.test_run_files import ODD, others


def branch(batch: int, last: float | None, averaged: float | None, **more: Any) -> BranchResult:
    return BranchResult(
        branch=Branch(global_batch_size=batch, micro_batch_size=2, **more),
        samples=960,
        steps=960 // batch,
        skipped_steps=0,
        loss_last=last,
        loss_averaged=averaged,
        averaged_steps=10,
        seconds=4.0,
    )


def result(*branches: BranchResult, **changes: Any) -> ForkResult:
    about: dict[str, Any] = {"kind": "done", "iteration": 40, "consumed_samples": 320}
    about |= {"samples": 960, "eval_samples": 512, "loss_start": 2.3, "seconds": 12.0}
    return ForkResult(**{**about, "branches": branches, **changes})


def write(log: DecisionLog, found: ForkResult) -> None:
    at = {"iteration": found.iteration, "consumed_samples": found.consumed_samples}
    log.append("fork", **at, outcome=found.to_json())


TWO = branch(8, 2.26, 2.2), branch(32, 2.28, 2.23)


def figure(payload: dict[str, Any]) -> dict[str, Any]:
    (found,) = [f for f in payload["figures"] if f["id"] == "forks"]
    return found


def test_each_test_that_was_done_is_drawn_with_losses_errors_and_verdict(tmp_path: Path) -> None:
    run = usual_run(tmp_path, steps=40)
    assert all(f["id"] != "forks" for f in payload_of(tmp_path)["figures"])
    write(run.journal, result(*TWO, kept=0))
    write(run.journal, result(kind="refused", reason="no room"))
    write(run.journal, result(branch(8, 2.25, None), branch(8, 2.2, None, lr_factor=2.0)))
    drawn = figure(payload_of(tmp_path))
    first = {t["name"]: t for t in drawn["data"] if t["xaxis"] == "x"}
    names = ["1: batch 8 (kept)", "2: batch 32"]
    assert first["average of weights"]["y"] == first["last weights"]["y"] == names
    assert first["average of weights"]["x"] == [2.2, 2.23]
    assert first["last weights"]["x"] == [2.26, 2.28] and first["at the fork"]["x"] == [2.3]
    assert first["average of weights"]["error_x"]["value"] == 2 * LOSS_SD
    assert first["last weights"]["error_x"]["value"] == 4 * LOSS_SD
    assert {t["xaxis"] for t in drawn["data"]} == {"x", "x2"}, "the one that was refused is not"
    titles = [note["text"] for note in drawn["layout"]["annotations"]]
    assert titles == ["1. after step 40", "2. after step 40"]
    assert "critical batch size" in drawn["caption"]
    ends = [drawn["layout"][name]["domain"] for name in ("yaxis", "yaxis2")]
    assert 0 < ends[1][0] < ends[1][1] < ends[0][0] < ends[0][1] < 1


def test_two_batches_say_a_critical_batch_size() -> None:
    told = fork_record({"outcome": result(*TWO, kept=0).to_json()}).verdict
    # R = .07 / .1, and Phi = 8 (4 R - 1) / (1 - R).
    phi = 8 * (4 * 0.7 - 1) / (1 - 0.7)
    error = LOSS_SD * math.sqrt(1 + 0.7**2) / 0.1
    low, high = (8 * (4 * r - 1) / (1 - r) for r in (0.7 - error, 0.7 + error))
    assert told == (
        "a sample in batches of 32 makes 0.70 +- 0.04 of the progress of one in batches of 8: "
        f"critical batch size {phi:.3g} ({low:.3g} to {high:.3g}); the run went on from batch 8"
    )


@pytest.mark.parametrize(
    ("branches", "more", "said"),
    [
        ((branch(8, 2.3, 2.297), branch(32, 2.3, 2.298)), {}, "fell by too little to compare"),
        ((branch(8, 2.2, 2.20), branch(32, 2.2, 2.19)), {}, "critical batch size unbounded"),
        ((branch(8, 2.2, None), branch(32, 2.2, 2.19)), {}, "nothing to compare"),
        (
            (branch(8, 2.2, 2.20), branch(8, 2.2, 2.18, lr_factor=2.0)),
            {},
            "batch 8 at 2 times the rate is better by 0.0200 +- 0.0042",
        ),
        (
            (branch(8, 2.2, 2.20), branch(8, 2.2, 2.198, lr_factor=2.0)),
            {},
            "no branch is clearly better: 0.0020 +- 0.0042",
        ),
        (
            (branch(8, 2.2, 2.20), branch(8, 2.2, 2.17, lr_factor=2.0)),
            {"eval_samples": 128},
            "+- 0.0085",
        ),
        ((), {}, "nothing to compare; the run went on from the fork"),
    ],
)
def test_a_verdict_claims_no_more_than_the_losses_bear(
    branches: tuple[BranchResult, ...], more: dict[str, Any], said: str
) -> None:
    assert said in fork_record({"outcome": result(*branches, **more).to_json()}).verdict


def test_what_a_restart_undid_is_not_drawn(tmp_path: Path) -> None:
    run = usual_run(tmp_path, steps=40)
    write(run.journal, result(*TWO, iteration=38))
    run.relaunch("job.0.1", iteration=30, samples=240)
    assert all(f["id"] != "forks" for f in payload_of(tmp_path)["figures"])


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: str(odd)[:6])
def test_a_fork_with_anything_in_it_is_shown(odd: Any, tmp_path: Path) -> None:
    run = usual_run(tmp_path, steps=20)
    record = {"kind": "fork", "iteration": 20, "consumed_samples": 160}
    record["outcome"] = result(*TWO, kept=0).to_json()
    with (run.path / "journal.jsonl").open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in others(record, odd))
    assert script_json(payload_of(tmp_path))


def test_every_figure_has_its_place_on_the_page() -> None:
    import copus_ext.monitor as package

    (folder,) = package.__path__
    ids = [
        line for line in Path(folder, "figures.py").read_text().splitlines() if '"id": "' in line
    ]
    page = Path(folder, "templates", "report.html").read_text()
    assert len(ids) >= 7
    for line in ids:
        assert f'<figure id="f-{line.split(chr(34))[3]}"' in page, line
