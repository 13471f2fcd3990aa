"""The sum of a gradient over ranks that share samples, of which each rank gets a part."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

MAX_ELEMENTS = 1 << 22
"""Elements, fp32, of the buffer that gradients are copied into on their way."""


@torch.no_grad()
def share_of_sum(grads: Sequence[torch.Tensor], group: Any) -> torch.Tensor:
    """This rank's part of the sum of gradients over the ranks that share samples. Each of them has
    a part of every sample's gradient, and the square of a part is not a part of the square.

    Collective over the group. It copies a bounded number of elements at a time.

    Args:
        grads: of n elements together, of any shapes; alike on all ranks of the group.

    Returns:
        [n / size of the group, rounded up] fp32; the parts of all ranks in their order are the sum,
        and zeros behind it.
    """
    size, flat = group.size(), [grad.reshape(-1) for grad in grads]
    ends = list(itertools.accumulate(len(grad) for grad in flat))
    share = -(-ends[-1] // size)
    own = torch.empty(share, dtype=torch.float32, device=flat[0].device)
    most = min(max(MAX_ELEMENTS // size, 1), share)
    buffer = own.new_empty(size * most)
    for start in range(0, share, most):
        count = min(most, share - start)
        # A row for each rank: the elements of its part that this piece has.
        rows = buffer[: size * count].view(size, count)
        for rank, row in enumerate(rows):
            _copy(flat, ends, rank * share + start, row)
        dist.reduce_scatter_tensor(own[start : start + count], rows.view(-1), group=group)
    return own


def _copy(flat: list[torch.Tensor], ends: list[int], first: int, row: torch.Tensor) -> None:
    """Copies elements from number `first` on into a row; zeros where none are left."""
    done, number = 0, bisect.bisect_right(ends, first)
    while done < len(row) and number < len(flat):
        local_first = first + done - (ends[number] - len(flat[number]))
        part = flat[number][local_first : local_first + len(row) - done]
        row[done : done + len(part)].copy_(part)
        done, number = done + len(part), number + 1
    row[done:].zero_()
