"""The journal of a run as values: decisions with their changes of layout and outcomes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from copus_ext.goodput.headroom import Headroom
from copus_ext.goodput.messages import conditions_line
from copus_ext.monitor.values import (
    FOREIGN,
    number,
    rows,
    seconds_of,
    table,
    text,
    whole,
    written,
)
from megatron.trainer.common.errors import counted
from megatron.trainer.config.layout import Layout

MOVED, CALLED_OFF, ABANDONED = "moved", "called off", "abandoned"
"""How a change of layout ends: it was made; the run ended before it began; the run left to start
again."""
SCHEDULED = "as --layout-schedule says"
"""Why a schedule changed the layout."""
_GIVEN_UP = {"relayout.cancelled": CALLED_OFF, "relayout.abandoned": ABANDONED}
SEGMENT = "segment"
"""What a controller notes where a phase begins, which the record of steps tells as well."""
_MAX_RATIO = 1 << 20
_COUNTS, _TEXTS = ("best_batch", "present_batch", "num_layouts"), ("best_layout", "source")
_NO_NOTE = (
    "relayout.requested",
    "relayout.begin",
    "relayout.commit",
    "decision",
    "outcome",
    "relayout",
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A configuration by its names; None and empty where the journal does not say."""

    batch: int | None
    micro: int | None
    layout: str

    def __str__(self) -> str:
        return f"batch {self.batch} in micro-batches of {self.micro} on {self.layout}"


@dataclass(frozen=True, kw_only=True)
class Account:
    """What a decision knew of the configuration that the run would be in if the controller had
    changed nothing: the first one, on the layout of the flags."""

    deciding_s: float
    """Seconds of this decision, which are not among those of steps."""
    length_ratio: int
    """Samples in which the run counts that a sample of the present length is."""
    critical_batch_size: float | None
    """That the decision went by, samples of the present length."""
    critical_range: tuple[float, float] | None
    """One standard deviation down and up of that, as it was believed."""
    first: Sizes
    """The first configuration, samples of the present length."""
    first_samples_per_s: float | None
    """Its throughput by what the run has timed; None where it has timed nothing that tells it."""
    first_sd: float
    """Relative standard deviation of that; 0 if it was timed itself."""


@dataclass(kw_only=True)
class RelayoutRecord:
    """A change of layout that was tried."""

    number: int | None
    """Of the decision."""
    iteration: int | None
    t: float | None
    """When it ended, seconds since the epoch."""
    start: str
    to: str
    kind: str
    """`moved`, `called off`, `abandoned`, `cancelled` or `rolled_back`."""
    reason: str
    """Why the layout did not change."""
    pause_s: float | None
    predicted_s: float | None
    """Pause that the controller predicted."""
    phases: dict[str, float]
    """Seconds of each phase."""


@dataclass(kw_only=True)
class OutcomeRecord:
    """Measurements after a change, up to 50 steps later; speeds are samples/s."""

    number: int | None
    """Of the decision."""
    iteration: int | None
    """Step after which the change was made."""
    before: Sizes
    after: Sizes
    gain: float | None
    """Predicted gain in goodput."""
    gain_sd: float | None
    """Standard deviation of the logarithm of 1 plus that."""
    predicted: float | None
    """None where nothing had told how fast this machine is."""
    predicted_sd: float | None
    """Relative standard deviation of that."""
    speed_before: float | None
    timed_before: tuple[int, int, int] | None
    """First and last of the steps that this was measured over, and how many; None if unknown."""
    speed: float | None
    timed_after: tuple[int, int, int] | None
    steps: int | None
    """Steps measured."""
    pause_s: float | None
    """Seconds by which the first step was longer than the others."""
    spiked: bool

    @property
    def ratio(self) -> float | None:
        """Measured over predicted throughput."""
        return self.speed / self.predicted if self.speed and self.predicted else None


