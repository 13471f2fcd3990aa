"""Copies of the optimizer state in memory, from which the ranks that are left rebuild what others
held: each rank keeps one of its own shard and one of a shard of another node.

A copy is taken between two steps, and is the state of one step on all ranks. Older copies go when
all ranks have said that theirs are complete. Weights are not copied: they are the rounded masters.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from copus_ext.extras.elastic.membership import Membership, WorldChanged
from copus_ext.extras.elastic.messages import Generation
from copus_ext.reshard.ownership import all_of_layout
from copus_ext.reshard.parameters import shape_of
from copus_ext.reshard.saved_state import adam_steps, scaler_state
from megatron.trainer.checkpoint.save import common_state
from megatron.trainer.common.collectives import broadcast_from_rank0, first_problem
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.host_memory import HostMemory
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.model_shape import ModelShape
from megatron.trainer.distributed.sharding import Record
from megatron.trainer.model.shards import KINDS, Shards, local_shards
from megatron.trainer.train.callbacks import Callback, CallbackContext

logger = logging.getLogger(__name__)

_END_S = 5.0
_FAILED, _UNDER_WAY, _COMPLETE = range(3)


class Moment(NamedTuple):
    """When a copy was taken; later ones are greater. A run that falls back to a checkpoint has
    fewer steps in a later generation."""

    generation: int
    """The ranks that took it."""
    iteration: int


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A copy of the shard of one rank."""

    rank: int
    """Whose it is, in the generation of its moment."""
    records: list[Record]
    """Of that rank, in one flat shard."""
    buffer: torch.Tensor
    """[3, n] the `KINDS` of its n elements, fp32, in memory of the host."""

    @classmethod
    def empty(cls, rank: int, records: Sequence[Record]) -> Piece:
        """Room for the copy of a rank that holds some records."""
        total = sum(record.numel for record in records)
        buffer = torch.empty((len(KINDS), total), dtype=torch.float32)
        return cls(rank=rank, records=cls.records_of(records), buffer=buffer)

    @staticmethod
    def records_of(records: Sequence[Record]) -> list[Record]:
        """The records of a rank, one after another in one flat shard."""
        flat, offset = [], 0
        for record in records:
            flat.append(record._replace(shard=0, offset=offset))
            offset += record.numel
        return flat

    @classmethod
    @torch.no_grad()
    def of(cls, rank: int, live: Shards, memory: HostMemory) -> Piece:
        """A copy that is begun; `memory` knows when it is there."""
        room = memory.empty(len(KINDS), sum(record.numel for record in live.records))
        piece = cls(rank=rank, records=cls.records_of(live.records), buffer=room)
        with memory.copying():
            for row, kind in zip(piece.buffer, KINDS):
                for record, flat in zip(live.records, piece.records):
                    part = live.tensors[record.shard][kind]
                    part = part[record.offset : record.offset + record.numel]
                    row[flat.offset : flat.offset + flat.numel].copy_(part, non_blocking=True)
        return piece

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(zip(KINDS, self.buffer))


@dataclass(kw_only=True)
class CopySet:
    layout: Layout
    """Of the ranks that took it."""
    common: dict[str, Any]
    """The state that is the same on all ranks, as a checkpoint holds it."""
    step: int
    """Updates of Adam."""
    scaler: dict[str, Any] | None
    """Of the loss."""
    pieces: list[Piece] = field(default_factory=list)
    """The own one first."""


class HeldCopies:
    """All that this process holds; outlives the worlds that it was in."""

    def __init__(self) -> None:
        self.sets: dict[Moment, CopySet] = {}
        self.memory = HostMemory()
        """Of the own pieces."""

    def keep_only(self, moment: Moment) -> None:
        """Drops all others, whose messages have come."""
        kept = self.sets.pop(moment)
        for one in self.sets.values():
            self.memory.give_back(one.pieces[0].buffer)
        self.sets = {moment: kept}

    def drop(self, moment: Moment) -> None:
        self.sets.pop(moment, None)

    def clear(self) -> None:
        self.sets.clear()

    @property
    def num_bytes(self) -> int:
        pieces = [piece for one in self.sets.values() for piece in one.pieces]
        return sum(piece.buffer.numel() * piece.buffer.element_size() for piece in pieces)


