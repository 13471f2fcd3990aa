"""Gradients clipped by groups of samples, the same under every layout and micro-batch size.

A group is N samples in a row of the run (`--clip-group-size`). Replicas read whole groups in turn.
When the last micro-batch of a group has been added to `main_grad`, the gradient is taken out, and
its norm is added up over tensor and pipeline ranks while the schedule goes on. `main_grad` gets the
sum of the scaled groups before megatron-core reduces it, so that the distributed optimizer and the
clipping of the whole gradient see nothing new. There is no second pass.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron.trainer.extras.group_clip.flags import limit_of
from megatron.trainer.train.step_feature import Schedule, StepFeature

if TYPE_CHECKING:
    from megatron.trainer.config import Config
    from megatron.trainer.model.gpt import Model
    from megatron.trainer.train.job import Job

_WITHIN = (".self_attention.", ".mlp.", ".eh_proj.")
_COPIED = (".linear_q_down_proj.", ".linear_kv_down_proj.")
"""Matrices that every tensor-parallel rank has, with a part of the gradient each."""


def is_counted(name: str, param: torch.Tensor) -> bool:
    """Whether a parameter of a dense model counts in the norm of a group.

    Weight matrices of attention and MLP do. Under every layout their gradients are whole before the
    reduction over replicas.
    """
    if param.ndim < 2 or any(part in name for part in _COPIED):
        return False
    return any(part in name for part in _WITHIN)


class GroupClip(StepFeature):
    """Scales the gradients of groups of samples on this rank, before they are reduced.

    Args:
        chunks: data-parallel wrappers of this rank, without overlap of reduction and backward pass.
        groups: process groups of the layout, without context and expert parallelism.
        group_size: samples of a group, a multiple of the micro-batch size.
        limit: largest norm of the mean gradient of a group; None: all groups of a step get the
            smallest norm among them.
        max_behind: backward passes that any rank may still have to end, of those that this rank
            has ended, at the end of one of them.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        groups: Any,
        *,
        group_size: int,
        limit: float | None,
        max_behind: int = 1,
    ) -> None:
        self.norms: list[torch.Tensor] = []
        """Norms of the mean gradients of this replica's groups in the last step, before clipping:
        fp64 scalars on the device of the gradients."""
        self.peak_waiting = 0
        """Most groups of which this rank has held a whole copy at once."""
        self._size, self._limit, self._groups = group_size, limit, groups
        self.sample_block = group_size
        self._max_behind = max_behind
        self._micro_batches = self._num_groups = self._max_waiting = 0
        # Alone, a rank has the norm of a group at once and needs no copy of it.
        self._is_alone = groups.mp.size() == 1
        self._parts = [_Part(chunk) for chunk in chunks]
        self._waiting: deque[_Group] = deque()
        self._handles: list[Any] = []
        for part in self._parts:
            for param in part.params:
                # The node that accumulates; the data-parallel wrapper holds it and its hook, which
                # adds to `main_grad`, came first.
                node = param.expand_as(param).grad_fn.next_functions[0][0]
                hook = functools.partial(self._on_accumulated, part)
                self._handles.append(node.register_hook(hook))

    def begin_schedule(self, job: Job, schedule: Schedule) -> Mapping[str, Any]:
        if not schedule.forward_only:
            self.begin(schedule.num_microbatches, schedule.micro_batch_size)
        return {}

    def begin(self, num_microbatches: int, micro_batch_size: int) -> None:
        """Must be called before the forward and backward passes of a step."""
        self._micro_batches = self._size // micro_batch_size
        self._num_groups = num_microbatches // self._micro_batches
        assert self._micro_batches * micro_batch_size == self._size, micro_batch_size
        assert self._num_groups * self._micro_batches == num_microbatches, num_microbatches
        assert not self._waiting, "the step before was not finished"
        self._max_waiting = math.ceil(self._max_behind / self._micro_batches)
        self.norms = []
        for part in self._parts:
            part.seen = part.taken = 0

    def counted(self) -> list[Any]:
        """The parameters of this rank that count in the norm of a group."""
        return [param for part in self._parts for param in part.counted]

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._parts = [], []

    @torch.no_grad()
    def _on_accumulated(self, part: _Part, *_: Any) -> None:
        """A parameter of a chunk has got the gradient of a micro-batch."""
        part.seen += 1
        if part.seen % (len(part.params) * self._micro_batches):
            return
        self._make_room()
        # Every chunk meets the groups in order. The first to end one opens it.
        place = part.taken - len(self.norms)
        if place == len(self._waiting):
            self._waiting.append(_Group(part.buffers[0].device))
        group = self._waiting[place]
        part.taken += 1
        group.squares += part.squares()
        group.gradients.append((part, part.buffers if self._is_alone else part.take()))
        if len(group.gradients) < len(self._parts):
            return
        if self._is_alone:
            self._add_first()
            return
        group.handle = dist.all_reduce(group.squares, group=self._groups.mp, async_op=True)
        self.peak_waiting = max(self.peak_waiting, self._num_ended())

    def _num_ended(self) -> int:
        """Groups that wait and that all chunks of this rank have ended."""
        return sum(group.handle is not None for group in self._waiting)

    def _make_room(self) -> None:
        """Adds the groups whose norms are there, in order, so that no copy is kept for longer.

        Beyond the most that can be under way it waits for the first: all ranks have ended that one,
        and need nothing of this rank to send their part of its norm.
        """
        while ended := self._num_ended():
            handle = self._waiting[0].handle
            if ended < self._max_waiting and not handle.is_completed():
                return
            self._add_first()

    def _add_first(self) -> None:
        """Scales the first group that waits and adds it to the sum; waits for its norm."""
        group = self._waiting.popleft()
        if group.handle is not None:
            group.handle.wait()
        # megatron-core has divided by all micro-batches of the replica.
        norm = group.squares.sqrt() * self._num_groups
        self.norms.append(norm)
        scale = scale_of(norm, self._limit).float()
        for part, gradients in group.gradients:
            for total, gradient in zip(part.sums, gradients):
                total.addcmul_(gradient, scale)
                if self._is_alone:
                    gradient.zero_()
            if not self._is_alone:
                part.spare.append(gradients)

    @torch.no_grad()
    def finish(self) -> None:
        """Puts the sum of all groups in the place of the gradient, which is reduced next."""
        ended = len(self.norms) + self._num_ended()
        if ended != self._num_groups or len(self._waiting) != self._num_ended():
            raise RuntimeError(
                f"--clip-group-size {self._size}: {ended} groups ended and {self._num_groups} were "
                "expected; drop the flag for this model"
            )
        while self._waiting:
            self._add_first()
        common = None if self._limit is not None else self._smallest().float()
        for part in self._parts:
            for buffer, total in zip(part.buffers, part.sums):
                buffer.copy_(total if common is None else total.mul_(common))
                total.zero_()

    def _smallest(self) -> torch.Tensor:
        """The smallest norm of a group of the step over all replicas; 0 if all gradients are 0."""
        norms = torch.stack(self.norms)
        # A group without tokens has no gradient to scale the others to. What is not finite is in
        # the sum already.
        smallest = torch.where(norms > 0, norms, math.inf).nan_to_num(nan=math.inf).min()
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=self._groups.dp)
        return torch.where(smallest.isinf(), 0.0, smallest)


