"""Context parallelism: ranks that share the tokens of each sample, and what they exchange.

A sample of s tokens is cut into 2c chunks for c ranks. Rank r holds chunks r and 2c - 1 - r, in
this order, as in Megatron-LM: each rank then has the same work under a causal mask.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist


def local_tokens(batch: dict[str, torch.Tensor], group: Any) -> dict[str, torch.Tensor]:
    """This rank's chunks of every tensor of a micro-batch.

    Args:
        batch: tensors [micro batch, s, ...], s a multiple of twice the group's size.
        group: context parallel; one rank keeps everything.

    Returns:
        Tensors [micro batch, s / c, ...], contiguous.
    """
    if group.size() == 1:
        return batch
    return {name: local_chunks(whole, group, dim=1) for name, whole in batch.items()}


def local_chunks(whole: torch.Tensor, group: Any, *, dim: int) -> torch.Tensor:
    """This rank's two chunks of a tensor with all tokens of the sample along `dim`."""
    size, rank = group.size(), group.rank()
    chunks = whole.chunk(2 * size, dim=dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=dim)


@functools.cache
def _order_of_chunks(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each chunk of the sample stands among the chunks of all ranks, and the inverse; [2c]
    each. They are cached, since every layer uses them several times in a step."""
    held = [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]
    places = [held.index(chunk) for chunk in range(2 * size)]
    return torch.tensor(places, device=device), torch.tensor(held, device=device)


def _in_order(by_rank: torch.Tensor, size: int) -> torch.Tensor:
    """[s, ...] from the chunks of one rank after another to the order of the sample."""
    return _permuted(by_rank, _order_of_chunks(size, by_rank.device)[0])


def _by_rank(whole: torch.Tensor, size: int) -> torch.Tensor:
    return _permuted(whole.contiguous(), _order_of_chunks(size, whole.device)[1])


def _permuted(tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    chunks = tensor.view(len(order), -1, *tensor.shape[1:])
    return chunks.index_select(0, order).view(tensor.shape)


class _Gather(torch.autograd.Function):
    """[s / c, ...] of each rank -> [s, ...] in the order of the sample, on every rank."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        size = group.size()
        gathered = own.new_empty(size * own.shape[0], *own.shape[1:])
        dist.all_gather_into_tensor(gathered, own.contiguous(), group=group)
        return _in_order(gathered, size)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        size = ctx.group.size()
        by_rank = _by_rank(grads[0], size)
        own = by_rank.new_empty(by_rank.shape[0] // size, *by_rank.shape[1:])
        dist.reduce_scatter_tensor(own, by_rank, group=ctx.group)
        return own, None


def gather_sequence(own: torch.Tensor, group: Any) -> torch.Tensor:
    """All tokens of the sample in their order, on every rank; its gradient is summed over ranks.

    Args:
        own: [s / c, ...] this rank's chunks.

    Returns:
        [s, ...].
    """
    return _Gather.apply(own, group)  # pyright: ignore[reportReturnType]


def _sequence_to_heads(own: torch.Tensor, group: Any) -> torch.Tensor:
    size = group.size()
    tokens, batch, heads, width = own.shape
    parts = own.view(tokens, batch, size, heads // size, width).permute(2, 0, 1, 3, 4)
    # Contiguous: gloo would fill an output with the strides of a permuted one in memory order.
    parts = parts.contiguous()
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts, group=group)
    by_rank = received.view(size * tokens, batch, heads // size, width)
    return _in_order(by_rank, size)


def _heads_to_sequence(whole: torch.Tensor, group: Any) -> torch.Tensor:
    size = group.size()
    tokens, batch, heads, width = whole.shape
    by_rank = _by_rank(whole, size)
    received = torch.empty_like(by_rank, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, by_rank, group=group)
    parts = received.view(size, tokens // size, batch, heads, width).permute(1, 2, 0, 3, 4)
    return parts.reshape(tokens // size, batch, size * heads, width)


class _SequenceToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _sequence_to_heads(own, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _heads_to_sequence(grads[0], ctx.group), None


class _HeadsToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _heads_to_sequence(whole, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sequence_to_heads(grads[0].contiguous(), ctx.group), None


def sequence_to_heads(own: torch.Tensor, group: Any) -> torch.Tensor:
    """Exchanges some tokens of all heads for all tokens of some heads (arXiv 2309.14509).

    Args:
        own: [s / c, batch, heads, width]; heads a multiple of c.

    Returns:
        [s, batch, heads / c, width], tokens in the order of the sample.
    """
    return _SequenceToHeads.apply(own, group)  # pyright: ignore[reportReturnType]


def heads_to_sequence(whole: torch.Tensor, group: Any) -> torch.Tensor:
    return _HeadsToSequence.apply(whole, group)  # pyright: ignore[reportReturnType]
