"""What a simulation is of: machine, model, batches, the course of the training, the costs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from copus_ext.cost_model.cluster_spec import ClusterSpec
from copus_ext.cost_model.model_spec import PRESETS, SpecError
from copus_ext.cost_model.spec_file import read_json
from copus_ext.goodput import costs
from copus_ext.planner.profile import Timing
from copus_ext.planner.search import Planner
from copus_ext.planner.space import Limits
from copus_ext.simulate.course import GroundTruth, TrainingDynamics
from copus_ext.simulate.schedule import RateSchedule
from copus_ext.simulate.speeds import PROFILED_SD, Speeds, planned
from copus_ext.simulate.trajectory import NoiseTrajectory, power_law

_DATA = Path(__file__).parent / "data"
BEYOND = 1.5
"""The course is known up to so many times the progress of the last target."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One machine, one model, one recipe."""

    name: str
    """What to call it."""
    model: str
    """Name of the model's preset."""
    seq_length: int
    """Tokens of a sample."""
    cluster: ClusterSpec
    """Machine."""
    batches: tuple[int, ...]
    """Grid, ascending; the first is that of the first step, for which the rates were chosen."""
    total_samples: int
    """Samples of the run: beyond it nothing is reached, and the controller counts on it."""
    warmup_samples: int
    """Samples over which the learning rate warms up; nobody decides before."""
    targets: dict[str, float]
    """Progress at which a loss is reached, samples, by the loss."""
    trajectory: NoiseTrajectory
    """Noise scale over progress."""
    truth: GroundTruth
    """What a sample is worth."""
    switch_cost_s: float
    """Seconds that a change of layout takes."""
    assumed_cost_s: float | None = None
    """Seconds that the controller takes it to cost before it saw one; None: what it would work out
    for this model and machine."""
    limits: Limits = field(default_factory=Limits)
    """Configurations that are left out."""
    timings: tuple[Timing, ...] = ()
    """Measured step times, if there are some."""
    measured: Speeds | None = None
    """Speeds to take as they are instead of asking the planner."""
    beta2: float = 0.95
    """Of Adam: how long the learning rate follows a larger batch."""
    lr_decay: float = 0.1
    """Part of the learning rate that a cosine leaves at the end; `seesaw` looks at it, and a truth
    with a `rate_exponent`."""
    gns_interval: int | None = None
    """Steps between measurements of the noise scale; None: as the controller does."""
    speed_error: float = 0.0
    """Relative error of the speeds that are known before the run."""
    known_sd: float | None = PROFILED_SD
    """Relative uncertainty that the controller takes those to have; None: the planner's."""
    about: dict[str, Any] = field(default_factory=dict)
    """Where the numbers are from."""

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
            )
        return self._speeds[key]

    @cached_property
    def _speeds(self) -> dict[int, Speeds]:
        return {}

    @cached_property
    def course(self) -> TrainingDynamics:
        """What gets how far."""
        end = BEYOND * self.last
        return TrainingDynamics(phi_at=self.trajectory.phi_at, truth=self.truth, end=end)

    @cached_property
    def schedule(self) -> RateSchedule:
        """What the learning rate makes of a sample."""
        return RateSchedule(
            warmup_samples=self.warmup_samples,
            total_samples=self.total_samples,
            end_part=self.lr_decay,
            exponent=self.truth.rate_exponent,
        )

    @property
    def last(self) -> float:
        """Progress of the last target."""
        return max(self.targets.values())

    @property
    def prior_cost_s(self) -> float:
        """Seconds that the controller takes a change of layout to cost."""
        if self.assumed_cost_s is not None:
            return self.assumed_cost_s
        m, cluster = self.planner.model, self.cluster
        shape = SimpleNamespace(
            hidden_size=m.hidden_size,
            ffn_hidden_size=m.ffn,
            num_layers=m.num_layers,
            gated_linear_unit=m.gated,
            mtp_num_layers=m.mtp_num_layers,
            padded_vocab_size=int(m.padded_vocab_size(1)),
        )
        device = "cpu" if cluster.constants == "cpu" else "cuda"
        config = SimpleNamespace(
            model=shape,
            runtime=SimpleNamespace(device=device),
            layout=SimpleNamespace(world_size=cluster.world_size),
        )
        link = cluster.nic_bytes_per_s / cluster.gpus_per_node
        return costs.prior_s(config, link_bytes_per_s=link if cluster.num_nodes > 1 else None)

    def change(self, **values: Any) -> Scenario:
        """The same with other values."""
        return dataclasses.replace(self, **values)

    def recalibrated(self, calibration: float) -> Scenario:
        """The same course of Phi where the noise scale that is measured stands for another part of
        it: samples get as far, and the controller sees something else."""
        factor = self.truth.calibration / calibration
        phi = tuple(factor * x for x in self.trajectory.phi)
        return self.change(
            trajectory=dataclasses.replace(self.trajectory, phi=phi),
            truth=dataclasses.replace(self.truth, calibration=calibration),
        )

    def follow(self, trajectory: NoiseTrajectory) -> Scenario:
        """The same with another course of the noise, stretched to the progress of this one; its
        own losses are not taken over."""
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
            calibration=data["calibration"], reference_batch=float(data["batches"][0])
        ),
        switch_cost_s=data["switch_cost_s"],
        limits=Limits(
            fixed=limits.get("fixed", {}),
            recompute=tuple(limits.get("recompute", ("none",))),
            use_distributed_optimizer=tuple(limits.get("use_distributed_optimizer", (False,))),
            cross_node_tp=limits.get("cross_node_tp", True),
        ),
        about={"source": data["source"], "links": data["links"]},
    )
