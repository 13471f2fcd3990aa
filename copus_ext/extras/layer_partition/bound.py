"""Seconds that a pipeline takes at least: for much less than a simulation, many pipelines at once.

Arrays are [pp, vpp, ...] for chunks and [pp, ...] for stages. What follows are pipelines, and
arrays may differ there in what they broadcast to.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def meetings(pp: int, num_microbatches: int) -> Any:
    """[pp] exchanges that plain 1F1B waits for over the boundary behind every stage."""
    ahead = pp - 1 - np.arange(pp)
    return np.where(ahead > 0, num_microbatches + np.minimum(ahead, num_microbatches), 0)


def own_s(forward: Any, backward: Any, hop: Any, num_microbatches: int, *, plain: bool) -> Any:
    """[pp, ...] seconds of all passes and, in plain 1F1B, exchanges of every stage.

    Args:
        forward: [pp, ...] seconds of a forward pass of a stage, one micro-batch.
        backward: [pp, ...] the same of the backward pass.
        hop: [pp, ...] seconds of a message to the next stage.
        num_microbatches: of a replica.
        plain: whether stages have one chunk.
    """
    work = num_microbatches * (forward + backward)
    if not plain:
        return work
    waited = _along(meetings(len(hop), num_microbatches), hop) * hop
    waited[1:] += waited[:-1].copy()
    return work + waited


def turn_s(forward: Any, backward: Any, hop: Any, num_microbatches: int) -> Any:
    """[pp, ...] seconds of every stage in plain 1F1B besides one micro-batch's way through all
    stages and back; arguments as for `own_s`.

    That is what a stage does before its last forward pass, whose micro-batch then goes on down and
    up again, or behind its first backward pass, if that is longer.
    """
    more, pp = num_microbatches - 1, len(hop)
    ahead = pp - 1 - np.arange(pp)
    also = _along(np.maximum(more - ahead, 0), forward)
    hops = hop * _along(ahead > 0, hop)
    hops[1:] += hops[:-1].copy()
    before = more * forward + also * backward
    behind = more * backward + also * forward
    return np.maximum(before, behind) + more * hops


def min_step_s(forward: Any, backward: Any, hop: Any, end: Any, num_microbatches: int) -> Any:
    """[...] seconds that no step is shorter than.

    The own work and exchanges of any stage, behind the first micro-batch on its way down to it,
    before its own end, or before the last gradient's way up and the end of the first stage. In
    plain 1F1B also one micro-batch's way through all stages and `turn_s` of any. With several
    chunks also all messages over one link, one after the other.

    Args:
        forward: [pp, vpp, ...] seconds of the forward pass of a chunk, one micro-batch.
        backward: [pp, vpp, ...] the same of the backward pass.
        hop: [pp, ...] seconds of a message to the next stage; the last row is only used with
            several chunks.
        end: [pp, ...] seconds behind the last backward pass.
        num_microbatches: of a replica.
    """
    pp, vpp = len(forward), forward.shape[1]
    f, g = forward[:, 0], backward[:, 0]
    own = own_s(forward.sum(axis=1), backward.sum(axis=1), hop, num_microbatches, plain=vpp == 1)
    down, up = _before(f + hop), _before(g + hop)
    if vpp == 1:
        # The message from the stage before is among the stage's own.
        down[1:] -= hop[:-1]
        up[1:] -= hop[:-1]
        through = (f + g).sum(axis=0) + 2 * hop[:-1].sum(axis=0)
        also = through + turn_s(f, g, hop, num_microbatches).max(axis=0) + end[0]
    else:
        messages = num_microbatches * vpp * hop
        messages[-1] -= num_microbatches * hop[-1]
        also = (messages + down + f).max(axis=0)
    start = own + down
    done = np.maximum((start + end).max(axis=0), also)
    return np.maximum(done, (start + up).max(axis=0) + end[0]) if pp > 1 else done


def _before(values: Any) -> Any:
    """[pp, ...] sums of the stages before each."""
    return np.cumsum(values, axis=0) - values


def _along(values: Any, like: Any) -> Any:
    """[pp, 1, ...] of as many dimensions as another array."""
    return values.reshape(-1, *[1] * (np.ndim(like) - 1))
