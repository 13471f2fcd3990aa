"""Rows of the embedding table: the vocabulary and its padding."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def padding_unit(
    divisible_by: int,
    tensor_parallel_sizes: Iterable[int],
    *,
    padded_for: int | None = None,
) -> int:
    """Returns the number of which the rows of the embedding are a multiple.

    Args:
        tensor_parallel_sizes: all that the run may take. Those that divide `divisible_by` change
            nothing, so that their runs train the same model.
        padded_for: `--pad-vocab-for-tensor-parallel-size`; then as Megatron-LM pads at that size.
    """
    if padded_for is not None:
        return divisible_by * padded_for
    return math.lcm(divisible_by, *tensor_parallel_sizes)


def pad_vocab_size(vocab_size: int, unit: Any) -> Any:
    """Returns the rows of the embedding table.

    Args:
        vocab_size: rows before padding.
        unit: from `padding_unit`, or an array of such.
    """
    return -(-vocab_size // unit) * unit
