"""What the controller made of a run last: from the end of its journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from copus_ext.goodput.situation import Candidate, Decision, Row, Situation
from copus_ext.goodput.summary import goodput, next_choice
from copus_ext.report.ends import Decided
from copus_ext.report.values import FOREIGN, LINE, number, text, whole

_CHANGES = 3


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A configuration that may come next."""

    batch: int
    """Samples of a step."""
    micro_batch: int
    """Samples of a micro-batch."""
    layout: str
    """Such as `tp1.pp2.dp4`."""
    goodput: float | None
    """Useful samples per second, predicted; None without a noise scale."""
    gain: float | None
    """Worth over that of the present configuration, minus 1."""
    needed: float | None
    """Gain that it would take to move there."""
    verdict: str
    """`chosen`, or what keeps it back."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A decision to change something, and what came of it."""

    number: int | None
    """Of the decision."""
    iteration: int | None
    """Steps done before."""
    kind: str
    """`batch`, or `relayout` for another layout."""
    to: str
    """The configuration chosen, in words."""
    gain: float | None
    """Predicted gain in goodput."""
    predicted_samples_per_s: float | None
    """Throughput that was predicted."""
    samples_per_s: float | None
    """Throughput that came; None before it is known."""
    speed_over_predicted: float | None
    """The one over the other."""
    pause_s: float | None
    """Seconds for which training stood still for it."""
    state: str
    """`measured`, `being measured`, `only observed`, `under way`, or why it did not come about."""


@dataclass(frozen=True, kw_only=True)
class Deciding:
    """The controller."""

    mode: str
    """`act` or `observe`."""
    policy: str
    """How the batch is chosen."""
    iteration: int | None
    """Step of the last decision; None before the first."""
    reason: str
    """Why it came out as it did, or why there is none."""
    target_batch: float | None
    """Batch that the policy aims at in the end, samples."""
    goodput: float | None
    """Of the present configuration: useful samples per second, those of a batch of the reference
    size counting in full. At the last decision."""
    best: Choice | None
    """The best other configuration within reach; None where none was weighed since the last
    change."""
    calibration: float | None
    """c: the noise scale that counts is c times the measured one."""
    changes: tuple[Change, ...]
    """The last three, newest last."""


def deciding_of(decided: Decided, *, present: tuple[str, int | None, int | None]) -> Deciding:
    """What the journal says.

    Args:
        decided: its end.
        present: layout, micro-batch and batch of the last step.
    """
    starts = decided.of("start")
    start = starts[-1] if starts else {}
    flags = start.get("flags")
    policy = flags.get("copus_policy") if isinstance(flags, dict) else None
    known: dict[str, Any] = dict(
        iteration=None,
        reason="nothing decided yet",
        target_batch=None,
        goodput=None,
        best=None,
        calibration=None,
    )
    if decided.last is not None:
        try:
            known = _weighed(decided.last, present)
        except FOREIGN:
            known["reason"] = "the journal is of another version"
    if failures := decided.of("failure"):
        known["reason"] = f"ended with an error: {text(failures[-1].get('error'), LINE)}"
    return Deciding(
        mode=text(start.get("mode")) or "act",
        policy=text(policy),
        changes=tuple(_changes(decided)),
        **known,
    )


def _weighed(record: Mapping[str, Any], present: tuple[str, int | None, int | None]) -> dict:
    s, d = Situation.from_json(record["situation"]), Decision.from_json(record["decision"])
    row = next((row for row in (s.now, d.to, *s.rows) if _place(row) == present), None)
    # What was weighed against a configuration says nothing of the one that follows it.
    found = next_choice(s, d) if row == s.now else None
    return {
        "iteration": s.iteration,
        "reason": text(d.reason, LINE),
        "target_batch": d.target_batch,
        "goodput": None if row is None else goodput(s, row),
        "best": None if found is None else _choice(s, found),
        "calibration": s.rules.calibration,
    }


def _place(row: Row) -> tuple[str, int, int]:
    return str(row.as_layout), row.micro_batch_size, row.global_batch_size


def _choice(s: Situation, candidate: Candidate) -> Choice:
    layout, micro_batch, batch = _place(candidate.row)
    return Choice(
        batch=batch,
        micro_batch=micro_batch,
        layout=layout,
        goodput=goodput(s, candidate.row),
        gain=candidate.gain,
        needed=candidate.needed,
        verdict=text(candidate.verdict),
    )


def _changes(decided: Decided) -> list[Change]:
    """The newest, from decisions, outcomes and changes of layout of one number."""
    known: dict[Any, dict[str, Any]] = {}

    def of(key: Any) -> dict[str, Any]:
        # One that was rolled back has its number again: what comes last is last.
        return known.setdefault(str(key), {})

    for record in decided.changes:
        of(record.get("number"))["decision"] = record
    for record in decided.of("outcome"):
        of(record.get("decision"))["outcome"] = record
    for record in decided.of("switch", "switch.cancelled", "switch.abandoned"):
        of(record.get("number"))["switch"] = record
    found = [_change(about) for about in known.values()]
    found.sort(key=lambda c: (c.iteration or 0, c.number or 0))
    return found[-_CHANGES:]


def _change(about: Mapping[str, dict[str, Any]]) -> Change:
    decision, outcome = about.get("decision", {}), about.get("outcome", {})
    switch = about.get("switch", {})
    told = decision.get("decision")
    told = told if isinstance(told, dict) else {}
    at = next((w for r in (decision, outcome, switch) if (w := whole(r.get("iteration")))), None)
    to, layout = told.get("to"), outcome.get("to_layout") or switch.get("to")
    chosen = to if isinstance(to, dict) else {}
    batch = whole(outcome.get("to_batch")) or whole(chosen.get("global_batch_size"))
    micro = whole(outcome.get("to_micro_batch")) or whole(chosen.get("micro_batch_size"))
    is_move = bool(switch) or told.get("kind") == "relayout"
    is_move |= outcome.get("from_layout") != outcome.get("to_layout")
    words = [f"batch {batch} in {micro}"] if batch and micro else []
    if is_move:
        words.append(text(layout) or _layout(chosen))
    moved = switch.get("outcome")
    pause = number(moved.get("pause_s")) if isinstance(moved, dict) else None
    predicted = number(outcome.get("predicted_samples_per_s"))
    return Change(
        number=next(
            (
                n
                for n in (decision.get("number"), outcome.get("decision"), switch.get("number"))
                if whole(n) is not None
            ),
            None,
        ),
        iteration=at,
        kind="relayout" if is_move else "batch",
        to=" on ".join(words),
        gain=number(outcome.get("gain")) or number(told.get("gain")),
        predicted_samples_per_s=predicted or number(chosen.get("samples_per_s")),
        samples_per_s=number(outcome.get("samples_per_s")),
        speed_over_predicted=number(outcome.get("speed_over_predicted")),
        pause_s=pause if is_move else number(outcome.get("pause_s")),
        state=_state(decision, outcome, switch, is_move=is_move),
    )


def _layout(row: Mapping[str, Any]) -> str:
    try:
        return str(Row(**row).as_layout)
    except FOREIGN:
        return ""


def _state(decision: Mapping, outcome: Mapping, switch: Mapping, *, is_move: bool) -> str:
    if outcome:
        return "measured"
    if decision and decision.get("obeyed") is not True:
        return "only observed"
    moved = switch.get("outcome")
    if isinstance(moved, dict):
        if moved.get("kind") == "moved":
            return "being measured"
        return f"not done: {text(moved.get('reason'), LINE)}"
    if switch:
        return f"not done: {text(switch.get('reason'), LINE)}"
    return "under way" if is_move else "being measured"
