"""A scenario: machine, model, batches, training dynamics, and costs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from copus_ext.cost_model.cluster_spec import ClusterSpec
from copus_ext.cost_model.constants import USUAL
from copus_ext.cost_model.model_spec import PRESETS
from copus_ext.cost_model.spec_file import SpecError, read_json
from copus_ext.goodput.costs import Machine
from copus_ext.planner.profile import Timing
from copus_ext.planner.search import Planner
from copus_ext.planner.space import Limits
from copus_ext.reshard.pause import PausePredictor, predictor_of, shape_for
from copus_ext.simulate.conditions import Event, factors_at, planner_under
from copus_ext.simulate.noise_trajectory import NoiseEstimatorModel, NoiseTrajectory, power_law
from copus_ext.simulate.noisy_quadratic import NoisyQuadratic, QuadraticTraining
from copus_ext.simulate.speeds import PROFILED_SD, Speeds, planned
from copus_ext.simulate.training import ProgressTraining, Training, loss_curve
from copus_ext.simulate.training_dynamics import (
    GroundTruth,
    RateSchedule,
    ScheduleKind,
    TrainingDynamics,
)
from copus_ext.simulate.tuned_schedules import BatchSchedule, Tuned, Tuner, static
from megatron.training.config.layout import Layout

_DATA = Path(__file__).parent / "data"
NOISY_QUADRATIC = "noisy_quadratic"
_NOISE_PART = 120.0
"""Noise scale at the end, samples, over the trace of the quadratic's noise."""
_PEAKS = tuple((2.0 ** np.arange(-6, 2.1, 0.25)).tolist())
_TARGET_SHARE = 0.8
_FIRST_LOSS = 10.8
"""ln of a vocabulary of 49,000."""
BEYOND = 1.5
"""The dynamics are known up to this multiple of the progress of the last target."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One machine, one model, one recipe."""

    name: str
    model: str
    """Name of the model's preset."""
    seq_length: int
    cluster: ClusterSpec
    batches: tuple[int, ...]
    """Batch sizes, ascending; the learning rate was chosen for the first."""
    total_samples: int
    warmup_samples: int
    """Samples of the warm-up of the learning rate; most policies keep the batch in it."""
    targets: dict[str, float]
    """Progress at which a loss is reached, samples, by the loss."""
    trajectory: NoiseTrajectory
    truth: GroundTruth
    switch_cost_s: float | None = None
    """Seconds of every change of layout; None: those that are predicted of it (`pause_s`)."""
    assumed_cost_s: float | None = None
    """Seconds that the controller predicts for each before the first; None: as for a real run."""
    limits: Limits = field(default_factory=Limits)
    timings: tuple[Timing, ...] = ()
    """Measured step times for the planner."""
    measured: Speeds | None = None
    """Speeds to use instead of the planner's."""
    beta2: float = 0.95
    """Of Adam."""
    lr_decay: float = 0.1
    """Part of the learning rate at the end of its cosine."""
    gns_interval: int | None = None
    """Steps between measurements of the noise scale; None: as the controller does."""
    speed_error: float = 0.0
    """Relative error of the speeds that are known before the run."""
    known_sd: float | None = PROFILED_SD
    """Their relative uncertainty, as the controller assumes; None: the planner's."""
    events: tuple[Event, ...] = ()
    """When parts of the machine become faster or slower; the oracle does not know of them."""
    step_noise: float = 0.0
    """Scatter of the logarithm of a step's seconds, standard deviation."""
    quadratic: NoisyQuadratic | None = None
    """The truth instead of `truth` and `trajectory`. Targets are then losses."""
    peak: float = 1.0
    """Of its learning rate at the first batch."""
    lr_schedule: ScheduleKind = "cosine"
    """Of the learning rate."""
    about: dict[str, Any] = field(default_factory=dict)
    """Sources of the numbers."""

    @cached_property
    def planner(self) -> Planner:
        """Of model and machine."""
        model = PRESETS[self.model].with_seq_length(self.seq_length)
        return Planner(model, self.cluster, limits=self.limits, timings=self.timings)

    def speeds(self, seed: int = 0) -> Speeds:
        """Throughput of every configuration; a seed draws the errors of what is known of it."""
        if self.measured is not None:
            return self.measured
        key = seed if self.speed_error else 0
        if key not in self._speeds:
            self._speeds[key] = planned(
                self.planner,
                self.batches,
                error_sd=self.speed_error,
                seed=key,
                known_sd=self.known_sd,
                others=[
                    planner_under(self.planner, factors)
                    for event in self.events
                    if (factors := factors_at(self.events, event.at)) != USUAL
                ],
            )
        return self._speeds[key]

    @cached_property
    def _speeds(self) -> dict[int, Speeds]:
        return {}

    @cached_property
    def dynamics(self) -> TrainingDynamics:
        """The progress of batches."""
        end = BEYOND * self.last
        return TrainingDynamics(phi_at=self.trajectory.phi_at, truth=self.truth, end=end)

    @cached_property
    def schedule(self) -> RateSchedule:
        """The learning rate."""
        return RateSchedule(
            warmup_samples=self.warmup_samples,
            total_samples=self.total_samples,
            end_part=self.lr_decay,
            exponent=self.truth.rate_exponent,
            kind=self.lr_schedule,
        )

    def training(self) -> Training:
        """A run at its start."""
        if self.quadratic is not None:
            return QuadraticTraining(self.quadratic, self.schedule, peak=self.peak)
        return ProgressTraining(self.dynamics, self.schedule, loss_curve(self.targets))

    def estimator(self, seed: int) -> NoiseEstimatorModel:
        """Draws what a run measures of the noise scale."""
        return NoiseEstimatorModel(seed)

    @property
    def last(self) -> float:
        """Progress of the last target."""
        return max(self.targets.values())

    @cached_property
    def pauses(self) -> PausePredictor:
        """Predicts changes of layout, as in a real run."""
        sizes = {layout.tp for layout in self.speeds().layouts}
        sharded = self.limits.use_distributed_optimizer[0]
        shape = shape_for(self.planner.model, tp_sizes=sorted(sizes), sharded=sharded)
        return predictor_of(shape, Machine.of(self.cluster))

    def pause_s(self, before: Layout, after: Layout) -> float:
        """Seconds that a change between two layouts takes."""
        if self.switch_cost_s is None:
            return self.pauses.seconds(before, after)
        return 0.0 if before == after else self.switch_cost_s

    def prior_s(self, before: Layout, after: Layout) -> float:
        """Seconds that the controller predicts for it before it has measured a change."""
        if self.assumed_cost_s is None:
            return self.pauses.seconds(before, after)
        return 0.0 if before == after else self.assumed_cost_s

    def pause_range_s(self, seed: int = 0) -> tuple[float, float]:
        """Least and most seconds of a change between its layouts."""
        pairs = itertools.permutations(self.speeds(seed).layouts, 2)
        found = [self.pause_s(*pair) for pair in pairs] or [0.0]
        return min(found), max(found)

    def change(self, **values: Any) -> Scenario:
        """The same with other values."""
        return dataclasses.replace(self, **values)

    def with_noisy_quadratic(self) -> Scenario:
        """The same machine and length, training on a noisy quadratic.

        Its noise is a fixed part of the preset's noise scale at the end. The fastest static batch
        then costs at most a tenth more than the best under the present truth, and the noise scale
        at the end is within a few times its critical batch size. The rate is the best of the first
        batch for the whole length. The target is what that batch reaches at 80 % of the length, in
        the name of the preset's last loss; the loss starts at that of a uniform guess.
        """
        phi = float(self.trajectory.phi_at(self.last))
        unit = NoisyQuadratic(noise_trace=phi / _NOISE_PART)
        tuner, first = Tuner(unit, self.schedule), [static(self.batches[0])]
        peaks = np.array(_PEAKS)
        peak = float(peaks[tuner.final_losses(first, peaks, self.total_samples).argmin()])
        goal = tuner.final_losses(first, peaks, _TARGET_SHARE * self.total_samples).min()
        name = max(self.targets, key=self.targets.__getitem__)
        try:
            last = float(name)
        except ValueError:
            last = loss_curve(self.targets).loss(self.last)
        scale = (_FIRST_LOSS - last) / (1.0 - float(goal))
        problem = dataclasses.replace(unit, loss_scale=scale, loss_floor=_FIRST_LOSS - scale)
        return self.change(quadratic=problem, peak=peak, targets={name: last})

    def tuned(self, schedules: Sequence[BatchSchedule]) -> dict[str, list[Tuned]]:
        """By target, batch schedules on a noisy quadratic, each with its best rate and length and
        the fastest layout of every batch.

        Raises:
            ValueError: another truth.
        """
        if self.quadratic is None:
            raise ValueError("only a noisy quadratic has learning rates to tune")
        speeds, tuner = self.speeds(), Tuner(self.quadratic, self.schedule)
        seconds = {b: b / speeds.fastest(b).samples_per_s for b in self.batches}
        return {
            name: tuner.tuned(schedules, loss, step_seconds=lambda b: seconds[round(b)])
            for name, loss in self.targets.items()
        }

    @cached_property
    def tuned_statics(self) -> dict[str, list[Tuned]]:
        """By target, every static batch on a noisy quadratic."""
        return self.tuned([static(batch) for batch in self.batches])

    @property
    def truth_name(self) -> str:
        """Of `--truth`."""
        return self.truth.objective if self.quadratic is None else NOISY_QUADRATIC

    def recalibrated(self, multiplier: float) -> Scenario:
        """The same critical batch sizes with another noise scale multiplier: samples get as far,
        and the controller measures another noise scale."""
        factor = self.truth.noise_scale_multiplier / multiplier
        phi = tuple(factor * x for x in self.trajectory.phi)
        return self.change(
            trajectory=dataclasses.replace(self.trajectory, phi=phi),
            truth=dataclasses.replace(self.truth, noise_scale_multiplier=multiplier),
        )

    def follow(self, trajectory: NoiseTrajectory) -> Scenario:
        """The same with another noise scale, stretched to the progress of this one."""
        return self.change(trajectory=trajectory.stretched(self.last))


