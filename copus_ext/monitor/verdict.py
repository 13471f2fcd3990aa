"""What the controller did with a run and whether that brought it forward: one sentence for all
that it decided, and one for what a schedule moved."""

from __future__ import annotations

from collections import Counter

from copus_ext.monitor.journal import SCHEDULED, DecisionRecord
from copus_ext.monitor.liveness import RunLiveness
from copus_ext.monitor.run_files import RunHistory
from copus_ext.monitor.time_saved import TimeSaved
from megatron.trainer.common.errors import counted

_NOTHING = 0.0005
"""Share of the time below which nothing was gained or lost."""


def verdict(signs: RunLiveness, run: RunHistory, line: str, saved: TimeSaved | None) -> str:
    """How a run stands, what its controller changed, and whether the run was sooner for it.

    Args:
        signs: what the run is doing.
        run: what was read of it.
        line: of `time_saved.so_far`; empty without a controller.
        saved: its estimate.
    """
    words = signs.why if signs.state == "empty" else signs.state
    steps = f" after {counted(run.steps[-1].iteration, 'step')}" if run.steps else ""
    head = f"{words[:1].upper()}{words[1:]}{steps}"
    if not line:
        has = "has" if signs.is_alive else "had"
        head = head if signs.state == "empty" else f"{head}; it {has} no controller"
        return f"{head}.{_scheduled(run)}"
    return f"{head}; {_brought(run, line, saved, _verbs(signs))}.{_scheduled(run)}"


def _scheduled(run: RunHistory) -> str:
    """What --layout-schedule moved, in a sentence of its own; empty if nothing."""
    to = [move.to for move in run.scheduled_moves]
    return f" The layout moved {_times(len(to))}, to {to[-1]}, {SCHEDULED}." if to else ""


def _verbs(signs: RunLiveness) -> tuple[str, str]:
    """What is asked of a run: whether it came sooner or later. One that broke off never came."""
    if signs.state in ("done", "empty"):
        return "finished sooner", "finished later"
    return ("is ahead", "is behind") if signs.is_alive else ("was ahead", "was behind")


def _brought(run: RunHistory, line: str, saved: TimeSaved | None, verbs: tuple[str, str]) -> str:
    decisions, sooner = run.decisions, verbs[0]
    kind, _, why = line.partition(": ")
    made = _changes(decisions.made)
    failed = ", until an error disabled it" if decisions.failure else ""
    nothing = "nothing was gained or lost"
    if decisions.mode == "observe" and not made:
        return f"COPUS only observed{failed}, so {nothing}"
    if saved is None and kind.startswith("nothing"):
        if made:
            return f"COPUS changed {made}{failed}, and {nothing}: {why}"
        asked = f" in {counted(len(decisions.standing), 'decision')}"
        return f"COPUS changed nothing{asked}{failed}, so {nothing}"
    did = f"COPUS changed {made or 'nothing that was read here'}{failed}"
    if saved is None:
        return f"{did}; whether the run {sooner} is not known: {why}"
    took = f"the same progress took {line}"
    if max(abs(saved.low), abs(saved.high)) < _NOTHING:
        return f"{did}, and {nothing}: {took}"
    if saved.low <= 0.0 <= saved.high:
        return f"{did}; whether the run {sooner} is not sure: by its own estimate, {took}"
    came = sooner if saved.low > 0.0 else verbs[1]
    own = "by its own estimate, held against no other run,"
    return f"{did}, and {own} the run {came}: {took}"


def _changes(made: list[DecisionRecord]) -> str:
    """What was changed and how often; empty if nothing was."""
    kinds = Counter(kind for d in made for kind in _kinds(d))
    parts = [
        f"{kind} {_times(kinds[kind])}"
        for kind in ("the batch", "the micro-batch", "the layout")
        if kinds[kind]
    ]
    if kinds["the batch"] and made[0].now.batch != made[-1].to.batch:
        before = made[0].now.batch
        parts[0] += "" if before is None else f" (from {before} to {made[-1].to.batch})"
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def _kinds(d: DecisionRecord) -> list[str]:
    """What one change changed; a micro-batch that follows the rest is not named."""
    found = ["the batch"] * (d.now.batch != d.to.batch) + ["the layout"] * (d.kind == "relayout")
    return found or ["the micro-batch"]


def _times(num: int) -> str:
    return {1: "once", 2: "twice"}.get(num, f"{num} times")