@dataclass(kw_only=True)
class DecisionRecord:
    place: int
    """Offset of its line in the journal."""
    number: int | None
    iteration: int | None
    samples: int | None
    t: float | None
    """Seconds since the epoch."""
    kind: str
    """`stay`, `batch` or `relayout`."""
    applied: bool
    reason: str
    gain: float | None
    """Predicted gain in goodput of the choice, or of the best alternative within reach."""
    gain_sd: float | None
    """Standard deviation of the logarithm of 1 plus that gain."""
    needed: float | None
    """Gain required to switch there."""
    now: Sizes
    to: Sizes
    predicted: float | None
    """Predicted samples/s of `to`; None where nothing had told how fast this machine is."""
    predicted_sd: float | None
    """Relative standard deviation of that."""
    account: Account | None = None
    """None where the first configuration is unknown."""
    undone: bool = False
    """Whether a restart went back to before it."""
    relayout: RelayoutRecord | None = None
    outcome: OutcomeRecord | None = None

    @property
    def is_change(self) -> bool:
        """Whether another configuration was chosen."""
        return self.kind != "stay"

    @property
    def is_proposal(self) -> bool:
        """Whether another configuration was chosen by a controller that only observed."""
        return self.is_change and not self.applied and self.outcome is None

    @property
    def was_made(self) -> bool:
        """Whether the run took on another configuration, and has not gone back before it."""
        if not self.is_change or not self.applied or self.undone:
            return False
        if self.relayout is not None:
            return self.relayout.kind == MOVED
        return self.kind != "relayout" or self.outcome is not None


@dataclass(kw_only=True)
class NoteRecord:
    """Any other line: a start, a pause, a failure."""

    kind: str
    t: float | None
    iteration: int | None
    line: str


