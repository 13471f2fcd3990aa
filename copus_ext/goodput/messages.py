"""Decisions and outcomes in words and numbers, for the log, the sinks and the end of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from copus_ext.cost_model.conditions import is_small
from copus_ext.goodput.config_change import ConfigChange
from copus_ext.goodput.decide import aim_words, best_alternative
from copus_ext.goodput.inputs import Candidate, ConfigThroughput, Decision, DecisionInputs
from copus_ext.goodput.state import WINDOW_STEPS
from megatron.trainer.common.errors import counted

UNDECIDED = " copus: no decision yet |"
FAILED = " copus: controller disabled, see the error above; the run keeps its configuration |"


def decision_line(decision: Decision) -> str:
    """The line that a log shows of a decision that changes nothing."""
    if decision.kind != "stay":
        return f" copus: would change {decision.reason} |"
    batch = decision.to.global_batch_size
    aim = aim_words(decision.target_batch, now=batch, to=batch)
    return f" copus: batch {batch} stays |{f' {aim} |' if aim else ''} {decision.reason} |"


def length_line(total_samples: int, *, before: int, after: int) -> str:
    """Why the number of steps is another after a change of the batch.

    Args:
        total_samples: of the run.
        before: step at which it would have ended.
        after: step at which it ends now.
    """
    return (
        f"copus: training is measured in samples: its {total_samples} samples now end at step "
        f"{after} instead of {before}"
    )


def summary(
    changes: list[ConfigChange], *, mode: str, num_before: int = 0, total: int | None = None
) -> str:
    """The changes of a launch and their outcomes, a line for each.

    Args:
        changes: the newest of the run.
        mode: `--copus-mode`.
        num_before: changes of earlier launches, which are only counted.
        total: changes of the run; None: no more than are given.
    """
    if mode != "act":
        return "copus: observed only; the journal says what it would have done"
    num_here = (len(changes) if total is None else total) - num_before
    here = changes[-num_here:] if num_here > 0 else []
    before = f" in this launch; {counted(num_before, 'change')} before" if num_before else ""
    what = f"{counted(num_here, 'change')} decided" if here else "nothing was changed"
    lines = [f"copus: {what}{before}"]
    for c in here:
        sizes = f"{c.from_batch} -> {c.to_batch}"
        if c.from_micro_batch != c.to_micro_batch:
            sizes += f" (micro-batch {c.from_micro_batch} -> {c.to_micro_batch})"
        if c.from_layout != c.to_layout:
            sizes += f", layout {c.from_layout} -> {c.to_layout}"
        parts = [f"  step {c.iteration}: batch {sizes}"]
        if c.gain is not None:
            doubt = f" +- {100 * (1.0 + c.gain) * c.gain_sd:.1f}" if c.gain_sd else ""
            parts.append(f"predicted goodput {100 * c.gain:+.1f}{doubt} %")
        parts += outcome_parts(c)
        if c.loss_slope is not None and c.slope_before is not None:
            parts.append(f"loss per 1000 samples {c.slope_before:.3f} -> {c.loss_slope:.3f}")
        if c.spiked:
            parts.append("loss spike")
        lines.append(", ".join(parts))
    return "\n".join(lines)


def outcome_parts(c: ConfigChange) -> list[str]:
    """The measured speeds before and after a change, each with its steps, and how the prediction
    compares."""
    before = "too few steps to tell"
    if c.samples_per_s_before is not None:
        before = _timed(c.samples_per_s_before, c.timed_before)
    if c.samples_per_s is None:
        return [f"measured {before}, then too few steps to tell"] if c.samples_per_s_before else []
    parts = [f"measured {before}, then {_timed(c.samples_per_s, c.timed_after)}"]
    if c.samples_per_s_before is not None:
        parts.append(f"{100 * (c.samples_per_s / c.samples_per_s_before - 1):+.1f} %")
    if c.speed_over_predicted is not None and c.predicted_samples_per_s is not None:
        doubt = f" +- {c.predicted_samples_per_s * (c.predicted_sd or 0.0):.1f}"
        doubt = "" if c.predicted_sd is None else doubt
        parts.append(f"{c.predicted_samples_per_s:.1f}{doubt} predicted")
    return parts


def _timed(speed: float, steps: Sequence[int]) -> str:
    """A throughput and the steps that it was measured over."""
    of = f" in steps {steps[0]} to {steps[1]}" if len(steps) == 3 else ""
    return f"{speed:.1f} samples/s{of}"


def goodput(s: DecisionInputs, row: ConfigThroughput) -> float | None:
    """Useful samples per second of a configuration, those of a batch of the reference size counting
    in full; None without a noise scale."""
    critical = s.critical_batch_size
    if not critical or critical <= 0:
        return None
    worth = (s.rules.reference_batch + critical) / (row.global_batch_size + critical)
    return row.samples_per_s * worth


def next_choice(s: DecisionInputs, decision: Decision) -> Candidate | None:
    """The configuration that was chosen, or that would come next."""
    if decision.kind == "stay":
        return best_alternative(s, decision.candidates)
    return next((c for c in decision.candidates if c.row == decision.to), None)


def decision_scalars(s: DecisionInputs, decision: Decision, *, number: int) -> dict[str, float]:
    """The numbers of a decision by tag.

    Args:
        s: where the run stood.
        decision: what came out.
        number: of the decision.
    """
    best = next_choice(s, decision)
    is_scaled = decision.is_scaled
    named = {
        "copus/decisions": float(number),
        "copus/goodput": goodput(s, s.now) if s.now.source == "measured" else None,
        "copus/target-batch": decision.target_batch,
        "copus/next-batch": None if best is None else float(best.row.global_batch_size),
        "copus/next-goodput": goodput(s, best.row) if best and is_scaled else None,
        "copus/next-gain": None if best is None else best.gain,
        "copus/next-gain-sd": None if best is None else best.gain_sd,
        "copus/next-gain-needed": None if best is None else best.needed,
    }
    return {tag: value for tag, value in named.items() if value is not None}


def outcome_scalars(change: ConfigChange, *, num_changes: int) -> dict[str, float]:
    """The numbers of a change by tag. The error of the prediction, which raises an alarm, is only
    among them where enough steps have shown it.

    Args:
        change: whose outcome was measured.
        num_changes: changes of the run so far.
    """
    is_sure = (change.steps or 0) >= WINDOW_STEPS
    named = {
        "copus/changes": float(num_changes),
        "copus/predicted-samples-per-s": change.predicted_samples_per_s,
        "copus/samples-per-s": change.samples_per_s,
        "copus/speed-over-predicted": change.speed_over_predicted if is_sure else None,
    }
    return {tag: value for tag, value in named.items() if value is not None}


def conditions_line(
    *, before_s: float | None, after_s: float | None, factors: Mapping[str, float]
) -> str:
    """What has changed, and what is put down to which part of a step.

    Args:
        before_s: seconds of a step before; None where steps take what they took.
        after_s: seconds since.
        factors: seconds of the parts of a step over the usual ones, by name.
    """
    head, nothing = "links were timed again", "all is as usual"
    if before_s and after_s:
        if is_small(after_s / before_s):
            nothing = "no part of a step stands out"
        head = f"steps took {after_s:.3g} s instead of {before_s:.3g} s; {head}"
    parts = [
        f"{_PART_WORDS.get(name, name)} {x:.2f} times the usual time"
        for name, x in factors.items()
        if abs(x - 1.0) > 0.01
    ]
    return f"{head}: " + (", ".join(parts) if parts else nothing)


_PART_WORDS = {
    "compute": "computation",
    "tp": "tensor-parallel messages",
    "pp": "pipeline messages",
    "dp": "data-parallel messages",
    "within": "links within nodes",
    "across": "the network",
}
