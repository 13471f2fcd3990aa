"""Finds the fastest layer partition that fits: all of them where they are few, else a search.

In plain 1F1B the work, bytes and end of a stage depend only on where the stage starts and stops.
Dynamic programs over (stage, first block) bound all ways to continue from there that fit. The
bounds start a branch and bound, prune its branches, and prove where nothing fits.

Chunks of one stage depend on each other. Beyond `MAX_PARTITIONS` the search climbs from balanced
partitions, moves one layer at a time, and proves little.

`MAX_WORK` bounds what a search computes, counted and not timed: every machine answers the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from copus_ext.extras.layer_partition.problem import PartitionProblem, Priced

MAX_PARTITIONS = 50_000
"""Up to so many partitions are all priced, and so many branches are kept."""
MAX_WORK = 4e8
"""Numbers that a search moves, about: a second or two."""
_AT_FIRST, _AT_ONCE = 64, 2_000
"""Partitions that are simulated together, where the first ones may rule out the others."""
_CALL, _CELL, _PRICED, _TABLE = 1500, 10, 20, 40
"""What a simulated pass costs besides one number a partition; a branch for every block; a chunk of
a partition before it is simulated; and a run of blocks on a stage, before any branch."""
_SETTLED = 20
_SAME = 1e-9
"""Relative difference of two step times that are one."""
_MAX_ROUNDS, _CLIMBED = 200, 4


@dataclass(frozen=True, kw_only=True)
class Found:
    partition: Any
    """[chunks] layers of every chunk: the fastest that fits, else the one that lacks least."""
    step_s: float
    """Seconds of a step; NaN where nothing fits."""
    excess_bytes: float
    """Bytes that its worst stage lacks; at most 0 where it fits."""
    min_step_s: float
    """No partition that fits is faster than this."""
    proved: bool
    """Whether no other partition is faster (or, where none fits, whether surely none does)."""
    num_simulated: int
    """Partitions whose schedule was simulated."""


@dataclass(kw_only=True)
class _Best:
    problem: PartitionProblem
    work: float
    """What may still be computed."""
    partition: Any = None
    step_s: float = np.inf
    share: float = np.inf
    """Of its memory that its fullest stage uses: decides between equally fast ones."""
    num_simulated: int = 0
    unseen_s: float = np.inf
    """Those that there was no work left for are not faster than this."""

    def try_all(self, partitions: Any, *, until_better: bool = False) -> None:
        """Simulates those of [n, chunks] partitions that fit and could be faster.

        Args:
            partitions: the most promising of them come first.
            until_better: whether to stop where some were faster.
        """
        p, before = self.problem, self.step_s
        if not len(partitions):
            return
        priced = p.price(partitions)
        self.work -= _PRICED * partitions.size
        fits = np.flatnonzero(p.excess(priced) <= 0)
        least = p.min_step_s(priced.take(fits))
        order = fits[np.argsort(least, kind="stable")]
        least = np.sort(least, kind="stable")
        start, size = 0, _AT_FIRST
        while start < len(order):
            # Slower for sure, and so are all that follow.
            if least[start] > self.step_s * (1 + _SAME):
                break
            if self.work <= 0 and self.partition is not None:
                self.unseen_s = min(self.unseen_s, float(least[start]))
                break
            some = order[start : start + size]
            chosen = priced.take(some)
            seconds = self._simulate(chosen)
            shares = (chosen.peak_bytes / p.limit_bytes[:, None]).max(axis=0)
            self._take(partitions[some], seconds, shares)
            if until_better and self.step_s < before * (1 - _SAME):
                break
            start, size = start + len(some), min(2 * size, _AT_ONCE)

    def climb(self, starts: Any) -> None:
        """Moves one layer from a chunk to another while that helps.

        Starts at the fastest of [n, chunks] partitions.
        """
        p = self.problem
        starts = starts[p.excess(p.price(starts)) <= 0]
        if not len(starts):
            return
        seconds = self._simulate(p.price(starts))
        chosen = np.argsort(seconds, kind="stable")[:_CLIMBED]
        for i in chosen:
            share = self.work / 2
            one = _Best(problem=p, work=share)
            one.try_all(starts[i][None])
            for _ in range(_MAX_ROUNDS):
                before = one.step_s
                if one.work > 0:
                    one.try_all(_neighbours(p, one.partition), until_better=True)
                if not one.step_s < before * (1 - _SAME):
                    break
            self.num_simulated += one.num_simulated
            self.work -= share - one.work
            self._take(one.partition[None], np.array([one.step_s]), np.array([one.share]))

    def _simulate(self, priced: Priced) -> Any:
        """[n] seconds of a step."""
        p, num = self.problem, priced.end_s.shape[1]
        # Most have settled by then.
        rounds = min(p.num_microbatches, _SETTLED * (p.pp if p.vpp > 1 else 8))
        passes = p.pp * (p.pp + rounds) if p.vpp == 1 else 2 * p.pp * p.vpp * rounds
        self.work -= passes * (num + _CALL)
        self.num_simulated += num
        return p.step_s(priced)

    def _take(self, partitions: Any, seconds: Any, shares: Any) -> None:
        near = np.flatnonzero(seconds <= min(seconds.min(), self.step_s) * (1 + _SAME))
        if not len(near):
            return
        i = near[np.lexsort((*partitions[near].T[::-1], shares[near]))[0]]
        if seconds[i] < self.step_s * (1 - _SAME) or shares[i] < self.share * (1 - _SAME):
            self.partition, self.step_s, self.share = (
                partitions[i],
                float(seconds[i]),
                float(shares[i]),
            )

    def found(self, min_step_s: float, proved: bool) -> Found:
        """What is told of a search that left out nothing faster than `min_step_s`."""
        min_step_s = min(min_step_s, self.unseen_s)
        proved = proved and not self.unseen_s < self.step_s * (1 - _SAME)
        return Found(
            partition=self.partition,
            step_s=self.step_s,
            excess_bytes=float(self.problem.excess(self.problem.price(self.partition[None]))[0]),
            min_step_s=min(min_step_s, self.step_s),
            proved=proved,
            num_simulated=self.num_simulated,
        )


def search(
    problem: PartitionProblem,
    *,
    max_partitions: int = MAX_PARTITIONS,
    max_work: float = MAX_WORK,
    starts: Any = (),
) -> Found:
    """The fastest partition within every stage's memory.

    Args:
        problem: with at least one partition (`PartitionProblem.num_partitions`).
        max_partitions: up to so many are all looked at, and so many branches are kept at a time.
        max_work: what may be computed, about, in numbers that are moved.
        starts: [n, chunks] partitions to climb from, besides balanced ones.
    """
    best = _Best(problem=problem, work=max_work)
    more = np.asarray(starts, dtype=np.int64).reshape(-1, problem.num_chunks)
    if problem.num_partitions <= max_partitions:
        return _exhaustive(problem, best)
    if problem.vpp == 1:
        return branch_and_bound(problem, max_partitions, best=best, starts=more)
    return _from_balanced(problem, best, more)


def min_of_all(problem: PartitionProblem) -> float:
    """Seconds of a step that no partition beats; infinity where surely none fits."""
    if problem.vpp > 1 or not problem.num_partitions:
        return float(_min_of_all(problem))
    tables = _Tables(problem)
    least = max(tables.ahead[0, 0], tables.through[0, 0] + tables.turns[0, 0])
    return float(least) + problem.fixed_s


def _exhaustive(problem: PartitionProblem, best: _Best) -> Found:
    partitions = problem.all_partitions()
    excess = problem.excess(problem.price(partitions))
    if excess.min() > 0:
        return _nothing(problem, partitions[int(excess.argmin())], proved=True)
    best.try_all(partitions[excess <= 0])
    return best.found(best.step_s, True)


def _nothing(problem: PartitionProblem, partition: Any, proved: bool) -> Found:
    best = _Best(problem=problem, work=MAX_WORK)
    best.try_all(partition[None])
    if best.partition is not None:
        # Sums in another order: it was a rounding error that lacked.
        return best.found(0.0, False)
    return Found(
        partition=partition,
        step_s=np.nan,
        excess_bytes=float(problem.excess(problem.price(partition[None]))[0]),
        min_step_s=np.inf,
        proved=proved,
        num_simulated=0,
    )


class _Tables:
    """Of a stage from one block to another, and of the best way to go on from there.

    `ahead[r, i]` is the least lower bound of what stages r and later take when r starts at block i:
    over all ways to partition the rest that fit, the greatest of each stage's own work and messages
    behind and before those of the stages from r up to it. `through[r, i]` is the least that one
    micro-batch takes there and back, `turns[r, i]` the least of the greatest `turn_s`.
    """

    def __init__(self, problem: PartitionProblem) -> None:
        p, num = problem, problem.blocks.num_layers + 2
        self.problem, self.num = p, num
        at = np.arange(num + 1)
        size = at[None, :] - at[:, None]
        shape = (p.pp, num + 1, num + 1)
        parts = {name: values[:, None, :] - values[:, :, None] for name, values in p.prefix.items()}
        self.allowed = np.broadcast_to(size >= 1, shape).copy()
        # Embedding and head stay with the ends, which may hold nothing else if they are bare.
        self.allowed[0, 1:] = False
        self.allowed[-1, :, :-1] = False
        self.allowed[1:, 0] = False
        self.allowed[:-1, :, -1] = False
        least = p.min_layers + (np.arange(p.pp) == 0) + (np.arange(p.pp) == p.pp - 1)
        self.allowed &= size >= least[:, None, None]
        flying = np.minimum(p.pp - np.arange(p.pp), p.num_microbatches)[:, None, None]
        peak = parts["static_bytes"] + p.max_working_bytes + p.fixed_bytes
        peak = peak + flying * (parts["saved_bytes"] + p.chunk_bytes)
        self.excess = np.where(self.allowed, peak - p.limit_bytes[:, None, None], np.inf)
        self.fits = self.excess <= 0
        self.forward, self.backward = parts["forward_s"], parts["backward_s"]
        self.end = np.zeros(shape)
        if p.end_of_step is not None:
            held, back = (x.reshape(p.pp, -1) for x in (parts["parameters"], self.backward))
            found = p.end_of_step(np.maximum(held, 0.0), np.maximum(back, 0.0))
            self.end = np.broadcast_to(found, held.shape).reshape(shape)
        # Of stage r: its work and messages but one there and back with r - 1, so that every stage
        # before it counts with its own boundary.
        self.before = np.append(0.0, p.p2p_time_s[:-1])
        self.own = p.own_s(self.forward, self.backward) - 2 * self.before[:, None, None]
        self.turn = p.turn_s(self.forward, self.backward)
        shape = (p.pp + 1, num + 1)
        self.ahead, self.through, self.turns = (np.full(shape, np.inf) for _ in range(3))
        self.ahead[p.pp, num], self.through[p.pp, num], self.turns[p.pp, num] = -np.inf, 0.0, 0.0
        self.next = np.zeros((p.pp, num + 1), dtype=np.int64)
        for r in reversed(range(p.pp)):
            way = self.passed(r)
            bound = np.maximum(self.own[r], way + self.ahead[r + 1])
            bound = np.where(self.fits[r], bound, np.inf)
            self.next[r] = bound.argmin(axis=1)
            self.ahead[r] = bound.min(axis=1)
            way = np.where(self.fits[r], way + self.through[r + 1], np.inf)
            self.through[r] = way.min(axis=1)
            turn = np.where(self.fits[r], np.maximum(self.turn[r], self.turns[r + 1]), np.inf)
            self.turns[r] = turn.min(axis=1)

    def passed(self, r: int) -> Any:
        """[i, k] what stage r adds to those after it: one micro-batch, there and back."""
        hop = self.problem.p2p_time_s[r] if r < self.problem.pp - 1 else 0.0
        return self.forward[r] + self.backward[r] + 2 * hop

    def start(self) -> Any:
        """[pp] the partition of the least lower bound."""
        return self.follow(self.next)

    def follow(self, following: Any) -> Any:
        """[pp] layers, from the next block of every stage and first block."""
        places = [0]
        for r in range(self.problem.pp):
            places.append(int(following[r, places[-1]]))
        return _layers(np.array([places]))[0]

    def min_excess(self) -> Any:
        """[pp] the partition whose worst stage lacks the fewest bytes."""
        p = self.problem
        worst = np.full(self.num + 1, np.inf)
        worst[-1] = -np.inf
        following = np.zeros_like(self.next)
        for r in reversed(range(p.pp)):
            lacks = np.where(self.allowed[r], np.maximum(self.excess[r], worst), np.inf)
            following[r] = lacks.argmin(axis=1)
            worst = lacks.min(axis=1)
        return self.follow(following)


def _layers(places: Any) -> Any:
    """[n, stages] layers, from [n, stages + 1] first blocks."""
    layers = np.diff(places, axis=1)
    layers[:, 0] -= 1
    layers[:, -1] -= 1
    return layers


def branch_and_bound(
    problem: PartitionProblem,
    max_branches: int,
    *,
    best: _Best | None = None,
    starts: Any = None,
) -> Found:
    """The fastest partition of whole stages, branch by branch, the most promising first.

    Args:
        problem: with vpp 1 and at least one partition.
        max_branches: how many are kept at a time; where more could still hold the best, the answer
            is not proved, but `Found.min_step_s` counts those left out.
        best: says what may be computed.
        starts: [n, chunks] partitions to climb from, too.
    """
    assert problem.vpp == 1, "stages of several chunks depend on more than where they start"
    tables = _Tables(problem)
    if not np.isfinite(tables.ahead[0, 0]):
        return _nothing(problem, tables.min_excess(), proved=True)
    best = best or _Best(problem=problem, work=MAX_WORK)
    best.work -= _TABLE * tables.fits.size
    first = [_balanced_partitions(problem), tables.start()[None]]
    best.climb(np.concatenate(first if starts is None else [*first, starts]))
    # What is left when the branches have been followed is for the simulations.
    cells = _CELL * problem.pp * (problem.blocks.num_layers + 2)
    max_branches = min(max_branches, max(int(best.work / 2 / cells), 1))
    places = np.zeros((1, 1), dtype=np.int64)
    low, end, down, shift, turn = (np.full(1, x) for x in (-np.inf, 0.0, 0.0, 0.0, 0.0))
    dropped = np.inf
    for r in range(problem.pp):
        i = places[:, -1]
        # All are [branches, next block].
        ends, way, own = tables.end[r, i], tables.passed(r)[i], tables.own[r, i]
        first = ends if r == 0 else end[:, None]
        bound = np.maximum(low[:, None], shift[:, None] + own + first)
        bound = np.maximum(bound, down[:, None] + own + tables.before[r] + ends)
        turns = np.maximum(turn[:, None], tables.turn[r, i])
        promise = np.maximum(bound, shift[:, None] + way + tables.ahead[r + 1] + first)
        rest = np.maximum(turns, tables.turns[r + 1]) + tables.through[r + 1]
        promise = np.maximum(promise, shift[:, None] + way + rest + first) + problem.fixed_s
        promise = np.where(tables.fits[r, i], promise, np.inf)
        at, to = np.nonzero(promise < best.step_s * (1 - _SAME))
        best.work -= _CELL * promise.size
        if len(at) > max_branches:
            order = np.argsort(promise[at, to], kind="stable")
            dropped = min(dropped, float(promise[at, to][order[max_branches]]))
            at, to = at[order[:max_branches]], to[order[:max_branches]]
        places = np.concatenate([places[at], to[:, None]], axis=1)
        low, turn = bound[at, to], turns[at, to]
        end = np.broadcast_to(first, promise.shape)[at, to]
        down = down[at] + tables.forward[r, i[at], to] + problem.p2p_time_s[r]
        shift = shift[at] + way[at, to]
    best.try_all(_layers(places))
    if best.partition is None:
        return _nothing(problem, tables.min_excess(), proved=not np.isfinite(dropped))
    return best.found(dropped, not dropped < best.step_s * (1 - _SAME))


def _neighbours(problem: PartitionProblem, partition: Any) -> Any:
    """[n, chunks] the partition with one layer taken from one chunk and given to another."""
    one = np.eye(len(partition), dtype=np.int64)
    moved = partition + (one[None] - one[:, None]).reshape(-1, len(partition))
    return moved[(moved >= problem.min_layers).all(axis=1) & (moved != partition).any(axis=1)]


def _from_balanced(problem: PartitionProblem, best: _Best, more: Any) -> Found:
    starts = np.concatenate([_balanced_partitions(problem), more])
    best.climb(starts)
    if best.partition is None:
        partition = _made_to_fit(problem, starts, best.work)
        if problem.excess(problem.price(partition[None]))[0] > 0:
            return _nothing(problem, partition, proved=False)
        best.climb(partition[None])
    least = float(_min_of_all(problem))
    return best.found(least, best.step_s <= least * (1 + _SAME))


def _balanced_partitions(problem: PartitionProblem) -> Any:
    """[n, chunks] where to start: equal chunks in the middle with all sizes of the ends, and the
    chunks whose slowest is fastest."""
    return np.unique(np.concatenate([_ends_varied(problem), _balanced(problem)]), axis=0)


def _ends_varied(problem: PartitionProblem) -> Any:
    """[n, chunks] partitions of all sizes of both end chunks, as even as can be between."""
    chunks, layers, least = problem.num_chunks, problem.blocks.num_layers, problem.min_layers
    most, partitions = 2 * -(-layers // chunks) + 1, []
    if chunks < 3:
        return np.zeros((0, chunks), dtype=np.int64)
    for first in range(int(least[0]), most):
        for last in range(int(least[-1]), most):
            rest, middle = layers - first - last, chunks - 2
            if rest < middle:
                continue
            more = np.arange(1, middle + 1) * rest // middle
            partitions.append([first, *np.diff(more, prepend=0), last])
    return np.array(partitions, dtype=np.int64).reshape(-1, chunks)


def _balanced(problem: PartitionProblem) -> Any:
    """[n, chunks] the partition whose slowest chunk is fastest, and the one whose slowest stage is,
    the layers of a stage spread over its chunks."""
    p, least = problem, problem.min_layers
    found = [_fastest_slowest(p, least, np.arange(p.num_chunks) % p.pp)]
    if p.vpp > 1:
        stages = _fastest_slowest(p, least.reshape(p.vpp, p.pp).sum(axis=0), np.arange(p.pp))
        each, left = np.divmod(stages - least.reshape(p.vpp, p.pp).sum(axis=0), p.vpp)
        # The embedding is in the first chunk and the head in the last: others get what is left.
        number = np.arange(p.vpp)[:, None]
        turned = np.where(np.arange(p.pp) == 0, p.vpp - 1 - number, number)
        found.append((least.reshape(p.vpp, p.pp) + each + (turned < left)).reshape(-1))
    return np.array(found)


def _fastest_slowest(problem: PartitionProblem, least: Any, stage_of: Any) -> Any:
    """[parts] layers of every part of the model, so that the slowest is as fast as can be.

    Args:
        problem: layers and stages.
        least: [parts] layers that each must hold.
        stage_of: [parts] where each runs.
    """
    num = problem.blocks.num_layers + 2
    work = problem.prefix["forward_s"] + problem.prefix["backward_s"]
    least = least.copy()
    least[0] += 1
    least[-1] += 1
    worst = np.full(num + 1, np.inf)
    worst[-1] = -np.inf
    following = np.zeros((len(least), num + 1), dtype=np.int64)
    at = np.arange(num + 1)
    for k in reversed(range(len(least))):
        own = work[stage_of[k]][None, :] - work[stage_of[k]][:, None]
        slowest = np.maximum(own, worst)
        slowest[at[None, :] - at[:, None] < least[k]] = np.inf
        following[k], worst = slowest.argmin(axis=1), slowest.min(axis=1)
    places = [0]
    for k in range(len(least)):
        places.append(int(following[k, places[-1]]))
    return _layers(np.array([places]))[0]


def _made_to_fit(problem: PartitionProblem, starts: Any, work: float) -> Any:
    """[chunks] the partition that lacks the fewest bytes of all that moving layers reaches, until
    so much was computed."""
    partition, lacks = None, np.inf
    partitions = starts
    for _ in range(_MAX_ROUNDS):
        excess = problem.excess(problem.price(partitions))
        work -= _PRICED * partitions.size
        if not excess.min() < lacks or lacks <= 0:
            break
        partition, lacks = partitions[int(excess.argmin())], float(excess.min())
        partitions = _neighbours(problem, partition)
        if not len(partitions) or work <= 0:
            break
    return partition


def _min_of_all(problem: PartitionProblem) -> Any:
    """Seconds that no partition beats: all work on all stages at once."""
    fastest = (problem.of_stages("forward_s") + problem.of_stages("backward_s")).min(axis=0)
    work = problem.num_microbatches * fastest.sum() / problem.speed.sum()
    return work + problem.fixed_s
