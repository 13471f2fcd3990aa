"""Stages on several types of GPU: each with its own costs and memory, and which type goes first.

All replicas are equal, stage by stage; a stage runs on one type.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from copus_ext.perf.blocks import Blocks, costs_by_block
from copus_ext.perf.cluster_spec import ClusterSpec
from copus_ext.perf.model_spec import ModelSpec
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.cut_problem import CutProblem
from copus_ext.planner.cuts import Cut, NoCut, best_cut
from copus_ext.planner.space import point_of, to_rows


@dataclass(frozen=True, kw_only=True)
class StageType:
    """Some stages on one type of GPU."""

    cluster: ClusterSpec
    """The type, its links and its constants."""
    num_stages: int
    """How many stages its GPUs make."""
    limit_bytes: float
    """Bytes that such a stage may use."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """An order of the types with its fastest cut."""

    order: tuple[int, ...]
    """[pp] of every stage, the place of its type in the list given."""
    cut: Cut
    """Layers of every chunk."""


def mixed_problem(
    model: ModelSpec,
    configuration: Configuration,
    stages: Sequence[StageType],
    *,
    bare_ends: bool = False,
) -> CutProblem:
    """The cuts of one configuration over stages of several types.

    A message between two types takes the time of the slower one; each type has its own end of the
    step, and the step constant is the largest.

    Args:
        model: what is trained.
        configuration: layout, batch and memory options; its layers need not divide.
        stages: the type of every stage, in order (`num_stages` is not read).
        bare_ends: whether the ends may hold embedding or head alone.

    Raises:
        ValueError: not one type for every stage, or recompute `block`.
    """
    if len(stages) != configuration.pp:
        raise ValueError(f"{len(stages)} stage types for pp={configuration.pp}; give one per stage")
    point = point_of(configuration)
    costs = [
        costs_by_block(to_rows(model, s.cluster, point), s.cluster.load_constants()) for s in stages
    ]
    names = [f.name for f in fields(Blocks)]
    blocks = Blocks(**{n: np.stack([getattr(c.blocks, n) for c in costs]) for n in names})
    hops = np.stack([c.hop_s for c in costs])
    following = np.roll(np.arange(len(costs)), -1)
    at = np.arange(len(costs))

    def end(held: Any, backward: Any) -> Any:
        return np.stack([c.end_of_step(held, backward)[r] for r, c in enumerate(costs)])

    return CutProblem(
        pp=configuration.pp,
        vpp=configuration.vpp,
        num_microbatches=configuration.num_microbatches,
        blocks=blocks,
        hop_s=np.maximum(hops[at, at], hops[following, at]),
        limit_bytes=[s.limit_bytes for s in stages],
        fixed_bytes=max(c.fixed_bytes for c in costs),
        chunk_bytes=max(c.chunk_bytes for c in costs),
        end_of_step=end,
        fixed_s=max(c.fixed_s for c in costs),
        bare_ends=bare_ends,
    )


def best_placement(
    model: ModelSpec,
    configuration: Configuration,
    types: Sequence[StageType],
    *,
    bare_ends: bool = False,
) -> Placed | NoCut:
    """The order of the types, each in one run of stages, and the cut that make the step shortest.

    Args:
        model: what is trained.
        configuration: layout, batch and memory options.
        types: all types, few of them; their stages add up to the pipeline.
        bare_ends: whether the ends may hold embedding or head alone.

    Returns:
        The best, of equally good ones the first; or the last reason why there is none.

    Raises:
        ValueError: the stages do not add up.
    """
    num_stages = sum(t.num_stages for t in types)
    if num_stages != configuration.pp:
        raise ValueError(
            f"types make {num_stages} stages but pp={configuration.pp}; a stage needs tp x dp "
            f"= {configuration.tp * configuration.dp} GPUs of one type"
        )
    best: Placed | NoCut | None = None
    for turn in itertools.permutations(range(len(types))):
        order = tuple(i for i in turn for _ in range(types[i].num_stages))
        stages = [types[i] for i in order]
        found = best_cut(mixed_problem(model, configuration, stages, bare_ends=bare_ends))
        if isinstance(found, Cut):
            if not isinstance(best, Placed) or found.step_s < best.cut.step_s:
                best = Placed(order=order, cut=found)
        elif not isinstance(best, Placed):
            best = found
    assert best is not None, "there is at least one type"
    return best
