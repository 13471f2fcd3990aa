"""Intervals of figures by what they came from: seeds, clusters, first batches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_BOOTSTRAPS = 2000


def interval(
    values: Sequence[Any],
    figure: Callable[[Sequence[Any]], float],
    by: Sequence[Callable[[Any], Any]] = (),
) -> list[float]:
    """A 95 % interval of a figure by drawing anew what gave its values.

    Args:
        values: that the figure is of.
        figure: of some of them, in any order.
        by: what each came from, the outer one first. Clusters and seeds: clusters are drawn, and
            within each of those its seeds, each with all of its values. Empty: values are drawn.
    """
    rng = np.random.default_rng(0)

    def drawn(some: Sequence[Any], keys: Sequence[Callable[[Any], Any]]) -> list[Any]:
        if not keys:
            return list(some)
        groups: dict[Any, list[Any]] = {}
        for value in some:
            groups.setdefault(keys[0](value), []).append(value)
        each = list(groups.values())
        chosen = rng.integers(0, len(each), len(each))
        return [value for i in chosen for value in drawn(each[i], keys[1:])]

    if not by:
        values, by = list(enumerate(values)), [lambda pair: pair[0]]
        plain, figure = figure, lambda some: plain([value for _, value in some])
    found = [figure(drawn(values, by)) for _ in range(_BOOTSTRAPS)]
    return [float(x) for x in np.percentile(found, [2.5, 97.5])]


_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""97.5 % quantiles of Student's t by number of values."""


def interval_of_few(
    values: Sequence[Any], figure: Callable[[Sequence[Any]], float]
) -> list[float] | None:
    """A 95 % interval of a mean of a few values, by Student's t; None for one.

    Drawing so few anew would give no more than their range, which is too narrow. From six on it is
    `interval`.

    Args:
        values: that the figure is of, such as seeds.
        figure: a mean over some of them.
    """
    each = [figure([value]) for value in values]
    if len(each) < 2:
        return None
    if len(each) not in _STUDENT:
        return interval(values, figure)
    half = _STUDENT[len(each)] * statistics.stdev(each) / math.sqrt(len(each))
    middle = statistics.fmean(each)
    return [middle - half, middle + half]