def presets() -> list[str]:
    """Names of the scenarios that ship."""
    return sorted(path.stem for path in _DATA.glob("*.json"))


def preset(name: str) -> Scenario:
    """One of them.

    Raises:
        SpecError: there is none of that name.
    """
    if name not in presets():
        raise SpecError(f"--preset {name}: unknown; known: {', '.join(presets())}")
    return from_json(name, read_json(_DATA / f"{name}.json"))


def from_json(name: str, data: dict[str, Any]) -> Scenario:
    """Reads a scenario's file.

    Raises:
        SpecError: a model or cluster that cannot be.
        KeyError, TypeError: a file of another form.
    """
    if data["model"] not in PRESETS:
        raise SpecError(f"model {data['model']} is unknown; known: {', '.join(PRESETS)}")
    noise, limits = data["noise"], data.get("limits", {})
    return Scenario(
        name=name,
        model=data["model"],
        seq_length=data["seq_length"],
        cluster=ClusterSpec.from_json(data["cluster"]),
        batches=tuple(data["batches"]),
        total_samples=data["total_samples"],
        warmup_samples=data["warmup_samples"],
        targets={str(loss): float(at) for loss, at in data["targets"].items()},
        trajectory=power_law(
            end=max(data["targets"].values()),
            phi_end=noise["phi_end_samples"],
            exponent=noise["exponent"],
        ),
        truth=GroundTruth(
            noise_scale_multiplier=data["noise_scale_multiplier"],
            reference_batch=float(data["batches"][0]),
        ),
        switch_cost_s=data.get("switch_cost_s"),
        limits=Limits(
            # A scenario says so where ranks may share samples.
            fixed={"cp": 1, **limits.get("fixed", {})},
            recompute=tuple(limits.get("recompute", ("none",))),
            use_distributed_optimizer=tuple(limits.get("use_distributed_optimizer", (False,))),
            cross_node_tp=limits.get("cross_node_tp", True),
        ),
        about={"source": data["source"], "links": data["links"]},
    )