def backup_ranks_of_released(generation: Generation, following: Generation) -> list[int | None]:
    """By rank, the rank that keeps its copy while ranks leave: one that stays, for those that do
    not."""
    members, released = generation.members, set(following.released)
    stay = [rank for rank, member in enumerate(members) if member not in released]
    return [stay[i % len(stay)] if one in released else None for i, one in enumerate(members)]


def backup_ranks(generation: Generation) -> list[int | None]:
    """By rank, the rank that keeps its copy; None where it is alone.

    Nodes keep each other's in pairs, and in a ring of three where their number is odd. So one
    second node of all is fatal, or two. On one node a neighbour keeps it, which covers lost ranks
    and not the node.
    """
    nodes = generation.nodes
    found: list[int | None] = [None] * len(generation.members)
    if len(nodes) == 1:
        size = len(generation.members)
        return [(rank + 1) % size if size > 1 else None for rank in range(size)]
    partner = {}
    ring = nodes[-3:] if len(nodes) % 2 else []
    paired = nodes[: len(nodes) - len(ring)]
    for first, second in zip(paired[::2], paired[1::2]):
        partner |= {first: second, second: first}
    partner |= {node: ring[(i + 1) % len(ring)] for i, node in enumerate(ring)}
    for node in nodes:
        theirs = generation.ranks_of(partner[node])
        for i, rank in enumerate(generation.ranks_of(node)):
            found[rank] = theirs[i % len(theirs)]
    return found


