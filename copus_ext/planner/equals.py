"""Which configurations are equally fast as far as anybody can tell, and which of them comes first.

Of two that are predicted within 3 % of each other, the one said to be faster is so in 56 % of the
pairs on published clusters (decision 078): little more than a coin knows. So such a difference
decides nothing. What few people run decides: the fewer of it, the earlier.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from copus_ext.cost_model.context import HEADS
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.cost_model.rows import RECOMPUTE_BLOCK, RECOMPUTE_SELECTIVE
from copus_ext.planner.plan import Prediction, Ranked
from copus_ext.planner.space import Candidates

EQUAL = 0.03
"""Share of a step below which a predicted difference is none."""
MAY_FIT, FAR_ABOVE = 0.25, 1.2
"""Least probability to fit of what is worth trying, and its largest peak over the limit."""
SHORT = 8192
"""Tokens of a sample up to which ranks rarely share it."""


def rarities(model: ModelSpec, points: Candidates) -> Any:
    """[n] how much a configuration has that few people run: ranks that share short samples, a core
    of the attention that is computed again beside a flash kernel, some layers that are, logits in
    parts, and the doublings of the chunks of a stage."""
    shares = points.cp > 1
    rare = np.log2(points.vpp) + 2.0 * (shares & (model.seq_length <= SHORT))
    rare = rare + 0.5 * (shares & (points.cp_comm_type == HEADS))
    rare = rare + 2.0 * ((points.recompute == RECOMPUTE_SELECTIVE) & model.fused_attention)
    rare = rare + 0.5 * (points.recompute == RECOMPUTE_BLOCK)
    return rare + 0.5 * (points.logits_chunks > 1)


def in_order(seconds: Any, rare: Any) -> Any:
    """[n] indices: the fastest and its equals first, of these the least rare; then the fastest of
    the rest with its equals, and so on.

    Args:
        seconds: [n] of a sample.
        rare: [n] of `rarities`.
    """
    order = np.argsort(seconds, kind="stable")
    fast, start, found = seconds[order], 0, []
    while start < len(order):
        end = int(np.searchsorted(fast, fast[start] * (1.0 + EQUAL), side="right"))
        band = order[start:end]
        found.append(band[np.lexsort((seconds[band], rare[band]))])
        start = max(end, start + 1)
    return np.concatenate(found) if found else order


def may_fit(likely: Any, peak_bytes: Any, limit_bytes: float) -> Any:
    """[n] whether what is not sure to fit is worth trying, by probabilities and peaks: [n]. Reports
    that widen the doubt make probable even what needs several times the memory."""
    return (likely >= MAY_FIT) & (peak_bytes <= FAR_ABOVE * limit_bytes)


def worth_trying(seconds: Any, likely: Any, rare: Any, *, safe_s: float, number: int) -> list[int]:
    """Indices of what to try before the fastest that is safe: where gain times probability is
    greatest, the least rare of its equals; then the same among all that are faster still.

    Args:
        seconds: [n] of a sample.
        likely: [n] probability to fit.
        rare: [n] of `rarities`.
        safe_s: seconds of a sample of the fastest that is safe; infinite where none is, and then
            the likeliest to fit is the first.
        number: how many at most.
    """
    found: list[int] = []
    left = np.arange(len(seconds))
    while len(found) < number:
        left = left[seconds[left] < safe_s / (1.0 + EQUAL)]
        if not len(left):
            break
        gain = np.log(safe_s / seconds[left]) if np.isfinite(safe_s) else 1.0
        best = left[np.argmax(likely[left] * gain)]
        alike = seconds[left] <= (1.0 + EQUAL) * seconds[best]
        alike = left[alike & (likely[left] >= likely[best] - 0.05)]
        found.append(int(alike[np.lexsort((seconds[alike], rare[alike]))[0]]))
        safe_s = float(seconds[found[-1]])
    return found


def longer(one: Prediction, first: Prediction) -> float:
    """Its time over that of another one, less 1, each for a sample: batches may differ."""
    return first.samples_per_s / one.samples_per_s - 1.0


def grouped(ranked: Sequence[Ranked], top: int) -> list[Ranked]:
    """The first few of an order that no earlier one stands for. It stands for those of its
    time that have the same tensor, pipeline and expert sizes, which become its `equals`."""
    rows: list[tuple[Ranked, list[Ranked]]] = []
    for one in ranked:
        for first, others in rows:
            is_equal = longer(one.prediction, first.prediction) <= EQUAL
            if _kind(first) == _kind(one) and is_equal:
                is_other = difference(first, one) and not any(_is_same(one, x) for x in others)
                others += [one] if is_other else []
                break
        else:
            rows.append((one, []))
    return [dataclasses.replace(first, equals=others) for first, others in rows[:top]]


def _kind(one: Ranked) -> tuple[Any, ...]:
    at = one.configuration.layout
    return at.tp, at.pp, at.ep, at.expert_tensor_parallel_size


def _is_same(one: Ranked, other: Ranked) -> bool:
    """Whether two differ at most in how they split the optimizer state of a single copy."""
    a, b = one.configuration, other.configuration
    same = dataclasses.replace(b, use_distributed_optimizer=a.use_distributed_optimizer)
    return a == (same if a.layout.copies == 1 else b)


def difference(first: Ranked, other: Ranked) -> str:
    """What another configuration has that the first of its row has not, and its time for a sample;
    empty where that is nothing."""
    a, b = first.configuration, other.configuration
    words = [] if a.layout.vpp == b.layout.vpp else [f"vpp {b.layout.vpp}"]
    if (a.layout.cp, a.cp_comm_type) != (b.layout.cp, b.cp_comm_type):
        words.append(f"cp {b.layout.cp} {b.cp_comm_type or ''}".rstrip())
    words += [] if a.micro_batch_size == b.micro_batch_size else [f"b {b.micro_batch_size}"]
    words += [] if a.recomputation == b.recomputation else [f"recompute {b.recomputation}"]
    words += [] if a.logits_chunks == b.logits_chunks else [f"logits-chunks {b.logits_chunks}"]
    if a.use_distributed_optimizer != b.use_distributed_optimizer and b.layout.copies > 1:
        words.append("zero" if b.use_distributed_optimizer else "no zero")
    if a.global_batch_size != b.global_batch_size:
        words.append(f"B {b.global_batch_size}")
    change = 100 * longer(other.prediction, first.prediction)
    return f"{' '.join(words)} ({change:+.1f} %)" if words else ""
