"""The landscape of a decision: marks lie on their cells, numbers are those of the record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from copus_ext.monitor.landscape import BEST, HERE, landscape
from copus_ext.monitor.report import render, report_of
from copus_ext.monitor.run_files import RunReader
from copus_ext.monitor.values import rows
from tests.helpers.launch import ROOT
from tests.helpers.written_runs import WrittenRun, rewrite

RECORDED = ROOT / "docs" / "results" / "act_run.journal.jsonl"


def decisions() -> list[dict[str, Any]]:
    records = map(json.loads, RECORDED.read_text().splitlines())
    return [record for record in records if record["kind"] == "decision"]


def layout_of(row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(row.get(name, 1) or 1 for name in ("tp", "cp", "pp", "vpp", "dp"))


@pytest.mark.parametrize("number", [0, 8, -1])
def test_star_and_ring_lie_on_their_cells(number: int) -> None:
    reader = RunReader(RECORDED)
    reader.refresh()
    decided, record = reader.history().decisions.standing[number], decisions()[number]
    found = landscape(record, decided)
    assert found is not None
    critical = record["decision"]["critical_batch_size"]
    goodput = {}
    for row in record["situation"]["rows"]:
        place = layout_of(row), row["global_batch_size"]
        value = row["samples_per_s"] / (1 + row["global_batch_size"] / critical)
        goodput[place] = max(value, goodput.get(place, 0.0))
    best = max(goodput, key=lambda place: goodput[place])
    went = record["decision"]["to"] if record["applied"] else None
    went = went or record["situation"]["rows"][record["situation"]["current"]]
    cells = {
        (name, batch): cell
        for name, line in found.lines
        for batch, cell in zip(found.batches, line, strict=True)
        if cell is not None
    }
    ((star, star_batch),) = [place for place, cell in cells.items() if BEST in cell.mark]
    ((ring, ring_batch),) = [place for place, cell in cells.items() if HERE in cell.mark]
    assert found.lines[0][0] == star and star_batch == best[1]
    assert cells[star, star_batch].share == 1.0
    assert (ring, ring_batch) == (decided.to.layout, went["global_batch_size"])
    place = layout_of(went), ring_batch
    assert cells[ring, ring_batch].share == pytest.approx(goodput[place] / goodput[best])
    assert len(cells) == len(goodput)


def test_a_decision_that_was_not_made_leaves_the_ring_where_the_run_was(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path)
    run.step(20)
    decision = run.decide(applied=False)
    assert decision.kind != "stay"
    found = report_of(RunReader(tmp_path)).landscape
    assert found is not None
    (ring,) = [
        (name, batch)
        for name, line in found.lines
        for batch, cell in zip(found.batches, line)
        if cell is not None and HERE in cell.mark
    ]
    assert ring == (str(run.layout), run.batch)


def test_without_a_critical_batch_size_nothing_is_drawn(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path)
    run.step(20)
    run.decide()

    def forget(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for line in lines:
            if line["kind"] == "decision":
                line["decision"]["critical_batch_size"] = None
        return lines

    rewrite(tmp_path / "journal.jsonl", forget)
    report = report_of(RunReader(tmp_path))
    assert report.landscape is None and 'class="cells"' not in render(report)


def test_of_many_layouts_the_best_are_shown_and_the_rest_are_counted() -> None:
    reader = RunReader(RECORDED)
    reader.refresh()
    decided, record = reader.history().decisions.standing[-1], decisions()[-1]
    known = rows(record["situation"]["rows"])
    for pp in range(2, 40):
        slow = {"tp": 1, "pp": pp, "vpp": 1, "dp": 1, "samples_per_s": 1.0 / pp}
        known.append({"micro_batch_size": 1, "global_batch_size": 64, "source": "x", **slow})
    found = landscape({**record, "situation": {"rows": known}}, decided)
    assert found is not None and len(found.lines) <= 13
    assert "slower layouts left out" in found.caption
    assert any(cell and HERE in cell.mark for _, line in found.lines for cell in line)
