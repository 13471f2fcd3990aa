"""Seconds and bytes of a model block by block: what a layer partition is made of.

A block cannot be split. Block 0 is the embedding, blocks 1 to L are the layers, and block L + 1 is
the final norm with the head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from copus_ext.cost_model import layer_time
from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.extras import terms_of
from copus_ext.cost_model.layer_time import MicroBatch
from copus_ext.cost_model.memory import (
    FRAGMENTATION,
    buffer_bytes,
    end_parameters,
    gradient_copy_bytes,
    head_bytes,
    layer_bytes,
    layer_parameters,
    message_bytes,
    process_bytes,
)
from copus_ext.cost_model.rows import RECOMPUTE_BLOCK, ConfigBatch
from copus_ext.cost_model.step import end_of_step, handled_s

SecondsBehind = Callable[[Any, Any], Any]
"""Seconds behind the last backward pass: of [pp, n] parameters held and [pp, n] seconds of a
backward pass of one micro-batch, [pp, n]."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Costs of one micro-batch through every block, on one tensor-parallel rank: each [L + 2], or
    [pp, L + 2] where they depend on the stage the block would run on."""

    forward_s: Any
    """Seconds of the forward pass."""
    backward_s: Any
    """Seconds of the backward pass, recomputation included."""
    parameters: Any
    static_bytes: Any
    """Bytes of weights, gradients and optimizer."""
    saved_bytes: Any
    """Bytes kept for every micro-batch in flight."""
    working_bytes: Any
    """Bytes that come and go; one block of a stage at a time has them."""

    def __post_init__(self) -> None:
        lengths = set()
        for field in fields(self):
            values = np.asarray(getattr(self, field.name), dtype=float)
            object.__setattr__(self, field.name, values)
            if values.ndim not in (1, 2) or not np.isfinite(values).all() or (values < 0).any():
                raise ValueError(
                    f"{field.name} must be finite, at least 0, [blocks] or [pp, blocks]"
                )
            lengths.add(values.shape[-1])
        if len(lengths) != 1 or min(lengths) < 3:
            raise ValueError(
                f"blocks of {sorted(lengths)} entries: every field needs one for the embedding, "
                "one per layer, one for the head"
            )

    @property
    def num_layers(self) -> int:
        return self.forward_s.shape[-1] - 2


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """What a configuration costs besides its blocks."""

    blocks: Blocks
    p2p_time_s: Any
    """[pp] seconds of a message from stage r to r + 1; the last from the last to the first."""
    fixed_bytes: float
    """Bytes of every stage: context, buffers."""
    resting_bytes: float
    """Of them, those that a process needs before it has any tensor."""
    copied_bytes: float
    """For each parameter, when the optimizer steps and nothing is kept for the passes."""
    chunk_bytes: float
    """Bytes kept for every chunk and micro-batch in flight, besides those of its blocks."""
    chunk_s: float
    """Seconds of a pass of every chunk, besides those of its blocks."""
    end_of_step: SecondsBehind
    """Reduction, optimizer, gathering."""
    fixed_s: float
    """Seconds of a step that no stage can change."""


def costs_by_block(
    rows: ConfigBatch, c: Constants, *, context_bytes: float | None = None
) -> StageCosts:
    """Takes the cost model apart: with equal stages its parts add up to `step_time` and `memory`.
    The seconds of extras are those of equal stages whatever layers a stage has.

    Args:
        rows: one row; its layers need not divide by its stages.
        context_bytes: of a process; None: as predicted.

    Raises:
        ValueError: layers that cost more or less by their place in a chunk (recompute `block`).
    """
    rows = rows.full()
    assert len(rows) == 1, "one configuration at a time"
    if rows.recompute[0] == RECOMPUTE_BLOCK:
        raise ValueError("recompute=block has no cost per layer; use none, selective or full")
    micro_batch = MicroBatch.of(rows, c)
    kept, working = layer_bytes(rows)
    first, last = end_parameters(rows)
    of = functools.partial(_blocks, int(rows.num_layers[0]))
    parameters = of(first, layer_parameters(rows), last)
    share = 1.0 / rows.copies[0] if rows.use_distributed_optimizer[0] else 1.0
    owned = rows.optimizer_bytes[0] * share
    terms = terms_of(rows)
    resting = float(process_bytes(rows)[0]) if context_bytes is None else context_bytes
    local_message = FRAGMENTATION * message_bytes(rows)[0]

    ring = functools.partial(layer_time.ring_s, rows, c)
    forward = of(*micro_batch.forward)
    mean_s = forward.sum() / rows.pp

    def end(held: Any, backward: Any) -> Any:
        return sum(end_of_step(rows, c, held, backward, mean_s).seconds(ring))

    return StageCosts(
        blocks=Blocks(
            forward_s=forward,
            backward_s=of(*micro_batch.backward),
            parameters=parameters,
            static_bytes=(rows.element_bytes + rows.gradient_bytes + owned + terms.parameter_bytes)
            * parameters
            + of(0.0, terms.layer_bytes, 0.0),
            saved_bytes=FRAGMENTATION * of(0.0, kept, 0.0),
            working_bytes=FRAGMENTATION * of(0.0, working, head_bytes(rows)),
        ),
        p2p_time_s=layer_time.p2p_time_s(rows, c)[:, 0],
        fixed_bytes=float(resting + FRAGMENTATION * buffer_bytes(rows)[0]),
        resting_bytes=resting,
        copied_bytes=float(gradient_copy_bytes(rows)[0] * share),
        chunk_bytes=float(local_message) if rows.on_cpu[0] and rows.vpp[0] > 1 else 0.0,
        chunk_s=float(handled_s(rows, c, int(rows.vpp[0]))[0]),
        end_of_step=end,
        fixed_s=c.factors.compute * c.step_s,
    )


def _blocks(num_layers: int, first: Any, layer: Any, last: Any) -> Any:
    """[L + 2] of what one embedding, layer and head cost."""
    first, layer, last = (float(np.asarray(x).reshape(-1)[0]) for x in (first, layer, last))
    return np.array([first, *[layer] * num_layers, last])


@functools.lru_cache(maxsize=1024)
def in_flight_chunks(pp: int, vpp: int, num_microbatches: int, stage: int) -> Any:
    """Micro-batches of every chunk whose activations a stage holds, at the moments that matter.

    Args:
        num_microbatches: per replica; with vpp > 1 a multiple of pp.
        stage: which.

    Returns:
        [k, vpp] counts: at every other moment some row of these holds as much of each chunk.
    """
    if vpp == 1:
        return np.array([[min(pp - stage, num_microbatches)]])
    # Warm-up passes are fewer than those of vpp + 1 groups; then every group is like the last.
    count = min(num_microbatches, (2 * vpp + 4) * pp)
    order = [q // pp % vpp for q in range(count * vpp)]
    warm = min(2 * (pp - stage - 1) + (vpp - 1) * pp, len(order))
    held, seen = [0] * vpp, set()
    for q, chunk in enumerate(order):
        held[chunk] += 1
        if q + 1 >= warm:
            seen.add(tuple(held))
        if q >= warm:
            held[vpp - 1 - order[q - warm]] -= 1
    table = np.array(sorted(seen))
    below = [((table >= row).all(axis=1) & (table > row).any(axis=1)).any() for row in table]
    return table[~np.array(below)]
