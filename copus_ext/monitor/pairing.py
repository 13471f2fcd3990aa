"""Puts the lines of a journal together: decisions with their changes of layout and outcomes, in the
order of the file, since a restart may have made a number again."""

from __future__ import annotations

from typing import Any

from copus_ext.monitor.decisions import (
    ABANDONED,
    CALLED_OFF,
    MOVED,
    Decided,
    Decisions,
    Note,
    Outcome,
    Sizes,
    Switch,
    sizes_of,
)
from copus_ext.monitor.values import number, rows, seconds_of, table, text, whole
from megatron.training.common.errors import counted

_GIVEN_UP = {"switch.cancelled": CALLED_OFF, "switch.abandoned": ABANDONED}
_SWITCHED = ("switch", "switch.cancelled", "switch.abandoned")
_QUIET = ("switch.requested", "switch.begin", "switch.commit", "decision", "outcome", "switch")


def add(found: Decisions, place: int, record: dict[str, Any]) -> None:
    """Puts the next line of a journal to those before it.

    Args:
        found: what the lines before have told.
        place: where the record begins in its file.
        record: best without its table of configurations, see `slim`.
    """
    kind = record.get("kind")
    if not isinstance(kind, str):
        return
    if kind == "start":
        _start(found, record)
    elif kind == "decision":
        found.decided.append(_decided(place, record))
    elif kind == "outcome":
        outcome = _outcome(record)
        found.outcomes.append(outcome)
        if decided := _find(found, outcome.number):
            decided.outcome = outcome
    elif kind == "switch.requested":
        found.requested = whole(record.get("number")), number(record.get("predicted_s"))
    elif kind == "switch.begin":
        found.begun_t = seconds_of(record.get("time"))
    elif kind in _SWITCHED:
        _add_switch(found, kind, record)
    elif kind == "failure":
        found.failure = text(record.get("error"))
    if kind not in _QUIET:
        found.notes.append(_note(kind, record))


def _start(found: Decisions, record: dict[str, Any]) -> None:
    """A launch: what was decided beyond where it starts is no part of the run any more."""
    found.mode = text(record.get("mode"), 20)
    found.flags = table(record.get("flags"))
    found.peak_flops = number(record.get("peak_flops"))
    found.failure, found.begun_t = "", None
    iteration, layout = whole(record.get("iteration")), text(record.get("layout"), 100)
    if layout:
        found.layouts.append((iteration or 0, layout))
    if iteration is not None:
        for decided in found.decided:
            decided.undone |= decided.iteration is not None and decided.iteration > iteration


def _add_switch(found: Decisions, kind: str, record: dict[str, Any]) -> None:
    """How a change of layout ended; that it was given up may be said without its number, and once
    more with it."""
    found.begun_t = None
    wanted, predicted_s = found.requested
    own = whole(record.get("number"))
    about = own if own is not None or kind == "switch" else wanted
    switch = _switch(record, kind, predicted_s if about == wanted else None)
    switch.number = about
    decided = _find(found, about)
    if decided is not None:
        switch.iteration = decided.iteration if switch.iteration is None else switch.iteration
        switch.start, switch.to = switch.start or decided.now.layout, switch.to or decided.to.layout
        if kind == "switch.abandoned" and decided.switch and decided.switch.kind == ABANDONED:
            return
        decided.switch = switch
    found.switches.append(switch)
    if switch.kind == MOVED and switch.to:
        found.layouts.append((switch.iteration or 0, switch.to))


def _find(found: Decisions, wanted: int | None) -> Decided | None:
    """The last decision of that number: a restart may have made it again."""
    same = (d for d in reversed(found.decided) if d.number == wanted and wanted is not None)
    return next(same, None)


def _decided(place: int, record: dict[str, Any]) -> Decided:
    decision, situation = table(record.get("decision")), table(record.get("situation"))
    now, to = table(situation.get("now")), table(decision.get("to"))
    kind = text(decision.get("kind"), 20)
    shown = _shown(rows(decision.get("candidates")), now=now, to=to, kind=kind)
    gain = number(decision.get("gain"))
    return Decided(
        place=place,
        number=whole(record.get("number")),
        iteration=whole(record.get("iteration")),
        samples=whole(record.get("consumed_samples")),
        t=seconds_of(record.get("time")),
        kind=kind,
        obeyed=record.get("obeyed") is True,
        reason=text(decision.get("reason")),
        gain=number(shown.get("gain")) if gain is None else gain,
        needed=number(shown.get("needed")),
        now=sizes_of(now),
        to=sizes_of(to),
        predicted=number(to.get("samples_per_s")),
        target=number(decision.get("target_batch")),
    )


