"""What was predicted of a run that the user timed, what it took, and what its row becomes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from copus_ext.cost_model.memory import peaks
from copus_ext.cost_model.peak_correction import AS_PREDICTED
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.explain import GIB
from copus_ext.planner.known_peaks import is_impossible, least_bytes_of, sizes_of
from copus_ext.planner.plan import Plan, Ranked
from copus_ext.planner.profile import Timing, keys_of
from copus_ext.planner.search import Planner
from copus_ext.planner.space import points_of, to_config_batch

_FAR_SD, _FAR_FACTOR = 3.0, 2.0
"""Standard deviations of a prediction, and factor, beyond which a time is doubted."""

_SURE = 0.9
"""Probability to fit from which on a report of an out-of-memory is doubted."""
_TOLD = 0.01
"""Share of a step from which on what becomes of a part is told."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A run beside its prediction."""

    configuration: Configuration
    predicted_s: float
    """Seconds of a step by the constants alone."""
    predicted_sd: float
    """Relative uncertainty of that."""
    measured_s: float
    """Seconds that it took."""
    factor: float
    """What all that is known of times multiplies the prediction by."""
    of_parts: float
    """The share of `factor` that the factors of the parts of a step have in it."""
    parts: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Seconds of each part of a step, predicted and by its own factors."""

    @property
    def is_far_off(self) -> bool:
        """Whether the time is too far off to be taken without a question."""
        far = abs(math.log(self.measured_s / self.predicted_s))
        return far > min(_FAR_SD * self.predicted_sd, math.log(_FAR_FACTOR))

    def __str__(self) -> str:
        times = f"predicted {self.predicted_s:.3g} s, measured {self.measured_s:.4g} s"
        return f"{self.configuration}: {times} (x {self.measured_s / self.predicted_s:.2f})"

    def warning(self) -> str:
        """What may be wrong with a time that is far off, and what to do."""
        batch = self.configuration.global_batch_size
        return (
            f"{self}, and the prediction may be {100 * self.predicted_sd:.0f} % off: is it the "
            f"time of a whole step of batch {batch}, on such GPUs and links, in this layout? "
            "Else the software (attention, norms, precision, token dispatcher) or the network "
            "(--nic) is not as described: correct what is wrong, since all rows follow this time"
        )

    def shares(self) -> str:
        """Where the difference goes, in words."""
        other = self.factor / self.of_parts
        told = [
            f"{name} {before:.3g} to {now:.3g} s"
            for name, (before, now) in self.parts.items()
            if abs(now - before) >= _TOLD * self.predicted_s
        ]
        words = f" ({', '.join(told)})" if told else ""
        return (
            f"counted as x {self.factor:.2f}: x {self.of_parts:.2f} by the parts of a step{words}, "
            f"x {other:.2f} by a factor of all rows, some of it only of rows like this one"
        )


def timed(planner: Planner, ran: Sequence[Timing]) -> list[Timed]:
    """Some runs that correct a planner, beside their predictions."""
    found = []
    unmeasured = planner.on(planner.cluster)
    unmeasured.retime(())
    for timing in ran:
        predicted_s, factor, of_parts, parts = planner.correction_of(timing.configuration)
        found.append(
            Timed(
                configuration=timing.configuration,
                predicted_s=predicted_s,
                predicted_sd=unmeasured.priced(timing.configuration).prediction.step_rel_sd,
                measured_s=timing.step_s,
                factor=factor,
                of_parts=of_parts,
                parts=parts,
            )
        )
    return found


def as_measured(planner: Planner, one: Ranked) -> Ranked:
    """A row with the time that was measured of it in place of what corrections make of it; any
    other as it is, but for its equals."""
    equals = [as_measured(planner, other) for other in one.equals]
    one = replace(one, equals=equals) if equals else one
    c, p = one.configuration, one.prediction
    step_s = measured_s(planner, c)
    if step_s is None:
        return one
    less = step_s / p.step_s
    rates = {
        name: getattr(p, name) / less
        for name in ("samples_per_s", "tokens_per_s", "tflops_per_gpu", "mfu")
    }
    parts = {name: seconds * less for name, seconds in p.time_s.items()}
    return replace(one, prediction=replace(p, step_s=step_s, time_s=parts, **rates))


def plan_as_measured(planner: Planner, plan: Plan) -> Plan:
    """The same of all rows of a plan."""
    rows, tries = ([as_measured(planner, x) for x in some] for some in (plan.ranked, plan.tries))
    fastest = plan.fastest and (
        plan.fastest[0],
        measured_s(planner, plan.fastest[0]) or plan.fastest[1],
    )
    return replace(plan, ranked=rows, tries=tries, fastest=fastest)


def measured_s(planner: Planner, c: Configuration) -> float | None:
    """Seconds of a step as measured with this very batch, the mean of several; None without."""
    runs = [t for t in planner.timings if t.configuration.global_batch_size == c.global_batch_size]
    if not runs:
        return None
    own, *keys = keys_of(points_of([c, *(t.configuration for t in runs)])).tolist()
    times = [t.step_s for t, key in zip(runs, keys) if key == own]
    return sum(times) / len(times) if times else None


def doubts_of(planner: Planner, some: Sequence[Timed], ran: Sequence[Timing]) -> list[str]:
    """What of the runs that were measured contradicts what was predicted of them."""
    found = [run.warning() for run in some if run.is_far_off]
    found += [peak_warning(planner, one) for one in ran]
    found += [oom_warning(planner, c) for c in planner.too_large]
    return [line for line in found if line]


def instead_of_help(planner: Planner, some: Sequence[Timed]) -> str:
    """What stands for what another machine would save, where a run contradicts its prediction;
    else empty."""
    far = next((run.measured_s / run.predicted_s for run in some if run.is_far_off), None)
    if far is not None:
        why, what = f"a time measured at x {far:.2f} of its prediction", "network"
    elif contradicts(planner):
        why, what = "an out-of-memory that contradicts its prediction", "GPU"
    else:
        return ""
    return (
        "what another network, more memory or another order of ranks would save is not known: "
        f"{why} says that the software or the {what} is not as described"
    )


def contradicts(planner: Planner) -> bool:
    """Whether something ran out of memory that surely fits by the prediction."""
    return any(oom_warning(planner, c) for c in planner.too_large)


def oom_warning(planner: Planner, c: Configuration) -> str:
    """What may be wrong with a report that a configuration ran out of memory which surely fits by
    the prediction; else empty."""
    if planner.cluster.is_gloo:
        return ""
    (peak,), (sd,) = peaks(to_config_batch(planner.model, planner.cluster, points_of([c])))
    likely = float(AS_PREDICTED.fit_probability(peak, planner.limit_bytes, sd))
    if likely < _SURE:
        return ""
    size = sizes_of(planner)[1]
    return (
        f"{c}: it ran out of the {size / GIB:.1f} GiB of a GPU, and a peak of {peak / GIB:.1f} GiB "
        f"was predicted, to fit with probability {likely:.2f}: the report contradicts the "
        f"prediction by a factor of {size / peak:.1f} or more. Something else than the model's "
        "memory is likely: another process on the GPU, less memory than --gpu or --cluster says, "
        "something that is not described (--attention, --gradient-bytes, recompute and zero of "
        f"CONFIG), or samples longer than {planner.model.seq_length} tokens. Check it: nvidia-smi "
        "before the start shows what a GPU has and what is in use, and the log of a run with a "
        "smaller micro-batch its 'max allocated', for --measured 'CONFIG: 18.2 s, 62 GiB'. Leave "
        "the report out if so, since the memory of all rows follows it"
    )


def peak_warning(planner: Planner, run: Timing) -> str:
    """What may be wrong with the memory of a run: it cannot be, or it is far off; else empty."""
    c = run.configuration
    if is_impossible(planner, run):
        least = least_bytes_of(planner, c) / GIB
        most, whose = (run.peak_bytes, "measured") if run.peak_bytes else (sizes_of(planner)[0], "")
        return (
            f"{c}: weights, gradients and optimizer alone are {least:.1f} GiB of a GPU, above the "
            f"{most / GIB:.1f} GiB {whose or 'that it has'}: the layout, zero or the bytes of "
            "gradients and optimizer are not as described; correct what is wrong, since what this "
            "run says of the memory of others is left out"
        )
    if run.peak_bytes is None or planner.cluster.is_gloo:
        return ""
    (peak,), (sd,) = peaks(to_config_batch(planner.model, planner.cluster, points_of([c])))
    if abs(math.log(run.peak_bytes / peak)) <= min(_FAR_SD * sd, math.log(_FAR_FACTOR)):
        return ""
    return (
        f"{c}: predicted peak {peak / GIB:.1f} GiB, measured {run.peak_bytes / GIB:.1f} GiB "
        f"(doubt {100 * sd:.0f} %): is it what the whole process held at most, on the GPU "
        "that needs most, in this layout? The memory of all rows follows it"
    )
