"""The cells of the virtual clock: clusters, truths, first batches, and what a user cannot know.

A truth is the course of the critical batch size over a run, or a noisy quadratic from which it
comes out. Its level is a third, once or three times what the published law says of the run, and the
critical batch size is 3.2, 8 or 20 times the noise scale. The planner is right, off by 10 %, or off
by 20 %, so that it misranks. Runs stand for 1, 10 or 100 hours: pauses are shorter in proportion.
These four are dealt out to the cells of a seed in equal numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from copus_ext.cost_model.cluster_spec import ClusterSpec
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.cost_model.models import PRESETS
from copus_ext.extras.simulate.noise_trajectory import NoiseTrajectory
from copus_ext.extras.simulate.scenario import Scenario, preset
from copus_ext.extras.simulate.training_dynamics import GroundTruth
from copus_ext.goodput.belief import published_critical_batch_size
from copus_ext.planner.space import Limits

SMALL_MODEL = dataclasses.replace(
    PRESETS["llama-2-7b"],
    name="llama-1.3b",
    num_layers=24,
    hidden_size=2048,
    num_attention_heads=16,
    ffn_hidden_size=5632,
)
HABIT_TOKENS = 4e6
"""A batch that many people take."""
_MIN_HABIT_STEPS = 50
"""Steps of a run with that batch, below which nobody would take it."""
_TARGET_SHARE, _SAMPLES_SHARE = 1 / 1.6, 1.3
"""Progress of the target over the samples for which the law is asked; samples of a run over those
that the best static batch needs to the target."""
LEVELS, MULTIPLIERS = (1 / 3, 1.0, 3.0), (3.2, 8.0, 20.0)
ERRORS, HOURS = (0.0, 0.1, 0.2), (1.0, 10.0, 100.0)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A machine, a model, and the length of its run."""

    model: ModelSpec
    seq_length: int
    batches: tuple[int, ...]
    tokens: float
    """Of the run for which the law is asked; few enough to simulate every step."""
    spec: ClusterSpec
    limits: Limits


