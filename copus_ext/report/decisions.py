"""The journal of a run as values: what was decided, how it was carried out, what came of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from copus_ext.report.values import number, rows, seconds_of, table, text, whole

_PARTS = ("switch.requested", "switch.begin", "switch.commit", "decision", "outcome", "switch")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A configuration by name."""

    batch: int | None
    """Samples of a step."""
    micro: int | None
    """Samples of a micro-batch."""
    layout: str
    """Such as `tp2.pp1.dp4`."""

    def __str__(self) -> str:
        return f"batch {self.batch} in micro-batches of {self.micro} on {self.layout}"


@dataclass(kw_only=True)
class Switch:
    """A change of layout that was tried."""

    number: int | None
    """Of the decision."""
    iteration: int | None
    """Steps done before."""
    samples: int | None
    """Samples done before."""
    t: float | None
    """When it had ended, seconds since the epoch."""
    start: str
    """Layout before."""
    to: str
    """Layout wanted."""
    kind: str
    """`moved`, `cancelled` or `rolled_back`."""
    reason: str
    """Why it did not come about."""
    pause_s: float | None
    """Seconds of the whole."""
    predicted_s: float | None
    """Seconds that it was taken to cost."""
    phases: dict[str, float]
    """Seconds of each phase."""
    wire_bytes: int | None
    """Bytes of state that ranks sent to each other."""


@dataclass(kw_only=True)
class Outcome:
    """What came of a change, 50 steps later."""

    number: int | None
    """Of the decision."""
    iteration: int | None
    """Step after which it was made."""
    samples: int | None
    """Samples done then."""
    before: Sizes
    """Configuration before."""
    after: Sizes
    """Configuration since."""
    gain: float | None
    """Predicted gain in goodput."""
    predicted: float | None
    """Samples/s predicted."""
    speed_before: float | None
    """Samples/s before."""
    speed: float | None
    """Samples/s after."""
    slope_before: float | None
    """Loss per thousand samples before."""
    slope: float | None
    """Loss per thousand samples after."""
    loss_rise: float | None
    """Largest rise of the loss over its mean before."""
    steps: int | None
    """Steps that it is judged by."""
    spiked: bool
    """Whether the loss rose like a spike."""


@dataclass(kw_only=True)
class Decided:
    """One decision."""

    place: int
    """Where its record begins in the journal."""
    number: int | None
    """Its number."""
    iteration: int | None
    """Steps done."""
    samples: int | None
    """Samples done."""
    t: float | None
    """Seconds since the epoch."""
    kind: str
    """`stay`, `batch` or `relayout`."""
    obeyed: bool
    """Whether it was carried out."""
    reason: str
    """One line with the numbers."""
    gain: float | None
    """Predicted gain in goodput: of what was chosen, else of the best move within reach."""
    needed: float | None
    """Gain that this needs."""
    now: Sizes
    """Configuration at that time."""
    to: Sizes
    """Configuration to go on with."""
    target: float | None
    """Batch that the policy aims at."""
    undone: bool = False
    """Whether a restart went back to before it."""
    switch: Switch | None = None
    """How the layout was changed for it."""
    outcome: Outcome | None = None
    """What came of it."""

    @property
    def is_change(self) -> bool:
        """Whether another configuration was chosen."""
        return self.kind != "stay"


@dataclass(kw_only=True)
class Note:
    """Any other line: a start, a pause, a failure."""

    kind: str
    """Of the line."""
    t: float | None
    """Seconds since the epoch."""
    iteration: int | None
    """Steps done."""
    line: str
    """What it says."""


@dataclass(kw_only=True)
class Decisions:
    """The whole journal."""

    mode: str = ""
    """`act` or `observe`; empty without a journal."""
    decided: list[Decided] = field(default_factory=list)
    """In the order made, undone ones too."""
    switches: list[Switch] = field(default_factory=list)
    """All that were tried, in order."""
    outcomes: list[Outcome] = field(default_factory=list)
    """In order."""
    notes: list[Note] = field(default_factory=list)
    """In order."""


def read_decisions(records: Iterable[tuple[int, dict[str, Any]]]) -> Decisions:
    """Puts the lines of a journal together.

    Args:
        records: place in the file and record, without the tables of configurations.
    """
    found = Decisions()
    expected: dict[int | None, float | None] = {}
    for place, record in records:
        kind = record["kind"]
        if kind == "start":
            found.mode = text(record.get("mode"), 20)
            _undo(found, whole(record.get("iteration")))
        if kind == "decision":
            found.decided.append(_decided(place, record))
        elif kind == "switch.requested":
            expected[whole(record.get("number"))] = number(record.get("predicted_s"))
        elif kind == "switch":
            switch = _switch(record, expected.get(whole(record.get("number"))))
            found.switches.append(switch)
            if decided := _find(found, switch.number):
                decided.switch = switch
        elif kind == "outcome":
            outcome = _outcome(record)
            found.outcomes.append(outcome)
            if decided := _find(found, outcome.number):
                decided.outcome = outcome
        elif kind not in _PARTS:
            found.notes.append(_note(record))
    return found


def _find(found: Decisions, wanted: int | None) -> Decided | None:
    """The last decision of that number: a restart may have made it again."""
    same = (d for d in reversed(found.decided) if d.number == wanted and wanted is not None)
    return next(same, None)


def _undo(found: Decisions, iteration: int | None) -> None:
    """What was decided beyond where a launch starts is no part of the run any more."""
    if iteration is not None:
        for decided in found.decided:
            decided.undone |= decided.iteration is not None and decided.iteration > iteration


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


def _switch(record: dict[str, Any], predicted_s: float | None) -> Switch:
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
        kind=text(outcome.get("kind"), 20),
        reason=text(outcome.get("reason")),
        pause_s=number(outcome.get("pause_s")),
        predicted_s=predicted_s,
        phases=phases,
        wire_bytes=whole(outcome.get("wire_bytes")),
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
        loss_rise=number(record.get("loss_rise")),
        steps=whole(record.get("steps")),
        spiked=record.get("spiked") is True,
    )


def _note(record: dict[str, Any]) -> Note:
    kind = text(record["kind"], 60)
    hold = whole(record.get("hold_growth_until_samples"))
    lines = {
        "start": f"the controller starts in mode {text(record.get('mode'), 20)}",
        "end": f"the controller ends after {text(record.get('changes'), 20)} changes",
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


def layout_name(row: dict[str, Any]) -> str:
    """The name of a row's layout; empty if it has none."""
    tp, pp, vpp, dp = (whole(row.get(size)) for size in ("tp", "pp", "vpp", "dp"))
    if tp is None or pp is None or dp is None:
        return ""
    return f"tp{tp}.pp{pp}{f'.vpp{vpp}' if vpp and vpp > 1 else ''}.dp{dp}"


def sizes_of(row: dict[str, Any]) -> Sizes:
    """The configuration of a row of the journal."""
    return Sizes(
        batch=whole(row.get("global_batch_size")),
        micro=whole(row.get("micro_batch_size")),
        layout=layout_name(row),
    )
