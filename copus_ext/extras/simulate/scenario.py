"""A scenario: machine, model, batches, training dynamics, and costs."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from copus_ext.cost_model.cluster_spec import ClusterSpec
from copus_ext.cost_model.constants import USUAL
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.cost_model.models import PRESETS
from copus_ext.cost_model.spec_file import SpecError, read_json
from copus_ext.extras.simulate.conditions import Event, factors_at, planner_under
from copus_ext.extras.simulate.noise_trajectory import NoiseTrajectory, power_law
from copus_ext.extras.simulate.noisy_quadratic import NoisyQuadratic, QuadraticTraining
from copus_ext.extras.simulate.speeds import Speeds, planned
from copus_ext.extras.simulate.training import ProgressTraining, Training, loss_curve
from copus_ext.extras.simulate.training_dynamics import (
    GroundTruth,
    RateSchedule,
    ScheduleKind,
    TrainingDynamics,
)
from copus_ext.extras.simulate.tuned_statics import Tuned, Tuner
from copus_ext.goodput.costs import Machine
from copus_ext.planner.search import Planner
from copus_ext.planner.space import Limits
from copus_ext.reshard.pause import PausePredictor, predictor_of, shape_for
from megatron.trainer.config.layout import Layout

_DATA = Path(__file__).parent / "data"
PROGRESS, NOISY_QUADRATIC = "progress", "noisy_quadratic"
_NOISE_PART = 120.0
"""Noise scale at the end, samples, over the trace of the quadratic's noise."""
_PEAKS = tuple((2.0 ** np.arange(-6, 2.1, 0.25)).tolist())
_TARGET_SHARE = 0.8
_FIRST_LOSS = 10.8
"""ln of a vocabulary of 49,000."""
LR_END = 0.1
"""Part of the learning rate at the end of its cosine."""
BEYOND = 1.5
"""The dynamics are known up to this multiple of the progress of the last target."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    name: str
    model: str
    """Name of the model's preset, or of `spec`."""
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
    relayout_cost_s: float | None = None
    """Seconds of every change of layout; None: those that are predicted of it (`pause_s`)."""
    limits: Limits = field(default_factory=Limits)
    measured: Speeds | None = None
    """Speeds to use instead of the planner's."""
    events: tuple[Event, ...] = ()
    """When parts of the machine become faster or slower; the oracle does not know of them."""
    step_noise: float = 0.0
    """Scatter of the logarithm of a step's seconds, standard deviation."""
    quadratic: NoisyQuadratic | None = None
    """The truth instead of `truth` and `trajectory`. Targets are then losses."""
    peak: float = 1.0
    """Of its learning rate at the first batch."""
    lr_schedule: ScheduleKind = "cosine"
    spec: ModelSpec | None = None
    """The model itself, where no preset has it."""
    about: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def planner(self) -> Planner:
        model = (self.spec or PRESETS[self.model]).with_seq_length(self.seq_length)
        return Planner(model, self.cluster, limits=self.limits)

    @cached_property
    def speeds(self) -> Speeds:
        """Throughput of every configuration."""
        if self.measured is not None:
            return self.measured
        under = (factors_at(self.events, event.at) for event in self.events)
        others = [planner_under(self.planner, f) for f in under if f != USUAL]
        return planned(self.planner, self.batches, others=others)

    @cached_property
    def dynamics(self) -> TrainingDynamics:
        end = BEYOND * self.last
        return TrainingDynamics(phi_at=self.trajectory.phi_at, truth=self.truth, end=end)

    @cached_property
    def schedule(self) -> RateSchedule:
        return RateSchedule(
            warmup_samples=self.warmup_samples,
            total_samples=self.total_samples,
            end_part=LR_END,
            exponent=self.truth.rate_exponent,
            kind=self.lr_schedule,
        )

    def training(self) -> Training:
        if self.quadratic is not None:
            return QuadraticTraining(self.quadratic, self.schedule, peak=self.peak)
        return ProgressTraining(self.dynamics, self.schedule, loss_curve(self.targets))

    @property
    def last(self) -> float:
        return max(self.targets.values())

    @cached_property
    def pauses(self) -> PausePredictor:
        """Predicts changes of layout, as in a real run."""
        sizes = {layout.tp for layout in self.speeds.layouts}
        sharded = self.limits.use_distributed_optimizer[0]
        shape = shape_for(self.planner.model, tp_sizes=sorted(sizes), sharded=sharded)
        return predictor_of(shape, Machine.of(self.cluster))

    def pause_s(self, before: Layout, after: Layout) -> float:
        """Seconds that a change between two layouts takes, as the controller predicts them, too."""
        if self.relayout_cost_s is None:
            return self.pauses.seconds(before, after)
        return 0.0 if before == after else self.relayout_cost_s

    def pause_range_s(self) -> tuple[float, float]:
        """Least and most seconds of a change between its layouts."""
        found = [self.pause_s(*pair) for pair in itertools.permutations(self.speeds.layouts, 2)]
        return min(found, default=0.0), max(found, default=0.0)

    def change(self, **values: Any) -> Scenario:
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
        tuner, first = Tuner(unit, self.schedule), self.batches[:1]
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

    @cached_property
    def tuned_statics(self) -> dict[str, list[Tuned]]:
        """By target, every batch on a noisy quadratic with its best rate and length."""
        assert self.quadratic is not None, "only a noisy quadratic has learning rates to tune"
        tuner = Tuner(self.quadratic, self.schedule)
        return {name: tuner.tuned(self.batches, loss) for name, loss in self.targets.items()}

    @property
    def truth_name(self) -> str:
        """Of `--truth`."""
        return PROGRESS if self.quadratic is None else NOISY_QUADRATIC


def presets() -> list[str]:
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
        truth=GroundTruth(noise_scale_multiplier=data["noise_scale_multiplier"]),
        relayout_cost_s=data.get("relayout_cost_s"),
        limits=Limits(
            # A scenario says so where ranks may share samples.
            fixed={"cp": 1, **limits.get("fixed", {})},
            recompute=tuple(limits.get("recompute", ("none",))),
            use_distributed_optimizer=tuple(limits.get("use_distributed_optimizer", (False,))),
            cross_node_tp=limits.get("cross_node_tp", True),
        ),
        about={"source": data["source"], "links": data["links"]},
    )
