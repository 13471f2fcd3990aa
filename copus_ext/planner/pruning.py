"""What a search can leave out early: what cannot fit, and what another configuration beats."""

from __future__ import annotations

from typing import Any

import numpy as np

from copus_ext.cost_model.cluster_spec import ClusterSpec
from copus_ext.cost_model.memory import static_bytes
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.cost_model.rows import RECOMPUTE_BLOCK, RECOMPUTE_FULL, RECOMPUTE_SELECTIVE
from copus_ext.planner.space import SIZES, Candidates, to_config_batch


def least_bytes(model: ModelSpec, cluster: ClusterSpec, points: Candidates) -> Any:
    """[n] bytes that do not depend on the batch; looked up, as few of them differ."""
    names = ("tp", "pp", "use_distributed_optimizer")
    names += () if model.num_experts is None else ("ep", "etp")
    kinds = np.zeros(len(points), dtype=np.int64)
    for name in names:
        found, size = numbered(getattr(points, name))
        kinds = size * kinds + found
    kinds, num = numbered(kinds)
    one = np.empty(num, dtype=np.int64)
    one[kinds[::-1]] = np.arange(len(points))[::-1]
    return static_bytes(to_config_batch(model, cluster, points.take(one)))[kinds]


_ALL = 1 << 30
"""Recomputed layers of a chunk, if it is all of them."""


def prune_dominated(points: Candidates, surely_fits: Any, measured: Candidates) -> Any:
    """Marks the points that an equal one with less recomputation beats.

    Nothing, the first layers of a chunk, more of them, all: each does what the one before does and
    more; so do nothing, the core of the attention, everything.

    Args:
        points: legal ones that fit.
        surely_fits: [n] bool, those that may beat others.
        measured: where times are known, which follow no order: their kin are left alone.

    Returns:
        [n] bool.
    """
    has_experts = any((x.ep != 1).any() or (x.etp != x.tp).any() for x in (points, measured))
    shares = any((x.cp != 1).any() for x in (points, measured))
    idle = (() if has_experts else ("ep", "etp")) + (() if shares else ("cp", "cp_comm_type"))
    names = tuple(n for n in SIZES if n not in idle)
    lines = _numbered(points, measured, names)
    own, known = lines[: len(points)], lines[len(points) :]
    batch, num_batches = numbered(points.asked_batch_size)
    group, num_groups = numbered(num_batches * own + batch)
    selective = points.recompute == RECOMPUTE_SELECTIVE
    layers = np.where(points.recompute == RECOMPUTE_BLOCK, points.recompute_num_layers, 0)
    layers = np.where(points.recompute == RECOMPUTE_FULL, _ALL, layers)
    least = np.full(num_groups, _ALL + 1)
    np.minimum.at(least, group, np.where(surely_fits & ~selective, layers, _ALL + 1))
    by_selective = np.zeros(num_groups, dtype=bool)
    np.logical_or.at(by_selective, group, surely_fits & selective)
    beaten = np.where(selective, least[group] == 0, layers > least[group])
    beaten |= (layers == _ALL) & by_selective[group]
    return beaten & ~np.isin(own, known)


def numbered(values: Any) -> tuple[Any, int]:
    """[n] whole numbers from 0 on in place of values, equal where they are, and how many there are;
    sooner than a sort where values are small."""
    values = np.asarray(values).astype(np.int64)
    most = int(values.max(initial=0))
    if most > 4 * len(values) + 4096:
        found, number = np.unique(values, return_inverse=True)
        return number.reshape(-1), len(found)
    there = np.zeros(most + 1, dtype=bool)
    there[values] = True
    number = np.cumsum(there) - 1
    return number[values], int(there.sum())


def _numbered(points: Candidates, others: Candidates, names: tuple[str, ...]) -> Any:
    """[n + m] a number for every kind of configuration, equal for those that differ only in
    recomputation and batch."""
    kinds = np.zeros(len(points) + len(others), dtype=np.int64)
    for name in (*names, "use_distributed_optimizer"):
        found, size = numbered(np.concatenate([getattr(x, name) for x in (points, others)]))
        kinds = numbered(size * kinds + found)[0]
    return kinds
