"""Exact clocks of megatron-core's pipeline schedules, many configurations at once.

Plain 1F1B exchanges messages in rendezvous: neighbours meet, both wait for the later one, and no
transfer hides behind compute. The interleaved schedule sends eagerly: a message arrives one hop
after the pass that made it. Arrays hold one configuration per column.

The simulation is max-plus linear. Rounds of the steady phase repeat one list of operations, so that
once a round moves every clock by the same amount all later rounds do, and the rest is a jump.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_SAME = 1e-12


def pipeline_time(
    forward: Array, backward: Array, hop: Array, num_microbatches: NDArray[np.int64], *, vpp: int
) -> Array:
    """Clock of every stage when its last pass of a step is done.

    Args:
        forward: [pp, vpp, n] seconds of the forward pass of a chunk, one micro-batch.
        backward: [pp, vpp, n] seconds of its backward pass, recomputation included.
        hop: [pp - 1 or pp, n] seconds of a message from stage r to r + 1 or back; the interleaved
            schedule also uses the last row, from the last stage to the first.
        num_microbatches: [n] per replica; with vpp > 1 multiples of pp.
        vpp: chunks of a stage.

    Returns:
        [pp, n] seconds.
    """
    pp, _, num = forward.shape
    if pp == 1:
        return num_microbatches * (forward.sum(axis=1) + backward.sum(axis=1))
    if vpp > 1:
        return _by_count(forward, backward, hop, num_microbatches)
    clocks = np.empty((pp, num))
    f, g, c = forward[:, 0], backward[:, 0], hop[: pp - 1]
    long = num_microbatches >= pp
    if long.any():
        clocks[:, long] = _rounds(f[:, long], g[:, long], c[:, long], num_microbatches[long])
    for count in np.unique(num_microbatches[~long]):
        at = num_microbatches == count
        clocks[:, at] = _short(f[:, at], g[:, at], c[:, at], int(count))
    return clocks


class _Rendezvous:
    """Clocks of plain 1F1B, moved by its operations."""

    def __init__(self, forward: Array, backward: Array, hop: Array) -> None:
        self.f, self.g, self.c = forward, backward, hop
        self.x = np.zeros_like(forward)

    def exchange(self, r: int) -> None:
        """Stages r and r + 1 meet; outside the pipeline nobody is met."""
        if 0 <= r < len(self.c):
            both = np.maximum(self.x[r], self.x[r + 1]) + self.c[r]
            self.x[r] = both
            self.x[r + 1] = both

    def round(self, stages: range) -> None:
        """One steady iteration of these stages, from the last to the first.

        A stage runs forward, meets the next one (activation out, gradient in), runs backward; the
        meeting with the stage before is that stage's.
        """
        for r in reversed(stages):
            self.x[r] += self.f[r]
            self.exchange(r)
            self.x[r] += self.g[r]


def _rounds(forward: Array, backward: Array, hop: Array, count: NDArray[np.int64]) -> Array:
    """Plain 1F1B with at least as many micro-batches as stages."""
    pp = len(forward)
    s = _Rendezvous(forward, backward, hop)
    _warm_up(s, pp)
    left = count - pp + 1  # rounds that all stages take part in
    done = np.zeros(len(count), dtype=bool)
    final = np.empty_like(s.x)
    number = 0
    while True:
        before = s.x.copy()
        s.round(range(pp))
        number += 1
        step = s.x - before
        settled = np.ptp(step, axis=0) <= _SAME * s.x.max(axis=0)
        stop = ~done & (settled | (left == number))
        if stop.any():
            final[:, stop] = s.x[:, stop] + (left - number)[stop] * step[:, stop]
            done |= stop
        if done.all():
            break
    s.x = final
    _cool_down(s, pp)
    return s.x


def _warm_up(s: _Rendezvous, pp: int) -> None:
    """Up to the point where every stage has received what its first steady forward needs."""
    for number in range(pp - 1):
        # The k-th micro-batch runs down to the stage that keeps it for its steady phase.
        for r in range(pp - 1 - number):
            s.x[r] += s.f[r]
            s.exchange(r)


def _cool_down(s: _Rendezvous, pp: int) -> None:
    """Later stages still have steady iterations to do, then the gradients run back."""
    for number in range(1, pp):
        s.round(range(number, pp))
        for r in reversed(range(number)):
            s.exchange(r)
            s.x[r] += s.g[r]


def _short(forward: Array, backward: Array, hop: Array, count: int) -> Array:
    """Plain 1F1B with fewer micro-batches than stages: the program of each stage, merged."""
    s = _Rendezvous(forward, backward, hop)
    for kind, r in _program(len(forward), count):
        if kind == "x":
            s.exchange(r)
        else:
            s.x[r] += s.f[r] if kind == "f" else s.g[r]
    return s.x


@functools.lru_cache(maxsize=256)
def _program(pp: int, count: int) -> list[tuple[str, int]]:
    """All operations of plain 1F1B in an order that respects every stage's own and the meetings."""
    programs = [_stage_program(r, pp, count) for r in range(pp)]
    at, merged = [0] * pp, []
    while any(at[r] < len(programs[r]) for r in range(pp)):
        for r in range(pp):
            while at[r] < len(programs[r]):
                kind, boundary = programs[r][at[r]]
                if kind == "x":
                    other = boundary if boundary < r else r + 1
                    if at[other] >= len(programs[other]) or programs[other][at[other]] != (
                        "x",
                        boundary,
                    ):
                        break
                    at[other] += 1
                at[r] += 1
                merged.append((kind, boundary))
    return merged


