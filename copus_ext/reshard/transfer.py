"""Carries out a plan: own elements by copy, the others from rank to rank in bounded messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from copus_ext.reshard.plan import ReshardPlan, TransferOp
from megatron.trainer.distributed.sharding import Box, Record, volume
from megatron.trainer.model.shards import ALL_KINDS, Shards

ALONE_BYTES = 128 << 10
"""Elements of at least so many bytes are a message of their own; fewer are packed together."""
BUCKET_BYTES = {"gloo": 4 << 20, "nccl": 64 << 20}
"""Largest message by backend."""
WINDOW = 32
"""Messages under way in each direction if each starts on its own (gloo)."""
BUFFERS = 4
"""Of them, those that go through a buffer."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Elements of one kind (master, moment), as one end of a message holds them."""

    kind: str
    op: TransferOp
    box: Box


@dataclass(frozen=True, kw_only=True)
class _Message:
    """The same list of parts on both ends. An end that holds them contiguously, on the device of
    the messages, sends from its shard or receives into it; else they go through a buffer."""

    parts: list[_Part]
    numel: int


_Prepared = tuple[torch.Tensor, Callable[[], None]]
_Any = TypeVar("_Any")


class _Channel(Generic[_Any]):
    """The messages to a rank or from one, a window at a time."""

    def __init__(
        self,
        messages: Iterable[_Any],
        prepare: Callable[[_Any], _Prepared | None],
        call: Callable[..., Any],
        peer: dict[str, int],
    ) -> None:
        self.left, self.under_way = deque(messages), deque()
        self._prepare, self._call, self._peer = prepare, call, peer

    def start(self, group: Any) -> None:
        """Starts as many as may be under way."""
        while self.left and len(self.under_way) < WINDOW:
            prepared = self._prepare(self.left[0])
            if prepared is None:
                return
            self.left.popleft()
            work = self._call(prepared[0], group=group, **self._peer)
            self.under_way.append((work, prepared[1]))

    def finish_one(self, timeout: timedelta) -> None:
        if self.under_way:
            work, finish = self.under_way.popleft()
            work.wait(timeout)
            finish()


def _run_channels(channels: Sequence[_Channel[Any]], group: Any, timeout: timedelta) -> None:
    while any(channel.left or channel.under_way for channel in channels):
        for channel in channels:
            channel.start(group)
        for channel in channels:
            channel.finish_one(timeout)


