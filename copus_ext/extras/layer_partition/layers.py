"""Which stage runs which layers: the fastest partition of uneven layers over equal or mixed GPUs.

The schedule is simulated exactly (`copus_ext.cost_model.schedule`); every stage has its own speed
and memory. Up to `search.MAX_PARTITIONS` partitions are all priced. Beyond that,
`LayerPartition.proved` says whether the answer is surely the best.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from copus_ext.cost_model.cluster_spec import ClusterSpec
from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.cost_model.peak_correction import AS_PREDICTED, PeakCorrection
from copus_ext.extras.layer_partition.problem import PartitionProblem, measured_costs
from copus_ext.extras.layer_partition.search import MAX_PARTITIONS, MAX_WORK, search
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.plan import Plan
from copus_ext.planner.search import Planner
from copus_ext.planner.space import points_of, to_config_batch
from megatron.trainer.config.layer_partition import text_of_partition

GIB = 2.0**30
_ALL_WORK = 2e9
"""What may be computed for all pipelines of a plan together; see `search.MAX_WORK`."""


@dataclass(frozen=True, kw_only=True)
class LayerPartition:
    """Layers of every chunk, and what they cost."""

    pp: int
    """Stages."""
    vpp: int
    """Chunks of a stage."""
    layers: tuple[int, ...]
    """Layers of every chunk in the order of the model: chunk k runs on stage k mod pp."""
    step_s: float
    """Seconds of a step, simulated."""
    min_step_s: float
    """No partition that fits is faster than this; `step_s` where `proved`."""
    proved: bool
    """Whether surely none is faster."""
    peak_bytes: tuple[float, ...]
    """Bytes that every stage needs."""
    num_simulated: int = 0
    """Partitions that were simulated to find it."""

    @property
    def stages(self) -> list[list[int]]:
        return [list(self.layers[r :: self.pp]) for r in range(self.pp)]

    @property
    def is_even(self) -> bool:
        """Whether every chunk has as many layers, which needs no flag."""
        return len(set(self.layers)) == 1

    @property
    def layout(self) -> str:
        """The value of `--pipeline-model-parallel-layout`."""
        return text_of_partition(self.layers)

    def __str__(self) -> str:
        """Short text such as `5,4x18,3`."""
        runs = [(n, len(list(run))) for n, run in itertools.groupby(self.layers)]
        return ",".join(f"{n}x{times}" if times > 1 else str(n) for n, times in runs)

    def to_flags(self) -> list[str]:
        """Megatron's flags of the pipeline: sizes of the first and last stage where they suffice,
        else the layout, which says itself how many chunks a stage has."""
        flags = ["--pipeline-model-parallel-size", str(self.pp)]
        if self.is_even and self.vpp > 1:
            return [*flags, "--num-virtual-stages-per-pipeline-rank", str(self.vpp)]
        if self.is_even:
            return flags
        middle = set(self.layers[1:-1])
        if self.vpp == 1 and len(middle) <= 1 and min(self.layers) > 0:
            flags += ["--decoder-first-pipeline-num-layers", str(self.layers[0])]
            return [*flags, "--decoder-last-pipeline-num-layers", str(self.layers[-1])]
        return [*flags, "--pipeline-model-parallel-layout", self.layout]

    def times(self, factor: float) -> LayerPartition:
        """The same with all seconds so many times as long."""
        return replace(self, step_s=factor * self.step_s, min_step_s=factor * self.min_step_s)

    def to_json(self) -> dict[str, Any]:
        return {
            "layers": list(self.layers),
            "layout": self.layout,
            "step_s": self.step_s,
            "min_step_s": self.min_step_s,
            "proved": self.proved,
            "peak_bytes": list(self.peak_bytes),
        }


@dataclass(frozen=True, kw_only=True)
class NoPartition:
    """Why there is none; the codes are those of `Rejected`."""

    code: str
    """`layers` or `memory`."""
    detail: str
    """The numbers."""
    fix: str
    """What would help."""
    proved: bool = True
    """Whether surely none fits; else none was found."""


def best_partition(
    problem: PartitionProblem,
    *,
    max_partitions: int = MAX_PARTITIONS,
    max_work: float = MAX_WORK,
    starts: Sequence[Sequence[int]] = (),
) -> LayerPartition | NoPartition:
    """The partition with the shortest simulated step among those that fit on every stage.

    Of equally fast ones that were looked at, that with the most memory to spare.

    Args:
        problem: layers, stages and limits.
        max_partitions: up to so many are all looked at.
        max_work: what may be computed beyond that; see `search`.
        starts: partitions to start from, besides balanced ones.
    """
    layers, chunks = problem.blocks.num_layers, problem.num_chunks
    if not problem.num_partitions:
        return NoPartition(
            code="layers",
            detail=(
                f"{layers} layers cannot fill {chunks} chunks (pp={problem.pp} vpp={problem.vpp})"
            ),
            fix=f"use at most {layers} chunks",
        )
    found = search(problem, max_partitions=max_partitions, max_work=max_work, starts=list(starts))
    peaks = problem.price(found.partition[None]).peak_bytes[:, 0]
    if found.excess_bytes > 0:
        worst = int(np.argmax(peaks - problem.limit_bytes))
        partition = ",".join(map(str, found.partition))
        return NoPartition(
            code="memory",
            detail=(
                f"no partition{'' if found.proved else ' that was tried'} of {layers} layers over "
                f"pp={problem.pp} vpp={problem.vpp} fits: the nearest, {partition}, needs "
                f"{peaks[worst] / GIB:.1f} GiB of {problem.limit_bytes[worst] / GIB:.1f} GiB "
                f"usable on stage {worst}"
            ),
            fix=(
                f"{found.excess_bytes / GIB:.1f} GiB too much; use more stages, a smaller "
                "micro-batch or recomputation"
            ),
            proved=found.proved,
        )
    return LayerPartition(
        pp=problem.pp,
        vpp=problem.vpp,
        layers=tuple(int(n) for n in found.partition),
        step_s=found.step_s,
        min_step_s=found.min_step_s,
        proved=found.proved,
        peak_bytes=tuple(float(x) for x in peaks),
        num_simulated=found.num_simulated,
    )


def price_partition(
    problem: PartitionProblem, layers: tuple[int, ...] | list[int]
) -> LayerPartition:
    """A partition that was not searched for, such as the even one; it need not fit.

    Raises:
        ValueError: layers that are not those of the problem.
    """
    given = list(layers)
    if len(given) != problem.num_chunks or sum(given) != problem.blocks.num_layers:
        raise ValueError(
            f"a partition of {given} is none of {problem.blocks.num_layers} layers into "
            f"{problem.num_chunks} chunks; give one number per chunk that add up"
        )
    if (np.array(given) < problem.min_layers).any():
        raise ValueError(f"a partition of {given} leaves a chunk empty; give every chunk a layer")
    priced = problem.price([given])
    step_s = float(problem.step_s(priced)[0])
    return LayerPartition(
        pp=problem.pp,
        vpp=problem.vpp,
        layers=tuple(given),
        step_s=step_s,
        min_step_s=float(problem.min_step_s(priced)[0]),
        proved=False,
        peak_bytes=tuple(float(x) for x in priced.peak_bytes[:, 0]),
    )


def problem_of(
    model: ModelSpec,
    cluster: ClusterSpec,
    configuration: Configuration,
    *,
    limit_bytes: Any,
    constants: Constants | None = None,
    speed: Any = None,
    correction: PeakCorrection = AS_PREDICTED,
) -> PartitionProblem:
    """The partitions of one configuration; its layers need not divide by its stages.

    Args:
        model: what is trained.
        cluster: GPUs of speed 1.
        configuration: layout, batch and memory options.
        limit_bytes: [pp] or one number, bytes that a stage may use.
        constants: of the cost model; None takes those that go with the cluster.
        speed: [pp] speed of every stage's GPU; None: all 1.
        correction: what measured peaks say of the bytes.

    Raises:
        ValueError: recompute `block`, or a size that makes no sense.
    """
    rows = to_config_batch(model, cluster, points_of([configuration]))
    costs = measured_costs(
        rows,
        constants or cluster.load_constants(),
        correction=correction,
    )
    return PartitionProblem.of(costs, configuration, limit_bytes=limit_bytes, speed=speed)


@dataclass(frozen=True, kw_only=True)
class Repartition:
    """A ranked configuration and its fastest partition."""

    rank: int
    """Place in the ranking, from 1."""
    configuration: Configuration
    """What was ranked, with even stages."""
    even_step_s: float
    """Seconds of its step."""
    partition: LayerPartition
    """The fastest that fits, which may be the even one."""

    @property
    def gain(self) -> float:
        """Share of the even step that the partition saves."""
        return 1 - self.partition.step_s / self.even_step_s

    @property
    def flags(self) -> list[str]:
        """Megatron's flags of the configuration with the partition."""
        flags, own = self.configuration.to_flags(), self.partition.to_flags()
        for name in (own[0], "--num-virtual-stages-per-pipeline-rank"):
            if name in flags:
                at = flags.index(name)
                del flags[at : at + 2]
        return [*flags[:2], *own, *flags[2:]]

    def __str__(self) -> str:
        surely = "" if self.partition.proved else f", at best {self.partition.min_step_s:.4g} s"
        return (
            f"rank {self.rank} partition {self.partition}: {self.partition.step_s:.4g} s instead "
            f"of {self.even_step_s:.4g} s ({100 * self.gain:.1f} % less{surely}): "
            f"{shlex.join(self.partition.to_flags())}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "even_step_s": self.even_step_s,
            "gain": self.gain,
            "cut": self.partition.to_json(),
            "flags": self.flags,
        }


