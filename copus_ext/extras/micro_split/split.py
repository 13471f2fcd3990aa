"""How a replica's samples are best split into micro-batches that need not be equal.

Micro-batches run one after the other: seconds add up, memory does not. Seconds of one are not
linear in its size, as small ones wait for launches, so that the sizes are searched, exactly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from copus_ext.cost_model.step import stage_work
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.plan import Plan
from copus_ext.planner.search import Planner
from copus_ext.planner.space import points_of, to_config_batch

_NO_GAIN = 1e-9
_LARGEST = 64
"""Samples of the largest micro-batch to consider."""


@dataclass(frozen=True, kw_only=True)
class Split:
    sizes: tuple[int, ...]
    """Samples of each, largest first."""
    seconds: float
    """Of all their passes."""

    def __str__(self) -> str:
        """Short text such as `4x3+2`."""
        runs = [(n, self.sizes.count(n)) for n in sorted(set(self.sizes), reverse=True)]
        return "+".join(f"{n}x{times}" if times > 1 else str(n) for n, times in runs)


def best_split(samples: int, seconds: Mapping[int, float]) -> Split:
    """The sizes with the least sum of seconds, by dynamic programming.

    Args:
        samples: of the replica in a step.
        seconds: of one micro-batch, by its samples; the sizes that fit the memory.

    Returns:
        The best; of equally fast ones that with the fewest micro-batches.

    Raises:
        ValueError: no sum of the sizes is that number.
    """
    sizes = sorted(size for size in seconds if 0 < size <= samples)
    best: list[tuple[float, int, int] | None] = [(0.0, 0, 0)] + [None] * samples
    for total in range(1, samples + 1):
        for size in sizes:
            before = best[total - size] if size <= total else None
            if before is None:
                continue
            found = (before[0] + seconds[size], before[1] + 1, size)
            known = best[total]
            if known is None or found[:2] < known[:2]:
                best[total] = found
    whole = best[samples]
    if whole is None:
        raise ValueError(f"{samples} samples are not a sum of micro-batches of {sizes}")
    chosen, left = [], samples
    while left:
        entry = best[left]
        assert entry is not None
        chosen.append(entry[2])
        left -= entry[2]
    return Split(sizes=tuple(sorted(chosen, reverse=True)), seconds=whole[0])


def best_tail(samples: int, seconds: Mapping[int, float]) -> Split:
    """The same among full micro-batches of one size and a smaller last one, as the trainer runs
    them with `--allow-uneven-micro-batches`.

    Raises:
        ValueError: no size leaves a rest that has a time, too.
    """
    found = []
    for size in sorted(seconds, reverse=True):
        full, left = divmod(samples, size)
        if full and (not left or left in seconds):
            sizes = (size,) * full + ((left,) if left else ())
            total = full * seconds[size] + (seconds[left] if left else 0.0)
            found.append(Split(sizes=sizes, seconds=total))
    if not found:
        raise ValueError(f"{samples} samples are not a sum of micro-batches of {sorted(seconds)}")
    return min(found, key=lambda x: (x.seconds, len(x.sizes)))


def seconds_by_size(planner: Planner, configuration: Configuration, most: int) -> dict[int, float]:
    """Seconds of the passes of one micro-batch of every size that fits the memory.

    Times are the cost model's.

    Args:
        planner: of the model on the cluster.
        configuration: without a pipeline.
        most: largest size to consider.
    """
    seconds: dict[int, float] = {}
    for size in range(1, most + 1):
        one = dataclasses.replace(
            configuration,
            micro_batch_size=size,
            global_batch_size=size * configuration.layout.dp,
        )
        rows = to_config_batch(planner.model, planner.cluster, points_of([one])).full()
        if float(planner.peak_bytes_of(rows)[0]) > planner.safe_bytes(one):
            break
        forward, backward, _ = stage_work(rows, planner.constants, 1, 1)
        seconds[size] = float((forward + backward).sum())
    return seconds


@dataclass(frozen=True, kw_only=True)
class UnequalMicroBatches:
    """A ranked layout without a pipeline and its best micro-batches."""

    rank: int
    """Place in the ranking, from 1."""
    configuration: Configuration
    """What was ranked, in equal micro-batches."""
    split: Split
    """What the trainer can run: full ones and a smaller last one."""
    free: Split
    """The best of any sizes."""
    saved_s: float
    """Seconds of a step that `split` saves over the equal ones."""
    step_s: float
    """Of the equal ones."""

    @property
    def flags(self) -> list[str]:
        """Megatron's flags, and ours for the smaller last micro-batch."""
        c = dataclasses.replace(self.configuration, micro_batch_size=self.split.sizes[0])
        return [*c.to_flags(), "--allow-uneven-micro-batches"]

    def __str__(self) -> str:
        return (
            f"rank {self.rank} micro-batches {self.split}: {self.step_s - self.saved_s:.4g} s "
            f"instead of {self.step_s:.4g} s ({100 * self.saved_s / self.step_s:.1f} % less): "
            f"--micro-batch-size {self.split.sizes[0]} --allow-uneven-micro-batches"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "sizes": list(self.split.sizes),
            "best_of_any_sizes": list(self.free.sizes),
            "step_s": self.step_s,
            "saved_s": self.saved_s,
            "flags": self.flags,
        }


def unequal_micro_batches(planner: Planner, plan: Plan) -> list[UnequalMicroBatches]:
    """Of a plan's layouts without a pipeline those that uneven micro-batches make faster.

    Args:
        planner: that made the plan.
        plan: what it ranked.

    Raises:
        SpecError: a mixture of experts.
    """
    planner.model.check_dense("the search of unequal micro-batches")
    found, seen = [], set()
    for i, ranked in enumerate(plan.ranked):
        c = ranked.configuration
        key = (c.layout, c.cp_comm_type, c.recomputation, c.use_distributed_optimizer)
        if c.layout.pp > 1 or key in seen or c.global_batch_size % c.layout.dp:
            continue
        seen.add(key)
        own = c.global_batch_size // c.layout.dp
        seconds = seconds_by_size(planner, c, min(own, _LARGEST))
        if c.micro_batch_size not in seconds:
            continue
        split, free = best_tail(own, seconds), best_split(own, seconds)
        saved = c.num_microbatches * seconds[c.micro_batch_size] - split.seconds
        step_s = ranked.prediction.step_s
        if saved > _NO_GAIN * step_s:
            found.append(
                UnequalMicroBatches(
                    rank=i + 1,
                    configuration=c,
                    split=split,
                    free=free,
                    saved_s=min(saved, step_s),
                    step_s=step_s,
                )
            )
    return found