def _on_host(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """A state for messages to any rank: a tensor on a GPU would come out on the one with the same
    number."""
    if state is None:
        return None
    return {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in state.items()}


@dataclass(frozen=True)
class _Chunks:
    chunks: list[Any]


def check_state(fp8: str | None, optimizer: str) -> None:
    """Raises UsageError where the state of a run cannot be copied."""
    wrong = ["--fp8-format"] * bool(fp8) + [f"--optimizer {optimizer}"] * (optimizer != "adam")
    if wrong:
        raise UsageError(
            f"--elastic copies the weights and moments of Adam alone; drop {' and '.join(wrong)}"
        )


class PeerCopies(Callback):
    """Takes the copies of a run while it trains. The last of its callbacks, on every rank. `marks`
    are further entries of the common state, for whoever goes on from a copy."""

    def __init__(
        self,
        held: HeldCopies,
        membership: Membership,
        generation: Generation,
        *,
        interval: int,
        marks: dict[str, Any] | None = None,
    ) -> None:
        self.held, self._membership, self._interval = held, membership, interval
        self._marks = marks or {}
        self._generation, self._backup_ranks = generation, backup_ranks(generation)
        self._shape: ModelShape | None = None
        self._group: Any = None
        self._flags: Any = None
        self._pending: Moment | None = None
        self._sending: threading.Thread | None = None
        self._state = _COMPLETE
        self._is_first = True

    def on_train_start(self, context: CallbackContext) -> None:
        """Makes the group for the messages between keepers."""
        check_state(context.config.precision.fp8, context.config.optim.optimizer)
        self._shape = shape_of(context.config)
        self._group, self._flags = (dist.new_group(backend="gloo") for _ in range(2))

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Takes a copy if one is due: the state is that after the step before, as it goes on.

        Raises:
            WorldChanged: ranks wait to join or leave, and all ranks have their copies.
        """
        is_over = self._agree()
        iteration = context.state.iteration
        if is_over:
            self._leave_together(context)
        if self._is_first or (self._pending is None and iteration % self._interval == 0):
            self._is_first = False
            moment = self._take(context)
            self._pending, self._state = moment, _UNDER_WAY
            what = self.held.sets[moment], self._backup_ranks
            self._sending = threading.Thread(
                target=self._exchange, args=what, name="copies", daemon=True
            )
            self._sending.start()

    def on_grads_ready(self, context: CallbackContext) -> None:
        """The optimizer writes next."""
        self.held.memory.before_write()

    def _agree(self) -> bool:
        """Drops older copies once all ranks have the newest. Returns whether all ranks know of a
        generation that ranks join or leave, and no copy is under way."""
        membership = self._membership
        knows = membership.is_over and not membership.has_lost
        flags = torch.tensor([int(knows), self._state])
        dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=self._flags)
        worst = int(flags[1])
        is_over = bool(flags[0]) and worst != _UNDER_WAY
        if self._pending is not None and worst != _UNDER_WAY:
            if worst == _COMPLETE:
                self.held.keep_only(self._pending)
            else:
                self.held.drop(self._pending)
                if dist.get_rank() == 0:
                    print(f"ALERT: no copy of iteration {self._pending.iteration}: it failed")
            self._pending, self._state = None, _COMPLETE
        return is_over

    def _leave_together(self, context: CallbackContext) -> None:
        """Takes a last copy in this world. Ranks that leave the run hand theirs to others.

        Raises:
            WorldChanged: always.
        """
        moment = self._take(context)
        following = broadcast_from_rank0(self._membership.latest)
        if following.released:
            self._join_thread()
            self._hand_over(moment, following)
        raise WorldChanged("ranks come or leave")

    def _hand_over(self, moment: Moment, following: Generation) -> None:
        """Sends the copies of ranks that leave to ranks that stay. Where that fails, older copies
        or the checkpoint have to do. Collective."""
        copies = self.held.sets[moment]
        backup_ranks = backup_ranks_of_released(self._generation, following)
        pieces, problem = [], ""
        try:
            pieces = self._pieces_for(copies, backup_ranks)
        except RuntimeError as error:  # no memory: nobody may wait for this rank
            problem = str(error)
        problem = first_problem(problem)
        if not problem:
            self._exchange(copies, backup_ranks, pieces)
            problem = first_problem("" if self._state == _COMPLETE else "a message failed")
        if problem:
            self.held.drop(moment)
            if dist.get_rank() == 0:
                print(f"ALERT: ranks leave and could not hand over their state: {problem}")

    def _take(self, context: CallbackContext) -> Moment:
        """Copies this rank's shard, between two steps; the copy's place among those held."""
        config = context.config
        moment = Moment(self._generation.number, context.state.iteration)
        live = local_shards(_Chunks(context.model), context.optimizer, context.groups)
        self.held.sets[moment] = CopySet(
            layout=config.layout,
            common=self._marks
            | common_state(config, context.state, context.scheduler, context.data_identity),
            step=adam_steps(context.optimizer) or 0,
            scaler=_on_host(scaler_state(context.optimizer)),
            pieces=[Piece.of(dist.get_rank(), live, self.held.memory)],
        )
        return moment

    def _pieces_for(self, copies: CopySet, backup_ranks: Sequence[int | None]) -> list[Piece]:
        """Room for the copies that this rank keeps."""
        assert self._shape is not None
        rank, records = dist.get_rank(), all_of_layout(self._shape, copies.layout)
        wards = [ward for ward, keeper in enumerate(backup_ranks) if keeper == rank]
        return [Piece.empty(ward, records[ward]) for ward in wards]

    def _exchange(
        self, copies: CopySet, backup_ranks: Sequence[int | None], pieces: list[Piece] | None = None
    ) -> None:
        """Sends the own copy to its keeper and receives those that this rank keeps."""
        try:
            self.held.memory.wait()
            pieces = self._pieces_for(copies, backup_ranks) if pieces is None else pieces
            work: list[Any] = [
                dist.irecv(piece.buffer, group=self._group, group_src=piece.rank)
                for piece in pieces
            ]
            if (keeper := backup_ranks[dist.get_rank()]) is not None:
                own = copies.pieces[0].buffer
                work.append(dist.isend(own, group=self._group, group_dst=keeper))
            for one in work:
                one.wait()
            copies.pieces += pieces
            self._state = _COMPLETE
        except Exception as error:  # no memory, or the world is over; older copies stay
            logger.debug("a copy was not exchanged: %r", error)
            self._state = _FAILED

    def _join_thread(self) -> None:
        if self._sending is not None:
            self._sending.join(_END_S)
            self._sending = None

    def on_train_end(self, context: CallbackContext) -> None:
        self.close()

    def close(self) -> None:
        """Ends the exchange and lets go of the group, in any world."""
        self._join_thread()
        self.held.memory.wait()
        self._group = self._flags = None