def group_clip_of(config: Config, model: Model, groups: Any) -> GroupClip | None:
    """What `--clip-group-size` and `--clip-group-norm` ask for; see `Extra.feature`."""
    flags = config.extras["group_clip"]
    if flags.clip_group_size is None:
        return None
    behind = config.layout.pp
    if config.layout.vpp > 1:
        behind = max(behind, config.parallel.microbatch_group_size_per_vp_stage or 0)
    clip = GroupClip(
        model.chunks,
        groups,
        group_size=flags.clip_group_size,
        limit=limit_of(flags.clip_group_norm),
        max_behind=behind,
    )
    model.before_reduction(clip.finish)
    return clip


def scale_of(norm: torch.Tensor, limit: float | None) -> torch.Tensor:
    """The factor of a group's gradient.

    Args:
        norm: of the mean gradient of the group.
        limit: largest norm; None: every group gets norm 1, but one without a gradient stays so.

    Returns:
        At most 1 with a limit. NaN for a norm that is not finite, so that all ranks skip the step.
    """
    if limit is None:
        scale = torch.where(norm > 0, 1.0 / norm, 0.0)
    else:
        scale = (limit / norm).clamp(max=1.0)
    return torch.where(norm.isfinite(), scale, math.nan)


class _Part:
    """A chunk of the model: its gradients, and the sum of those that are scaled."""

    def __init__(self, chunk: Any) -> None:
        self.params: list[Any] = [p for p in chunk.parameters() if p.requires_grad]
        self.buffers: list[torch.Tensor] = [buffer.grad_data for buffer in chunk.buffers]
        self.sums = [torch.zeros_like(buffer) for buffer in self.buffers]
        self.spare: list[list[torch.Tensor]] = []
        """Copies of the gradients that no group holds."""
        self.seen = 0
        """Gradients that parameters have got in this step."""
        self.taken = 0
        """Groups of this step that have ended here."""
        while hasattr(chunk, "module"):
            chunk = chunk.module
        self.counted: list[Any] = [
            param
            for name, param in chunk.named_parameters()
            if param.requires_grad
            and is_counted(name, param)
            and param_is_not_tensor_parallel_duplicate(param)
            and param_is_not_shared(param)
        ]

    def take(self) -> list[torch.Tensor]:
        """Moves the gradients into copies and leaves zeros."""
        copies = self.spare.pop() if self.spare else [torch.empty_like(b) for b in self.buffers]
        for copy, buffer in zip(copies, self.buffers):
            copy.copy_(buffer)
            buffer.zero_()
        return copies

    def squares(self) -> Any:
        """The squared norm of the gradient of this rank's counted parameters, fp64; fp32 within a
        parameter."""
        if not self.counted:
            return 0.0
        grads = [param.main_grad for param in self.counted]
        norms = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32))
        return norms.double().square().sum()


class _Group:
    """A group of samples whose gradient is taken out."""

    def __init__(self, device: torch.device) -> None:
        self.squares = torch.zeros((), dtype=torch.float64, device=device)
        """Squared norm, as far as it is added up."""
        self.gradients: list[tuple[_Part, list[torch.Tensor]]] = []
        """Of each chunk that has ended the group, by buffer."""
        self.handle: Any = None
        """Of the sum over tensor and pipeline ranks, once all chunks have ended the group."""
