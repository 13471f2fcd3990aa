"""K-FAC: gradients of matrices times the inverse covariances of what goes into and comes back to
their layers.

The method is that of arXiv 1503.05671, put in front of Adam. The gradient G of a linear layer's
weight [outputs, inputs] becomes B^-1 G A^-1, before it is clipped. A is the covariance of the
layer's inputs, and B that of the gradients of its outputs, both over the tokens of a step. Biases,
norms, embeddings and the output layer keep their gradient.

It differs from the paper in three points. Covariances are of one step alone and of its own labels:
then nothing has to be saved, and no pass is added. Both have a mean eigenvalue of 1 before the
damping is added, so that neither the loss scale nor the batch counts. The product gets the norm
that the gradient had, so that `--clip-grad` and the norm in the log keep their meaning.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from megatron.trainer.extras.kfac.flags import MAX_WIDE
from megatron.trainer.model.attention import SharedLinear
from megatron.trainer.train.step_feature import Schedule, StepFeature

if TYPE_CHECKING:
    from megatron.trainer.config import Config
    from megatron.trainer.model.gpt import Model
    from megatron.trainer.train.job import Job

_TINY = torch.finfo(torch.float32).tiny
_BLOCK = 64
"""Rows of a covariance that go to the other replicas as one piece, up to their diagonal."""


@contextlib.contextmanager
def tensor_float32(device: torch.device) -> Iterator[None]:
    """Products of fp32 matrices round their factors to TF32 on a GPU, where whole fp32 takes many
    times as long. Activations in bf16 lose nothing by it.

    Args:
        device: of the matrices; on a CPU nothing changes.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class SharedGradients:
    """The matrices of a bucket of gradients of which every replica keeps one piece.

    A rank needs the whole gradient of each matrix of which its piece has a part. Most lie within
    one piece. So only those that a piece's end cuts are exchanged, unless that sends more than the
    whole bucket.

    Args:
        group: replicas, with the pieces in order.
        weights: matrices, of which the bucket may have some.
    """

    def __init__(self, bucket: Any, group: Any, weights: set[Any]) -> None:
        self.data, self.group = bucket.grad_data, group
        """Gradients of the bucket, and its replicas with their pieces in order."""
        self._size = self.data.numel() // group.size()
        first = self.data.storage_offset()
        self._spans: dict[Any, tuple[int, int]] = {}
        for weight in bucket.params_list:
            if weight in weights:
                begin = weight.main_grad.storage_offset() - first
                self._spans[weight] = begin, begin + weight.numel()
        self._cut = [
            (begin, end)
            for begin, end in self._spans.values()
            if begin // self._size != (end - 1) // self._size
        ]
        # A sum goes round twice, a gathered bucket once.
        self.is_gathered = 2 * sum(e - b for b, e in self._cut) >= self.data.numel()
        """Whether the whole bucket is."""

    def __contains__(self, weight: Any) -> bool:
        return weight in self._spans

    def is_own(self, weight: Any) -> bool:
        """Whether this rank's piece has a part of a matrix of the bucket."""
        begin, end = self._spans[weight]
        first = self.group.rank() * self._size
        return begin < first + self._size and first < end

    @torch.no_grad()
    def complete(self) -> None:
        """Makes the gradients of the matrices whole on all ranks that have a part. All ranks of
        the group call it, once each has the reduced gradients of its piece."""
        first = self.group.rank() * self._size
        if self.is_gathered:
            own = self.data[first : first + self._size]
            dist.all_gather_into_tensor(self.data, own, group=self.group)
            return
        pieces = []
        for begin, end in self._cut:
            piece = torch.zeros_like(self.data[begin:end])
            local_begin, local_end = max(begin, first), min(end, first + self._size)
            if local_begin < local_end:
                piece[local_begin - begin : local_end - begin] = self.data[local_begin:local_end]
            pieces.append(piece)
        if not pieces:
            return
        packed = torch.cat(pieces)
        dist.all_reduce(packed, group=self.group)
        lengths = [end - begin for begin, end in self._cut]
        for (begin, end), whole in zip(self._cut, packed.split(lengths), strict=True):
            self.data[begin:end] = whole


