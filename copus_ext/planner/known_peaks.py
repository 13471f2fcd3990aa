"""What runs say of the memory: a correction of all peaks, and what is known of single ones. A
`planner` is a `search.Planner`, which uses this file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from copus_ext.cost_model.memory import memory
from copus_ext.cost_model.peak_correction import AS_PREDICTED, MIN_PEAK_SD, PeakCorrection
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.profile import Timing, keys_of
from copus_ext.planner.space import Candidates, points_of, to_config_batch

PREDICTED, MEASURED, RAN = "predicted", "measured", "ran"
"""Where a peak comes from: not from this configuration; from its run; or nobody gave that of its
run, which a GPU had the memory for."""
OUT_OF_MEMORY, NO_LESS = "out_of_memory", "no_less"
"""The same where it ran out of memory, and where it needs no less than one on the same ranks that
did."""
WORDS = {
    PREDICTED: "",
    MEASURED: "measured",
    RAN: "it ran, with a peak that is predicted",
    OUT_OF_MEMORY: "it ran out of memory",
    NO_LESS: "it needs no less than what ran out of memory on these ranks",
}
"""What is said of each."""
FITS = {MEASURED: 1.0, RAN: 1.0, OUT_OF_MEMORY: 0.0, NO_LESS: 0.0}
"""The probability to fit where a run decides it."""
_IMPOSSIBLE = 1.0 + 2.0 * MIN_PEAK_SD
"""Weights, gradients and optimizer over a peak from which on it is not that of such a run."""
_ON_RANKS = ("tp", "pp", "ep", "etp", "cp", "dp")
_EQUAL = 1e-9


def sizes_of(planner: Any) -> tuple[float, float]:
    """Bytes that no run of the cluster can exceed, and that one needs at least that ran out of
    memory. A CPU rank may have more than the share of the memory that is thought its own, or
    less."""
    cluster = planner.cluster
    if cluster.is_gloo:
        return math.inf, -math.inf
    sizes = [node.gpu.memory_bytes for node in cluster.nodes or [cluster]]
    return max(sizes), min(sizes)


def correction_of(planner: Any, timings: Sequence[Timing]) -> PeakCorrection:
    """What the peaks of runs, and that others ran out of memory, say of all peaks. Runs that cannot
    have been as described say nothing (see `least_bytes_of`)."""
    most, least = sizes_of(planner)
    ran = [x for x in timings if not is_impossible(planner, x)]
    lacked = planner.too_large
    if not (ran or lacked):
        return AS_PREDICTED
    some = [*(x.configuration for x in ran), *lacked]
    return PeakCorrection.of(
        memory(to_config_batch(planner.model, planner.cluster, points_of(some))),
        [*(x.peak_bytes or math.nan for x in ran), *(math.nan for _ in lacked)],
        at_most=[*(most for _ in ran), *(math.inf for _ in lacked)],
        at_least=[*(-math.inf for _ in ran), *(least for _ in lacked)],
    )


def least_bytes_of(planner: Any, c: Configuration) -> float:
    """Weights, gradients and optimizer of the rank that holds most of them, which are exact."""
    stages = memory(to_config_batch(planner.model, planner.cluster, points_of([c]))).stages
    return float(np.sum([stages[k] for k in ("weights", "grads", "optimizer")], axis=0).max())


def is_impossible(planner: Any, run: Timing) -> bool:
    """Whether a run on GPUs cannot have had its peak, or the memory of a GPU, if it was as
    described."""
    most = run.peak_bytes or sizes_of(planner)[0]
    if planner.cluster.is_gloo or math.isinf(most):
        return False
    return least_bytes_of(planner, run.configuration) > _IMPOSSIBLE * most


def ran_out(planner: Any, points: Candidates) -> Any:
    """[n] whether each is known not to fit: one that ran out of memory, or one on the same ranks
    that is predicted to need no less than it. What the prediction may be off by, both share."""
    found = np.zeros(len(points), dtype=bool)
    if not (planner.too_large and len(points)):
        return found
    lacked = points_of(planner.too_large)
    own, theirs = (
        np.stack([getattr(x, name) for name in _ON_RANKS], axis=1) for x in (points, lacked)
    )
    alike = (own[:, None] == theirs[None]).all(axis=2)
    at = np.flatnonzero(alike.any(axis=1))
    if not len(at):
        return found
    needs, limits = (
        planner.peak_bytes_of(
            to_config_batch(planner.model, planner.cluster, some).unevenly_loaded()
        )
        for some in (points.take(at), lacked)
    )
    least = np.where(alike[at], limits[None], np.inf).min(axis=1)
    found[at] = needs >= (1.0 - _EQUAL) * least
    return found


def known_of(planner: Any, points: Candidates, peak_bytes: Any) -> tuple[Any, list[str]]:
    """Peaks with those of runs in the place of predictions, and where each comes from.

    Args:
        planner: that knows the runs.
        points: n of them.
        peak_bytes: [n] predicted.
    """
    peaks, names = np.array(peak_bytes, dtype=float), [PREDICTED] * len(points)
    runs = planner.timings
    most, keys = sizes_of(planner)[0], keys_of(points)
    lacked = {tuple(k) for k in keys_of(points_of(planner.too_large)).tolist()}
    told: dict[tuple[Any, ...], float] = {}
    for key, run in zip(keys_of(points_of([x.configuration for x in runs])).tolist(), runs):
        if run.peak_bytes is not None:
            told[tuple(key)] = max(run.peak_bytes, told.get(tuple(key), 0.0))
    did_run, did_not = planner.did_run(points), ran_out(planner, points)
    for i, key in enumerate(map(tuple, keys.tolist())):
        if did_run[i]:
            if key in told:
                peaks[i], names[i] = told[key], MEASURED
            else:
                peaks[i], names[i] = min(peaks[i], most), RAN
        elif did_not[i]:
            names[i] = OUT_OF_MEMORY if key in lacked else NO_LESS
    return peaks, names
