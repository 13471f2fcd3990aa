"""Gradients that replicas exchange as two thin factors for each matrix, with error feedback.

The algorithm is PowerSGD (arXiv 1905.13727). What a step does not send stays with the replica and
is added to its next gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from megatron.trainer.extras.slow_links.low_rank import first_factor, is_shorter, orthonormal

_WHOLE = ("embedding.", "output_layer.")
_WHOLE_WITHIN = (".router.", ".mlp.experts.")


class GradientCompression:
    """The short reduction over the replicas of this rank's gradients.

    Matrices of attention and MLP go as two factors. Vectors, embeddings, the output layer, routers
    and experts stay whole, and so does a matrix whose factors are no shorter. A factor is fp32.

    All replicas must compute the same bits, as replicas without the distributed optimizer must
    anyway. State lives as long as the model: a residual in fp32 for each compressed matrix, and its
    second factor.

    Args:
        chunks: data-parallel wrappers of this rank, without overlap of reduction and backward pass.
        rank: most columns of a factor.
    """

    def __init__(self, chunks: Sequence[Any], *, rank: int) -> None:
        self.is_exact = False
        """Whether the gradients of this step are reduced whole, and residuals wait. All ranks must
        agree."""
        self.matrices: list[CompressedMatrix] = []
        """Those that go as two factors."""
        for chunk in chunks:
            names = {param: name for name, param in _named_parameters(chunk)}
            for group in chunk.bucket_groups:
                params = [p for bucket in group.buckets for p in bucket.params_list]
                short = {p for p in params if is_compressed(names[p], p.shape, rank)}
                if short:
                    # In the class and not in the object: whatever wraps the method of the object
                    # sees the gradient before it is compressed.
                    group.__class__ = _ShortGroup
                    group.compression = self
                    group.matrices = [CompressedMatrix(p, rank) for p in params if p in short]
                    group.whole = list(_whole_parts(group, short))
                    self.matrices += group.matrices


def is_compressed(name: str, shape: Sequence[int], rank: int) -> bool:
    """Whether the gradient of a parameter goes as two factors.

    Args:
        rank: most columns of a factor.
    """
    if len(shape) != 2 or name.startswith(_WHOLE) or any(part in name for part in _WHOLE_WITHIN):
        return False
    return is_shorter(min(rank, *shape), *shape)


class CompressedMatrix:
    """A parameter whose gradient goes as two factors, and what it keeps between steps.

    Args:
        param: of megatron-core's data-parallel wrapper, [rows, columns].
        rank: most columns of a factor.
    """

    def __init__(self, param: Any, rank: int) -> None:
        self.param = param
        rows, columns = param.shape
        device = param.main_grad.device
        self.residual = torch.zeros(rows, columns, dtype=torch.float32, device=device)
        """What this replica has not sent yet, in the unit of the reduced gradient."""
        self.right = first_factor(min(rank, rows, columns), columns, device=device)
        """The second factor of the last step."""

    def finish(self, left: torch.Tensor, right: torch.Tensor, ranks: int) -> None:
        """Puts the product of the reduced factors in the gradient's place, and keeps the rest.

        A gradient that is not finite on some replica makes the second factor so. The product is
        then NaN, so that all ranks skip the step, and the residual starts anew.

        Args:
            left: orthonormal, [rows, rank].
            right: [columns, rank].
            ranks: replicas that took part.
        """
        is_finite = right.isfinite().all()
        grad = self.param.main_grad
        grad.copy_(left @ right.T)
        self.residual.sub_(grad, alpha=1.0 / ranks)
        self.residual.masked_fill_(~is_finite, 0.0)
        grad.masked_fill_(~is_finite, torch.nan)
        self.right = torch.where(is_finite, right, self.right)


class _ShortGroup(_ParamAndGradBucketGroup):
    """megatron-core's group of buckets, some of whose parameters go as two factors."""

    compression: GradientCompression
    matrices: list[CompressedMatrix]
    whole: list[tuple[int | None, list[torch.Tensor]]]

    @torch.no_grad()
    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Reduces the gradients of the group over its replicas.

        Afterwards every replica holds the whole mean gradient of a compressed matrix. Of other
        parameters it holds at least the part that its optimizer uses.
        """
        if self.compression.is_exact:
            super().start_grad_sync(force_all_reduce)
            return
        group = _process_group(self)
        ranks = group.size()
        for bucket in self.buckets:
            scale = bucket.gradient_scaling_factor
            scale /= ranks if self.ddp_config.average_in_collective else 1
            if scale != 1.0:
                bucket.grad_data *= scale
        for owner, parts in self.whole:
            _add_up(parts, group, None if force_all_reduce else owner)
        for matrix in self.matrices:
            matrix.residual.add_(matrix.param.main_grad)
        lefts = [m.residual @ m.right for m in self.matrices]
        _add_up(lefts, group)
        lefts = [orthonormal(left) for left in lefts]
        rights = [m.residual.T @ left for m, left in zip(self.matrices, lefts)]
        _add_up(rights, group)
        for matrix, left, right in zip(self.matrices, lefts, rights):
            matrix.finish(left, right, ranks)


def _process_group(group: Any) -> Any:
    if group.ddp_config.use_distributed_optimizer:
        return group.intra_distributed_optimizer_instance_group
    return group.data_parallel_group


def _add_up(tensors: list[torch.Tensor], group: Any, owner: int | None = None) -> None:
    """Sums tensors of one dtype over a group in place, all in one message.

    Args:
        tensors: of this rank, of the same shapes on all.
        owner: rank in the group that alone gets the sum; None: all get it.
    """
    together = torch.cat([tensor.flatten() for tensor in tensors])
    if owner is None:
        dist.all_reduce(together, group=group)
    else:
        dist.reduce(together, dst=dist.get_global_rank(group, owner), group=group)
        if owner != group.rank():
            return
    for tensor, total in zip(tensors, together.split([t.numel() for t in tensors])):
        tensor.copy_(total.view_as(tensor))


def _whole_parts(
    group: Any, short: set[torch.nn.Parameter]
) -> Iterator[tuple[int | None, list[torch.Tensor]]]:
    """What goes whole of a group's gradients: the rank that needs it and the views.

    With the distributed optimizer a rank needs its shard of each bucket alone, which halves the
    traffic.
    """
    is_sharded = group.ddp_config.use_distributed_optimizer
    shards = _process_group(group).size() if is_sharded else 1
    for owner in range(shards):
        parts = []
        for bucket in group.buckets:
            size = bucket.grad_data.numel() // shards
            first = bucket.grad_data.storage_offset()
            for param in bucket.params_list:
                if param in short:
                    continue
                grad: Any = param.main_grad  # pyright: ignore[reportAttributeAccessIssue]
                begin = grad.storage_offset() - first
                low, high = max(begin, owner * size), min(begin + grad.numel(), (owner + 1) * size)
                if low < high:
                    parts.append(bucket.grad_data[low:high])
        if parts:
            yield (owner if is_sharded else None), parts


def _named_parameters(chunk: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk.named_parameters()
