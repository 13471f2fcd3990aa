"""Searches the best order of a few or of many things by what each order costs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
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
_BEAM = 256
"""Ways to fill the first places that are kept."""
_TRUST = 0.5
"""How much the chain that believes most in the guide believes in it."""
_LONGEST = 0.25
"""Part of an order that a reversed or moved block may have, at most."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best order that a search came across."""

    order: NDArray[np.int64]
    """[n] what is at every place."""
    cost: float
    """Of this order."""
    num_priced: int
    """Orders that were priced."""


def every_order(
    num: int,
    *,
    equivalent: Sequence[Sequence[int]] = (),
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
        [m, num], first the given order if it is one of those kept.
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
        kept = np.argsort(flat, kind="stable")[:_BEAM]
        kept = kept[np.isfinite(flat[kept])]
        orders, strain = orders[kept // num], flat[kept]
        orders[:, place] = kept % num
    return orders[: _BEAM // 4]


def anneal(cost: Cost, guide: Cost, starts: Orders, *, evaluations: int, seed: int = 0) -> Found:
    """Simulated annealing from the best of some orders, then swaps and turns of three until none
    helps.

    What is accepted depends on relative changes only, so that units do not matter. The number of
    orders priced is bounded beforehand: the same input has the same answer on any machine.

    Args:
        cost: [m, n] orders -> [m] positive costs.
        guide: the same, a small preference among orders of equal cost.
        starts: [m, n] orders to begin with.
        evaluations: orders to price, about.
        seed: of the random numbers.
    """
    random = np.random.default_rng(seed)
    begin = cost(starts)
    ranked = np.argsort(begin, kind="stable")
    chosen = ranked[np.arange(_CHAINS) % min(len(ranked), _CHAINS // 4)]
    now, current = starts[chosen].copy(), begin[chosen].copy()
    hint = guide(now)
    best, least = starts[ranked[0]].copy(), float(begin[ranked[0]])
    priced = len(starts)
    trust = np.linspace(0.0, _TRUST, _CHAINS)
    rounds = max((evaluations - priced) // _CHAINS, 1)
    for number in range(rounds):
        heat = _HOT * (_COLD / _HOT) ** (number / rounds)
        tried = np.stack([_moved(order, random) for order in now])
        new, new_hint = cost(tried), guide(tried)
        growth = (new - current) / current + trust * (new_hint - hint) / hint
        take = random.random(_CHAINS) < np.exp2(-np.maximum(growth, 0.0) / heat)
        now[take], current[take], hint[take] = tried[take], new[take], new_hint[take]
        at = int(np.argmin(new))
        if new[at] < least:
            best, least = tried[at].copy(), float(new[at])
        priced += _CHAINS
        if number == rounds // 2:
            # The worse half goes on from where the better half is.
            order = np.argsort(current, kind="stable")
            half = _CHAINS // 2
            for values in (now, current, hint):
                values[order[half:]] = values[order[: _CHAINS - half]]
    found = Found(order=best, cost=least, num_priced=priced)
    return _polish(cost, found, most=evaluations // 4)


def _moved(order: NDArray[np.int64], random: np.random.Generator) -> NDArray[np.int64]:
    """A neighbour: two swapped, one inserted elsewhere, a block reversed, or a block moved."""
    num = len(order)
    longest = max(int(num * _LONGEST), 2)
    kind, i, j, size = (int(random.integers(most)) for most in (4, num, num, longest))
    moved = order.copy()
    if kind == 0 or num < 3:
        moved[[i, j]] = moved[[j, i]]
    elif kind == 1:
        moved = np.insert(np.delete(order, i), j, order[i])
    elif kind == 2:
        end = min(i + size + 2, num)
        moved[i:end] = moved[i:end][::-1]
    else:
        end = min(i + size + 1, num)
        rest = np.delete(order, slice(i, end))
        moved = np.insert(rest, min(j, len(rest)), order[i:end])
    return moved


def _polish(cost: Cost, found: Found, *, most: int) -> Found:
    """Takes the best of all swaps until none helps, then the best of all turns of three.

    Repeats both until neither helps, or until about `most` orders were priced.
    """
    num, best, least = len(found.order), found.order, found.cost
    turns = num * (num - 1) * (num - 2) // 3
    near = [_cycles(num, size) for size in (2, 3) if size <= num and (size == 2 or turns <= most)]
    priced, left = 0, near
    while left and priced < most:
        tried = best[left[0]]
        costs = cost(tried)
        priced += len(tried)
        at = int(np.argmin(costs))
        if costs[at] < least:
            best, least, left = tried[at], float(costs[at]), near
        else:
            left = left[1:]
    return Found(order=best, cost=least, num_priced=found.num_priced + priced)


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
