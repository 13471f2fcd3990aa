"""What the controller of a run decided last, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from copus_ext.goodput.decide import critical_batch_size_words
from copus_ext.goodput.headroom import Headroom
from copus_ext.goodput.inputs import ConfigThroughput, Decision, DecisionInputs
from copus_ext.goodput.messages import goodput, next_choice
from copus_ext.monitor.journal import DecisionRecord
from copus_ext.monitor.run_files import RunHistory, RunReader
from copus_ext.monitor.time_saved import TimeSaved, so_far
from copus_ext.monitor.values import FOREIGN, LINE, text

_CHANGES = 3


@dataclass(frozen=True, kw_only=True)
class NextChoice:
    """The best alternative to the current configuration."""

    global_batch_size: int
    micro_batch_size: int
    layout: str
    goodput: float | None
    """Predicted useful samples per second; None without a noise scale, and while nothing has told
    how fast this machine is."""
    gain: float | None
    """Predicted relative gain in goodput over the current configuration."""
    gain_sd: float | None
    """Standard deviation of the logarithm of 1 plus that."""
    needed: float | None
    """Gain required to switch there."""
    verdict: str
    """`chosen`, or the reason against it."""


@dataclass(frozen=True, kw_only=True)
class ChangeStatus:
    """A decision to change something, and its outcome."""

    number: int | None
    """Of the decision."""
    iteration: int | None
    """Steps done before."""
    kind: str
    """`batch`, or `relayout` if the layout changes too."""
    to: str
    """The chosen configuration, in words."""
    gain: float | None
    """Predicted gain in goodput."""
    gain_sd: float | None
    """Standard deviation of the logarithm of 1 plus that."""
    samples_per_s_before: float | None
    """Measured throughput of the configuration before."""
    predicted_samples_per_s: float | None
    """None where nothing had told how fast this machine is."""
    predicted_sd: float | None
    """Relative standard deviation of that."""
    samples_per_s: float | None
    """Measured throughput; None before it is known."""
    speed_over_predicted: float | None
    pause_s: float | None
    """Seconds without training."""
    state: str
    """`measured`, `being measured`, `only observed`, `under way`, or why it was not made."""


@dataclass(frozen=True, kw_only=True)
class ControllerStatus:
    mode: str
    """`act` or `observe`."""
    policy: str
    iteration: int | None = None
    """Step of the last decision; None before the first."""
    reason: str = "nothing decided yet"
    """Why the last decision came out as it did, or why there is none."""
    target_batch: float | None = None
    """Batch that the policy aims at in the end, samples."""
    goodput: float | None = None
    """Useful samples per second of the current configuration, as it was timed for the last
    decision; None where it was not."""
    best: NextChoice | None = None
    """The best alternative within reach; None if none was compared since the last change."""
    noise_scale_multiplier: float | None = None
    """The critical batch size over the noise scale, where that decides."""
    critical_batch_size: float | None = None
    """What the last decision went by, samples; None where it knew none."""
    critical_batch_size_source: str = ""
    """That size and what it comes from, in words."""
    headroom: Headroom | None = None
    """What there is to gain in the rest of the run; None if unknown."""
    so_far: str = ""
    """What was gained so far against staying at the start, or why that is not known."""
    time_saved: TimeSaved | None = None
    """The same as a number."""
    changes: tuple[ChangeStatus, ...] = ()
    """The last three, newest last."""


def controller_status(
    reader: RunReader, run: RunHistory, *, current: tuple[str, int | None, int | None]
) -> ControllerStatus | None:
    """The controller of a run; None without a journal.

    Args:
        reader: of the run.
        run: what was read.
        current: layout, micro-batch size and global batch size of the last step.
    """
    decisions = run.decisions
    if decisions.is_empty:
        return None
    known: dict[str, Any] = {}
    standing = decisions.standing
    if standing:
        try:
            known = _last_decision(reader.decision_at(standing[-1].place), current)
        except FOREIGN:
            known["reason"] = "the record of this decision is damaged"
    if decisions.failure:
        known["reason"] = f"controller disabled: {text(decisions.failure, LINE)}"
    mode, policy = decisions.mode, text(decisions.flags.get("copus_policy"), LINE)
    if not mode:  # the start of the launch is not among the lines that were read
        mode, policy = (text(run.config.get(f"copus_{name}")) for name in ("mode", "policy"))
    line, saved = so_far(run)
    return ControllerStatus(
        so_far=line,
        time_saved=saved,
        mode=mode or "act",
        policy=policy,
        headroom=decisions.headroom,
        changes=tuple(_change(d) for d in standing if d.is_change)[-_CHANGES:],
        **known,
    )


def _last_decision(
    record: Mapping[str, Any], current: tuple[str, int | None, int | None]
) -> dict[str, Any]:
    s, d = DecisionInputs.from_json(record["situation"]), Decision.from_json(record["decision"])
    row = next((row for row in (s.now, d.to, *s.rows) if _names(row) == current), None)
    # Gains over one configuration say nothing of the one that follows it.
    found = next_choice(s, d) if row == s.now else None
    best = None
    if found is not None:
        layout, micro_batch_size, global_batch_size = _names(found.row)
        best = NextChoice(
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            layout=layout,
            goodput=goodput(s, found.row) if d.is_scaled else None,
            gain=found.gain,
            gain_sd=found.gain_sd,
            needed=found.needed,
            verdict=text(found.blocked_reason) or "chosen",
        )
    return {
        "iteration": s.iteration,
        "reason": text(d.reason, LINE),
        "target_batch": d.target_batch,
        "goodput": goodput(s, row) if row is not None and row.source == "measured" else None,
        "best": best,
        "noise_scale_multiplier": s.rules.noise_scale_multiplier,
        "critical_batch_size": s.critical_batch_size,
        "critical_batch_size_source": critical_batch_size_words(s) if s.critical_batch_size else "",
    }


def _names(row: ConfigThroughput) -> tuple[str, int, int]:
    return str(row.layout), row.micro_batch_size, row.global_batch_size


def _change(d: DecisionRecord) -> ChangeStatus:
    outcome, relayout = d.outcome, d.relayout
    to = d.to if outcome is None else outcome.after
    changes_layout = d.kind == "relayout" or relayout is not None
    changes_layout |= outcome is not None and outcome.before.layout != outcome.after.layout
    words = [f"batch {to.batch} in {to.micro}"] if to.batch and to.micro else []
    pause_s = None if outcome is None else outcome.pause_s
    if changes_layout:
        words.append(to.layout or (relayout.to if relayout is not None else ""))
        pause_s = None if relayout is None else relayout.pause_s
    return ChangeStatus(
        number=d.number,
        iteration=d.iteration,
        kind="relayout" if changes_layout else "batch",
        to=" on ".join(filter(None, words)),
        gain=d.gain if outcome is None or outcome.gain is None else outcome.gain,
        gain_sd=d.gain_sd if outcome is None or outcome.gain is None else outcome.gain_sd,
        samples_per_s_before=outcome and outcome.speed_before,
        predicted_samples_per_s=d.predicted if outcome is None else outcome.predicted,
        predicted_sd=d.predicted_sd if outcome is None else outcome.predicted_sd,
        samples_per_s=outcome and outcome.speed,
        speed_over_predicted=outcome and outcome.ratio,
        pause_s=pause_s,
        state=_state(d),
    )


def _state(d: DecisionRecord) -> str:
    if d.outcome is not None:
        return "measured"
    if not d.applied:
        return "only observed"
    if d.relayout is not None and not d.was_made:
        return f"not done: {text(d.relayout.reason or d.relayout.kind, LINE)}"
    return "being measured" if d.was_made else "under way"
