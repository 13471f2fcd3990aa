"""What runs say of the memory: a correction of all peaks, and what is known of single ones. A
`planner` is a `search.Planner`, which uses this file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from copus_ext.cost_model.memory import memory, peaks
from copus_ext.cost_model.peak_correction import (
    AS_PREDICTED,
    MIN_PEAK_SD,
    PeakCorrection,
    less_likely,
)
from copus_ext.cost_model.rows import RECOMPUTE_BLOCK, RECOMPUTE_FULL, RECOMPUTE_NONE, ConfigBatch
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.profile import Timing, keys_of
from copus_ext.planner.space import (
    LEGAL,
    Candidates,
    Limits,
    joined,
    judge,
    points_of,
    to_config_batch,
)

PREDICTED, MEASURED, RAN = "predicted", "measured", "ran"
"""Where a peak comes from: not from this configuration; from its run; or nobody gave that of its
run, which a GPU had the memory for."""
OUT_OF_MEMORY, NO_LESS, NO_MORE = "out_of_memory", "no_less", "no_more"
"""The same where it ran out of memory, and where it needs no less than one on the same ranks that
did, or no more than one that ran."""
WORDS = {
    PREDICTED: "",
    MEASURED: "measured",
    RAN: "it ran, with a peak that is predicted",
    OUT_OF_MEMORY: "it ran out of memory",
    NO_LESS: "it needs no less than what ran out of memory on these ranks",
    NO_MORE: "it needs no more than what ran on these ranks",
}
"""What is said of each."""
FITS = {MEASURED: 1.0, RAN: 1.0, NO_MORE: 1.0, OUT_OF_MEMORY: 0.0, NO_LESS: 0.0}
"""The probability to fit where a run decides it."""
_IMPOSSIBLE = 1.0 + 2.0 * MIN_PEAK_SD
"""Weights, gradients and optimizer over a peak from which on it is not that of such a run."""
_ON_RANKS = ("tp", "pp", "ep", "etp", "cp", "dp")
_NO_MORE_OF, _NO_LESS_OF = (
    ("micro_batch_size", "vpp"),
    ("logits_chunks", "sequence_parallel", "use_distributed_optimizer"),
)
"""Options of which more needs more memory, and less."""
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


def peaks_of(planner: Any, rows: ConfigBatch) -> tuple[Any, Any]:
    """Corrected bytes of the stage that needs most, and their relative uncertainty: [n] each. What
    ran out of memory never makes anything more likely to fit."""
    found, before = peaks(rows, correction=planner.peaks), planner.peaks.without
    if before is None:
        return found
    return less_likely(found, peaks(rows, correction=before), planner.limit_bytes)


def _needs(planner: Any, points: Candidates) -> Any:
    rows = to_config_batch(planner.model, planner.cluster, points).unevenly_loaded()
    return planner.peak_bytes_of(rows)


def _on_same_ranks(points: Candidates, others: Candidates) -> Any:
    """[n, m] whether points have the ranks of others."""
    own, theirs = (
        np.stack([getattr(x, name) for name in _ON_RANKS], axis=1) for x in (points, others)
    )
    return (own[:, None] == theirs[None]).all(axis=2)


def ran_out(planner: Any, points: Candidates) -> Any:
    """[n] whether each is known not to fit: one that ran out of memory, or one on the same ranks
    that is predicted to need no less than it. What the prediction may be off by, both share."""
    found = np.zeros(len(points), dtype=bool)
    if not (planner.too_large and len(points)):
        return found
    lacked = points_of(planner.too_large)
    alike = _on_same_ranks(points, lacked)
    at = np.flatnonzero(alike.any(axis=1))
    if not len(at):
        return found
    needs, limits = _needs(planner, points.take(at)), _needs(planner, lacked)
    least = np.where(alike[at], limits[None], np.inf).min(axis=1)
    found[at] = needs >= (1.0 - _EQUAL) * least
    return found


def _below_runs(planner: Any, points: Candidates) -> tuple[Any, Any]:
    """[n] whether each is known to fit beside a run on the same ranks: it has no option that needs
    more memory, and is predicted to need no more in all; and [n] the run's peak in proportion,
    infinity where none was measured."""
    found, most = np.zeros(len(points), dtype=bool), np.full(len(points), np.inf)
    runs = [x for x in planner.timings if not is_impossible(planner, x)] if len(points) else []
    if not runs:
        return found, most
    theirs = points_of([x.configuration for x in runs])
    below = _on_same_ranks(points, theirs)
    below &= (points.cp_comm_type[:, None] == theirs.cp_comm_type) | (points.cp == 1)[:, None]
    below &= _computes_again(points, theirs)
    for names, sign in ((_NO_MORE_OF, 1), (_NO_LESS_OF, -1)):
        for name in names:
            own, limit = (sign * _in_effect(x, name) for x in (points, theirs))
            below &= own[:, None] <= limit
    at = np.flatnonzero(below.any(axis=1))
    if not len(at):
        return found, most
    shares = _needs(planner, points.take(at))[:, None] / _needs(planner, theirs)
    below = below[at] & (shares <= 1.0 + _EQUAL)
    measured = np.array([x.peak_bytes or np.inf for x in runs])
    found[at] = below.any(axis=1)
    most[at] = np.where(below, np.minimum(shares, 1.0) * measured, np.inf).min(axis=1)
    return found, most


def _in_effect(points: Candidates, name: str) -> Any:
    """[n] an option, 1 where a single rank has nothing to split by it."""
    ranks = {"sequence_parallel": points.tp, "use_distributed_optimizer": points.dp * points.cp}
    values = getattr(points, name).astype(np.int64)
    return np.where(ranks[name] == 1, 1, values) if name in ranks else values


def _computes_again(points: Candidates, others: Candidates) -> Any:
    """[n, m] whether points compute again all that others do."""
    own, theirs = points.recompute[:, None], others.recompute
    layers = points.recompute_num_layers[:, None] >= others.recompute_num_layers
    more = (own == RECOMPUTE_FULL) | (theirs == RECOMPUTE_NONE)
    # Chunks of as many layers, of which some are computed again.
    alike = points.vpp[:, None] == others.vpp
    return more | ((own == theirs) & ((own != RECOMPUTE_BLOCK) | (layers & alike)))


def known_to_fit(planner: Any, points: Candidates) -> Any:
    """[n] whether each was timed, or needs no more than what was, unless it needs no less than what
    ran out of memory."""
    ran = planner.did_run(points)
    return ran | (_below_runs(planner, points)[0] & ~ran_out(planner, points))


def with_runs(planner: Any, points: Candidates, batch: int, limits: Limits) -> Candidates:
    """Points of a global batch and what ran that is not among them though limits allow it, such as
    tensor parallelism over nodes. One that overlaps more, or less, stands for its run."""
    known = [x.configuration for x in planner.timings if _is_within(x.configuration, limits)]
    if not known:
        return points
    runs = points_of(list(dict.fromkeys(known)))
    unit = runs.dp * runs.micro_batch_size
    unit = unit * np.where(runs.vpp > 1, runs.pp, 1)
    rounded = batch // unit * unit if limits.round_down else np.full(len(runs), batch)
    asked = np.full(len(runs), batch)
    runs = replace(runs, global_batch_size=np.maximum(rounded, 1), asked_batch_size=asked)
    runs = judge(planner.model, planner.cluster, runs, replace(limits, cross_node_tp=True))
    own, theirs = (
        keys_of(replace(x, overlap=x.overlap | True, logits_chunks=x.logits_chunks * 0 + 1))
        for x in (points, runs)
    )
    there = {tuple(key) for key in own.tolist()}
    lacks = np.array([tuple(key) not in there for key in theirs.tolist()])
    at = np.flatnonzero(lacks & (runs.code == LEGAL))
    return joined([points, runs.take(at)]) if len(at) else points


def _is_within(c: Configuration, limits: Limits) -> bool:
    """Whether limits allow a configuration, however it overlaps."""
    at, layers = c.layout, limits.fixed.get("recompute_num_layers")
    sizes = {name: getattr(at, name) for name in ("tp", "pp", "vpp", "ep", "cp", "dp")}
    sizes |= {"etp": at.expert_tensor_parallel_size, "micro_batch": c.micro_batch_size}
    return (
        limits.allows(**sizes)
        and c.recompute in limits.recompute
        and (c.recompute != "block" or layers in (None, c.recompute_num_layers))
        and c.use_distributed_optimizer in limits.use_distributed_optimizer
        and c.use_tp_pp_dp_mapping == limits.use_tp_pp_dp_mapping
        and c.logits_chunks in limits.logits_chunks
        and (limits.sequence_parallel or not c.sequence_parallel)
        and (at.cp == 1 or c.cp_comm_type in (limits.cp_comm_types or (c.cp_comm_type,)))
    )


def known_of(planner: Any, points: Candidates, peak_bytes: Any) -> tuple[Any, list[str]]:
    """Peaks with those of runs in the place of predictions, and where each comes from.

    Args:
        planner: that knows the runs.
        points: n of them.
        peak_bytes: [n] predicted.
    """
    needs, names = np.array(peak_bytes, dtype=float), [PREDICTED] * len(points)
    runs = planner.timings
    most, keys = sizes_of(planner)[0], keys_of(points)
    lacked = {tuple(k) for k in keys_of(points_of(planner.too_large)).tolist()}
    told: dict[tuple[Any, ...], float] = {}
    for key, run in zip(keys_of(points_of([x.configuration for x in runs])).tolist(), runs):
        if run.peak_bytes is not None:
            told[tuple(key)] = max(run.peak_bytes, told.get(tuple(key), 0.0))
    did_run, did_not = planner.did_run(points), ran_out(planner, points)
    below, limits = _below_runs(planner, points)
    for i, key in enumerate(map(tuple, keys.tolist())):
        if did_run[i]:
            if key in told:
                needs[i], names[i] = told[key], MEASURED
            else:
                needs[i], names[i] = min(needs[i], most), RAN
        elif did_not[i]:
            names[i] = OUT_OF_MEMORY if key in lacked else NO_LESS
        elif below[i]:
            needs[i] = limits[i] if np.isfinite(limits[i]) else min(needs[i], most)
            names[i] = NO_MORE
    return needs, names