class Factors:
    """The covariances of one linear layer, and their inverses.

    Args:
        layer: gives one tensor, or a tuple that begins with it; its weight is
            [outputs, inputs].
        damping: above 0. Its root is added to the eigenvalues of either covariance, whose mean is
            1.
        max_wide: inputs or outputs above which the covariance is left out.
    """

    def __init__(self, layer: Any, *, damping: float, max_wide: int = MAX_WIDE) -> None:
        self.weight = layer.weight
        self.is_on = False
        """Whether the next passes of the layer count; only `begin` turns it on."""
        outputs, inputs = self.weight.shape
        self._widths = {"inputs": inputs, "outputs": outputs}
        self.kinds = [kind for kind, width in self._widths.items() if width <= max_wide]
        """Which covariances there are."""
        self._damping = math.sqrt(damping)
        self.inverses: dict[str, Tensor] = {}
        """By kind: [width, width] fp32. A refresh replaces them and writes into none."""
        self.sums: dict[str, Tensor] = {}
        """By kind: [width, width] fp32, the sum over tokens of what passes counted."""
        self._hook = layer.register_forward_hook(self._on_forward)

    def begin(self) -> None:
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
            with tensor_float32(rows.device):
                self.sums[kind].addmm_(rows.T, rows)

    @torch.no_grad()
    def refresh(self) -> None:
        """Inverts what has been summed, and forgets the sums. An inverse stays what it was where
        its sum is not finite or cannot be inverted."""
        for kind, total in self.sums.items():
            inverse = _inverse(total, self._damping)
            if inverse is not None:
                self.inverses[kind] = inverse
        self.drop_sums()

    @torch.no_grad()
    def reduce(self, group: Any) -> None:
        """Adds up the sums of all ranks of a group, which all call it. They are symmetric, so that
        little more than their lower half travels.
        """
        if not self.sums or group.size() == 1:
            return
        pieces = [piece for total in self.sums.values() for piece in _lower_half(total)]
        packed = torch.cat([piece.reshape(-1) for piece in pieces])
        dist.all_reduce(packed, group=group)
        for piece, summed in zip(pieces, packed.split([p.numel() for p in pieces]), strict=True):
            piece.copy_(summed.view_as(piece))
        for total in self.sums.values():
            lower = total.tril(-1)
            total.tril_().add_(lower.T)

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
        with tensor_float32(own.device):
            if "outputs" in self.inverses:
                new = self.inverses["outputs"] @ new
            if "inputs" in self.inverses:
                new = new @ self.inverses["inputs"]
        return new * (own.norm() / new.norm().clamp_min(_TINY))

    def remove_hook(self) -> None:
        """Takes the hook off the layer, which else keeps this alive."""
        self._hook.remove()


def _lower_half(total: Tensor) -> list[Tensor]:
    """Views of a square matrix that hold its lower half: some rows, up to the end of their
    diagonal."""
    begins = range(0, len(total), _BLOCK)
    return [total[i : i + _BLOCK, : i + _BLOCK] for i in begins]


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


