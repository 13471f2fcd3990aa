"""K-FAC: gradients of matrices times the inverse covariances of what goes into and comes back to
their layers.

The method is that of arXiv 1503.05671, put in front of Adam. The gradient G of a linear layer's
weight [outputs, inputs] becomes B^-1 G A^-1, before it is clipped. A is the covariance of the
layer's inputs, and B that of the gradients of its outputs, both over the tokens of a step. Biases,
norms, embeddings and the output layer keep their gradient.

It differs from the paper in three points, each of which leaves something out that would have to be
saved or shared. Covariances are of one step alone and of its own labels. Both have a mean eigenvalue
of 1 before the damping is added. The product gets the norm that the gradient had, so that
`--clip-grad` and the norm in the log keep their meaning.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

MOST_WIDE = 8192
"""Inputs or outputs of a layer above which it has no such covariance: it would take 0.5 GB twice
above that."""
_TINY = torch.finfo(torch.float32).tiny


class Factors:
    """The covariances of one linear layer, and their inverses.

    Args:
        layer: gives one tensor, or a tuple that begins with it; its weight is
            [outputs, inputs].
        damping: above 0. Its root is added to the eigenvalues of either covariance, whose mean is
            1.
        most_wide: inputs or outputs above which the covariance is left out.
    """

    def __init__(self, layer: Any, *, damping: float, most_wide: int = MOST_WIDE) -> None:
        self.weight = layer.weight
        self.is_on = False
        """Whether the layer's next passes count."""
        outputs, inputs = self.weight.shape
        self._widths = {"inputs": inputs, "outputs": outputs}
        self.kinds = [kind for kind, width in self._widths.items() if width <= most_wide]
        """Which covariances there are."""
        self._damping = math.sqrt(damping)
        self._inverses: dict[str, Tensor] = {}
        self.sums: dict[str, Tensor] = {}
        """By kind: [width, width] fp32, the sum over tokens of what passes counted."""
        self._hook = layer.register_forward_hook(self._on_forward)

    def begin(self) -> None:
        """Lets the following passes count, from zero."""
        self.is_on, device = True, self.weight.device
        self.sums = {
            kind: torch.zeros(self._widths[kind], self._widths[kind], device=device)
            for kind in self.kinds
        }

    def _on_forward(self, layer: Any, inputs: Any, outputs: Any) -> None:
        # Layers that are computed again run first without gradients.
        if not self.is_on or not torch.is_grad_enabled():
            return
        self._add("inputs", inputs[0].detach())
        output = outputs[0] if isinstance(outputs, tuple) else outputs
        if output.requires_grad:
            output.register_hook(functools.partial(self._add, "outputs"))

    @torch.no_grad()
    def _add(self, kind: str, values: Tensor) -> None:
        if kind in self.sums:
            rows = values.reshape(-1, self._widths[kind]).float()
            self.sums[kind].addmm_(rows.T, rows)

    @torch.no_grad()
    def refresh(self) -> None:
        """Inverts what has been summed, and forgets the sums. An inverse stays what it was where
        its sum is not finite or cannot be inverted."""
        for kind, total in self.sums.items():
            inverse = _inverse(total, self._damping)
            if inverse is not None:
                self._inverses[kind] = inverse
        self.drop_sums()

    def drop_sums(self) -> None:
        """Ends the passes that count, and forgets them."""
        self.is_on, self.sums = False, {}

    @torch.no_grad()
    def product(self, grad: Tensor) -> Tensor:
        """The gradient times the inverses, with the gradient's norm.

        Args:
            grad: [outputs, inputs], of any dtype.

        Returns:
            fp32; the gradient itself before the first refresh.
        """
        own = grad.float()
        new = own
        if "outputs" in self._inverses:
            new = self._inverses["outputs"] @ new
        if "inputs" in self._inverses:
            new = new @ self._inverses["inputs"]
        return new * (own.norm() / new.norm().clamp_min(_TINY))

    def remove_hook(self) -> None:
        """Takes the hook off the layer, which else keeps this alive."""
        self._hook.remove()


def _inverse(total: Tensor, damping: float) -> Tensor | None:
    """The inverse of a sum of squares with a mean eigenvalue of 1 and some added to each; None
    where there is none."""
    mean = total.trace() / len(total)
    if not mean.isfinite():
        return None
    scaled = total / mean.clamp_min(_TINY)
    scaled.diagonal().add_(damping)
    lower, failed = torch.linalg.cholesky_ex(scaled)
    return None if failed else torch.cholesky_inverse(lower)


class Kfac:
    """K-FAC for the matrices of this rank.

    Nothing of it is saved. A launch, a new layout and a checkpoint begin anew with the covariances
    of their first step, so that a run which is resumed goes on as the one that saved. A rank of the
    distributed optimizer gathers the gradients of its buckets, and inverts for the matrices of its
    own shard alone.

    Args:
        chunks: data-parallel wrappers of this rank, without tensor parallelism.
        groups: process groups of the layout.
        damping: see `Factors`.
        interval: steps between two refreshes.
    """

    def __init__(
        self, chunks: Sequence[Any], groups: Any, *, damping: float, interval: int
    ) -> None:
        self._replicas, self._interval = groups.dp_cp, interval
        self._since: int | None = None
        layers = [
            module
            for chunk in chunks
            for name, module in chunk.named_modules()
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear))
            and not name.endswith("output_layer")
        ]
        self.factors = [Factors(layer, damping=damping) for layer in layers]
        """Of every matrix of this rank, in an order that all replicas share."""
        weights = {factors.weight for factors in self.factors}
        self._buckets = [
            (bucket, group.intra_distributed_optimizer_instance_group)
            for chunk in chunks
            if chunk.ddp_config.use_distributed_optimizer
            for group in chunk.bucket_groups
            for bucket in group.buckets
            if weights & bucket.params and self._replicas.size() > 1
        ]
        self._own = [factors for factors in self.factors if self._is_own(factors.weight)]

    def _is_own(self, weight: Any) -> bool:
        """Whether this rank's optimizer has a part of a matrix."""
        for bucket, group in self._buckets:
            if weight in bucket.params:
                size = bucket.grad_data.numel() // group.size()
                grad = weight.main_grad
                begin = grad.storage_offset() - bucket.grad_data.storage_offset()
                first = group.rank() * size
                return begin < first + size and first < begin + grad.numel()
        return True

    def begin(self) -> None:
        """A step is about to run forward and backward."""
        if self._since is None or self._since >= self._interval:
            for factors in self.factors:
                factors.begin()
            self._since = 0
        self._since += 1

    def precondition(self) -> None:
        """Replaces the reduced gradients. All replicas take part."""
        for factors in self.factors:
            for total in factors.sums.values():
                dist.all_reduce(total, group=self._replicas)
        for factors in self._own:
            if factors.is_on:
                factors.refresh()
        for factors in self.factors:
            factors.drop_sums()
        for bucket, group in self._buckets:
            shards = bucket.grad_data.view(group.size(), -1)
            dist.all_gather_into_tensor(bucket.grad_data, shards[group.rank()], group=group)
        for factors in self._own:
            grad = factors.weight.main_grad
            grad.copy_(factors.product(grad))

    def restart(self) -> None:
        """Lets the next step begin anew."""
        self._since = None

    def remove_hooks(self) -> None:
        """Takes the hooks off the layers, so that the model can go."""
        for factors in self.factors:
            factors.remove_hook()
