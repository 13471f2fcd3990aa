"""Rebuilds the state of a run in the memory of other ranks: finds the newest step of which the
ranks together hold all, and fills a job of any layout from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from copus_ext.extras.elastic.copies import CopySet, HeldCopies, Moment, Piece
from copus_ext.reshard.ownership import all_of_layout
from copus_ext.reshard.parameters import shape_of
from copus_ext.reshard.plan import make_plan
from copus_ext.reshard.saved_state import masters_to_weights, restore_counts, share_weights
from copus_ext.reshard.transfer import Transfer
from megatron.trainer.checkpoint.load import Stored, stored_of
from megatron.trainer.common.collectives import all_gather_object
from megatron.trainer.config import Config
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.model_shape import ModelShape
from megatron.trainer.distributed.sharding import Record
from megatron.trainer.model.shards import Shards, local_shards

_MESSAGE_S = 60.0
_PLACE = Path("memory of the ranks")


@dataclass(frozen=True, kw_only=True)
class Found:
    """A moment of which the ranks of a generation hold all."""

    moment: Moment
    """The newest such."""
    layout: Layout
    """It was taken under."""
    held: list[list[int]]
    """By rank now, the ranks then whose copies it has."""
    common: dict[str, Any]
    """The state that is the same on all ranks."""
    step: int
    """Updates of Adam."""
    scaler: dict[str, Any] | None
    """Of the loss."""


def find(held: HeldCopies) -> Found | None:
    """The newest moment of which all ranks of the world together hold every copy. Collective.

    Returns:
        The same on every rank; None where there is no such moment. Then all copies are dropped.
    """
    own = {
        moment: (str(one.layout), [piece.rank for piece in one.pieces])
        for moment, one in held.sets.items()
    }
    everyone = all_gather_object(own)
    moments = sorted({moment for one in everyone for moment in one}, reverse=True)
    for moment in moments:
        layout = Layout.from_text(next(one[moment][0] for one in everyone if moment in one))
        by_rank = [one[moment][1] if moment in one else [] for one in everyone]
        if {rank for ranks in by_rank for rank in ranks} >= set(range(layout.world_size)):
            return _found(held, moment, layout, by_rank)
    held.clear()
    return None


def _found(held: HeldCopies, moment: Moment, layout: Layout, by_rank: list[list[int]]) -> Found:
    """Adds what the lowest rank that was there knows of the moment."""
    source = next(rank for rank, ranks in enumerate(by_rank) if ranks)
    box: list[Any] = [None]
    if dist.get_rank() == source:
        one = held.sets[moment]
        box = [(one.common, one.step, one.scaler)]
    dist.broadcast_object_list(box, src=source)
    common, step, scaler = box[0]
    return Found(
        moment=moment, layout=layout, held=by_rank, common=common, step=step, scaler=scaler
    )


def stored_in_memory(found: Found, held: HeldCopies) -> Stored:
    """What `pretrain` resumes from, as if it were a checkpoint."""
    iteration = found.moment.iteration
    own = held.sets.get(found.moment)

    def restore(config: Config, model: Any, optimizer: Any, groups: Any) -> None:
        _restore(found, own, config, model, optimizer, groups)

    return stored_of(found.common, _PLACE, iteration, restore=restore)


def _restore(
    found: Found, own: CopySet | None, config: Config, model: Any, optimizer: Any, groups: Any
) -> None:
    """Fills a job that was just built. Collective over the world.

    Raises:
        Incomplete: elements that nobody holds.
        RuntimeError: a message failed.
    """
    shape = shape_of(config)
    target = local_shards(model, optimizer, groups)
    records = all_of_layout(shape, config.layout)
    if target.records != records[dist.get_rank()]:
        raise ValueError(f"the state of this model is not cut as planned for {config.layout}")
    plan = make_plan(_sources(found, shape), records)
    transfer = Transfer(
        plan,
        source=_source(found, own),
        target=target,
        group=dist.group.WORLD,
        timeout_s=_MESSAGE_S,
    )
    transfer.copy_own()
    transfer.exchange()
    restore_counts(optimizer, step=found.step, scaler=found.scaler)
    masters_to_weights(optimizer)
    share_weights(config, model, timeout_s=_MESSAGE_S)


def _sources(found: Found, shape: ModelShape) -> list[list[Record]]:
    """By rank now, the records of all copies that it holds."""
    then = all_of_layout(shape, found.layout)
    flat = [Piece.records_of(records) for records in then]
    return [
        [
            record._replace(shard=number)
            for number, rank in enumerate(ranks)
            for record in flat[rank]
        ]
        for ranks in found.held
    ]


def _source(found: Found, own: CopySet | None) -> Shards:
    """The copies of this rank, in the same order."""
    ranks = found.held[dist.get_rank()]
    pieces = {piece.rank: piece for piece in own.pieces} if own is not None else {}
    return Shards(
        records=[
            record._replace(shard=number)
            for number, rank in enumerate(ranks)
            for record in pieces[rank].records
        ],
        tensors=[pieces[rank].tensors for rank in ranks],
    )
