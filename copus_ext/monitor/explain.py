"""Decisions and their outcomes in plain words."""

from __future__ import annotations

from datetime import datetime, timezone

from copus_ext.goodput.headroom import Headroom
from copus_ext.monitor.journal import (
    ABANDONED,
    CALLED_OFF,
    MOVED,
    DecisionRecord,
    OutcomeRecord,
    RelayoutRecord,
    Sizes,
)
from megatron.trainer.common.errors import counted

_SHOWN = 0.005
"""Share of the time from which a saving is named."""


def amount(value: float | None) -> str:
    """A number with its unit prefix, such as `1.2 M`; `-` if unknown."""
    if value is None:
        return "-"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.3g} {letter}"
    return f"{value:,.6g}"


def percent(share: float | None, *, sign: bool = False) -> str:
    """A share in percent; `-` if unknown."""
    if share is None:
        return "-"
    return f"{100 * share:{'+' if sign else ''}.1f} %"


def seconds(value: float | None) -> str:
    """A duration for people; `-` if unknown."""
    if value is None:
        return "-"
    if value < 60:
        return f"{value:.3g} s"
    if value < 5400:
        return f"{value / 60:.1f} min"
    return f"{value / 3600:.1f} h" if value < 2 * 86400 else f"{value / 86400:.1f} days"


def date(t: float | None) -> str:
    """A time of day, UTC; `-` if unknown."""
    try:
        return "-" if t is None else f"{datetime.fromtimestamp(t, timezone.utc):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return "-"


def time_left(left_s: float, headroom: Headroom | None, *, t: float) -> str:
    """What is expected until the end of a run.

    Args:
        left_s: seconds to its end in its present configuration.
        headroom: what is to be gained in the rest of the run; None if unknown.
        t: now, seconds since the epoch.
    """
    words = f"{seconds(left_s)} if nothing changes, until {date(t + left_s)} UTC"
    if headroom is None:
        return words
    most = headroom.together.high
    if most < _SHOWN:
        return f"{words}; no other schedule could save {percent(_SHOWN)} of it"
    return (
        f"{words}; the best schedule could save at most {percent(most)} of it "
        f"({seconds(most * left_s)})"
    )


def difference(before: Sizes, after: Sizes) -> str:
    """What changes between two configurations."""
    parts = []
    if before.layout != after.layout:
        parts.append(f"layout {before.layout or '?'} to {after.layout or '?'}")
    if before.batch != after.batch:
        parts.append(f"batch {before.batch} to {after.batch}")
    if before.micro != after.micro:
        parts.append(f"micro-batch {before.micro} to {after.micro}")
    return ", ".join(parts) or "nothing"


def headline(d: DecisionRecord) -> str:
    if not d.is_change:
        return f"Stayed at {d.now if d.now.batch is not None else d.to}"
    change = difference(d.now, d.to)
    if d.applied:
        return f"Changed {change}"
    return f"Would have changed {change} (observed only)"


def why(d: DecisionRecord) -> str:
    """The reason of a decision, without the sizes that `headline` has said."""
    sizes, _, rest = d.reason.partition("; ")
    return rest if d.is_change and rest and " -> " in sizes else d.reason


def result(d: DecisionRecord) -> str:
    parts = []
    if d.undone:
        parts.append("undone: a restart went back to before it")
    if d.relayout is not None:
        parts.append(relayout_result(d.relayout))
    if d.outcome is not None:
        parts.append(outcome_result(d.outcome))
    if d.is_change and d.applied and not parts:
        parts.append("unknown: the journal has no outcome")
    return "; ".join(parts)


def relayout_result(s: RelayoutRecord) -> str:
    took = f"the change took {seconds(s.pause_s)}"
    if s.predicted_s is not None:
        took += f" ({seconds(s.predicted_s)} predicted)"
    if s.kind == MOVED:
        return took
    kinds = {
        "cancelled": "cancelled before anything was touched",
        "rolled_back": "rolled back",
        CALLED_OFF: "the run ended before it began",
        ABANDONED: "abandoned, and the run left to start again",
    }
    said = f"the layout stayed: {kinds.get(s.kind, s.kind)}"
    return f"{said}, {s.reason}" if s.reason else said


def outcome_result(o: OutcomeRecord) -> str:
    parts = []
    if o.speed is not None:
        parts.append(f"{o.speed:.3g} samples/s{_steps(o.timed_after)}")
    elif o.steps is not None:
        parts.append("too few steps to tell its speed")
    if o.speed is not None and o.speed_before:
        before = f"{o.speed_before:.3g}{_steps(o.timed_before)}"
        parts.append(f"{_against(o.speed, o.speed_before)} the {before} before")
    if o.speed is not None and o.predicted:
        parts.append(f"{_against(o.speed, o.predicted)} {predicted_speed(o)} predicted")
    if o.spiked:
        parts.append("the loss spiked")
    if o.steps is not None:
        parts.append(f"over {counted(o.steps, 'step')}")
    return ", ".join(parts)


def predicted_speed(o: OutcomeRecord) -> str:
    assert o.predicted is not None
    doubt = "" if o.predicted_sd is None else f" +- {o.predicted * o.predicted_sd:.2g}"
    return f"the {o.predicted:.3g}{doubt}"


def _steps(timed: tuple[int, int, int] | None) -> str:
    return "" if timed is None else f" in steps {timed[0]} to {timed[1]}"


def gain(share: float | None, sd: float | None, *, sign: bool = True) -> str:
    """A predicted gain in percent with one standard deviation of it; `-` if unknown.

    Args:
        sd: of the logarithm of 1 plus that; None where it is not known, 0 where it did not count.
    """
    if share is None or not sd:
        return percent(share, sign=sign)
    return f"{100 * share:{'+' if sign else ''}.1f} +- {100 * (1.0 + share) * sd:.1f} %"


def _against(value: float, other: float) -> str:
    """How a number compares with another, such as `3.0 % more than`."""
    off = value / other - 1.0
    return f"{percent(abs(off))} {'more' if off > 0 else 'less'} than"
