"""What a run of B8 did, from its own records, small enough to keep."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

POINTS = 250
"""Of the training curve that is kept."""


def account(folder: Path) -> dict[str, Any]:
    """Curves, changes and costs of a finished run.

    The clock begins when the trainer has its flags and counts everything but the evaluations: from
    the building of the model, the controller's setting up with it, over steps and decisions to
    changes of the layout.

    Args:
        folder: the run directory.
    """
    from copus_ext.controller.decision_log import NAME, read_journal
    from megatron.training.logging.metrics import read_metrics

    records = read_metrics(folder)
    path = folder / NAME
    journal = list(read_journal(path)) if path.exists() else []
    begin = next(r for r in records if r["kind"] == "run.start")
    steps, evaluations = clocked(records)
    moves = [r for r in journal if r["kind"] == "switch"]
    layouts = _layouts(steps, moves, begin["layout"])
    decisions = [r for r in journal if r["kind"] == "decision"]
    first = steps[0]
    return {
        "seconds": round(steps[-1]["clock"], 4),
        "set_up_s": round(first["clock"] - first["elapsed_per_iteration_ms"] / 1000, 4),
        "steps_s": round(sum(r["elapsed_per_iteration_ms"] for r in steps) / 1000, 4),
        "paused_s": round(sum(r["outcome"]["pause_s"] for r in moves), 4),
        "deciding_s": round(sum(r["seconds"] for r in decisions), 4),
        "steps": len(steps),
        "evaluations": evaluations,
        "training": _thinned(steps),
        "ways": _ways(steps, layouts),
        "speeds": _speeds(steps, layouts),
        "moves": [_brief(r) for r in moves],
        "decisions": [_decision(r) for r in decisions],
        "link_bytes_per_s": next(
            (r["link_bytes_per_s"] for r in journal if r["kind"] == "start"), None
        ),
    }


def clocked(
    records: list[dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[tuple[int, float, float]]]:
    """Steps with their `clock`, and evaluations as (samples, clock, loss).

    An evaluation lasts from the record of the step before it to its own; that is taken off.
    """
    began = next(r["m"] for r in records if r["kind"] == "run.start")
    steps, evaluations, off = [], [], 0.0
    for r in records:
        if r["kind"] == "step":
            steps.append({**r, "clock": r["m"] - began - off})
        elif r["kind"] == "eval":
            off += r["m"] - steps[-1]["m"]
            loss = round(r["losses"]["lm loss"], 6)
            evaluations.append((r["consumed_samples"], round(steps[-1]["clock"], 4), loss))
    return steps, evaluations


def _layouts(steps: list[dict[str, Any]], moves: list[dict[str, Any]], first: str) -> list[str]:
    """The layout of every step."""
    came = {r["iteration"]: r["to"] for r in moves if r["outcome"]["kind"] == "moved"}
    layouts, now = [], first
    for r in steps:
        layouts.append(now)
        now = came.get(r["iteration"], now)
    return layouts


def _thinned(steps: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Means of some steps in a row."""
    size = -(-len(steps) // POINTS)
    parts = [steps[i : i + size] for i in range(0, len(steps), size)]
    losses = [statistics.fmean(r["losses"]["lm loss"] for r in part) for part in parts]
    phi = [(part[-1].get("noise") or {}).get("phi_samples") for part in parts]
    return {
        "samples": [part[-1]["consumed_samples"] for part in parts],
        "seconds": [round(part[-1]["clock"], 3) for part in parts],
        "loss": [round(loss, 4) for loss in losses],
        "phi": [None if x is None else round(x, 2) for x in phi],
    }


def _ways(steps: list[dict[str, Any]], layouts: list[str]) -> list[dict[str, Any]]:
    """Where batch, micro-batch or layout changed: from which samples and seconds on."""
    ways: list[dict[str, Any]] = []
    before = None
    for i, (r, layout) in enumerate(zip(steps, layouts)):
        now = (layout, r["micro_batch_size"], r["global_batch_size"])
        if now != before:
            ways.append(
                {
                    "samples": steps[i - 1]["consumed_samples"] if i else 0,
                    "seconds": round(steps[i - 1]["clock"], 3) if i else 0.0,
                    **dict(zip(("layout", "micro_batch", "batch"), now)),
                }
            )
        before = now
    return ways


def _speeds(steps: list[dict[str, Any]], layouts: list[str]) -> list[dict[str, Any]]:
    """Median seconds of a step in every configuration that the run used."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for r, layout in zip(steps, layouts):
        key = layout, r["micro_batch_size"], r["global_batch_size"]
        groups.setdefault(key, []).append(r["elapsed_per_iteration_ms"] / 1000)
    return [
        {
            **dict(zip(("layout", "micro_batch", "batch"), key)),
            "steps": len(some),
            "median_s": round(statistics.median(some), 5),
        }
        for key, some in groups.items()
    ]


def _brief(move: dict[str, Any]) -> dict[str, Any]:
    outcome = move["outcome"]
    kept = {k: move[k] for k in ("iteration", "consumed_samples", "start", "to")}
    return {**kept, "kind": outcome["kind"], "pause_s": round(outcome["pause_s"], 4)}


def _decision(record: dict[str, Any]) -> dict[str, Any]:
    situation, decision = record["situation"], record["decision"]
    return {
        "iteration": record["iteration"],
        "samples": record["consumed_samples"],
        "kind": decision["kind"],
        "reason": decision["reason"],
        "phi": situation["noise"]["phi_samples"],
        "target": decision["target_batch"],
    }