@dataclass(kw_only=True)
class DecisionHistory:
    """A journal, or the end of one; lists are in the order of the file."""

    mode: str = ""
    """`act` or `observe`; empty if no start was read."""
    flags: dict[str, Any] = field(default_factory=dict)
    """Of the last launch."""
    headroom: Headroom | None = None
    """What was to be gained in the rest of the run, as last recorded by the last launch."""
    failure: str = ""
    """Why the controller of the last launch is disabled; empty if it is not."""
    has_ramp: bool = False
    """Whether the flags of the last launch change the batch by themselves."""
    decided: list[DecisionRecord] = field(default_factory=list)
    relayouts: list[RelayoutRecord] = field(default_factory=list)
    outcomes: list[OutcomeRecord] = field(default_factory=list)
    notes: list[NoteRecord] = field(default_factory=list)
    layouts: list[tuple[int, str]] = field(default_factory=list)
    """Steps done and the layout from there on."""
    begin: int = 0
    """Steps done when the journal begins."""
    firsts: list[tuple[int, Sizes]] = field(default_factory=list)
    """Steps done and the configuration without the controller from there on, in samples of the
    run; empty before a decision."""
    requested: tuple[int | None, float | None] = (None, None)
    """Decision of the last requested change of layout, and its predicted seconds."""
    is_untouched_at: int | None = 0
    """Steps done at the last start after which no decision of an earlier launch stands; None once
    there is one."""

    @property
    def is_empty(self) -> bool:
        """Whether there is no journal."""
        return not (self.decided or self.relayouts or self.outcomes or self.notes)

    @property
    def layout(self) -> str:
        """The last layout; empty if unknown."""
        return self.layouts[-1][1] if self.layouts else ""

    @property
    def first(self) -> Sizes | None:
        """The configuration without the controller, in samples of the run."""
        return self.firsts[-1][1] if self.firsts else None

    def first_at(self, iteration: int, ratio: float) -> Sizes | None:
        """The configuration without the controller after so many steps.

        Args:
            ratio: samples of the run that a sample is, in which the answer counts.
        """
        known = [first for at, first in self.firsts if at <= iteration]
        return _first_in(known[-1], round(ratio)) if known else None

    @property
    def standing(self) -> list[DecisionRecord]:
        """Decisions that no restart has undone."""
        return [d for d in self.decided if not d.undone]

    @property
    def made(self) -> list[DecisionRecord]:
        """Changes that were made and that no restart has undone."""
        return [d for d in self.decided if d.was_made]

    def add(self, place: int, record: dict[str, Any]) -> None:
        """Adds the next line.

        Args:
            record: the line. Of what a decision saw, only the present and the first configuration
                are kept: a long journal holds the table of all of them too often.
        """
        kind = record.get("kind")
        if not isinstance(kind, str):
            return
        if kind == "start":
            self._start(record)
        elif kind == "decision":
            self._add_decision(place, record)
            self.headroom = _headroom(record.get("headroom")) or self.headroom
        elif kind == "outcome":
            outcome = _outcome(record)
            # A launch that goes on from an earlier checkpoint measures it once more.
            same = outcome.number, outcome.iteration
            self.outcomes = [o for o in self.outcomes if (o.number, o.iteration) != same]
            self.outcomes.append(outcome)
            if decided := self._find(outcome.number):
                decided.outcome = outcome
        elif kind == "relayout.requested":
            self.requested = whole(record.get("number")), number(record.get("predicted_s"))
        elif kind == "relayout" or kind in _GIVEN_UP:
            self._add_relayout(kind, record)
        elif kind == "failure":
            self.failure = text(record.get("error"))
        if kind not in _NO_NOTE:
            self.notes.append(_note(kind, record))

    def _start(self, record: dict[str, Any]) -> None:
        """A launch undoes decisions that lie beyond its first step. One from the first step on, as
        with `--finetune`, is a run of its own."""
        self.mode = text(record.get("mode"), 20)
        self.flags = table(record.get("flags"))
        self.has_ramp = bool(record.get("rampup_batch_size"))
        self.failure = ""
        self.headroom = _headroom(record.get("headroom"))
        iteration, layout = whole(record.get("iteration")), text(record.get("layout"), 100)
        if not (self.decided or self.layouts):
            self.begin = iteration or 0
        if iteration is not None:
            for decided in self.decided:
                decided.undone |= decided.iteration is not None and decided.iteration > iteration
            self.outcomes = [o for o in self.outcomes if (o.iteration or 0) <= iteration]
            if iteration == 0:
                self.begin, self.firsts = 0, []
            if not self.standing:
                self.is_untouched_at = iteration
        if layout:
            self._enter(layout, iteration or 0)
            self.layouts.append((iteration or 0, layout))

    def _enter(self, layout: str, iteration: int) -> None:
        """A launch begins on a layout. The run would be on it too without the controller, unless
        the controller has asked for it."""
        asked = [d.to.layout for d in self.standing[-1:] if d.applied and d.is_change]
        if self.first is not None and layout not in (*asked, self.layout):
            first = replace(self.first, layout=layout)
            self.firsts = [*((at, old) for at, old in self.firsts if at < iteration)]
            self.firsts.append((iteration, first))

    def _add_decision(self, place: int, record: dict[str, Any]) -> None:
        now, ratio = _now_of(record), _length_ratio(record)
        sizes = sizes_of(now)
        at = self.is_untouched_at
        if (self.first is None or at is not None) and sizes.batch and sizes.micro:
            micro = sizes.micro * ratio
            first = Sizes(batch=sizes.batch * ratio, micro=micro, layout=sizes.layout)
            if self.first is None:
                self.firsts = [(0, first)]
            elif first != self.first:  # other flags since the start that undid its decisions
                self.firsts = [(at or 0, first)]
            self.is_untouched_at = None
        self.decided.append(_decision(place, record, now, self.first))

    def _add_relayout(self, kind: str, record: dict[str, Any]) -> None:
        """The end of a change of layout. One that was given up may be recorded without its number,
        and once more with it."""
        requested, predicted_s = self.requested
        own = whole(record.get("number"))
        about = own if own is not None or kind == "relayout" else requested
        relayout = relayout_of(record, kind, predicted_s if about == requested else None)
        relayout.number = about
        if (decided := self._find(about)) is not None:
            if relayout.iteration is None:
                relayout.iteration = decided.iteration
            relayout.start = relayout.start or decided.now.layout
            relayout.to = relayout.to or decided.to.layout
            if (
                kind == "relayout.abandoned"
                and decided.relayout
                and decided.relayout.kind == ABANDONED
            ):
                return
            decided.relayout = relayout
        self.relayouts.append(relayout)
        if relayout.kind == MOVED and relayout.to:
            self.layouts.append((relayout.iteration or 0, relayout.to))

    def _find(self, wanted: int | None) -> DecisionRecord | None:
        """The last decision of a number: a restart may have used it again."""
        same = (d for d in reversed(self.decided) if d.number == wanted and wanted is not None)
        return next(same, None)


def _headroom(value: Any) -> Headroom | None:
    """The headroom of a record; None if it is of another form."""
    try:
        figures = {name: whole(n) for name, n in value.items() if name in _COUNTS}
        texts = {name: text(t, 100) for name, t in value.items() if name in _TEXTS}
        found = Headroom.from_json({**value, **figures, **texts})
        # It is of another form if it cannot be put into words.
        return found if found.batch.high >= 0 and str(found) else None
    except FOREIGN:
        return None


def _now_of(record: dict[str, Any]) -> dict[str, Any]:
    """The present configuration as a decision saw it; empty if unknown."""
    situation = table(record.get("situation"))
    configurations, current = situation.get("rows"), whole(situation.get("current"))
    if not isinstance(configurations, list) or current is None:
        return {}
    return table(configurations[current]) if 0 <= current < len(configurations) else {}


