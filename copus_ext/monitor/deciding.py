"""What the controller made of a run last: from the end of its journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from copus_ext.goodput.inputs import Candidate, ConfigThroughput, Decision, DecisionInputs
from copus_ext.goodput.messages import goodput, next_choice
from copus_ext.monitor.decisions import Decided, Decisions
from copus_ext.monitor.ends import whole_record
from copus_ext.monitor.values import FOREIGN, LINE, text

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
class ControllerStatus:
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
    noise_scale_multiplier: float | None
    """c: the critical batch size is c times the measured noise scale."""
    changes: tuple[Change, ...]
    """The last three, newest last."""


def deciding_of(
    run: Path, decisions: Decisions, *, present: tuple[str, int | None, int | None]
) -> ControllerStatus:
    """What the journal says.

    Args:
        run: its directory.
        decisions: the end of its journal.
        present: layout, micro-batch and batch of the last step.
    """
    known: dict[str, Any] = dict(
        iteration=None,
        reason="nothing decided yet",
        target_batch=None,
        goodput=None,
        best=None,
        noise_scale_multiplier=None,
    )
    standing = decisions.standing
    if standing:
        try:
            known = _weighed(whole_record(run, standing[-1].place), present)
        except FOREIGN:
            known["reason"] = "the journal is of another version"
    if decisions.failure:
        known["reason"] = f"ended with an error: {text(decisions.failure, LINE)}"
    return ControllerStatus(
        mode=decisions.mode or "act",
        policy=text(decisions.flags.get("copus_policy"), LINE),
        changes=tuple(_change(d) for d in standing if d.is_change)[-_CHANGES:],
        **known,
    )


def _weighed(record: Mapping[str, Any], present: tuple[str, int | None, int | None]) -> dict:
    s, d = DecisionInputs.from_json(record["situation"]), Decision.from_json(record["decision"])
    row = next((row for row in (s.now, d.to, *s.rows) if _place(row) == present), None)
    # What was weighed against a configuration says nothing of the one that follows it.
    found = next_choice(s, d) if row == s.now else None
    return {
        "iteration": s.iteration,
        "reason": text(d.reason, LINE),
        "target_batch": d.target_batch,
        "goodput": None if row is None else goodput(s, row),
        "best": None if found is None else _choice(s, found),
        "noise_scale_multiplier": s.rules.noise_scale_multiplier,
    }


def _place(row: ConfigThroughput) -> tuple[str, int, int]:
    return str(row.as_layout), row.micro_batch_size, row.global_batch_size


def _choice(s: DecisionInputs, candidate: Candidate) -> Choice:
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


def _change(d: Decided) -> Change:
    outcome, switch = d.outcome, d.switch
    to = d.to if outcome is None else outcome.after
    is_move = d.kind == "relayout" or switch is not None
    is_move |= outcome is not None and outcome.before.layout != outcome.after.layout
    words = [f"batch {to.batch} in {to.micro}"] if to.batch and to.micro else []
    if is_move:
        words.append(to.layout or (switch.to if switch is not None else ""))
    pause_s = None if outcome is None else outcome.pause_s
    if is_move:
        pause_s = None if switch is None else switch.pause_s
    return Change(
        number=d.number,
        iteration=d.iteration,
        kind="relayout" if is_move else "batch",
        to=" on ".join(filter(None, words)),
        gain=d.gain if outcome is None or outcome.gain is None else outcome.gain,
        predicted_samples_per_s=(outcome and outcome.predicted) or d.predicted,
        samples_per_s=outcome and outcome.speed,
        speed_over_predicted=outcome and outcome.ratio,
        pause_s=pause_s,
        state=_state(d),
    )


def _state(d: Decided) -> str:
    if d.outcome is not None:
        return "measured"
    if not d.obeyed:
        return "only observed"
    if d.switch is not None and not d.was_made:
        return f"not done: {text(d.switch.reason or d.switch.kind, LINE)}"
    return "being measured" if d.was_made else "under way"
