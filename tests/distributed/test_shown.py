"""What is shown of changes is what was measured: the log, the journal, status and report of ten
short runs on real text, against the steps of their records."""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from copus_ext.commands import status
from copus_ext.controller.decision_log import read_journal
from copus_ext.goodput.state import TIMED_STEPS
from copus_ext.goodput.step_records import MIN_TIMED_STEPS, WARM_UP_STEPS
from copus_ext.goodput.step_time_watch import FIRST_STEPS
from copus_ext.monitor.report import report_of
from copus_ext.monitor.run_files import RunReader
from megatron.trainer.logging.metrics import read_metrics
from tests.distributed.worker_shown import NUM_FURTHER, SLOW_S
from tests.helpers.launch import ROOT, run_ranks
from tests.helpers.on_ranks import on_ranks

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(640)]
RUNS = ("plain", "slow", "moved", "fp16", "doubled")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten runs in five directories. Paragraphs are documents, so that ends of documents are many
    and the micro-batches have unlike numbers of tokens that count."""
    folder = tmp_path_factory.mktemp("shown")
    with (folder / "text.jsonl").open("w") as file:
        for page in sorted((ROOT / "docs/decisions").glob("*.md")):
            for paragraph in page.read_text().split("\n\n"):
                file.write(json.dumps({"text": paragraph[:40]}) + "\n")
    tool = [ROOT / "tools/preprocess_data.py", "--input", folder / "text.jsonl", "--append-eod"]
    tool += ["--tokenizer-type", "ByteLevelTokenizer", "--output-prefix", folder / "text"]
    run_ranks(tool, 1, timeout_s=120).check()
    on_ranks("worker_shown", folder, 2, timeout_s=600)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def test_losses_of_further_tokens_are_means_over_all_tokens(results: dict[str, Any]) -> None:
    further = results["further"]
    assert len(further["logged"]) == 3
    for logged, direct in zip(further["logged"], further["direct"], strict=True):
        assert len(logged) == NUM_FURTHER and logged == pytest.approx(direct, rel=1e-6)


class Record:
    """The steps of a run with their configurations, as its files have them."""

    def __init__(self, run: Path) -> None:
        self.journal = list(read_journal(run / "journal.jsonl"))
        self.steps: list[dict[str, Any]] = []
        layout, visit, before, began = "", 0, None, 0.0
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for r in records:
            if r["kind"] in ("run.start", "layout"):
                layout, visit, before = r["layout"], 0, None
            if r["kind"] == "run.start":
                began = r["t"]
            if r["kind"] != "step":
                continue
            now = f"{layout} {r['micro_batch_size']} {r['global_batch_size']}"
            visit, before = (visit + 1 if now == before else 1), now
            more = {"key": now, "visit": visit, "seconds": _seconds(r), "began": began}
            self.steps.append({**r, **more})
        assert len(read_metrics(run)) <= len(records)

    def until(self, when: str = "") -> dict[int, dict[str, Any]]:
        """The last record of each step of the launches that began before a time, or of all; those
        that were undone are gone."""
        most = datetime.fromisoformat(when).timestamp() if when else math.inf
        kept: dict[int, dict[str, Any]] = {}
        for step in self.steps:
            if step["began"] <= most:
                kept = {i: s for i, s in kept.items() if i < step["iteration"]}
                kept[step["iteration"]] = step
        return kept

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The journal's records of a kind."""
        return [r for r in self.journal if r["kind"] == kind]


def mark_warm(steps: list[dict[str, Any]]) -> None:
    """Marks the steps that tell the speed of their configuration: they updated the weights, are
    none of the first three in it, and were not much slower than the next ones."""
    visit: list[dict[str, Any]] = []
    for s in steps:
        visit = [] if s["visit"] == 1 else visit
        s["warm"] = s["updated"] and s["visit"] > WARM_UP_STEPS
        if not s["warm"] or s["visit"] > FIRST_STEPS:
            continue
        visit.append(s)
        newest = statistics.median(x["seconds"] for x in visit[-MIN_TIMED_STEPS:])
        while len(visit) > MIN_TIMED_STEPS and visit[0]["seconds"] > 1.5 * newest:
            visit.pop(0)["warm"] = False


def _seconds(step: dict[str, Any]) -> float:
    return step["elapsed_per_iteration_ms"] / 1000


def _key(outcome: dict[str, Any], side: str) -> str:
    sizes = outcome[f"{side}_micro_batch"], outcome[f"{side}_batch"]
    return f"{outcome[f'{side}_layout']} {sizes[0]} {sizes[1]}"


@pytest.mark.parametrize("name", RUNS)
def test_each_outcome_is_what_its_steps_measure(folder: Path, name: str) -> None:
    record = Record(folder / name)
    assert record.of("outcome") or name == "fp16"
    for outcome in record.of("outcome"):
        steps, at = record.until(outcome["time"]), outcome["iteration"]
        until = max([at, *outcome["timed_after"][1:2]])
        mark_warm([s for i, s in steps.items() if i <= until])
        assert at == 0 or steps[at]["key"] == _key(outcome, "from"), "what ran before the change"
        own: dict[str, list[dict[str, Any]]] = {"from": [], "to": []}
        for side, timed in (("from", "timed_before"), ("to", "timed_after")):
            speed = outcome["samples_per_s_before" if side == "from" else "samples_per_s"]
            if not outcome[timed]:
                assert speed is None
                continue
            first, last, count = outcome[timed]
            assert last <= at if side == "from" else first > at
            within = [s for i, s in steps.items() if first <= i <= last]
            assert {s["key"] for s in within} == {_key(outcome, side)}
            own[side] = [s for s in within if s["warm"]]
            plain = [s for s in own[side] if not s["noise"]["measured"]]
            own[side] = plain if len(plain) == count else own[side]
            assert len(own[side]) == count and own[side][0]["iteration"] == first
            each = [s["global_batch_size"] / s["seconds"] for s in own[side]]
            assert speed == pytest.approx(statistics.median(each), rel=1e-3)
        kinds = {s["noise"]["measured"] for side in own.values() for s in side}
        sizes = [sum(not s["noise"]["measured"] for s in side) for side in own.values()]
        assert kinds <= {False} or min(sizes) < MIN_TIMED_STEPS, "one clock for both"


