"""The goodput landscape of a decision: the goodput of every layout and batch at that time, and the
reason for the choice."""

from __future__ import annotations

import math
from typing import Any

from copus_ext.goodput import objectives
from copus_ext.goodput.decide import compares_goodput, gain_log_sd
from copus_ext.goodput.inputs import ConfigThroughput, DecisionInputs
from copus_ext.monitor.explain import explain, gain
from copus_ext.monitor.journal import DecisionRecord, sizes_of
from copus_ext.monitor.values import FOREIGN, number, rows, table, text, whole

_MAX_LAYOUTS = 24
_MAX, _MIN = 200, 20
"""Landscapes on a page, and the least of a run on it."""


def chosen_decisions(decided: list[DecisionRecord], num_runs: int = 1) -> list[DecisionRecord]:
    """The decisions whose landscape a page shows: all, if there is room; else the newest changes,
    the last decision, and others in even steps.

    Args:
        decided: of a run.
        num_runs: runs on the page.
    """
    valid = [d for d in decided if not d.undone]
    most = max(_MAX // num_runs, _MIN)
    if len(valid) <= most:
        return valid
    last = len(valid) - 1
    changes = [i for i, d in enumerate(valid) if d.is_change]
    picked = {*changes[1 - most :], last}
    others = [i for i in range(last) if i not in picked]
    room = min(most - len(picked), len(others))
    picked |= {others[i * len(others) // room] for i in range(room)}
    return [valid[i] for i in sorted(picked)]


def landscape(record: dict[str, Any], decided: DecisionRecord) -> dict[str, Any]:
    """A landscape as plain JSON types.

    Args:
        record: whole record of the decision.
        decided: its values.

    Returns:
        `layouts` and `batches` name rows and columns. `gains` (predicted, over the configuration of
        that time), `doubts` (their standard deviations) and `speeds` (samples/s) are those of the
        best micro-batch, in `micros`; None without one.
        `words` explain the choice.
    """
    found: dict[str, Any] = {
        "number": decided.number,
        "iteration": decided.iteration,
        "kind": decided.kind,
        "applied": decided.applied,
        "gain": decided.gain,
        "now": _place(decided.now.layout, decided.now.batch, decided.now.micro),
        "to": _place(decided.to.layout, decided.to.batch, decided.to.micro),
        "candidates": _candidates(table(record.get("decision"))),
        "words": [],
        "layouts": [],
    }
    try:
        situation = DecisionInputs.from_json(table(record.get("situation")))
        return found | _cells(situation) | {"words": explain(decided, situation)}
    except FOREIGN:
        unread = "The record of this decision is damaged, so that its table cannot be read."
        return found | {"words": [*explain(decided, None), unread]}


def _place(layout: str, batch: int | None, micro: int | None) -> list[Any]:
    return [layout, batch, micro]


def _candidates(decision: dict[str, Any]) -> list[list[Any]]:
    """Layout, batch, micro-batch, samples/s, gain, needed, what blocks it."""
    shown = []
    for candidate in rows(decision.get("candidates")):
        row = table(candidate.get("row"))
        sizes = sizes_of(row)
        share = number(candidate.get("gain"))
        words = "" if share is None else gain(share, number(candidate.get("gain_sd")))
        shown.append(
            [
                *(sizes.layout, sizes.batch, sizes.micro, number(row.get("samples_per_s"))),
                *(words, number(candidate.get("needed"))),
                text(candidate.get("blocked_reason"), 300) or "allowed",
            ]
        )
    return shown


def _cells(s: DecisionInputs) -> dict[str, Any]:
    by_goodput, critical = compares_goodput(s), s.critical_batch_size or 1.0
    values = _goodputs(s) if by_goodput else [row.samples_per_s for row in s.rows]
    base = values[s.current]
    if not (math.isfinite(base) and base > 0):
        by_goodput, base = False, s.now.samples_per_s
        values = [row.samples_per_s for row in s.rows]
    best: dict[tuple[str, int], int] = {}
    for i, row in enumerate(s.rows):
        key = (str(row.layout), int(row.global_batch_size))
        if key not in best or values[i] > values[best[key]]:
            best[key] = i
    layouts = _layouts(s, {key: values[i] for key, i in best.items()})
    batches = sorted({batch for _, batch in best})
    cells = [[best.get((name, batch)) for batch in batches] for name in layouts]

    def each(value: Any) -> list[list[Any]]:
        return [[None if i is None else value(i, s.rows[i]) for i in line] for line in cells]

    return {
        "layouts": layouts,
        "batches": batches,
        "by_goodput": by_goodput,
        "gains": each(lambda i, _: number(values[i] / base - 1.0)),
        "doubts": each(lambda i, row: number(values[i] / base * gain_log_sd(s, row, critical))),
        "speeds": each(lambda _, row: number(row.samples_per_s)),
        "micros": each(lambda _, row: whole(row.micro_batch_size)),
        "sources": each(lambda _, row: text(row.source, 20)),
        "left_out": len({str(row.layout) for row in s.rows}) - len(layouts),
    }


def _goodputs(s: DecisionInputs) -> list[float]:
    def one(row: ConfigThroughput) -> float:
        return float(
            objectives.goodput(
                s.rules.objective,
                row.samples_per_s,
                row.global_batch_size,
                s.critical_batch_size,
                reference_batch=s.rules.reference_batch,
            )
        )

    return [one(row) for row in s.rows]


def _layouts(s: DecisionInputs, values: dict[tuple[str, int], float]) -> list[str]:
    """The best layouts and the current one, in ascending order: the best is the top line."""
    best: dict[str, float] = {}
    for (name, _), value in values.items():
        best[name] = max(best.get(name, -math.inf), value)
    now = str(s.now.layout)
    order = sorted(best, key=lambda name: (name != now, -best[name]))[:_MAX_LAYOUTS]
    return sorted(order, key=lambda name: best[name])
