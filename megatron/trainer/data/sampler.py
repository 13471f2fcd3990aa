"""Which samples a rank reads: pure functions of the sample counter.

Samples are numbered 0, 1, 2, ... over the whole run. A global batch that starts at
`consumed_samples` is always the samples `consumed_samples ... consumed_samples + global_batch_size
- 1`, whatever the layout and the micro-batch size.
"""

from __future__ import annotations

from megatron.trainer.common.errors import UsageError

PADDING = -1
"""Stands for a sample that fills up a micro-batch and counts nothing."""


def micro_batch_sizes(num_samples: int, micro_batch_size: int) -> list[int]:
    """Samples of every micro-batch of a replica: full ones, then one with what is left.

    Args:
        num_samples: Samples of the replica in one step.
    """
    full, left = divmod(num_samples, micro_batch_size)
    return [micro_batch_size] * full + ([left] if left else [])


def micro_batch_indices(
    consumed_samples: int,
    global_batch_size: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    *,
    uneven: bool = False,
    block: int | None = None,
) -> list[list[int]]:
    """Sample numbers that one data-parallel rank reads for one global batch.

    The rows of all ranks, ordered by (micro-step, rank), are the global batch in order: micro-step
    i of rank r reads `consumed + (i * dp_size + r) * micro_batch_size` and the samples that follow,
    a shorter last one likewise behind all full ones. With blocks, replicas take turns by blocks:
    block i of rank r begins at `consumed + (i * dp_size + r) * block`, in micro-batches in order.

    Args:
        consumed_samples: Samples of the run before this batch.
        uneven: Let the last micro-batch of every rank be smaller.
        block: Samples in a row that one rank reads, a multiple of the micro-batch size; None: those
            of one micro-batch. Not with `uneven`.

    Returns:
        One list of `micro_batch_size` sample numbers per micro-step; the last may be shorter where
        that is allowed.

    Raises:
        UsageError: The global batch is not a multiple of micro-batch size x data-parallel size, or
            where the last may be smaller, of the data-parallel size.
    """
    _check(consumed_samples, micro_batch_size, dp_rank, dp_size)
    assert block is None or not (uneven or block % micro_batch_size), (block, micro_batch_size)
    if uneven and global_batch_size > 0 and global_batch_size % dp_size == 0:
        rows, start = [], consumed_samples
        for size in micro_batch_sizes(global_batch_size // dp_size, micro_batch_size):
            first = start + dp_rank * size
            rows.append(list(range(first, first + size)))
            start += size * dp_size
        return rows
    samples_per_step = micro_batch_size * dp_size
    if global_batch_size <= 0 or global_batch_size % samples_per_step:
        raise UsageError(
            f"--global-batch-size {global_batch_size} is not a positive multiple of "
            f"--micro-batch-size {micro_batch_size} x data-parallel size {dp_size}; "
            f"make it a multiple of {samples_per_step}"
        )
    block = block or micro_batch_size
    if global_batch_size % (block * dp_size):
        raise UsageError(
            f"--global-batch-size {global_batch_size} is not a multiple of the {block} "
            f"samples that a replica reads together x data-parallel size {dp_size}; make it a "
            f"multiple of {block * dp_size}"
        )
    first = consumed_samples + dp_rank * block
    return [
        list(range(row, row + micro_batch_size))
        for turn in range(first, first + global_batch_size, block * dp_size)
        for row in range(turn, turn + block, micro_batch_size)
    ]


def evaluation_indices(
    num_samples: int,
    start: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    min_multiple: int = 1,
) -> list[list[int]]:
    """Sample numbers that one data-parallel rank reads to evaluate on `num_samples` samples.

    Unlike a training batch, the number of samples need not fit the layout: missing places hold
    `PADDING`, and every rank gets the same number of micro-batches. So each layout reads exactly
    the same samples, each once.

    Args:
        num_samples: Samples to evaluate on, over all ranks.
        min_multiple: The number of micro-batches is a multiple of this (the interleaved pipeline
            schedule needs a multiple of the pipeline size).

    Returns:
        One list of `micro_batch_size` sample numbers, or `PADDING`, per micro-step.
    """
    _check(start, micro_batch_size, dp_rank, dp_size)
    assert num_samples >= 0 and min_multiple >= 1, (num_samples, min_multiple)
    samples_per_step = micro_batch_size * dp_size
    num_steps = -(-num_samples // samples_per_step)
    num_steps = -(-num_steps // min_multiple) * min_multiple
    end = start + num_samples
    first = start + dp_rank * micro_batch_size
    return [
        [
            sample if sample < end else PADDING
            for sample in range(
                first + step * samples_per_step, first + step * samples_per_step + micro_batch_size
            )
        ]
        for step in range(num_steps)
    ]


def _check(start: int, micro_batch_size: int, dp_rank: int, dp_size: int) -> None:
    assert start >= 0, start
    assert micro_batch_size >= 1, micro_batch_size
    assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
