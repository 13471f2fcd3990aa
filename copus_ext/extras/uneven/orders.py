"""Searches the best order of a few or of many things by what each order costs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Orders = NDArray[np.int64]
Cost = Callable[[Orders], Array]

_CHAINS = 48
"""Searches that cool down side by side, so that all their orders are priced together."""
_HOT, _COLD = 0.03, 0.0003
"""Relative growth of the cost that a chain takes as likely as not, at first and at last."""
_BEAM, _BEAM_CELLS = 256, 8192
"""Ways to fill the first places that are kept, and of how many places all of them may be."""
_TRUST = 0.5
"""How much the chain that believes most in the guide believes in it."""
_LONGEST = 0.25
"""Part of an order that a reversed or moved block may have, at most."""
_AT_FIRST, _AT_ONCE = 48, 4096
"""Orders that are priced together where most may turn out not to need it."""
_A_PRICE, _MIN_PRICED = 50, 8
"""Orders that are looked at for each that is priced, and how many are priced at least."""
_ROUNDING = 1e-12
"""Relative difference of two costs that is none."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best order that a search came across."""

    order: NDArray[np.int64]
    """[n] what is at every place."""
    cost: float
    num_priced: int
    """Orders that were priced."""


@functools.lru_cache(maxsize=16)
def every_order(
    num: int,
    *,
    equivalent: tuple[tuple[int, ...], ...] = (),
    turning: int = 1,
    reversible: bool = False,
) -> Orders:
    """All orders, but only one of those that symmetry makes equal.

    Args:
        num: things to order.
        equivalent: groups of things whose exchange has no effect.
        turning: q, where to turn places k q to k q + q - 1, for all k together, has no effect.
        reversible: whether to reverse all these has none either.

    Returns:
        [m, num], first the given order if it is one of those kept; not to be written to.
    """
    orders = np.array(list(itertools.permutations(range(num))), dtype=np.int64)
    keep = np.ones(len(orders), dtype=bool)
    place = np.argsort(orders, axis=1)
    # The least of all equal orders, compared place by place, passes every one of these tests.
    for group in equivalent:
        for a, b in itertools.pairwise(sorted(group)):
            keep &= place[:, a] < place[:, b]
    if turning > 1:
        keep &= orders[:, 0] == orders[:, :turning].min(axis=1)
    if turning > 2 and reversible:
        keep &= orders[:, 1] < orders[:, turning - 1]
    return orders[keep]


def greedy_orders(traffic: Array, seconds: Array) -> Orders:
    """Orders that put things that are near each other where most is sent.

    A beam search fills one place after the other and keeps the cheapest few ways so far. Which of
    two equal things is the right one shows only later.

    Args:
        traffic: [places, places] what is sent from place to place.
        seconds: [things, things] what it takes to send one unit from thing to thing.

    Returns:
        [m, places], the cheapest first for each of the ways to go through the places.
    """
    between, far = traffic + traffic.T, np.maximum(seconds, seconds.T)
    np.fill_diagonal(far, 0.0)
    found = []
    for closing in (False, True):
        sequence = _sequence(between, closing=closing)
        found += [_beam(between, far, sequence, power=power) for power in (1, 4)]
    return np.concatenate(found)


def _sequence(between: Array, *, closing: bool) -> list[int]:
    """The order in which places are filled: along what is sent most, or so that rings of few places
    close soon, which tells right from wrong early."""
    sequence = [int(np.argmax(between.sum(axis=1)))]
    while len(sequence) < len(between):
        left = [place for place in range(len(between)) if place not in sequence]

        def rank(place: int) -> tuple[float, float, float]:
            tied = np.flatnonzero(between[place, sequence])
            weight = float(between[place, sequence].sum())
            if not closing or not len(tied):
                return weight, 0.0, 0.0
            return len(tied), -float(tied[0]), weight

        sequence.append(max(left, key=lambda place: (*rank(place), -place)))
    return sequence


