"""Messages between stages that are a graph: outputs to those that take them, gradients back."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from copus_ext.extras.graph_stages.stage_graph import Message, StageGraph

_Expected = tuple[int, int]
"""Number of a message of the graph, and micro-batch."""


class GraphLink:
    """Sends without waiting for the receiver, and receives in the order in which the other stage
    sends.

    A receiving stage waits only for passes that come before in every order of the passes, so that
    no two stages wait for each other. Two stages have a group for outputs and one for gradients:
    with NCCL all messages of a rank in one group run one after the other.

    Building it is collective over the world.

    Args:
        first_rank: of the world, which runs stage 0 of this replica; the others follow.
        lengths: rows of a sample in the output of every node.
        width: of a row.
        dtype: of outputs and gradients.
        device: where they are.
    """

    def __init__(
        self,
        graph: StageGraph,
        stage: int,
        *,
        first_rank: int = 0,
        lengths: list[int],
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.graph, self.stage, self._first_rank = graph, stage, first_rank
        self._lengths, self._width = lengths, width
        self._dtype, self._device = dtype, device
        self._groups: dict[tuple[int, int, bool], Any] = {}
        self._make_groups()
        self._expected: dict[tuple[int, bool], deque[_Expected]] = {}
        self._coming: dict[tuple[bool, _Expected], tuple[Any, torch.Tensor]] = {}
        self._sending: list[tuple[Any, torch.Tensor]] = []
        self._micro_batch_size = 1

    def _make_groups(self) -> None:
        """Makes the groups of all replicas, in the same order on all ranks."""
        stages = self.graph.num_stages
        pairs = sorted({(m.source, m.target) for m in self.graph.messages})
        for first in range(0, dist.get_world_size(), stages):
            for a, b in pairs:
                for is_gradient in (False, True):
                    group = dist.new_group([first + a, first + b])
                    if first == self._first_rank and self.stage in (a, b):
                        self._groups[a, b, is_gradient] = group

    def _group(self, message: Message, *, is_gradient: bool) -> Any:
        return self._groups[message.source, message.target, is_gradient]

    def begin(self, num_microbatches: int, micro_batch_size: int) -> None:
        """Prepares for the messages of a step. All stages give the same."""
        self._micro_batch_size = micro_batch_size
        self._expected = {}
        messages = self.graph.messages
        for peer in range(self.graph.num_stages):
            for p in self.graph.program(peer, num_microbatches):
                sent = (self.graph.entering if p.is_backward else self.graph.leaving)(
                    peer, p.segment
                )
                for i in sent:
                    to = messages[i].source if p.is_backward else messages[i].target
                    if to == self.stage:
                        queue = self._expected.setdefault((peer, p.is_backward), deque())
                        queue.append((i, p.micro_batch))

    def expect(self, message: int, micro_batch: int, *, is_gradient: bool) -> None:
        """Lets a message come in while this rank computes."""
        key = message, micro_batch
        m = self.graph.messages[message]
        peer = m.target if is_gradient else m.source
        while (is_gradient, key) not in self._coming:
            i, number = self._expected[peer, is_gradient].popleft()
            own = self.graph.messages[i]
            rows = self._lengths[own.producer]
            shape = rows, self._micro_batch_size, self._width
            room = torch.empty(shape, dtype=self._dtype, device=self._device)
            group = self._group(own, is_gradient=is_gradient)
            request = dist.irecv(room, self._first_rank + peer, group=group)
            self._coming[is_gradient, (i, number)] = request, room

    def receive(self, message: int, micro_batch: int, *, is_gradient: bool) -> torch.Tensor:
        """Waits for a message.

        Args:
            is_gradient: whether it is the gradient, which comes from the target.

        Returns:
            [rows, micro batch, width].
        """
        self.expect(message, micro_batch, is_gradient=is_gradient)
        request, room = self._coming.pop((is_gradient, (message, micro_batch)))
        request.wait()
        return room

    def send(self, message: int, tensor: torch.Tensor, *, is_gradient: bool) -> None:
        """Sends an output or a gradient on its way."""
        m = self.graph.messages[message]
        whole = tensor.detach().contiguous()
        to = m.source if is_gradient else m.target
        # What has left is not kept till the end of the step.
        self._sending = [one for one in self._sending if one[0] and not one[0].is_completed()]
        group = self._group(m, is_gradient=is_gradient)
        request = dist.isend(whole, self._first_rank + to, group=group)
        self._sending.append((request, whole))

    def finish(self) -> None:
        """Waits until all that was sent has left."""
        for request, _ in self._sending:
            if request is not None:
                request.wait()
        self._sending.clear()
        assert not self._coming and not any(self._expected.values()), "a message was not received"

    def close(self) -> None:
        """Destroys the groups. All ranks."""
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()