@pytest.mark.parametrize("name", ["slow", "moved", "doubled"])
def test_no_slow_first_step_is_a_timing(folder: Path, name: str) -> None:
    """What a decision calls measured is the median of steps that are none of the first."""
    record = Record(folder / name)
    slept = [s for s in record.steps if s["seconds"] >= SLOW_S]
    assert len(slept) >= 6
    for decided in record.of("decision"):
        situation, steps = decided["situation"], record.until(decided["time"])
        now = situation["rows"][situation["current"]]
        visit = steps[decided["iteration"]]["visit"]
        if now["source"] != "measured" or visit < 2 * (WARM_UP_STEPS + MIN_TIMED_STEPS):
            continue
        mark_warm([s for i, s in steps.items() if i <= decided["iteration"]])
        here = steps[decided["iteration"]]["key"]
        keys = [s["key"] for i, s in steps.items() if i <= decided["iteration"]]
        if sum(key == here for key, _ in itertools.groupby(keys)) > 1:
            continue  # steps of an earlier visit count, too
        own = [
            s["seconds"]
            for i, s in steps.items()
            if i <= decided["iteration"] and s["key"] == here and s["warm"]
        ]
        usual = statistics.median(own[-TIMED_STEPS:])
        speed = now["global_batch_size"] / usual
        assert now["samples_per_s"] == pytest.approx(speed, rel=1e-3), decided["iteration"]


@pytest.mark.parametrize("name", RUNS)
def test_each_change_is_listed_once(folder: Path, results: dict[str, Any], name: str) -> None:
    changes = report_of(RunReader(folder / name)).changes
    steps = [line[0] for line in changes]
    assert len(steps) == len(set(steps)) == len({int(step) for step in steps})
    stands = Record(folder / name).until()
    for step, line in zip(steps, changes):
        assert int(step) in stands or int(step) == 0, line
    for told in results["told"][name]:
        lines = re.findall(r"^  step (\d+): batch", told, re.MULTILINE)
        assert len(lines) == len(set(lines))


@pytest.mark.parametrize("name", RUNS)
def test_a_gain_is_a_ratio_of_outcomes_or_a_prediction_with_its_doubt(
    folder: Path, results: dict[str, Any], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record, run = Record(folder / name), folder / name
    assert status.main([str(run)]) == 0
    shown = [*results["told"][name], capsys.readouterr().out]
    report = report_of(RunReader(run))
    shown += [" ".join(map(str, line)) for line in (*report.changes, *report.journal)]
    shown += [report.verdict, report.decision, *report.facts.values()]
    for text in shown:
        assert "gains " not in text
        flat = " ".join(text.split())
        for gain in re.findall(r"(?:predicted to (?:gain|lose)|predicted goodput) [^%]*%", flat):
            assert re.fullmatch(r".* [+-]?[\d.]+(?: \+- [\d.]+)? %", gain), gain
    for decided in record.of("decision"):
        decision, situation = decided["decision"], decided["situation"]
        if decision["gain"] is None:
            continue
        assert decision["gain_sd"] is not None
        doubt = " +-" if decision["gain_sd"] else " %"
        assert f"{100 * abs(decision['gain']):.1f}{doubt}" in decision["reason"]
        now = situation["rows"][situation["current"]]
        assert decision["is_scaled"] == ("measured" in (now["source"], decision["to"]["source"]))
    for outcome in record.of("outcome"):
        made = [
            d["decision"]
            for d in record.of("decision")
            if d["time"] <= outcome["time"]  # a restart may decide it once more
            and (d["number"], d["iteration"]) == (outcome["decision"], outcome["iteration"])
        ]
        wanted = made[-1]["to"]["samples_per_s"] if made[-1]["is_scaled"] else None
        assert outcome["predicted_samples_per_s"] == wanted


def test_an_outcome_is_told_with_the_ratio_of_its_speeds(
    folder: Path, results: dict[str, Any]
) -> None:
    num_told = 0
    for name in RUNS:
        lines = [line for text in results["told"][name] for line in text.splitlines()]
        for outcome in Record(folder / name).of("outcome"):
            before, after = outcome["samples_per_s_before"], outcome["samples_per_s"]
            if before is None or after is None:
                continue
            start = f"  step {outcome['iteration']}: "
            # Each launch measures a change that is still open once more.
            speeds = [f"{x:.1f} samples/s in steps" for x in (before, after)]
            told = [
                line
                for line in lines
                if line.startswith(start) and all(speed in line for speed in speeds)
            ]
            assert all(f", {100 * (after / before - 1):+.1f} %" in line for line in told), told
            num_told += len(told)
    assert num_told


def test_no_decision_follows_a_skipped_step(folder: Path) -> None:
    record = Record(folder / "fp16")
    steps = {s["iteration"]: s for s in record.steps}
    skipped = [i for i, s in steps.items() if not s["updated"]]
    assert len(skipped) > 20 and skipped[:20] == list(range(1, 21))
    decided = [d["iteration"] for d in record.of("decision")]
    assert decided and not {*decided} & {*skipped}
    for d in record.of("decision"):
        assert d["situation"]["noise"]["effective_steps"] <= d["iteration"] - len(
            [i for i in skipped if i <= d["iteration"]]
        )