def _beam(between: Array, far: Array, sequence: list[int], *, power: int) -> Orders:
    num = len(between)
    width = min(_BEAM, max(_BEAM_CELLS // num, num))
    orders = np.full((num, num), -1, dtype=np.int64)
    orders[:, sequence[0]] = np.arange(num)
    strain = np.zeros(num)
    for step, place in enumerate(sequence[1:], 1):
        near = [other for other in sequence[:step] if between[place, other] > 0]
        added = (between[place, near, None] * far[orders[:, near]]) ** power
        total = strain[:, None] + added.sum(axis=1)
        rows = np.arange(len(orders))[:, None]
        total[rows, orders[:, sequence[:step]]] = np.inf
        flat = total.ravel()
        kept = np.argsort(flat, kind="stable")[:width]
        kept = kept[np.isfinite(flat[kept])]
        orders, strain = orders[kept // num], flat[kept]
        orders[:, place] = kept % num
    return orders[: width // 4]


def cheapest(
    cost: Cost, least: Cost, orders: Orders, *, below: float = np.inf
) -> tuple[int, float, int]:
    """The cheapest of some orders, without pricing those that a lower bound rules out.

    Args:
        cost: [m, n] orders -> [m] positive costs.
        least: [m, n] orders -> [m] lower bounds of them.
        orders: [m, n] which.
        below: cost that the answer must be less than.

    Returns:
        Its index (-1: none costs less), its cost, and how many were priced.
    """
    low = least(orders)
    ranked = np.argsort(low, kind="stable")
    at, best, start, size = -1, below, 0, _AT_FIRST
    while start < len(ranked) and low[ranked[start]] < best * (1 - _ROUNDING):
        some = ranked[start : start + size]
        some = some[low[some] < best * (1 - _ROUNDING)]
        costs = cost(orders[some])
        i = int(np.argmin(costs))
        if costs[i] < best:
            at, best = int(some[i]), float(costs[i])
        start, size = start + len(some), min(2 * size, _AT_ONCE)
    return at, best, start


def anneal(
    cost: Cost,
    least: Cost,
    guide: Cost,
    starts: Orders,
    *,
    evaluations: int,
    polish: int,
    seed: int = 0,
) -> Found:
    """Simulated annealing from the best of some orders, then swaps and turns of three until none
    helps.

    The chains go by the lower bound, and the costs decide among what they came across. What is
    accepted depends on relative changes only, so that units do not matter. The number of orders
    looked at is bounded beforehand: the same input has the same answer on any machine.

    Args:
        cost: [m, n] orders -> [m] positive costs.
        least: the same, lower bounds of the costs, which are sooner to have.
        guide: the same, a small preference among orders of equal cost.
        starts: [m, n] orders to begin with.
        evaluations: orders that the chains look at, about.
        polish: orders that are looked at after that, about.
    """
    random = np.random.default_rng(seed)
    begin = least(starts)
    ranked = np.argsort(begin, kind="stable")
    chosen = ranked[np.arange(_CHAINS) % min(len(ranked), _CHAINS // 4)]
    now, current = starts[chosen].copy(), begin[chosen].copy()
    hint = guide(now)
    seen, lowest = now.copy(), current.copy()
    trust = np.linspace(0.0, _TRUST, _CHAINS)
    rounds = max((evaluations - len(starts)) // _CHAINS, 1)
    for number in range(rounds):
        heat = _HOT * (_COLD / _HOT) ** (number / rounds)
        tried = _moved(now, random)
        new, new_hint = least(tried), guide(tried)
        growth = (new - current) / current + trust * (new_hint - hint) / hint
        take = random.random(_CHAINS) < np.exp2(-np.maximum(growth, 0.0) / heat)
        now[take], current[take], hint[take] = tried[take], new[take], new_hint[take]
        better = new < lowest
        seen[better], lowest[better] = tried[better], new[better]
        if number == rounds // 2:
            # The worse half goes on from where the better half is.
            order = np.argsort(current, kind="stable")
            half = _CHAINS // 2
            for values in (now, current, hint):
                values[order[half:]] = values[order[: _CHAINS - half]]
    told = np.unique(np.concatenate([starts[ranked[: _CHAINS // 4]], seen, now]), axis=0)
    most = max(evaluations // _A_PRICE, _MIN_PRICED)
    told = told[np.argsort(least(told), kind="stable")[:most]]
    costs = cost(told)
    looked = len(starts) + rounds * _CHAINS + len(told)
    ends: list[Found] = []
    for i in np.argsort(costs, kind="stable"):
        if polish <= 0 and ends:
            break
        found = Found(order=told[i], cost=float(costs[i]), num_priced=0)
        ends.append(_polish(cost, least, found, most=polish))
        polish -= max(ends[-1].num_priced, 1)
        looked += ends[-1].num_priced
    best = min(ends, key=lambda found: found.cost)
    return Found(order=best.order, cost=best.cost, num_priced=looked)


def _moved(orders: Orders, random: np.random.Generator) -> Orders:
    """A neighbour of each: two swapped, one inserted elsewhere, a block reversed, or a block
    moved."""
    chains, num = orders.shape
    longest = max(int(num * _LONGEST), 2)
    kind, i, j, size = (
        random.integers(most, size=chains)[:, None] for most in (4, num, num, longest)
    )
    at = np.arange(num)[None]
    end = np.minimum(i + size + 1 + (kind == 2), num)
    inside = (at >= i) & (at < end)
    length = end - i
    # Every thing gets a number that says where it goes; between two others is in the middle.
    target = np.minimum(j, num - length)
    target = target + np.where(target >= i, length, 0)
    place = np.where(at == i, j + np.where(j > i, 0.5, -0.5), at)
    place = np.where(kind == 0, np.where(at == i, j, np.where(at == j, i, at)), place)
    place = np.where((kind == 2) & inside, i + end - 1 - at, np.where(kind == 2, at, place))
    moved = np.where(inside, target - 0.75 + 0.5 * (at - i) / num, at)
    place = np.where(kind == 3, moved, place)
    return np.take_along_axis(orders, np.argsort(place, axis=1, kind="stable"), axis=1)


def _polish(cost: Cost, least: Cost, found: Found, *, most: int) -> Found:
    """Takes the best of all swaps until none helps, then the best of all turns of three.

    Repeats both until neither helps, or until a further turn would look at more than `most` orders.
    """
    num, best, below = len(found.order), found.order, found.cost
    turns = num * (num - 1) * (num - 2) // 3
    near = [_cycles(num, size) for size in (2, 3) if size <= num and (size == 2 or turns <= most)]
    looked, left = 0, near
    while left and looked + len(left[0]) <= most:
        tried = best[left[0]]
        at, lower, _ = cheapest(cost, least, tried, below=below)
        looked += len(tried)
        if at >= 0:
            best, below, left = tried[at], lower, near
        else:
            left = left[1:]
    return Found(order=best, cost=below, num_priced=found.num_priced + looked)


@functools.lru_cache(maxsize=8)
def _cycles(num: int, size: int) -> Orders:
    """[m, num] every way to move so many things, each to the place of the next, others kept."""
    ways = []
    for chosen in itertools.combinations(range(num), size):
        for others in itertools.permutations(chosen[1:]):
            order = np.arange(num)
            cycle = [chosen[0], *others]
            order[cycle] = order[[*cycle[1:], cycle[0]]]
            ways.append(order)
    return np.array(ways, dtype=np.int64)
