"""The line with which the quickstart ends claims what its two runs show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import compare_runs
from scripts.compare_runs import Point, chart, curve, main, seconds_to, verdict

pytestmark = pytest.mark.unit
PLAIN = [Point(10.0, 4.0), Point(20.0, 3.0), Point(30.0, 2.0)]


def record(kind: str, m: float, **fields: Any) -> str:
    return json.dumps({"v": 1, "kind": kind, "m": m, "launch": "a", **fields})


def write(folder: Path, *lines: str) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_the_clock_counts_all_but_evaluations(tmp_path: Path) -> None:
    losses = {"losses": {"lm loss": 3.0}}
    run = write(
        tmp_path / "run",
        record("run.start", 100.0),
        record("step", 110.0),
        record("eval", 113.0, split="valid", **losses),
        record("step", 120.0),
        record("eval", 124.0, split="valid", **losses),
        record("eval", 125.0, split="test", **losses),
    )
    assert curve(run) == [Point(10.0, 3.0), Point(17.0, 3.0)]


def test_a_loss_is_there_between_two_evaluations() -> None:
    assert seconds_to(PLAIN, 2.5) == pytest.approx(25.0)
    assert seconds_to(PLAIN, 1.9) is None
    assert seconds_to(PLAIN, 4.5) == 10.0, "no later than at the first"


@pytest.mark.parametrize(
    ("ours", "says"),
    [
        ([Point(10.0, 3.0), Point(20.0, 1.0)], "was there after 15 s"),
        ([Point(15.0, 4.0), Point(40.0, 2.0)], "nothing was gained here"),
        ([Point(15.0, 4.0), Point(29.0, 2.005)], "nothing was gained here"),
        ([Point(15.0, 4.0), Point(29.0, 2.1)], "--copus was behind here"),
    ],
)
def test_the_line_claims_what_the_runs_show(ours: list[Point], says: str) -> None:
    line = verdict(PLAIN, ours)
    assert line.endswith(says) and "\n" not in line
    assert f"{ours[-1].loss:.3f} with --copus after {ours[-1].seconds:.0f} s" in line
    assert "2.000 without after 30 s" in line


def test_the_chart_has_every_point_in_its_place() -> None:
    drawn = chart(PLAIN, [Point(30.0, 1.0)])
    rows = drawn.splitlines()
    assert max(map(len, rows)) <= 80
    assert rows[0].startswith("  4.00 |") and rows[0].index("o") == 8 + 20
    assert rows[-3].startswith("  1.00 |") and rows[-3].endswith("*")
    assert drawn.count("o") == 3


def test_a_run_without_evaluations_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(tmp_path / "run", record("run.start", 1.0), record("step", 2.0))
    assert main([str(run), str(run)]) == 2
    assert "--eval-interval" in capsys.readouterr().err
    assert main([str(tmp_path / "none"), str(run)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    held_out = record("eval", 3.0, split="valid", losses={"lm loss": 3.0})
    twice = write(
        tmp_path / "twice", *[record("run.start", 1.0), record("step", 2.0), held_out] * 2
    )
    assert main([str(twice), str(run)]) == 2
    assert "was started 2 times" in capsys.readouterr().err
    assert main(["one"]) == 2
    assert compare_runs.__doc__ and "PLAIN_RUN" in capsys.readouterr().err