@torch.no_grad()
def gather_in_place(buffer: torch.Tensor, *, group: Any, timeout_s: float) -> None:
    """All-gathers equal parts of a flat buffer. Collective over the group, for backends whose
    messages start on their own (gloo).

    Args:
        buffer: the parts in the order of ranks; this rank's is sent, the others are filled.
        timeout_s: for each message.

    Raises:
        RuntimeError: a message failed or timed out.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    most = BUCKET_BYTES["gloo"] // buffer.element_size()
    parts = [part.split(most) for part in buffer.chunk(world)]
    for shift in range(1, world):
        to, come_from = (rank + shift) % world, (rank - shift) % world
        channels = (
            _Channel(parts[come_from], _as_it_is, dist.irecv, {"group_src": come_from}),
            _Channel(parts[rank], _as_it_is, dist.isend, {"group_dst": to}),
        )
        _run_channels(channels, group, timedelta(seconds=timeout_s))


def _as_it_is(tensor: torch.Tensor) -> _Prepared:
    return tensor, _nothing


class Transfer:
    """Moves the state of one rank from its old shards into its new ones.

    Messages lie on the device of the new shards, also where the old ones are copies in memory of
    the host: NCCL sends none from there.

    Args:
        source: shards of this rank before.
        target: shards of this rank after; filled in place.
        group: for the messages; all ranks of the world.
        timeout_s: for each message.
        bucket_bytes: largest message; None as the backend likes it.
        is_batched: start messages together; None as the backend needs it.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        *,
        source: Shards,
        target: Shards,
        group: Any,
        timeout_s: float,
        bucket_bytes: int | None = None,
        is_batched: bool | None = None,
    ) -> None:
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        self._source, self._target = source, target
        self._records = plan.source[self._rank], plan.target[self._rank]
        self._group, self._timeout = group, timedelta(seconds=timeout_s)
        backend = str(dist.get_backend(group))
        self._device = _device_of_messages(backend, source, target)
        self._bucket = (bucket_bytes or BUCKET_BYTES[backend]) // 4
        self._is_batched = backend == "nccl" if is_batched is None else is_batched
        self._local: list[TransferOp] = []
        to_others: dict[int, list[TransferOp]] = {}
        from_others: dict[int, list[TransferOp]] = {}
        for op in plan.ops:
            if op.source_rank == op.target_rank == self._rank:
                self._local.append(op)
            elif op.source_rank == self._rank:
                to_others.setdefault(op.target_rank, []).append(op)
            elif op.target_rank == self._rank:
                from_others.setdefault(op.source_rank, []).append(op)
        self._out = {rank: list(self._messages(own)) for rank, own in to_others.items()}
        self._in = {rank: list(self._messages(own)) for rank, own in from_others.items()}
        self._pools = (
            self._buffers([m for own in self._out.values() for m in own], self._sent_from),
            self._buffers([m for own in self._in.values() for m in own], self._received_in),
        )
        self.num_messages = 0
        """Messages that this rank sent."""

    def _buffers(
        self, messages: list[_Message], place_of: Callable[[_Message], torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """Buffers as large as needed, for messages that no shard holds as they are sent."""
        sizes = [m.numel for m in messages if place_of(m) is None]
        num = min(len(sizes), BUFFERS)
        size, dtype = max(sizes, default=0), torch.float32
        return [torch.zeros(size, dtype=dtype, device=self._device) for _ in range(num)]

    @torch.no_grad()
    def copy_own(self) -> None:
        """Copies what stays on this rank. Not collective."""
        for op in self._local:
            for kind in self._kinds(op):
                part = _Part(kind=kind, op=op, box=(op.lo, op.hi))
                self._target_view(part).copy_(self._source_view(part))

    @torch.no_grad()
    def exchange(self) -> None:
        """Sends and receives the rest. Collective over the group.

        Raises:
            RuntimeError: a message failed or timed out.
        """
        # In step k every rank sends to the rank k further on, so that no cycle waits for itself.
        for shift in range(1, self._world):
            to, come_from = (self._rank + shift) % self._world, (self._rank - shift) % self._world
            self._exchange(
                self._out.get(to, []), self._in.get(come_from, []), to=to, come_from=come_from
            )

    def _messages(self, ops: list[TransferOp]) -> Iterator[_Message]:
        """The operations between two ranks as messages, the same on both ends."""
        packed: list[_Part] = []
        filled = 0
        for op in ops:
            for box in small_enough((op.lo, op.hi), self._bucket):
                size = volume(*box)
                for kind in self._kinds(op):
                    part = _Part(kind=kind, op=op, box=box)
                    if size * 4 >= ALONE_BYTES:
                        yield _Message(parts=[part], numel=size)
                        continue
                    if packed and filled + size > self._bucket:
                        yield _Message(parts=packed, numel=filled)
                        packed, filled = [], 0
                    packed.append(part)
                    filled += size
        if packed:
            yield _Message(parts=packed, numel=filled)

    def _kinds(self, op: TransferOp) -> list[str]:
        """What both ends hold of the elements, in one order: the optimizer of a weight is the same
        under every layout."""
        is_source = op.source_rank == self._rank
        records = self._records[0 if is_source else 1]
        shards = self._source if is_source else self._target
        held = shards.tensors[records[op.source if is_source else op.target].shard]
        return [kind for kind in ALL_KINDS if kind in held]

    def _exchange(
        self, outgoing: list[_Message], incoming: list[_Message], *, to: int, come_from: int
    ) -> None:
        """Sends and receives between this rank and two others, a few messages at a time."""
        self.num_messages += len(outgoing)
        if self._is_batched:
            self._exchange_in_batches(outgoing, incoming, to=to, come_from=come_from)
            return
        channels = (
            _Channel(incoming, self._incoming, dist.irecv, {"group_src": come_from}),
            _Channel(outgoing, self._outgoing, dist.isend, {"group_dst": to}),
        )
        _run_channels(channels, self._group, self._timeout)

    def _exchange_in_batches(
        self, outgoing: list[_Message], incoming: list[_Message], *, to: int, come_from: int
    ) -> None:
        """The same for NCCL, where messages that do not start together may wait for each other."""
        for start in range(0, max(len(outgoing), len(incoming)), BUFFERS):
            part = slice(start, start + BUFFERS)
            operations, finishes = [], []
            for messages, prepare, call, peer in (
                (incoming[part], self._incoming, dist.irecv, come_from),
                (outgoing[part], self._outgoing, dist.isend, to),
            ):
                for message in messages:
                    prepared = prepare(message)
                    assert prepared is not None  # no more messages than buffers
                    tensor, finish = prepared
                    finishes.append(finish)
                    operations.append(dist.P2POp(call, tensor, group=self._group, group_peer=peer))
            for work in dist.batch_isend_irecv(operations):
                work.wait(self._timeout)
            for finish in finishes:
                finish()

    def _sent_from(self, message: _Message) -> torch.Tensor | None:
        """Where this rank's old shards hold a message as it is sent, else None."""
        return _contiguous(message, self._source_view, self._device)

    def _received_in(self, message: _Message) -> torch.Tensor | None:
        """Where this rank's new shards take a message as it comes, else None."""
        return _contiguous(message, self._target_view, self._device)

    def _outgoing(self, message: _Message) -> _Prepared | None:
        """What to send, and what to do once it is sent; None without a free buffer."""
        if (place := self._sent_from(message)) is not None:
            return place, _nothing
        pool = self._pools[0]
        if not pool:
            return None
        buffer = pool.pop()
        for part, packed in _split(message, buffer):
            view = self._source_view(part)
            packed.view(view.shape).copy_(view)
        return buffer[: message.numel], lambda: pool.append(buffer)

    def _incoming(self, message: _Message) -> _Prepared | None:
        """Where to receive, and what to do once it has come; None without a free buffer."""
        if (place := self._received_in(message)) is not None:
            return place, _nothing
        pool = self._pools[1]
        if not pool:
            return None
        buffer = pool.pop()

        def unpack() -> None:
            for part, packed in _split(message, buffer):
                view = self._target_view(part)
                view.copy_(packed.view(view.shape))
            pool.append(buffer)

        return buffer[: message.numel], unpack

    def _source_view(self, part: _Part) -> torch.Tensor:
        record = self._records[0][part.op.source]
        return view_of(self._source.tensors[record.shard][part.kind], record, part.box)

    def _target_view(self, part: _Part) -> torch.Tensor:
        record = self._records[1][part.op.target]
        return view_of(self._target.tensors[record.shard][part.kind], record, part.box)


def _device_of_messages(backend: str, source: Shards, target: Shards) -> torch.device:
    """The device of the new shards; of a rank without any, the one that the backend sends from."""
    if not target.tensors and backend == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    held = (t["param"].device for t in (*target.tensors, *source.tensors))
    return next(held, torch.device("cpu"))


def _contiguous(
    message: _Message, view_of_part: Callable[[_Part], torch.Tensor], device: torch.device
) -> torch.Tensor | None:
    """A message of one part as a flat view, if its elements are contiguous and on a device."""
    if len(message.parts) > 1:
        return None
    view = view_of_part(message.parts[0])
    return view.view(-1) if view.is_contiguous() and view.device == device else None


def _split(message: _Message, buffer: torch.Tensor) -> Iterator[tuple[_Part, torch.Tensor]]:
    """The parts of a message with their elements in a buffer."""
    at = 0
    for part in message.parts:
        size = volume(*part.box)
        yield part, buffer[at : at + size]
        at += size


def _nothing() -> None:
    pass


def view_of(shard: torch.Tensor, record: Record, box: Box) -> torch.Tensor:
    """The elements of a rectangle inside a record, as a view of its flat shard."""
    shape = [b - a for a, b in zip(record.lo, record.hi)]
    whole = shard[record.offset : record.offset + record.numel].view(shape)
    for axis, (a, b, start) in enumerate(zip(*box, record.lo)):
        whole = whole.narrow(axis, a - start, b - a)
    return whole


def small_enough(box: Box, most: int) -> Iterator[Box]:
    """A rectangle in parts of at most so many elements, about equally large."""
    lo, hi = box
    if volume(lo, hi) <= most:
        yield box
        return
    axis = next(i for i, (a, b) in enumerate(zip(lo, hi)) if b - a > 1)
    extent = hi[axis] - lo[axis]
    at_once = max(most * extent // volume(lo, hi), 1)
    num = -(-extent // at_once)
    for i in range(num):
        start, stop = (lo[axis] + extent * k // num for k in (i, i + 1))
        part = (*lo[:axis], start, *lo[axis + 1 :]), (*hi[:axis], stop, *hi[axis + 1 :])
        yield from small_enough(part, most)