def _doublings(first: int, last: int) -> tuple[int, ...]:
    return tuple(first * 2**k for k in range((last // first).bit_length()))


def _own(
    model: ModelSpec, seq_length: int, batches: tuple[int, ...], tokens: float, **spec: Any
) -> Cluster:
    return Cluster(
        model=model,
        seq_length=seq_length,
        batches=batches,
        tokens=tokens,
        spec=ClusterSpec.from_json({**spec, "nic_is_measured": True}),
        limits=Limits(
            fixed={"vpp": 1, "cp": 1},
            recompute=("none", "full"),
            use_distributed_optimizer=(True,),
            cross_node_tp=False,
        ),
    )


def _shipped(name: str) -> Cluster:
    s = preset(name)
    return Cluster(
        model=PRESETS[s.model],
        seq_length=s.seq_length,
        batches=s.batches,
        tokens=float(s.total_samples * s.seq_length),
        spec=s.cluster,
        limits=s.limits,
    )


_H100 = {"gpu": "H100-80GB", "constants": "h100-80g", "gpus_per_node": 8}
CLUSTERS: dict[str, Callable[[], Cluster]] = {
    "1.3b 4xA100 slow links": lambda: _own(
        SMALL_MODEL,
        2048,
        _doublings(8, 512),
        0.16e9,
        gpu="A100-80GB",
        constants="a100-80g",
        num_nodes=2,
        gpus_per_node=2,
        intra_bytes_per_s="200GB/s",
        nic_bytes_per_s="12.5GB/s",
    ),
    "3b 8xH100 fast links": lambda: _own(
        PRESETS["llama-3.2-3b"],
        4096,
        _doublings(8, 1024),
        0.6e9,
        **_H100,
        num_nodes=1,
        intra_bytes_per_s="300GB/s",
        nic_bytes_per_s="200GB/s",
    ),
    "13b 64xH100 fast links": lambda: _own(
        PRESETS["llama-2-13b"],
        4096,
        _doublings(32, 1024),
        0.9e9,
        **_H100,
        num_nodes=8,
        intra_bytes_per_s="300GB/s",
        nic_bytes_per_s="200GB/s",
    ),
    "32b 32xH100 slow links": lambda: _shipped("32xh100-32b"),
    "7b 32xMI210": lambda: _shipped("32xmi210-7b"),
}
QUADRATIC = "noisy quadratic"
_QUADRATIC_MULTIPLIER = 8.0
"""With which the scale of its noise was chosen, so that its critical batch size is the law's."""


def _falls_late(x: Any) -> Any:
    return np.where(x < 0.7, x**0.46, 0.7**0.46 * (x / 0.7) ** -2.0)


TRUTHS: dict[str, Callable[[Any], Any]] = {
    "P^.46": lambda x: x**0.46,
    "P^.63": lambda x: x**0.63,
    "P^1": lambda x: x,
    "levels off": lambda x: np.minimum(x / 0.16, 1.0) ** 0.9,
    "flat": np.ones_like,
    "falls late": _falls_late,
    QUADRATIC: lambda x: x**0.46,
}
"""Critical batch size over that of the law's level, by the share of progress to the target. The
noisy quadratic takes the scale of its noise from it."""
STARTS = ("law", "law / 8", "law x 8", "habit")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run that the rule has to make."""

    cluster: str
    truth: str
    start: str
    seed: int
    level: float
    """Critical batch size at the end over the law's."""
    multiplier: float
    """Critical batch size over the noise scale."""
    error: float
    """Standard deviation of the logarithm of true over predicted speed."""
    hours: float
    """That the run stands for."""


def cells(seeds: Sequence[int]) -> list[Cell]:
    """All cells of some seeds."""
    found = []
    places = list(itertools.product(CLUSTERS, TRUTHS, STARTS))
    for seed in seeds:
        random = np.random.default_rng([seed, 0x7E57])
        dealt = []
        for values in (LEVELS, MULTIPLIERS, ERRORS, HOURS):
            many = np.resize(np.array(values), len(places))
            dealt.append(random.permutation(many).tolist())
        for place, level, multiplier, error, hours in zip(places, *dealt):
            cluster, truth, start = place
            found.append(
                Cell(
                    cluster=cluster,
                    truth=truth,
                    start=start,
                    seed=seed,
                    level=level,
                    multiplier=multiplier,
                    error=error,
                    hours=hours,
                )
            )
    return found


def scenario(cell: Cell) -> Scenario:
    """The run of a cell, with the speeds that the planner predicts."""
    return _scenario(cell.cluster, cell.truth, cell.level, cell.multiplier, cell.hours)


@functools.lru_cache(maxsize=8)
def _scenario(cluster: str, truth: str, level: float, multiplier: float, hours: float) -> Scenario:
    c = CLUSTERS[cluster]()
    samples = c.tokens / c.seq_length
    last, x = samples * _TARGET_SHARE, np.geomspace(1e-4, 1.0, 200)
    end = level * published_critical_batch_size(samples, c.seq_length)
    if truth == QUADRATIC:
        multiplier = _QUADRATIC_MULTIPLIER  # a number of its own comes out
    s = Scenario(
        name=cluster,
        model=c.model.name,
        spec=c.model,
        seq_length=c.seq_length,
        cluster=c.spec,
        batches=c.batches,
        total_samples=int(samples),
        warmup_samples=int(0.01 * samples),
        targets={"2.8": last},
        trajectory=NoiseTrajectory(
            progress=tuple((x * last).tolist()),
            phi=tuple((end * TRUTHS[truth](x) / multiplier).tolist()),
        ),
        truth=GroundTruth(noise_scale_multiplier=multiplier),
        limits=c.limits,
    )
    needed = {b: s.dynamics.samples(b, last) for b in s.batches if b in s.speeds.batches}
    seconds = {b: n / s.speeds.fastest(b).samples_per_s for b, n in needed.items()}
    best = min(seconds, key=seconds.__getitem__)
    total = int(_SAMPLES_SHARE * needed[best])
    low, high = s.pause_range_s()
    pause_s = (low + high) / 2 * seconds[best] / (hours * 3600.0)
    s = s.change(total_samples=total, warmup_samples=int(0.01 * total), relayout_cost_s=pause_s)
    return s.with_noisy_quadratic() if truth == QUADRATIC else s


def first_batch(cell: Cell, s: Scenario, law_batch: int) -> int | None:
    """Samples of a cell's first batch, on the grid; None where nobody would take it."""
    low, high = s.batches[0], s.batches[-1]
    if cell.start == "habit":
        wanted = HABIT_TOKENS / s.seq_length
        near = min(s.batches, key=lambda b: abs(b - wanted))
        fits = s.total_samples >= _MIN_HABIT_STEPS * near
        return near if fits and near / wanted > 0.4 else None
    by = {"law": 1.0, "law / 8": 1 / 8, "law x 8": 8.0}[cell.start]
    return int(min(max(law_batch * by, low), high))
