"""Carries out a plan: own elements by copy, the others from peer to peer, in bounded messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from copus_ext.reconfigure.plan import Piece, Plan
from megatron.training.rectangles import Box, Record, volume
from megatron.training.shards import KINDS, Shards

DIRECT_BYTES = 128 << 10
"""A contiguous piece of at least so many bytes goes from shard to shard without being packed."""
BUCKET_BYTES = {"gloo": 2 << 20, "nccl": 64 << 20}
"""Largest message by backend."""
WINDOW = 4
"""Messages under way each way."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Elements of one kind of a piece, as one end of a message holds them."""

    kind: str
    piece: Piece
    box: Box


@dataclass(frozen=True, kw_only=True)
class _Message:
    """What goes at once; the same list of parts on both ends."""

    parts: list[_Part]
    is_direct: bool
    """One contiguous part, sent from and received into the shard itself."""
    numel: int


class Transfer:
    """Moves the state of one rank from its old shards into its new ones.

    Args:
        plan: of the whole change.
        source: what this rank held.
        target: what it is to hold; filled in place.
        source_records: by rank, records before.
        target_records: by rank, records after.
        group: for the messages; all ranks of the world.
        timeout_s: for each message.
        bucket_bytes: largest message; None as the backend likes it.
        is_batched: start messages together; None as the backend needs it.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        source: Shards,
        target: Shards,
        source_records: Sequence[Sequence[Record]],
        target_records: Sequence[Sequence[Record]],
        group: Any,
        timeout_s: float,
        bucket_bytes: int | None = None,
        is_batched: bool | None = None,
    ) -> None:
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        self._source, self._target = source, target
        self._records = source_records, target_records
        self._group, self._timeout = group, timedelta(seconds=timeout_s)
        self._bucket = (bucket_bytes or BUCKET_BYTES[str(dist.get_backend(group))]) // 4
        backend = str(dist.get_backend(group))
        self._is_batched = backend == "nccl" if is_batched is None else is_batched
        self._local = [p for p in plan.pieces if p.source_rank == p.target_rank == self._rank]
        self._out: dict[int, list[Piece]] = {}
        self._in: dict[int, list[Piece]] = {}
        for p in plan.pieces:
            if p.source_rank != p.target_rank:
                if p.source_rank == self._rank:
                    self._out.setdefault(p.target_rank, []).append(p)
                elif p.target_rank == self._rank:
                    self._in.setdefault(p.source_rank, []).append(p)
        device = self._any_tensor().device
        size = (2 * WINDOW, self._bucket)
        self._pool = list(torch.zeros(size, dtype=torch.float32, device=device).unbind())
        self.num_messages = 0
        """Messages that this rank sent."""

    def _any_tensor(self) -> torch.Tensor:
        tensors = [*self._source.tensors, *self._target.tensors]
        return tensors[0]["param"] if tensors else torch.empty(0)

    @torch.no_grad()
    def copy_own(self) -> None:
        """Copies what stays on this rank. Not collective."""
        for p in self._local:
            for kind in KINDS:
                self._target_view(_Part(kind=kind, piece=p, box=(p.lo, p.hi))).copy_(
                    self._source_view(_Part(kind=kind, piece=p, box=(p.lo, p.hi)))
                )

    @torch.no_grad()
    def exchange(self) -> None:
        """Sends and receives the rest. Collective over the group.

        Raises:
            RuntimeError: a message failed or timed out.
        """
        # In step k every rank sends to the one k further on: no cycle can wait for itself.
        for shift in range(1, self._world):
            to, come_from = (self._rank + shift) % self._world, (self._rank - shift) % self._world
            self._exchange(
                list(self._messages(self._out.get(to, []))),
                list(self._messages(self._in.get(come_from, []))),
                to=to,
                come_from=come_from,
            )

    def _messages(self, pieces: list[Piece]) -> Iterator[_Message]:
        """The pieces between two ranks as messages; both ends come to the same ones."""
        packed: list[_Part] = []
        filled = 0
        for piece in pieces:
            for box in self._small_enough((piece.lo, piece.hi)):
                size = volume(*box)
                is_direct = size * 4 >= DIRECT_BYTES and self._is_contiguous(piece, box)
                for kind in KINDS:
                    part = _Part(kind=kind, piece=piece, box=box)
                    if is_direct:
                        yield _Message(parts=[part], is_direct=True, numel=size)
                        continue
                    if packed and filled + size > self._bucket:
                        yield _Message(parts=packed, is_direct=False, numel=filled)
                        packed, filled = [], 0
                    packed.append(part)
                    filled += size
        if packed:
            yield _Message(parts=packed, is_direct=False, numel=filled)

    def _small_enough(self, box: Box) -> Iterator[Box]:
        """A rectangle in parts that each fit into a message."""
        if volume(*box) <= self._bucket:
            yield box
            return
        lo, hi = box
        axis = next(i for i, (a, b) in enumerate(zip(lo, hi)) if b - a > 1)
        per_index = volume(*box) // (hi[axis] - lo[axis])
        step = max(self._bucket // per_index, 1)
        for start in range(lo[axis], hi[axis], step):
            stop = min(start + step, hi[axis])
            low = (*lo[:axis], start, *lo[axis + 1 :])
            yield from self._small_enough((low, (*hi[:axis], stop, *hi[axis + 1 :])))

    def _is_contiguous(self, piece: Piece, box: Box) -> bool:
        before = self._records[0][piece.source_rank][piece.source]
        after = self._records[1][piece.target_rank][piece.target]
        return is_contiguous(box, before) and is_contiguous(box, after)

    def _exchange(
        self, outgoing: list[_Message], incoming: list[_Message], *, to: int, come_from: int
    ) -> None:
        """Sends and receives between this rank and two others, a few messages at a time."""
        self.num_messages += len(outgoing)
        if self._is_batched:
            self._exchange_in_batches(outgoing, incoming, to=to, come_from=come_from)
            return
        under_way: tuple[deque, deque] = deque(), deque()
        received = sent = 0
        while received < len(incoming) or sent < len(outgoing) or any(under_way):
            while received < len(incoming) and len(under_way[0]) < WINDOW:
                tensor, finish = self._incoming(incoming[received])
                work = dist.irecv(tensor, group=self._group, group_src=come_from)
                under_way[0].append((work, finish))
                received += 1
            while sent < len(outgoing) and len(under_way[1]) < WINDOW:
                tensor, finish = self._outgoing(outgoing[sent])
                work = dist.isend(tensor, group=self._group, group_dst=to)
                under_way[1].append((work, finish))
                sent += 1
            for waiting in under_way:
                if waiting:
                    work, finish = waiting.popleft()
                    work.wait(self._timeout)
                    finish()

    def _exchange_in_batches(
        self, outgoing: list[_Message], incoming: list[_Message], *, to: int, come_from: int
    ) -> None:
        """The same where messages that do not start together may wait for each other (NCCL)."""
        for start in range(0, max(len(outgoing), len(incoming)), WINDOW):
            part = slice(start, start + WINDOW)
            operations, finishes = [], []
            for messages, prepare, call, peer in (
                (incoming[part], self._incoming, dist.irecv, come_from),
                (outgoing[part], self._outgoing, dist.isend, to),
            ):
                for message in messages:
                    tensor, finish = prepare(message)
                    finishes.append(finish)
                    operations.append(dist.P2POp(call, tensor, group=self._group, group_peer=peer))
            for work in dist.batch_isend_irecv(operations):
                work.wait(self._timeout)
            for finish in finishes:
                finish()

    def _outgoing(self, message: _Message) -> tuple[torch.Tensor, Callable[[], None]]:
        """What to send, and what to do when it is sent."""
        if message.is_direct:
            return self._source_view(message.parts[0]).reshape(-1), _nothing
        buffer, at = self._pool.pop(), 0
        for part in message.parts:
            view = self._source_view(part)
            buffer[at : at + view.numel()].view(view.shape).copy_(view)
            at += view.numel()
        return buffer[:at], lambda: self._pool.append(buffer)

    def _incoming(self, message: _Message) -> tuple[torch.Tensor, Callable[[], None]]:
        """Where to receive, and what to do when it is there."""
        if message.is_direct:
            return self._target_view(message.parts[0]).view(-1), _nothing
        buffer = self._pool.pop()

        def unpack() -> None:
            at = 0
            for part in message.parts:
                view = self._target_view(part)
                view.copy_(buffer[at : at + view.numel()].view(view.shape))
                at += view.numel()
            self._pool.append(buffer)

        return buffer[: message.numel], unpack

    def _source_view(self, part: _Part) -> torch.Tensor:
        record = self._records[0][self._rank][part.piece.source]
        return view_of(self._source.tensors[record.shard][part.kind], record, part.box)

    def _target_view(self, part: _Part) -> torch.Tensor:
        record = self._records[1][self._rank][part.piece.target]
        return view_of(self._target.tensors[record.shard][part.kind], record, part.box)


def _nothing() -> None:
    pass


def view_of(shard: torch.Tensor, record: Record, box: Box) -> torch.Tensor:
    """The elements of a rectangle inside a record, as a view of its flat shard."""
    shape = [b - a for a, b in zip(record.lo, record.hi)]
    whole = shard[record.offset : record.offset + record.numel].view(shape)
    for axis, (a, b, start) in enumerate(zip(*box, record.lo)):
        whole = whole.narrow(axis, a - start, b - a)
    return whole


def is_contiguous(box: Box, record: Record) -> bool:
    """Whether the elements of a rectangle lie side by side in the shard of a record that holds
    it."""
    extents = [b - a for a, b in zip(*box)]
    whole = [b - a for a, b in zip(record.lo, record.hi)]
    # Behind the first axis of more than one index every axis must be taken whole.
    first = next((i for i, n in enumerate(extents) if n > 1), len(extents))
    return extents[first + 1 :] == whole[first + 1 :]
