"""The probe of links: who meets whom, lines through times, what stands out, how a pair talks."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from copus_ext.probe.findings import MOST_LINES, Culprits, culprits, duration, find, rate, usual
from copus_ext.probe.link_fit import Timed, fit_line, one_way
from copus_ext.probe.pair import follow, lead
from copus_ext.probe.session import tournament, without

SIZES = (8, 4096, 1 << 16, 1 << 20, 1 << 22, 1 << 24)


@pytest.mark.parametrize("n", range(2, 66))
def test_everyone_meets_everyone_once_and_nobody_twice_in_a_round(n: int) -> None:
    rounds = tournament(n)
    met = Counter(itertools.chain(*rounds))
    assert met == Counter(itertools.combinations(range(n), 2))
    for some in rounds:
        nodes = list(itertools.chain(*some))
        assert len(nodes) == len(set(nodes)) == n - n % 2
    assert len(rounds) == n - 1 + n % 2


@pytest.mark.parametrize("n", [1, 0])
def test_one_node_has_no_link(n: int) -> None:
    with pytest.raises(ValueError, match="2 nodes or more"):
        tournament(n)


@given(st.integers(2, 20), st.data())
def test_what_is_done_is_left_out(n: int, data: st.DataObject) -> None:
    pairs = list(itertools.combinations(range(n), 2))
    done = data.draw(st.sets(st.sampled_from(pairs)))
    left = without(tournament(n), done)
    assert sorted(itertools.chain(*left)) == sorted(set(pairs) - done)
    assert all(left)


ALPHAS = st.floats(1e-6, 1e-1)
BETAS = st.floats(1e6, 1e11)


@given(ALPHAS, BETAS)
def test_the_line_of_exact_times_is_found(alpha: float, beta: float) -> None:
    found = fit_line(SIZES, [alpha + n / beta for n in SIZES])
    longest = alpha + SIZES[-1] / beta
    if SIZES[-1] / beta < 0.1 * longest:
        assert found[1] == pytest.approx(10 * SIZES[-1] / longest), "no more than the times bound"
        return
    assert found[1] == pytest.approx(beta, rel=0.01)
    if SIZES[0] / beta < alpha:
        assert found[0] == pytest.approx(alpha, rel=0.01)


@given(ALPHAS, BETAS, st.lists(st.floats(-0.1, 0.1), min_size=6, max_size=6))
def test_noise_moves_the_line_no_more_than_it_moves_the_times(
    alpha: float, beta: float, noise: list[float]
) -> None:
    seconds = [(alpha + n / beta) * math.exp(e) for n, e in zip(SIZES, noise)]
    if SIZES[-1] / beta > 0.9 * (alpha + SIZES[-1] / beta):
        assert fit_line(SIZES, seconds)[1] == pytest.approx(beta, rel=0.4)


@given(ALPHAS, st.floats(1e6, 1e9), st.integers(1, 3), st.sampled_from([0.1, 0.3, 4.0]))
def test_one_size_off_the_line_does_not_bend_it(
    alpha: float, beta: float, which: int, factor: float
) -> None:
    """Such as a size that a limited link still lets through at full speed."""
    if SIZES[-1] / beta < 10 * alpha:
        return
    seconds = [(alpha + n / beta) * (factor if i == which else 1) for i, n in enumerate(SIZES)]
    assert fit_line(SIZES, seconds)[1] == pytest.approx(beta, rel=0.2)


def test_one_bad_largest_size_is_no_slow_link() -> None:
    sizes = SIZES[:5]
    seconds = [1e-4 + n / 1e9 for n in sizes[:-1]] + [1.6 * (1e-4 + sizes[-1] / 1e9)]
    assert fit_line(sizes, seconds)[1] > 0.85e9


@given(st.floats(1e6, 1e9), st.integers(3, 5), st.floats(0.0, 0.02))
def test_a_link_that_lets_all_but_the_largest_through_is_seen(
    beta: float, count: int, share: float
) -> None:
    """As a token bucket does, where the time for the pair ends before larger sizes."""
    sizes = SIZES[:count]
    longest = sizes[-1] / beta
    seconds = [share * longest + n / (1000 * beta) for n in sizes[:-1]] + [longest]
    assert fit_line(sizes, seconds)[1] == pytest.approx(beta, rel=0.3)


def test_times_that_do_not_grow_bound_the_bandwidth() -> None:
    assert fit_line((8, 1000), [1.0, 1.0])[1] == pytest.approx(10_000)
    assert fit_line((8, 1000), [2.0, 1.0])[1] == pytest.approx(10_000)


@given(ALPHAS, BETAS, st.integers(1, 9), st.floats(0, 5))
def test_one_way_is_a_round_trip_without_its_answer(
    alpha: float, beta: float, repeats: int, outlier: float
) -> None:
    trips = {n: [2 * alpha + n / beta + SIZES[0] / beta] * repeats for n in SIZES}
    for some in trips.values():
        if repeats > 2:
            some[0] += outlier  # the median knows better
    timed = one_way(trips)
    assert timed.latency_s == pytest.approx(alpha + SIZES[0] / beta)
    assert timed.seconds == pytest.approx([alpha + n / beta for n in SIZES])


@pytest.mark.parametrize(
    ("sizes", "seconds", "said"),
    [
        ((8,), (1.0,), "2 or more"),
        ((8, 9), (1.0,), "2 or more"),
        ((9, 8), (1.0, 1.0), "do not grow"),
        ((8, 9), (1.0, math.nan), "positive"),
        ((8, 9), (0.0, 1.0), "positive"),
    ],
)
def test_impossible_times_are_refused(sizes: tuple, seconds: tuple, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Timed(num_bytes=sizes, seconds=seconds)


def even(n: int, seed: int, spread: float) -> np.ndarray:
    """Links of 10 GB/s that scatter."""
    drawn = np.random.default_rng(seed).uniform(-spread, spread, (n, n))
    return 10e9 * np.exp(drawn)


def hosts(n: int) -> list[str]:
    return [f"node{i}" for i in range(n)]


SEEDS = st.integers(0, 2**32 - 1)


@given(st.integers(2, 24), SEEDS, st.floats(0, 0.3))
def test_even_links_with_noise_raise_nothing(n: int, seed: int, spread: float) -> None:
    speeds = even(n, seed, spread)
    delays = 1e7 / even(n, seed + 1, 2 * spread)
    found = find(speeds, delays, hosts(n))
    assert not found.lines and not found.slow and not found.far


@given(st.integers(3, 24), SEEDS, st.floats(0, 0.2), st.floats(4, 1000), st.booleans(), st.data())
def test_a_slow_link_is_named(
    n: int, seed: int, spread: float, factor: float, both: bool, data: st.DataObject
) -> None:
    speeds = even(n, seed, spread)
    i, j = data.draw(st.permutations(range(n)))[:2]
    speeds[i, j] /= factor
    if both:
        speeds[j, i] /= factor
    found = find(speeds, np.full((n, n), 1e-5), hosts(n))
    assert found.slow == Culprits(links=tuple(sorted({(i, j), (j, i)} if both else {(i, j)})))
    (line,) = found.lines
    low, high = sorted((i, j))
    way = f"between node{low} and node{high}:" if both else f"from node{i} to node{j}:"
    assert line.startswith(f"slow link: {way}")


@given(st.integers(3, 24), SEEDS, st.floats(0, 0.2), st.floats(4, 1000), st.data())
def test_a_slow_node_is_named_and_none_of_its_links(
    n: int, seed: int, spread: float, factor: float, data: st.DataObject
) -> None:
    speeds, i = even(n, seed, spread), data.draw(st.integers(0, n - 1))
    way = data.draw(st.sampled_from(["nodes", "senders", "receivers"]))
    if way != "receivers":
        speeds[i, :] /= factor
    if way != "senders":
        speeds[:, i] /= factor
    found = find(speeds, np.full((n, n), 1e-5), hosts(n))
    planted: dict[str, Any] = {way: (i,)}
    assert found.slow == Culprits(**planted)
    (line,) = found.lines
    assert line.startswith(f"slow node: node{i}: all ")


@given(st.integers(6, 24), SEEDS, st.data())
def test_a_slow_node_and_a_slow_link_elsewhere(n: int, seed: int, data: st.DataObject) -> None:
    speeds = even(n, seed, 0.2)
    i, j, k = data.draw(st.permutations(range(n)))[:3]
    for a, b in ((i, slice(None)), (slice(None), i), (j, k)):
        speeds[a, b] = 1e9
    found = find(speeds, np.full((n, n), 1e-5), hosts(n))
    assert found.slow == Culprits(nodes=(i,), links=((j, k),))
    assert len(found.lines) == 2


@given(st.integers(3, 12), SEEDS, st.data())
def test_a_far_node_is_named(n: int, seed: int, data: st.DataObject) -> None:
    delays, i = 1e6 / even(n, seed, 0.3), data.draw(st.integers(0, n - 1))
    delays[i, :] *= 20
    delays[:, i] *= 20
    found = find(even(n, seed, 0.2), delays, hosts(n))
    assert found.far == Culprits(nodes=(i,)) and not found.slow
    assert found.lines[0].startswith(f"far node: node{i}: all its links, ")
    assert not find(even(n, seed, 0.2), delays / 20, hosts(n)).far, "no step feels so little"


@given(st.integers(3, 12), SEEDS, st.floats(1e-6, 1e6))
def test_what_is_named_does_not_depend_on_the_unit(n: int, seed: int, unit: float) -> None:
    speeds = even(n, seed, 1.5)
    delays = np.full((n, n), 1e-5)
    assert find(speeds, delays, hosts(n)).slow == find(speeds * unit, delays, hosts(n)).slow


@given(st.integers(2, 10), SEEDS, st.data())
def test_every_bad_link_is_explained_and_no_good_one(
    n: int, seed: int, data: st.DataObject
) -> None:
    bad = np.random.default_rng(seed).choice([0.0, 1.0, np.nan], (n, n))
    found = culprits(bad)
    told = np.zeros((n, n), dtype=bool)
    for i in (*found.nodes, *found.senders):
        told[i, :] = True
    for i in (*found.nodes, *found.receivers):
        told[:, i] = True
    for i, j in found.links:
        assert not told[i, j], "told twice"
        told[i, j] = True
    off = ~np.eye(n, dtype=bool)
    assert (told[off & (bad == 1)]).all() and not told[off & (bad == 0)].any()


def test_a_cluster_of_two_is_compared_with_what_is_expected() -> None:
    speeds, delays = np.full((2, 2), 1e9), np.full((2, 2), 1e-5)
    assert not find(speeds, delays, hosts(2)).lines
    (line,) = find(speeds, delays, hosts(2), expected=1e10).lines
    assert line == "slow link: between node0 and node1: 1 GB/s and 1 GB/s back; expected 10 GB/s"


def test_links_that_are_all_slow_take_one_line() -> None:
    speeds, delays = even(8, 1, 0.1), np.full((8, 8), 1e-5)
    (line,) = find(speeds, delays, hosts(8), expected=1e11).lines
    assert line.startswith("slow links: all of them, ")


def test_many_slow_links_are_counted() -> None:
    n = 20
    speeds = np.full((n, n), 1e10)
    for i in range(n):
        speeds[i, [(i + 1) % n, (i + 2) % n]] = 1e9
    lines = find(speeds, np.full((n, n), 1e-5), hosts(n)).lines
    assert len(lines) == MOST_LINES + 1 and lines[-1] == "slow links: 20 more"


def test_nothing_known_is_nothing_wrong() -> None:
    unknown = np.full((4, 4), np.nan)
    found = find(unknown, unknown, hosts(4))
    assert not found.lines and math.isnan(found.bytes_per_s)


@given(st.integers(8, 30), SEEDS)
def test_the_usual_bandwidth_is_about_the_median(n: int, seed: int) -> None:
    speeds = even(n, seed, 0.3)
    middle = np.median(speeds[~np.eye(n, dtype=bool)])
    assert middle <= usual(speeds) <= 1.2 * middle


def test_numbers_are_written_for_people() -> None:
    assert [rate(x) for x in (12.34e9, 999.7e6, 25e6, 1500, 3)] == [
        "12.3 GB/s",
        "1 GB/s",
        "25 MB/s",
        "1.5 kB/s",
        "3 B/s",
    ]
    assert [duration(x) for x in (2.0, 0.0035, 0.99996e-3, 35e-6)] == [
        "2 s",
        "3.5 ms",
        "1 ms",
        "35 us",
    ]


class VirtualWire:
    """A link of exact speed on a clock of its own, with someone at the other end who answers."""

    def __init__(self, alpha: float, beta: float) -> None:
        self.now, self.alpha, self.beta = 0.0, alpha, beta
        self.orders: list[tuple[int, int]] = []
        self.sent: list[int] = []

    def send(self, num_bytes: int) -> None:
        self.sent.append(num_bytes)
        self.now += self.alpha + num_bytes / self.beta

    def receive(self, num_bytes: int) -> None:
        self.now += self.alpha + num_bytes / self.beta

    def order(self, num_bytes: int, count: int) -> None:
        self.orders.append((num_bytes, count))
        self.now += self.alpha

    def next_order(self) -> tuple[int, int]:
        raise AssertionError


@given(ALPHAS, BETAS, st.integers(1, 20), st.floats(0.01, 10))
def test_a_direction_is_timed_rightly_and_within_its_budget(
    alpha: float, beta: float, repeats: int, budget_s: float
) -> None:
    wire = VirtualWire(alpha, beta)
    trips = lead(wire, SIZES, repeats=repeats, budget_s=budget_s, clock=lambda: wire.now)
    assert list(trips) == list(SIZES[: len(trips)]) and len(trips) >= 2
    assert all(1 <= len(some) <= repeats for n, some in trips.items() if n > SIZES[0])
    assert wire.orders[-1] == (0, 0) and all(count for _, count in wire.orders[:-1])
    assert sum(count for _, count in wire.orders) == len(wire.sent)
    # Two sizes are timed whatever they cost; orders and a message under way come on top.
    forced = 2 * (3 * alpha + (SIZES[0] + SIZES[1]) / beta)
    assert wire.now <= budget_s + forced + 20 * alpha + 2 * SIZES[0] / beta
    timed = one_way(trips)
    assert timed.latency_s == pytest.approx(alpha + SIZES[0] / beta)
    if len(trips) == len(SIZES) and SIZES[-1] / beta > alpha:
        assert timed.bytes_per_s == pytest.approx(beta, rel=0.02)


def test_both_ends_say_the_same() -> None:
    """Over queues: whatever one end sends the other waits for, in both directions."""
    there, back = Queue(), Queue()

    class QueueWire:
        def __init__(self, out: Queue, into: Queue) -> None:
            self.out, self.into = out, into

        def send(self, num_bytes: int) -> None:
            self.out.put(num_bytes)

        def receive(self, num_bytes: int) -> None:
            assert self.into.get(timeout=10) == num_bytes

        def order(self, num_bytes: int, count: int) -> None:
            self.out.put((num_bytes, count))

        def next_order(self) -> tuple[int, int]:
            return self.into.get(timeout=10)

    def other() -> dict[int, list[float]]:
        wire = QueueWire(back, there)
        follow(wire, 8)
        return lead(wire, (8, 64, 512), repeats=3, budget_s=10)

    with ThreadPoolExecutor(1) as pool:
        far = pool.submit(other)
        wire = QueueWire(there, back)
        near = lead(wire, (8, 64, 512), repeats=3, budget_s=10)
        follow(wire, 8)
        assert {n: len(t) for n, t in near.items()} == {n: len(t) for n, t in far.result().items()}
    assert there.empty() and back.empty()
