"""Which rank reads which sample."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.trainer.common.errors import UsageError
from megatron.trainer.data.sampler import (
    PADDING,
    evaluation_indices,
    micro_batch_indices,
    micro_batch_sizes,
)

pytestmark = pytest.mark.unit

sizes = st.integers(1, 5)
batches = st.lists(st.tuples(sizes, sizes, sizes), min_size=1, max_size=6)
"""(micro-steps, micro-batch size, data-parallel size) of each global batch of a run."""


def read_batch(consumed: int, num_steps: int, mbs: int, dp: int) -> list[int]:
    """Samples of a global batch in the order (micro-step, rank, row)."""
    gbs = num_steps * mbs * dp
    ranks = [micro_batch_indices(consumed, gbs, mbs, rank, dp) for rank in range(dp)]
    assert all(len(rows) == num_steps for rows in ranks)
    assert all(len(row) == mbs for rows in ranks for row in rows)
    return [sample for step in range(num_steps) for rows in ranks for sample in rows[step]]


@given(start=st.integers(0, 1000), run=batches)
def test_a_run_reads_every_sample_once_and_in_order(start, run):
    consumed, read = start, []
    for num_steps, mbs, dp in run:
        read += read_batch(consumed, num_steps, mbs, dp)
        consumed += num_steps * mbs * dp
    assert read == list(range(start, consumed))


@given(start=st.integers(0, 100), own=st.integers(1, 30), mbs=sizes, dp=sizes)
def test_an_uneven_batch_is_read_once_and_in_order(start, own, mbs, dp):
    ranks = [micro_batch_indices(start, own * dp, mbs, rank, dp, uneven=True) for rank in range(dp)]
    counts = micro_batch_sizes(own, mbs)
    assert all([len(row) for row in rows] == counts for rows in ranks)
    assert sum(counts) == own and set(counts[:-1]) <= {mbs} and 0 < counts[-1] <= mbs
    steps = [sample for step in zip(*ranks, strict=True) for row in step for sample in row]
    assert steps == list(range(start, start + own * dp))
    if own % mbs == 0:
        assert ranks[0] == micro_batch_indices(start, own * dp, mbs, 0, dp)


@pytest.mark.parametrize("uneven", [False, True])
def test_a_batch_that_does_not_fit_names_the_flags(uneven):
    words = "--global-batch-size" + ("" if uneven else ".* --micro-batch-size 2 .* 4")
    for gbs in (0, -4, 5) if uneven else (0, 6, 10):
        with pytest.raises(UsageError, match=words):
            micro_batch_indices(0, gbs, 2, 0, 2, uneven=uneven)


@given(
    num_samples=st.integers(0, 60),
    start=st.integers(0, 100),
    mbs=sizes,
    dp=sizes,
    multiple=sizes,
)
def test_evaluation_reads_each_sample_once_under_any_layout(num_samples, start, mbs, dp, multiple):
    ranks = [evaluation_indices(num_samples, start, mbs, rank, dp, multiple) for rank in range(dp)]
    assert len({len(rows) for rows in ranks}) == 1
    num_steps = len(ranks[0])
    assert num_steps % multiple == 0
    read = [sample for step in range(num_steps) for rows in ranks for sample in rows[step]]
    assert len(read) == num_steps * mbs * dp
    assert [sample for sample in read if sample != PADDING] == list(
        range(start, start + num_samples)
    )
    # No more padding than the sizes ask for.
    assert len(read) - num_samples < mbs * dp * multiple
