"""Messages between pipeline stages: every tensor that crosses from one to the next passes here."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

_SCALE_BYTES = 4
_LEAST = 1e-30


class StageLink(P2PCommunicator):
    """megatron-core's messages between neighbouring stages, whole or with 8 bits for a number.

    A short message keeps the largest entry of each row (token) and rounds the others to 1/127 of
    it. Nothing is kept from one message to the next. Interleaved pipelines send whole messages:
    their requests are waited for elsewhere.

    Args:
        pp_group: pipeline parallel.
        config: megatron-core's configuration.
        message_bits: 8, or None for whole messages.
    """

    def __init__(self, pp_group: Any, config: Any, *, message_bits: int | None = None) -> None:
        super().__init__(pp_group, config)
        is_interleaved = self.virtual_pipeline_model_parallel_size is not None
        self.is_short = message_bits is not None and not is_interleaved
        self.is_exact = False
        """Whether the messages of this step are whole all the same. All ranks must agree."""

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
        if not self.is_short or self.is_exact:
            return super()._communicate(
                tensor_send_next=tensor_send_next,
                tensor_send_prev=tensor_send_prev,
                recv_prev=recv_prev,
                recv_next=recv_next,
                tensor_shape=tensor_shape,
                wait_on_reqs=wait_on_reqs,
            )
        ops, received = [], []
        # Kept until all are sent.
        sent = [
            (encoded(tensor), rank)
            for tensor, rank in (
                (tensor_send_prev, self.prev_rank),
                (tensor_send_next, self.next_rank),
            )
            if tensor is not None
        ]
        for is_wanted, rank in ((recv_prev, self.prev_rank), (recv_next, self.next_rank)):
            received.append(_empty(tensor_shape) if is_wanted else None)
            if is_wanted:
                ops.append(dist.P2POp(dist.irecv, received[-1], rank, self.pp_group))
        ops += [dist.P2POp(dist.isend, message, rank, self.pp_group) for message, rank in sent]
        for request in dist.batch_isend_irecv(ops) if ops else ():
            request.wait()
        previous, following = (
            message
            if message is None
            else decoded(message, tensor_shape, self.config.pipeline_dtype).requires_grad_()
            for message in received
        )
        return previous, following, None


def _empty(shape: Any) -> torch.Tensor:
    """Room for a message of a tensor of this shape."""
    *rows, width = shape
    size = (torch.Size(rows).numel(), width + _SCALE_BYTES)
    return torch.empty(size, dtype=torch.int8, device=torch.cuda.current_device())


@torch.no_grad()
def encoded(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in 8 bits.

    Args:
        tensor: [..., width], finite.

    Returns:
        [rows, width + 4] int8: each row in parts of 1/127 of its largest entry, then that part as
        the bytes of an fp32 number. A row that is not finite stays so.
    """
    rows = tensor.detach().reshape(-1, tensor.shape[-1]).float()
    part = rows.abs().amax(dim=1, keepdim=True).clamp(min=_LEAST) / 127.0
    whole = (rows / part).round().nan_to_num(0.0).to(torch.int8)
    return torch.cat([whole, part.view(torch.int8)], dim=1)


@torch.no_grad()
def decoded(message: torch.Tensor, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of `encoded`, up to half a part for each entry."""
    part = message[:, -_SCALE_BYTES:].contiguous().view(torch.float32)
    return (message[:, :-_SCALE_BYTES].float() * part).to(dtype).view(tuple(shape))
