"""Messages between pipeline stages: every tensor that crosses from one to the next passes here."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import (
    P2PCommunicator,
    _batched_p2p_ops,
    _p2p_ops,
)

from megatron.trainer.extras.slow_links.low_rank import LowRankMessages

_SCALE_BYTES = 4
_MIN = 1e-30


class StageLink(P2PCommunicator):
    """megatron-core's messages between neighbouring stages, whole or in fewer numbers.

    Messages of 8 bits keep the largest entry of each row (token) and round the others to 1/127 of
    it. Activations and gradients are both sent this way. Messages of low rank are products of two
    thin factors. Only gradients are sent this way, at the end of a step, when no forward message
    goes the other way, and not in an interleaved pipeline.

    Args:
        pp_group: pipeline parallel.
        message_rank: most columns of a factor, or None; not with messages of 8 bits.
    """

    def __init__(
        self,
        pp_group: Any,
        config: Any,
        *,
        message_rank: int | None = None,
    ) -> None:
        super().__init__(pp_group, config)
        self._eight_bits: EightBits | None = None
        self._low_rank = None
        if self.virtual_pipeline_model_parallel_size is None and message_rank is not None:
            self._low_rank = LowRankMessages(message_rank)
        self._is_exact = False
        self._whole_to_send = self._whole_to_receive = 0

    def begin(
        self, num_microbatches: int, *, is_exact: bool, message_bits: int | None = None
    ) -> None:
        """Prepares for the messages of a step or of an evaluation. All ranks must give the same.

        Args:
            is_exact: whether all messages of this step are whole.
            message_bits: 8; None for whole messages, or for those of low rank.
        """
        self._is_exact = is_exact
        self._eight_bits = EightBits() if message_bits is not None else None
        # A stage goes back once for each stage below, after its last forward pass. What it gets
        # for that is sent by a stage that may still be at its last forward pass.
        below = self.pp_group.size() - 1 - self.pp_group.rank()
        self._whole_to_receive = num_microbatches - min(below, num_microbatches)
        self._whole_to_send = num_microbatches - min(below + 1, num_microbatches)

    def _communicate(
        self,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> Any:
        shape = tensor_shape if tensor_send_prev is None else tensor_send_prev.shape
        codec = self._codec(shape, sends=tensor_send_prev is not None, receives=recv_next)
        if codec is None:
            return super()._communicate(
                tensor_send_next=tensor_send_next,
                tensor_send_prev=tensor_send_prev,
                recv_prev=recv_prev,
                recv_next=recv_next,
                tensor_shape=tensor_shape,
                wait_on_reqs=wait_on_reqs,
            )
        sent = {
            f"tensor_send_{name}": tensor if tensor is None else codec.encode(tensor)
            for name, tensor in (("prev", tensor_send_prev), ("next", tensor_send_next))
        }
        dtype = self.config.pipeline_dtype
        rooms = {
            f"tensor_recv_{name}": codec.room(tensor_shape, dtype) if is_wanted else None
            for name, is_wanted in (("prev", recv_prev), ("next", recv_next))
        }
        start = _batched_p2p_ops if self.config.batch_p2p_comm else _p2p_ops
        ranks: Any = {
            "prev_pipeline_rank": self.prev_rank,
            "next_pipeline_rank": self.next_rank,
        }
        requests: Any = start(**sent, **rooms, **ranks, group=self.pp_group)
        # The messages stay in memory until all of them are sent.
        messages: dict[str, Any] = {
            name.removeprefix("tensor_"): m for name, m in (sent | rooms).items()
        }
        pending = None
        if wait_on_reqs:
            for request in requests.values() if isinstance(requests, dict) else requests:
                request.wait()
            received = [
                None if m is None else codec.decode(m, tensor_shape, dtype).requires_grad_()
                for m in rooms.values()
            ]
        else:
            received = [
                None
                if m is None
                else torch.empty(
                    tuple(tensor_shape), dtype=dtype, device=m.device, requires_grad=True
                )
                for m in rooms.values()
            ]
            into = dict(zip(("recv_prev", "recv_next"), received))
            pending = {
                name: _Pending(request, codec, messages[name], into.get(name))
                for name, request in requests.items()
            }
        return *received, pending

    def _codec(self, shape: Any, *, sends: bool, receives: bool) -> Any:
        """Returns what encodes the messages of one call, or None if they are whole.

        Args:
            sends: whether a gradient goes to the previous stage.
            receives: whether a gradient comes from the next stage.
        """
        if self._is_exact:
            return None
        if self._low_rank is None:
            return self._eight_bits
        is_last = (sends and self._whole_to_send <= 0) or (receives and self._whole_to_receive <= 0)
        self._whole_to_send -= sends
        self._whole_to_receive -= receives
        # The last gradients are the only messages of their calls, and both ends count alike.
        return self._low_rank if is_last and self._low_rank.is_shorter(shape) else None


class _Pending:
    """A message under way, for the schedule of an interleaved pipeline to wait for.

    Args:
        message: as it travels; kept until then.
        into: receives what it decodes to; None for one that is sent.
    """

    def __init__(
        self, request: Any, codec: Any, message: torch.Tensor, into: torch.Tensor | None
    ) -> None:
        self._request, self._codec, self._message, self._into = request, codec, message, into

    @torch.no_grad()
    def wait(self) -> None:
        self._request.wait()
        if self._into is not None:
            self._into.copy_(self._codec.decode(self._message, self._into.shape, self._into.dtype))


class EightBits:
    """Encodes each row of a tensor in parts of 1/127 of its largest entry. It keeps no error for
    the next message."""

    @torch.no_grad()
    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        """Encodes a tensor in 8 bits for each number.

        Args:
            tensor: [..., width], of any floating dtype.

        Returns:
            [rows, width + 4] int8. A row holds its entries as multiples of 1/127 of its largest
            magnitude, and then that unit as the four bytes of an fp32 number. A row with an
            infinity or a NaN is decoded to NaN.
        """
        rows = tensor.detach().reshape(-1, tensor.shape[-1]).float()
        part = rows.abs().amax(dim=1, keepdim=True).clamp(min=_MIN) / 127.0
        whole = (rows / part).round().nan_to_num(0.0).to(torch.int8)
        return torch.cat([whole, part.view(torch.int8)], dim=1)

    def room(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        """Allocates what receives the message of a tensor of this shape; `dtype` does not count."""
        *rows, width = shape
        size = (torch.Size(rows).numel(), width + _SCALE_BYTES)
        return torch.empty(size, dtype=torch.int8, device=torch.cuda.current_device())

    @torch.no_grad()
    def decode(self, message: torch.Tensor, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        """Decodes what `encode` returned. Each entry is off by at most half a unit of its row."""
        part = message[:, -_SCALE_BYTES:].contiguous().view(torch.float32)
        return (message[:, :-_SCALE_BYTES].float() * part).to(dtype).view(tuple(shape))
