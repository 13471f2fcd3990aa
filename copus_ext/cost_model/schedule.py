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


_Operation = tuple[int, int, int, int, int, int]
"""One pass, with the places of its messages in a table of arrival times: stage; direction, 0
forward and 1 backward; chunk; the row of the message that it waits for, or -1; the boundary over
which its result goes, or -1 at the ends of the model; the row of the message that it sends, or
-1. No named tuple, as a search makes a hundred thousand."""


class _Passes:
    """The passes of the interleaved schedule as whole numbers.

    The number of a pass is kind + num_kinds * micro-batch. Its kind is
    (2 * chunk + direction) * pp + stage.
    """

    def __init__(self, pp: int, vpp: int) -> None:
        self.pp, self.vpp, self.num_kinds = pp, vpp, 2 * vpp * pp
        kinds = [(r, d, c) for c in range(vpp) for d in (0, 1) for r in range(pp)]
        self.kinds = [(d, c, self._needed(r, d, c), self._boundary(r, d, c)) for r, d, c in kinds]
        """By kind: direction, chunk, what to add for the number of the pass that it waits for (0
        for none), and the boundary over which its result goes (-1 at the ends of the model)."""

    def _needed(self, r: int, direction: int, chunk: int) -> int:
        pp = self.pp
        if direction == 0:
            if r > 0:
                return -1
            return -1 - pp if chunk > 0 else 0
        if r < pp - 1:
            return 1
        return 1 + pp if chunk < self.vpp - 1 else -pp

    def _boundary(self, r: int, direction: int, chunk: int) -> int:
        last = self.pp - 1
        if direction == 0:
            return r if r < last or chunk < self.vpp - 1 else -1
        if r > 0:
            return r - 1
        return last if chunk > 0 else -1

    def programs(self, count: int) -> tuple[list[list[int]], list[list[int]]]:
        """The passes of every stage in its own order; and how many each has done at the end of each
        segment.

        A segment ends with each group of the steady phase, and the last one with the schedule.
        Where a group ends, stage r has done r pairs more than stage 0, which is what the messages
        between them ask for.
        """
        pp, vpp, total = self.pp, self.vpp, count * self.vpp
        passes = [
            (chunk, self.num_kinds * m)
            for group in range(0, count, pp)
            for chunk in range(vpp)
            for m in range(group, group + pp)
        ]
        forward = [2 * chunk * pp + at for chunk, at in passes]
        backward = [(2 * (vpp - 1 - chunk) + 1) * pp + at for chunk, at in passes]
        programs, warm = [], []
        for r in range(pp):
            early = min(2 * (pp - r - 1) + (vpp - 1) * pp, total)
            program = forward[:early]
            for pair in zip(forward[early:], backward):
                program += pair
            program += backward[total - early :]
            programs.append([r + one for one in program])
            warm.append(early)
        rounds = min((total - warm[r] - r) // (pp * vpp) for r in range(pp))
        ends = [[warm[r] + 2 * (k * pp * vpp + r) for r in range(pp)] for k in range(rounds + 1)]
        return programs, [*ends, [len(program) for program in programs]]


@functools.lru_cache(maxsize=64)
def _compiled(pp: int, vpp: int, count: int) -> tuple[list[list[_Operation]], list[Any], int]:
    """All passes in an order that respects every need, with their messages in numbered rows.

    Returns:
        Operations by segment of `_Passes.programs`. At the end of each segment but the last, the
        passes whose messages are under way, numbered from the first micro-batch of the next group,
        and the rows of these messages: two ends with equal numbers can be compared. The number of
        rows.
    """
    passes = _Passes(pp, vpp)
    programs, ends = passes.programs(count)
    merge = _Merge(passes, programs, count)
    group = pp * passes.num_kinds
    segments, cuts = [], []
    for number, end in enumerate(ends):
        segments.append(merge.until(end))
        # What is under way belongs to the next group or the two after it.
        rows = merge.rows[number * group : (number + 3) * group]
        under_way = [one for one, row in enumerate(rows) if row >= 0]
        cuts.append((under_way, [rows[one] for one in under_way]))
    return segments, cuts[:-1], merge.num_rows


_TO_COME = -2
"""In place of a row: the pass has not run."""
_NO_MESSAGE = -1
"""In place of a row: the pass has run, and no message of it is under way."""


class _Merge:
    """Brings the passes of all stages into one order, and gives their messages rows."""

    def __init__(self, passes: _Passes, programs: list[list[int]], count: int) -> None:
        self._passes, self._programs, self._at = passes, programs, [0] * passes.pp
        self.rows = [_TO_COME] * (passes.num_kinds * count)
        """By pass: the row of its message while that is under way."""
        self.num_rows = 0
        self._free: list[int] = []

    def until(self, ends: list[int]) -> list[_Operation]:
        """Goes on to a place in the program of each stage; returns the operations on the way.

        Raises:
            AssertionError: the schedule waits for itself.
        """
        operations: list[_Operation] = []
        while any(at < end for at, end in zip(self._at, ends)):
            before = len(operations)
            for r, end in enumerate(ends):
                self._go_on(r, end, operations)
            if len(operations) == before:
                pp, vpp = self._passes.pp, self._passes.vpp
                raise AssertionError(f"pp {pp}, vpp {vpp}: the schedule waits for itself")
        return operations

    def _go_on(self, r: int, end: int, operations: list[_Operation]) -> None:
        """Runs a stage until it has to wait or is at a place of its program."""
        rows, free, program = self.rows, self._free, self._programs[r]
        kinds, num_kinds = self._passes.kinds, self._passes.num_kinds
        at = self._at[r]
        while at < end:
            one = program[at]
            direction, chunk, needed, boundary = kinds[one % num_kinds]
            waits_for = sends_to = _NO_MESSAGE
            if needed:
                waits_for = rows[one + needed]
                if waits_for == _TO_COME:
                    break
                if waits_for >= 0:
                    free.append(waits_for)
                    rows[one + needed] = _NO_MESSAGE
            if boundary >= 0:
                if free:
                    sends_to = free.pop()
                else:
                    sends_to, self.num_rows = self.num_rows, self.num_rows + 1
            rows[one] = sends_to
            operations.append((r, direction, chunk, waits_for, boundary, sends_to))
            at += 1
        self._at[r] = at


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
    for stage, direction, chunk, waits_for, boundary, sends_to in operations:
        now = clock[stage]
        if waits_for >= 0:
            np.maximum(now, message[waits_for], out=now)
        now += parts[direction][stage][chunk]
        if sends_to >= 0:
            link = clock[pp + stage]
            np.maximum(link, now, out=link)
            link += hops[boundary]
            message[sends_to][:] = link


def _play_alone(
    operations: list[_Operation], x: Array, arrivals: Array, work: tuple[Array, Array], hop: Array
) -> None:
    """The same column by column: sooner for few, as a number costs less than a short array."""
    pp = len(x) // 2
    for column in range(x.shape[1]):
        clock, message = x[:, column].tolist(), arrivals[:, column].tolist()
        hops = hop[:, column].tolist()
        parts = [part[..., column].tolist() for part in work]
        for stage, direction, chunk, waits_for, boundary, sends_to in operations:
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