def _length_ratio(record: dict[str, Any]) -> int:
    """Samples in which the run counts that a sample of a batch is."""
    rules = table(table(record.get("situation")).get("rules"))
    return min(max(whole(rules.get("length_ratio")) or 1, 1), _MAX_RATIO)


def sizes_of(row: dict[str, Any]) -> Sizes:
    """The names of a configuration of the journal."""
    tp, pp, vpp, dp = (whole(row.get(size)) for size in ("tp", "pp", "vpp", "dp"))
    try:
        more = {"cp": row.get("cp", 1), "ep": row.get("ep", 1), "etp": row.get("etp")}
        more["layer_partition"] = row.get("cut")
        layout = str(Layout(tp=tp or 0, pp=pp or 0, vpp=vpp or 1, dp=dp or 0, **more))
    except ValueError:
        layout = ""
    batch, micro = whole(row.get("global_batch_size")), whole(row.get("micro_batch_size"))
    return Sizes(batch=batch, micro=micro, layout=layout)


def _first_in(first: Sizes, ratio: int) -> Sizes:
    """The first configuration in longer samples, as a trainer cuts it that keeps its tokens."""
    if ratio <= 1:
        return first
    try:
        unit = Layout.from_text(first.layout).batch_unit
    except ValueError:
        unit = 1
    batch = max(round((first.batch or unit) / ratio / unit) * unit, unit)
    return replace(first, batch=batch, micro=max((first.micro or 1) // ratio, 1))


def _account(record: dict[str, Any], first: Sizes) -> Account:
    situation, decision = table(record.get("situation")), table(record.get("decision"))
    ratio = _length_ratio(record)
    own = _first_in(first, ratio)
    sizes = {"global_batch_size": own.batch, "micro_batch_size": own.micro}
    known = (row for row in rows(situation.get("rows")) if sizes.items() <= row.items())
    found = next((row for row in known if sizes_of(row).layout == own.layout), {})
    source, sd = text(found.get("source"), 20), number(found.get("relative_sd")) or 0.0
    critical = number(decision.get("critical_batch_size"))
    low, high = (number(decision.get(f"critical_batch_size_{end}")) for end in ("low", "high"))
    is_told = source in ("measured", "profiled", "corrected")
    return Account(
        deciding_s=number(record.get("seconds")) or 0.0,
        length_ratio=ratio,
        critical_batch_size=critical if critical and critical > 0 else None,
        critical_range=None if not low or not high else (low, high),
        first=own,
        first_samples_per_s=number(found.get("samples_per_s")) if is_told else None,
        first_sd=0.0 if source == "measured" else min(max(sd, 0.0), 0.9),
    )


def _decision(
    place: int, record: dict[str, Any], now: dict[str, Any], first: Sizes | None
) -> DecisionRecord:
    decision, situation = table(record.get("decision")), table(record.get("situation"))
    to, kind = table(decision.get("to")), text(decision.get("kind"), 20)
    growth = number(table(situation.get("rules")).get("growth"))
    candidates = rows(decision.get("candidates"))
    candidate = _candidate(candidates, now=now, to=to, kind=kind, growth=growth)
    gain, gain_sd = number(decision.get("gain")), number(decision.get("gain_sd"))
    return DecisionRecord(
        place=place,
        number=whole(record.get("number")),
        iteration=whole(record.get("iteration")),
        samples=whole(record.get("consumed_samples")),
        t=seconds_of(record.get("time")),
        kind=kind,
        applied=record.get("applied") is True,
        reason=text(decision.get("reason")),
        gain=number(candidate.get("gain")) if gain is None else gain,
        gain_sd=number(candidate.get("gain_sd")) if gain is None else gain_sd,
        needed=number(candidate.get("needed")),
        now=sizes_of(now),
        to=sizes_of(to),
        predicted=number(to.get("samples_per_s")) if decision.get("is_scaled", True) else None,
        predicted_sd=number(to.get("relative_sd")),
        account=None if first is None else _account(record, first),
    )


def _candidate(
    candidates: list[dict[str, Any]],
    *,
    now: dict[str, Any],
    to: dict[str, Any],
    kind: str,
    growth: float | None,
) -> dict[str, Any]:
    """The chosen candidate, or the best alternative; as `decide.best_alternative`, of values that
    anybody may have written."""
    if kind != "stay":
        return next((c for c in candidates if c.get("row") == to), {})
    others = [c for c in candidates if c.get("row") != now and number(c.get("needed")) is not None]
    most = (sizes_of(now).batch or 0) * (growth or math.inf)
    within = [c for c in others if (sizes_of(table(c.get("row"))).batch or math.inf) <= most]
    return next(iter(within or others), {})


def relayout_of(record: dict[str, Any], kind: str, predicted_s: float | None) -> RelayoutRecord:
    """A change of layout of a journal, or of a record of steps."""
    outcome = table(record.get("outcome"))
    took = {text(name, 60): number(value) for name, value in table(outcome.get("phases")).items()}
    return RelayoutRecord(
        number=whole(record.get("number")),
        iteration=whole(record.get("iteration")),
        t=written(record),
        start=text(record.get("start"), 100),
        to=text(record.get("to"), 100),
        kind=_GIVEN_UP.get(kind) or text(outcome.get("kind"), 20),
        reason=text(outcome.get("reason") or record.get("reason")),
        pause_s=number(outcome.get("pause_s")),
        predicted_s=predicted_s,
        phases={name: seconds for name, seconds in took.items() if seconds is not None},
    )


def _outcome(record: dict[str, Any]) -> OutcomeRecord:
    def sizes(side: str) -> Sizes:
        return Sizes(
            batch=whole(record.get(f"{side}_batch")),
            micro=whole(record.get(f"{side}_micro_batch")),
            layout=text(record.get(f"{side}_layout"), 100),
        )

    return OutcomeRecord(
        number=whole(record.get("decision")),
        iteration=whole(record.get("iteration")),
        before=sizes("from"),
        after=sizes("to"),
        gain=number(record.get("gain")),
        gain_sd=number(record.get("gain_sd")),
        predicted=number(record.get("predicted_samples_per_s")),
        predicted_sd=number(record.get("predicted_sd")),
        speed_before=number(record.get("samples_per_s_before")),
        timed_before=_timed(record.get("timed_before")),
        speed=number(record.get("samples_per_s")),
        timed_after=_timed(record.get("timed_after")),
        steps=whole(record.get("steps")),
        pause_s=number(record.get("pause_s")),
        spiked=record.get("spiked") is True,
    )


def _timed(value: Any) -> tuple[int, int, int] | None:
    steps = [whole(x) for x in value] if isinstance(value, list) else []
    first, last, count = steps if len(steps) == 3 else (None, None, None)
    return None if first is None or last is None or count is None else (first, last, count)


def _conditions(record: dict[str, Any]) -> str:
    given = record.get("factors")
    named = given.items() if isinstance(given, dict) else ()
    factors = {text(n, 20): x for n, value in named if (x := number(value)) is not None}
    before_s, after_s = number(record.get("before_s")), number(record.get("after_s"))
    return conditions_line(before_s=before_s, after_s=after_s, factors=factors)


def _spike(record: dict[str, Any]) -> str:
    after, what = "grew", "growth"
    if record.get("hold_shrinking_until_samples") is not None:
        after, what = "shrank", "shrinking"
    until = whole(record.get(f"hold_{what}_until_samples"))
    return f"the loss spiked after the batch {after}; no {what} until sample {until}"


def phase_words(record: dict[str, Any]) -> str:
    """The phase of a schedule that begins, from its record or from the controller's."""
    known = {
        name: whole(record.get(name))
        for name in ("phase", "global_batch_size", "micro_batch_size", "seq_length")
    }
    name = "the next phase" if known["phase"] is None else f"phase {known['phase']}"
    return (
        f"{name} of the schedule begins: batch {known['global_batch_size']} in micro-batches of "
        f"{known['micro_batch_size']}, samples of {known['seq_length']} tokens"
    )


def _note(kind: str, record: dict[str, Any]) -> NoteRecord:
    kind = text(kind, 60)
    made = counted(whole(record.get("changes")) or 0, "change")
    lines = {
        SEGMENT: phase_words(record),
        "start": f"the controller started in mode {text(record.get('mode'), 20)}",
        "end": f"the controller ended after {made}",
        "paused": "an operator paused the controller",
        "resumed": "an operator resumed the controller",
        "failure": f"the controller was disabled: {text(record.get('error'))}",
        "conditions": _conditions(record),
        "spike": _spike(record),
        "relayout.cancelled": f"change to {text(record.get('to'), 100)} cancelled",
        "relayout.abandoned": "change of layout abandoned; the run left to start again",
    }
    line = lines.get(kind, kind)
    if kind.startswith("relayout.") and (reason := text(record.get("reason"))):
        line = f"{line}: {reason}"
    if kind == "start" and (remark := text(record.get("note"))):
        line = f"{line}; {remark}"
    t = seconds_of(record.get("time"))
    return NoteRecord(kind=kind, t=t, iteration=whole(record.get("iteration")), line=line)
