"""`copus plan elastic`: how many ranks when, for a price."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from copus_ext.commands import plan
from copus_ext.monitor.rank_plan import node_counts, rank_range
from copus_ext.planner.request import UsageProblem

pytestmark = pytest.mark.unit
BASE = (
    "--model llama-3.2-3b --cluster h100-80g:32 --recompute none --train-tokens 2e9 "
    "--fix tp=1,pp=1 --global-batch-size 64,96,192,384"
)
JOURNAL = Path(__file__).resolve().parents[2] / "docs/results/act_run.journal.jsonl"


def run(capsys: pytest.CaptureFixture[str], text: str) -> tuple[int, str, str]:
    code = plan.main(shlex.split(text))
    out, err = capsys.readouterr()
    return code, out, err


def record(capsys: pytest.CaptureFixture[str], text: str) -> dict[str, Any]:
    code, out, err = run(capsys, f"elastic {BASE} {text} --json")
    assert code == 0, err
    return json.loads(out)


def test_a_plan_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    found = record(capsys, "--copus-ranks 16-64 --copus-cost-of-time 10")
    parts = found["stretches"]
    paused = sum(part["pause_s"] for part in parts) / 3600
    assert found["hours"] == pytest.approx(sum(part["hours"] for part in parts) + paused)
    assert found["rank_hours"] >= sum(part["rank_hours"] for part in parts) - 1e-9
    assert parts[0]["start_tokens"] == 0.0
    assert {part["ranks"] for part in parts} <= {16, 24, 32, 40, 48, 56, 64}
    best = found["fixed"][str(found["best_fixed"])]
    price, least = (one["rank_hours"] + 10 * one["hours"] for one in (found, best))
    assert found["price_saved"][0] == pytest.approx(1 - price / least, abs=1e-9)
    assert len(found["price_saved"]) == 9 and min(found["price_saved"]) >= 0


def test_a_larger_cost_of_time_takes_less_time(capsys: pytest.CaptureFixture[str]) -> None:
    costs = ("0", "10", "inf")
    plans = [record(capsys, f"--copus-ranks 16-48 --copus-cost-of-time {x}") for x in costs]
    hours = [found["hours"] for found in plans]
    assert hours == sorted(hours, reverse=True) and hours[-1] < hours[0]
    assert hours[-1] <= min(one["hours"] for one in plans[-1]["fixed"].values()) + 1e-9
    assert plans[0]["rank_hours"] <= min(x["rank_hours"] for x in plans[0]["fixed"].values()) + 1e-9


def test_without_a_cost_it_takes_as_long_as_the_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    found = record(capsys, "--copus-ranks 24-48")
    own = found["fixed"]["32"]
    assert found["hours"] <= own["hours"] * (1 + 1e-9)
    assert found["rank_hours"] <= own["rank_hours"] * (1 + 1e-9)


def test_one_number_of_ranks_is_a_fixed_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = record(capsys, "--copus-ranks 32-32")
    assert (found["saved"], found["as_fast"], found["best_fixed"]) == (0.0, 32, 32)
    assert set(found["price_saved"]) == {0.0}


def test_the_flag_and_the_command_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    asked = f"{BASE} --copus-ranks 16-32 --copus-cost-of-time 10"
    code, out, _ = run(capsys, f"--elastic {asked}")
    assert code == 0 and out == run(capsys, f"elastic {asked}")[1]
    assert "rank-hours" in out and "from published laws" in out


def test_a_journal_gives_the_course(capsys: pytest.CaptureFixture[str]) -> None:
    found = record(capsys, f"--copus-ranks 16-32 --copus-cost-of-time 10 --journal {JOURNAL}")
    assert found["critical_batch_size"] == f"from {JOURNAL}"
    assert len(found["price_saved"]) == 1


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ("", 2, "`elastic` needs --copus-ranks MIN-MAX; give it, such as 16-64"),
        ("--copus-ranks 16", 2, "--copus-ranks 16: write MIN-MAX, such as 16-64"),
        ("--copus-ranks 64-16", 2, "the first number must not exceed the second"),
        ("--copus-ranks 17-23", 2, "no whole number of nodes; use multiples of 8"),
        ("--copus-ranks 16-64 --copus-cost-of-time -1", 2, "-1 must be at least 0"),
        ("--copus-ranks 8-16", 2, "none takes as little time as the 32 of --cluster; give more"),
        ("--copus-ranks 16-64 --journal /none", 5, "--journal /none"),
        ("--copus-ranks 16-64 --model gpt3-175b", 4, "fits on 32 ranks; use another"),
    ],
)
def test_problems_are_told_in_one_line(
    capsys: pytest.CaptureFixture[str], flags: str, code: int, words: str
) -> None:
    got, _, err = run(capsys, f"elastic {BASE} {flags}")
    assert got == code and words in err and err.count("\n") == 1


def test_ranges_become_numbers_of_nodes() -> None:
    assert rank_range("4-16") == (4, 16)
    assert node_counts("16-64", 8) == [2, 3, 4, 5, 6, 7, 8]
    assert node_counts("5-5", 1) == [5]
    assert node_counts("8-1016", 8) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 127]
    for text in ("0-4", "-4", "4-", "a-b", "4-16-2"):
        with pytest.raises(UsageProblem):
            rank_range(text)
