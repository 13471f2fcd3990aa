"""Exact clocks of megatron-core's pipeline schedules, many configurations at once.

Plain 1F1B exchanges messages in rendezvous: neighbours meet, both wait for the later one, and no
transfer hides behind compute. The interleaved schedule sends eagerly: the messages of a stage, to
the next one and to the one before, leave over one link, each when the last one is through. Arrays
hold one configuration per column.

The simulation is max-plus linear. Rounds of the steady phase repeat one list of operations. Once a
round moves every clock by the same amount, all later rounds do, and the rest is a jump.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
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
        hop: [pp - 1 or pp, n] seconds of a message from stage r to r + 1 or back, which hold the
            link of its sender; the interleaved schedule also uses the last row, from the last stage
            to the first.
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


_Pass = tuple[int, int, int, int]
"""Stage, direction (0 forward, 1 backward), chunk, micro-batch."""
_FEW_COLUMNS = 4
"""Up to so many are simulated one by one."""
_FEW_GROUPS = 4
"""Groups of pp micro-batches that are simulated first; growth has mostly settled by then."""


def _by_count(
    forward: Array, backward: Array, hop: Array, num_microbatches: NDArray[np.int64]
) -> Array:
    """Interleaved 1F1B: simulated, and prolonged by whole groups once a group moves every clock and
    every message under way by the same time."""
    pp = len(forward)
    clocks = np.empty((pp, len(num_microbatches)))
    groups = num_microbatches // pp
    left = np.ones(len(groups), dtype=bool)
    limit = _FEW_GROUPS
    while left.any():
        for count in np.unique(np.minimum(groups[left], limit)):
            at = np.flatnonzero(left & (np.minimum(groups, limit) == count))
            f, g, c = forward[..., at], backward[..., at], hop[:, at]
            found, period = _interleaved(f, g, c, int(count) * pp)
            more = groups[at] - count
            ok = (more == 0) | np.isfinite(period)
            clocks[:, at[ok]] = found[:, ok] + np.where(more == 0, 0.0, more * period)[ok]
            left[at[ok]] = False
        limit *= 4
    return clocks


@functools.lru_cache(maxsize=64)
def _interleaved_order(pp: int, vpp: int, count: int) -> list[list[_Pass]]:
    """All passes in an order that respects every need, cut where a group of the steady phase ends.

    At such a cut stage r has done r pairs more than stage 0, which is what the messages between
    them ask for.
    """
    total = count * vpp
    passes = [
        (chunk, m)
        for group in range(0, count, pp)
        for chunk in range(vpp)
        for m in range(group, group + pp)
    ]
    programs, warm = [], []
    for r in range(pp):
        early = min(2 * (pp - r - 1) + (vpp - 1) * pp, total)
        program = [(0, *passes[q]) for q in range(early)]
        for q in range(total - early):
            program.append((0, *passes[q + early]))
            program.append((1, vpp - 1 - passes[q][0], passes[q][1]))
        program += [(1, vpp - 1 - c, m) for c, m in passes[total - early :]]
        programs.append(program)
        warm.append(early)
    rounds = min((total - warm[r] - r) // (pp * vpp) for r in range(pp))
    at, done = [0] * pp, set()
    segments = []
    for k in range(rounds + 1):
        until = [warm[r] + 2 * (k * pp * vpp + r) for r in range(pp)]
        segments.append(_merge(programs, at, until, done, pp, vpp))
    segments.append(_merge(programs, at, [len(p) for p in programs], done, pp, vpp))
    return segments


def _merge(
    programs: list[Any], at: list[int], until: list[int], done: set[_Pass], pp: int, vpp: int
) -> list[_Pass]:
    """Passes of all stages up to some place in each, in an order that respects every need."""
    merged: list[_Pass] = []
    while any(a < b for a, b in zip(at, until)):
        before = len(merged)
        for r in range(pp):
            while at[r] < until[r]:
                direction, chunk, m = programs[r][at[r]]
                one = (r, direction, chunk, m)
                need = _needed(*one, pp, vpp)
                if need is not None and need not in done:
                    break
                done.add(one)
                merged.append(one)
                at[r] += 1
        if len(merged) == before:
            raise AssertionError(f"pp {pp}, vpp {vpp}: the schedule waits for itself")
    return merged


def _needed(r: int, direction: int, chunk: int, m: int, pp: int, vpp: int) -> _Pass | None:
    """The pass whose result a pass waits for."""
    if direction == 0:
        if r > 0:
            return (r - 1, 0, chunk, m)
        return (pp - 1, 0, chunk - 1, m) if chunk > 0 else None
    if r < pp - 1:
        return (r + 1, 1, chunk, m)
    return (0, 1, chunk + 1, m) if chunk < vpp - 1 else (r, 0, chunk, m)


@dataclass(frozen=True, kw_only=True)
class _Operation:
    """One pass, with the places of its messages in a table of arrival times."""

    stage: int
    direction: int
    chunk: int
    waits_for: int
    """Row of the message it waits for, or -1."""
    boundary: int
    """Boundary over which its result goes, or -1 at the ends of the model."""
    sends_to: int
    """Row of the message it sends, or -1."""


@functools.lru_cache(maxsize=64)
def _compiled(pp: int, vpp: int, count: int) -> tuple[list[list[_Operation]], list[Any], int]:
    """The passes of `_interleaved_order` with their messages in numbered rows.

    Returns:
        Operations by segment; at each cut the rows under way in an order that repeats from cut to
        cut (None where it does not); the number of rows.
    """
    rows: dict[_Pass, int] = {}
    free: list[int] = []
    num_rows = 0
    segments, cuts = [], []
    for number, segment in enumerate(_interleaved_order(pp, vpp, count)):
        operations = []
        for r, direction, chunk, m in segment:
            need = _needed(r, direction, chunk, m, pp, vpp)
            waits_for = -1
            if need is not None and need[0] != r:
                waits_for = rows.pop(need)
                free.append(waits_for)
            boundary = _boundary_out(r, direction, chunk, pp, vpp)
            sends_to = -1
            if boundary is not None:
                if free:
                    sends_to = free.pop()
                else:
                    sends_to, num_rows = num_rows, num_rows + 1
                rows[r, direction, chunk, m] = sends_to
            operations.append(
                _Operation(
                    stage=r,
                    direction=direction,
                    chunk=chunk,
                    waits_for=waits_for,
                    boundary=-1 if boundary is None else boundary,
                    sends_to=sends_to,
                )
            )
        segments.append(operations)
        shifted = {(r, d, k, m - number * pp): row for (r, d, k, m), row in rows.items()}
        cuts.append((sorted(shifted), [shifted[key] for key in sorted(shifted)]))
    return segments, cuts[:-1], num_rows


def _interleaved(forward: Array, backward: Array, hop: Array, count: int) -> tuple[Array, Array]:
    """Clocks after so many micro-batches, and the time of a further group: NaN where the growth has
    not settled."""
    pp, vpp, num = forward.shape
    x, period = np.zeros((2 * pp, num)), np.full(num, np.nan)  # clocks of stages and of their links
    segments, cuts, num_rows = _compiled(pp, vpp, count)
    arrivals = np.zeros((num_rows, num))
    play = _play_alone if num <= _FEW_COLUMNS else _play_together
    previous: tuple[Any, Array] | None = None
    for number, operations in enumerate(segments):
        play(operations, x, arrivals, (forward, backward), hop)
        if number < len(cuts):
            names, at = cuts[number]
            state = np.concatenate([x, arrivals[at]])
            if previous is not None and previous[0] == names:
                steps = state - previous[1]
                same = np.ptp(steps, axis=0) <= _SAME * x.max(axis=0)
                period[same] = steps[0, same]
            previous = names, state
    return x[:pp], period


def _play_together(
    operations: list[_Operation], x: Array, arrivals: Array, work: tuple[Array, Array], hop: Array
) -> None:
    """Moves clocks and messages of all columns by some passes."""
    clock, message, hops, pp = list(x), list(arrivals), list(hop), len(x) // 2
    parts = [[list(chunks) for chunks in part] for part in work]
    for o in operations:
        now = clock[o.stage]
        if o.waits_for >= 0:
            np.maximum(now, message[o.waits_for], out=now)
        now += parts[o.direction][o.stage][o.chunk]
        if o.sends_to >= 0:
            link = clock[pp + o.stage]
            np.maximum(link, now, out=link)
            link += hops[o.boundary]
            message[o.sends_to][:] = link


def _play_alone(
    operations: list[_Operation], x: Array, arrivals: Array, work: tuple[Array, Array], hop: Array
) -> None:
    """The same column by column: sooner for few, as a number costs less than a short array."""
    flat = [
        (o.stage, o.direction, o.chunk, o.waits_for, o.boundary, o.sends_to) for o in operations
    ]
    pp = len(x) // 2
    for column in range(x.shape[1]):
        clock, message = x[:, column].tolist(), arrivals[:, column].tolist()
        hops = hop[:, column].tolist()
        parts = [part[..., column].tolist() for part in work]
        for stage, direction, chunk, waits_for, boundary, sends_to in flat:
            now = clock[stage]
            if waits_for >= 0 and message[waits_for] > now:
                now = message[waits_for]
            now += parts[direction][stage][chunk]
            clock[stage] = now
            if sends_to >= 0:
                link = clock[pp + stage]
                link = (link if link > now else now) + hops[boundary]
                clock[pp + stage] = message[sends_to] = link
        x[:, column], arrivals[:, column] = clock, message


def _boundary_out(r: int, direction: int, chunk: int, pp: int, vpp: int) -> int | None:
    """The boundary a pass sends its result over; None for the ends of the model."""
    if direction == 0:
        if r < pp - 1:
            return r
        return pp - 1 if chunk < vpp - 1 else None
    if r > 0:
        return r - 1
    return pp - 1 if chunk > 0 else None