def _shown(
    candidates: list[dict[str, Any]], *, now: dict[str, Any], to: dict[str, Any], kind: str
) -> dict[str, Any]:
    """The candidate that was taken, or else the best that could have been: one that is not too
    large to reach at once."""
    if kind != "stay":
        same = (c for c in candidates if c.get("row") == to)
        return next(same, {})
    others = [c for c in candidates if c.get("row") != now and number(c.get("needed")) is not None]
    within = [c for c in others if "at once" not in text(c.get("verdict"))]
    return next(iter(within or others), {})


def _switch(record: dict[str, Any], kind: str, predicted_s: float | None) -> Switch:
    outcome = table(record.get("outcome"))
    phases = {
        text(name, 60): seconds
        for name, value in table(outcome.get("phases")).items()
        if (seconds := number(value)) is not None
    }
    return Switch(
        number=whole(record.get("number")),
        iteration=whole(record.get("iteration")),
        samples=whole(record.get("consumed_samples")),
        t=seconds_of(record.get("time")),
        start=text(record.get("start"), 100),
        to=text(record.get("to"), 100),
        kind=_GIVEN_UP.get(kind) or text(outcome.get("kind"), 20),
        reason=text(outcome.get("reason") or record.get("reason")),
        pause_s=number(outcome.get("pause_s")),
        predicted_s=predicted_s,
        phases=phases,
    )


def _outcome(record: dict[str, Any]) -> Outcome:
    def sizes(side: str) -> Sizes:
        return Sizes(
            batch=whole(record.get(f"{side}_batch")),
            micro=whole(record.get(f"{side}_micro_batch")),
            layout=text(record.get(f"{side}_layout"), 100),
        )

    return Outcome(
        number=whole(record.get("decision")),
        iteration=whole(record.get("iteration")),
        samples=whole(record.get("consumed_samples")),
        before=sizes("from"),
        after=sizes("to"),
        gain=number(record.get("gain")),
        predicted=number(record.get("predicted_samples_per_s")),
        speed_before=number(record.get("samples_per_s_before")),
        speed=number(record.get("samples_per_s")),
        slope_before=number(record.get("slope_before")),
        slope=number(record.get("loss_slope")),
        steps=whole(record.get("steps")),
        pause_s=number(record.get("pause_s")),
        spiked=record.get("spiked") is True,
    )


def _note(kind: str, record: dict[str, Any]) -> Note:
    kind = text(kind, 60)
    hold = whole(record.get("hold_growth_until_samples"))
    made = counted(whole(record.get("changes")) or 0, "change")
    lines = {
        "start": f"the controller starts in mode {text(record.get('mode'), 20)}",
        "end": f"the controller ends after {made}",
        "paused": "an operator has paused decisions",
        "resumed": "decisions go on",
        "failure": f"the controller failed and decides no more: {text(record.get('error'))}",
        "spike": f"the loss rose after the batch grew; no growth until sample {hold}",
        "switch.cancelled": f"change to {text(record.get('to'), 100)} cancelled",
        "switch.abandoned": "change of layout abandoned; the run left to start again",
    }
    line = lines.get(kind, kind)
    if kind.startswith("switch.") and (reason := text(record.get("reason"))):
        line = f"{line}: {reason}"
    if kind == "start" and (remark := text(record.get("note"))):
        line = f"{line}; {remark}"
    t = seconds_of(record.get("time"))
    return Note(kind=kind, t=t, iteration=whole(record.get("iteration")), line=line)


def slim(record: dict[str, Any]) -> dict[str, Any]:
    """A record without the table of configurations, of which a long journal has too many to
    hold."""
    situation = record.get("situation")
    if not isinstance(situation, dict):
        return record
    rows, current = situation.get("rows"), whole(situation.get("current"))
    now = None
    if isinstance(rows, list) and current is not None and 0 <= current < len(rows):
        now = rows[current]
    kept = {k: v for k, v in situation.items() if k != "rows"}
    return {**record, "situation": {**kept, "now": now}}