def _stage_program(r: int, pp: int, count: int) -> list[tuple[str, int]]:
    warm = min(pp - 1 - r, count)
    up = [("x", r - 1)] if r > 0 else []
    down = [("x", r)] if r < pp - 1 else []
    program = ([*up, ("f", r), *down]) * warm
    if count > warm:
        program += up
    program += ([("f", r), *down, ("b", r), *up]) * (count - warm)
    return program + ([*down, ("b", r), *up]) * warm


def _by_count(
    forward: Array, backward: Array, hop: Array, num_microbatches: NDArray[np.int64]
) -> Array:
    """Interleaved 1F1B: simulated, and prolonged group by group where growth has settled."""
    pp = len(forward)
    clocks = np.empty((pp, len(num_microbatches)))
    for count in np.unique(num_microbatches):
        at = np.flatnonzero(num_microbatches == count)
        f, g, c = forward[..., at], backward[..., at], hop[:, at]
        groups = int(count) // pp
        if groups <= _GROUPS + 2:
            clocks[:, at] = _interleaved(f, g, c, int(count))
            continue
        three = [_interleaved(f, g, c, (_GROUPS + i) * pp) for i in range(3)]
        step = three[2] - three[1]
        tolerance = _SAME * three[2].max(axis=0) * 100
        even = (np.abs(step - (three[1] - three[0])) <= tolerance).all(axis=0) & (
            np.ptp(step, axis=0) <= tolerance
        )
        clocks[:, at] = three[2] + (groups - _GROUPS - 2) * step
        if not even.all():
            odd = ~even
            clocks[:, at[odd]] = _interleaved(f[..., odd], g[..., odd], c[:, odd], int(count))
    return clocks


_GROUPS = 6
"""Groups of pp micro-batches after which the growth of the interleaved schedule is looked at."""


@functools.lru_cache(maxsize=64)
def _interleaved_order(pp: int, vpp: int, count: int) -> list[tuple[int, int, int, int]]:
    """Operations (stage, direction, chunk, micro-batch) in an order that respects all needs."""
    total = count * vpp
    passes = []
    for group in range(0, count, pp):
        for chunk in range(vpp):
            passes += [(chunk, m) for m in range(group, min(group + pp, count))]
    programs = []
    for r in range(pp):
        warm = min(2 * (pp - r - 1) + (vpp - 1) * pp, total)
        program = [(0, *passes[q]) for q in range(warm)]
        for q in range(total - warm):
            program.append((0, *passes[q + warm]))
            program.append((1, vpp - 1 - passes[q][0], passes[q][1]))
        program += [(1, vpp - 1 - c, m) for c, m in passes[total - warm :]]
        programs.append(program)
    return _merge(programs, pp, vpp)


def _merge(programs: list[Any], pp: int, vpp: int) -> list[tuple[int, int, int, int]]:
    done: set[tuple[int, int, int, int]] = set()
    at, merged = [0] * pp, []
    while len(merged) < sum(map(len, programs)):
        for r in range(pp):
            while at[r] < len(programs[r]):
                direction, chunk, m = programs[r][at[r]]
                need = _needed(r, direction, chunk, m, pp, vpp)
                if need is not None and need not in done:
                    break
                done.add((r, direction, chunk, m))
                merged.append((r, direction, chunk, m))
                at[r] += 1
    return merged


def _needed(
    r: int, direction: int, chunk: int, m: int, pp: int, vpp: int
) -> tuple[int, int, int, int] | None:
    """The pass whose message a pass waits for."""
    if direction == 0:
        if r > 0:
            return (r - 1, 0, chunk, m)
        return (pp - 1, 0, chunk - 1, m) if chunk > 0 else None
    if r < pp - 1:
        return (r + 1, 1, chunk, m)
    return (0, 1, chunk + 1, m) if chunk < vpp - 1 else (r, 0, chunk, m)


def _interleaved(forward: Array, backward: Array, hop: Array, count: int) -> Array:
    pp, vpp, num = forward.shape
    x = np.zeros((pp, num))
    # Times at which messages arrive, by (stage, direction, chunk, micro-batch) that waits for them.
    ends: dict[tuple[int, int, int, int], Array] = {}
    for r, direction, chunk, m in _interleaved_order(pp, vpp, count):
        need = _needed(r, direction, chunk, m, pp, vpp)
        if need is not None and need[0] != r:
            np.maximum(x[r], ends.pop(need), out=x[r])
        x[r] += (backward if direction else forward)[r, chunk]
        boundary = _boundary_out(r, direction, chunk, pp, vpp)
        if boundary is not None:
            ends[r, direction, chunk, m] = x[r] + hop[boundary]
    return x


def _boundary_out(r: int, direction: int, chunk: int, pp: int, vpp: int) -> int | None:
    """The boundary a pass sends its result over; None for the ends of the model."""
    if direction == 0:
        if r < pp - 1:
            return r
        return pp - 1 if chunk < vpp - 1 else None
    if r > 0:
        return r - 1
    return pp - 1 if chunk > 0 else None
