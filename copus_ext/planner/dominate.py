"""Which configurations are beaten by one like them that recomputes less.

Less recomputation never takes longer, as the time of a step does not fall when a pass takes longer
(`tests/unit/test_pipeline_schedule.py`). It needs more memory, so that it only counts where it
surely fits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from copus_ext.cost_model.rows import RECOMPUTE_BLOCK, RECOMPUTE_FULL, RECOMPUTE_SELECTIVE
from copus_ext.planner.space import Points

_ALL = 1 << 30
"""Recomputed layers of a chunk, if it is all of them."""


def dominated(points: Points, surely_fits: Any, measured: Points) -> Any:
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
    lines = _numbered(points, measured, ("tp", "pp", "vpp", "dp", "micro_batch_size"))
    own, known = lines[: len(points)], lines[len(points) :]
    key = np.stack([own, points.asked_batch_size], axis=1)
    _, group = np.unique(key, axis=0, return_inverse=True)
    group = group.reshape(-1)
    num_groups = int(group.max(initial=-1)) + 1
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


def _numbered(points: Points, others: Points, names: tuple[str, ...]) -> Any:
    """[n + m] a number for every kind of configuration, equal for those that differ only in
    recomputation and batch."""
    columns = [np.concatenate([getattr(x, name) for x in (points, others)]) for name in names]
    zero = [x.use_distributed_optimizer.astype(np.int64) for x in (points, others)]
    table = np.stack([*columns, np.concatenate(zero)], axis=1)
    if not len(table):
        return np.zeros(0, dtype=np.int64)
    return np.unique(table, axis=0, return_inverse=True)[1].reshape(-1)
