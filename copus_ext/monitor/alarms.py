"""What an operator should look at: what a run recorded, and what can be seen from outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from copus_ext.goodput.state import WINDOW_STEPS
from copus_ext.launch.budget import Limits
from copus_ext.monitor.decisions import MOVED, Decisions
from copus_ext.monitor.ends import Record, seconds
from copus_ext.monitor.signs import RunLiveness
from copus_ext.monitor.values import LINE, text, whole

SLOW_STEPS = 10
"""No step for so many medians."""
MANY_MOVES = 3
"""Changes of layout in an hour."""
FAR_OFF = 0.2
"""Of a predicted throughput."""
_HOUR_S = 3600.0
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """One thing to look at."""

    name: str
    """What it is about."""
    line: str
    """In words."""
    iteration: int | None
    """Steps done when it was recorded; None if it is so now."""
    age_s: float | None
    """Seconds since; None if it is so now."""


def recorded(record: Record, *, t: float) -> list[Alarm]:
    """What the last launch recorded last.

    Args:
        record: of the run.
        t: now, seconds since the epoch.
    """
    found = []
    for event in record.since_start:
        if event.get("kind") in ("alert", "fault"):
            name = text(event.get("alert") or event.get("fault"), LINE)
            alarm = Alarm(
                name=name,
                line=text(event.get("line"), LINE) or name,
                iteration=whole(event.get("iteration")),
                age_s=max(t - seconds(event), 0.0),
            )
            found.append(alarm)
    return found[-_SHOWN:]


def seen(
    *,
    signs: RunLiveness,
    step_s: float | None,
    age_s: float | None,
    decisions: Decisions,
    crashes: Sequence[float],
    t: float,
) -> list[Alarm]:
    """What is so now.

    Args:
        signs: of life.
        step_s: median step.
        age_s: of the last step, seconds.
        decisions: the end of the controller's journal.
        crashes: when launches began that followed a crash.
        t: now, seconds since the epoch.
    """
    lines: dict[str, str] = {}
    is_late = step_s is not None and age_s is not None and age_s > max(SLOW_STEPS * step_s, 10.0)
    if signs.state == "training" and is_late and step_s is not None and age_s is not None:
        lines["no step"] = f"no step for {age_s:.0f} s, {age_s / step_s:.0f} times the median"
    graded = _graded(decisions)
    if graded and abs(graded[-1] - 1) > FAR_OFF:
        off = f"{100 * (graded[-1] - 1):+.0f} %"
        lines["prediction"] = f"the last change runs {off} off the predicted throughput"
    if signs.is_alive:
        lately = sum(t - then < _HOUR_S for then in _moves(decisions))
        if lately > MANY_MOVES:
            lines["many changes"] = f"the layout changed {lately} times within an hour"
        limits = Limits()
        lately = sum(t - then < _HOUR_S for then in crashes)
        if 2 * lately >= limits.per_hour or 2 * len(crashes) >= limits.per_run:
            lines["restarts"] = (
                f"{lately} crashes within an hour, {len(crashes)} in all; a supervisor allows "
                f"{limits.per_hour} and {limits.per_run} unless told otherwise"
            )
    return [Alarm(name=n, line=text, iteration=None, age_s=None) for n, text in lines.items()]


def _graded(decisions: Decisions) -> list[float]:
    """Throughput over the predicted one after changes, where enough steps have shown it."""
    known = (d.outcome for d in decisions.made if d.outcome is not None)
    return [o.ratio for o in known if o.ratio is not None and (o.steps or 0) >= WINDOW_STEPS]


def _moves(decisions: Decisions) -> list[float]:
    """When the layout changed."""
    return [s.t for s in decisions.switches if s.kind == MOVED and s.t]