class Kfac(StepFeature):
    """K-FAC for the matrices of this rank.

    Nothing of it is saved. A launch, a new layout and a checkpoint begin anew, with the covariances
    of their first step. So a run that is resumed goes on as the one that saved.

    With the distributed optimizer a rank inverts and multiplies for the matrices of its own shard
    alone, once it has those whole.

    Args:
        chunks: data-parallel wrappers of this rank, without tensor parallelism.
        damping: see `Factors`.
    """

    def __init__(
        self, chunks: Sequence[Any], groups: Any, *, damping: float, interval: int
    ) -> None:
        self._chunks, self._replicas, self._interval = chunks, groups.dp_cp, interval
        self._since: int | None = None
        layers = [
            module
            for chunk in chunks
            for name, module in chunk.named_modules()
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear, SharedLinear))
            and not name.endswith("output_layer")
        ]
        self.factors = [Factors(layer, damping=damping) for layer in layers]
        """One for every matrix of this rank, in an order that all replicas share."""
        weights = {factors.weight for factors in self.factors}
        self.shared = [
            SharedGradients(bucket, group.intra_distributed_optimizer_instance_group, weights)
            for chunk in chunks
            if chunk.ddp_config.use_distributed_optimizer
            for group in chunk.bucket_groups
            for bucket in group.buckets
            if weights & bucket.params and self._replicas.size() > 1
        ]
        """Buckets of which this rank has reduced a piece alone."""
        self.own = [factors for factors in self.factors if self._is_own(factors.weight)]
        """Those of which this rank's optimizer has a part."""

    @property
    def covariance_bytes(self) -> int:
        """Bytes of the covariances of all matrices of this rank, while they are summed."""
        widths = [f.weight.shape[kind == "inputs"] for f in self.factors for kind in f.kinds]
        return sum(4 * width * width for width in widths)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the inverses that this rank has."""
        kept = (x for factors in self.own for x in factors.inverses.values())
        return sum(x.numel() * x.element_size() for x in kept)

    def _is_own(self, weight: Any) -> bool:
        """Whether this rank's optimizer has a part of a matrix."""
        return next((shared.is_own(weight) for shared in self.shared if weight in shared), True)

    def begin_schedule(self, job: Job, schedule: Schedule) -> Mapping[str, Any]:
        if not schedule.forward_only:
            # Masked samples fill a step up, and their number depends on the layout.
            self.begin(may_refresh=not job.is_filled_up)
        return {}

    def before_optimizer(self, job: Job) -> None:
        with job.trace.span("kfac"):
            self.precondition()

    def before_save(self, job: Job) -> None:
        self.restart()

    def relayout_bytes(self, config: Config, held: int) -> tuple[float, float]:
        # The first step makes all covariances anew, which go about with the weights of a rank.
        weights = sum(p.numel() for chunk in self._chunks for p in chunk.parameters())
        sums_and_inverses = 2 * self.covariance_bytes * held / max(weights, 1)
        return sums_and_inverses, self.kept_bytes

    def begin(self, *, may_refresh: bool = True) -> None:
        """A step is about to run forward and backward. All replicas call it alike.

        Args:
            may_refresh: whether the samples of the step may make covariances; else a refresh that
                is due waits for the next step.
        """
        is_due = self._since is None or self._since >= self._interval
        if is_due and may_refresh:
            for factors in self.factors:
                factors.begin()
            self._since = 0
        if self._since is not None:
            self._since += 1

    def precondition(self) -> None:
        """Replaces the gradients, once they are reduced and before they are clipped. All replicas
        take part.

        With the distributed optimizer only the rank's own shard of a bucket is of use afterwards. A
        refresh that fails is tried again after the next interval.
        """
        for factors in self.factors:
            factors.reduce(self._replicas)
        for factors in self.own:
            if factors.is_on:
                factors.refresh()
        for factors in self.factors:
            factors.drop_sums()
        for shared in self.shared:
            shared.complete()
        for factors in self.own:
            grad = factors.weight.main_grad
            grad.copy_(factors.product(grad))

    def restart(self) -> None:
        """Forgets everything: the next step begins as the first one did."""
        self._since = None
        for factors in self.factors:
            factors.drop_sums()
            factors.inverses = {}

    def remove_hooks(self) -> None:
        """Takes the hooks off the layers and lets go of all of them, so that the model can go."""
        for factors in self.factors:
            factors.remove_hook()
        self.factors, self.own, self.shared, self._chunks = [], [], [], []


def kfac_of(config: Config, model: Model, groups: Any) -> Kfac | None:
    """What `--kfac` asks for; see `Extra.feature`."""
    flags = config.extras["kfac"]
    if not flags.kfac:
        return None
    return Kfac(model.chunks, groups, damping=flags.kfac_damping, interval=flags.kfac_interval)
