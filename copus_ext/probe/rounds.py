"""Which pairs of nodes are timed together: a tournament in which everyone meets everyone once."""

from __future__ import annotations

from collections.abc import Set

Pair = tuple[int, int]
"""Two nodes, the lower number first."""
Round = tuple[Pair, ...]
"""Pairs that are timed at the same time; no node is in two of them."""


def tournament(num_nodes: int) -> tuple[Round, ...]:
    """Rounds in which every pair of nodes meets once, as few as there can be.

    The circle method: one place stays, the others move on by one after every round. That is n - 1
    rounds of n / 2 pairs for an even n; for an odd one n rounds, in each of which one node rests.

    Raises:
        ValueError: fewer than two nodes.
    """
    if num_nodes < 2:
        raise ValueError(f"{num_nodes} node has no link; a probe needs 2 nodes or more")
    places = num_nodes + num_nodes % 2
    circle = list(range(1, places))
    rounds = []
    for _ in range(places - 1):
        row = [0, *circle]
        met = zip(row[: places // 2], reversed(row[places // 2 :]))
        rounds.append(tuple(sorted((min(p), max(p)) for p in met if max(p) < num_nodes)))
        circle = [circle[-1], *circle[:-1]]
    return tuple(rounds)


def without(rounds: tuple[Round, ...], done: Set[Pair]) -> tuple[Round, ...]:
    """The same rounds without some pairs; rounds in which nobody is left are left out."""
    left = (tuple(pair for pair in some if pair not in done) for some in rounds)
    return tuple(some for some in left if some)


def partner(some: Round, node: int) -> int | None:
    """Whom a node meets in a round; None if it rests."""
    return next((a + b - node for a, b in some if node in (a, b)), None)