def repartitions(planner: Planner, plan: Plan) -> list[Repartition]:
    """The fastest partition of every pipeline of a plan, without those recomputed by blocks.

    All share what may be computed, so that many pipelines take no longer than some.

    Args:
        planner: that made the plan.
        plan: what it ranked.

    Raises:
        SpecError: a mixture of experts.
    """
    planner.model.check_dense("the layer partition")
    found, known = [], {}
    pipelines = [
        (i, ranked.configuration)
        for i, ranked in enumerate(plan.ranked)
        if ranked.configuration.layout.pp > 1 and ranked.configuration.recompute != "block"
    ]
    share = min(MAX_WORK, _ALL_WORK / max(len(pipelines), 1))
    for i, c in pipelines:
        # Measured times say how much longer, or shorter, all of it takes.
        factor = planner.measured_factor(c)
        problem = problem_of(
            planner.model,
            planner.cluster,
            c,
            limit_bytes=planner.safe_bytes(c),
            constants=planner.constants,
            correction=planner.peaks,
        )
        each = planner.model.num_layers // problem.num_chunks
        even = price_partition(problem, [each] * problem.num_chunks)
        # What suits one layout is near what suits another of as many chunks.
        starts = known.setdefault((problem.pp, problem.vpp), {})
        partition = best_partition(problem, max_work=share, starts=list(starts))
        # The even one fits. Only a peak that is the limit to the last digit may come out without.
        if isinstance(partition, LayerPartition):
            better = partition if partition.step_s < even.step_s else even
            starts[partition.layers] = None
            found.append(
                Repartition(
                    rank=i + 1,
                    configuration=c,
                    even_step_s=factor * even.step_s,
                    partition=better.times(factor),
                )
            )
    return found


def lines(found: Sequence[Repartition]) -> list[str]:
    """What a table says of them, the fastest first."""
    uneven = [x for x in found if not x.partition.is_even]
    same = len(found) - len(uneven)
    told = [str(x) for x in sorted(uneven, key=lambda x: (x.partition.step_s, x.rank))]
    return [*told, f"{same} of {len(found)} ranked pipelines are fastest with even stages"]
