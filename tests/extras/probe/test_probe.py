"""The probe of links: rounds, fits, slow links and the record."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from copus_ext.cost_model.cluster_spec import ClusterSpec, preset
from copus_ext.extras.probe.command import answer, base_of, expected_of, parser, settings_of
from copus_ext.extras.probe.findings import (
    MAX_LINES,
    Culprits,
    culprits,
    duration,
    find,
    rate,
    table,
    usual,
)
from copus_ext.extras.probe.link_fit import Timed, duplex, fit_line, least, one_way
from copus_ext.extras.probe.pair import Wire, both_ways, lead
from copus_ext.extras.probe.record import LinkRecord, cluster_text
from copus_ext.extras.probe.session import tournament, without
from megatron.trainer.common.errors import UsageError
from tests.helpers.launch import ROOT

SIZES = (8, 4096, 1 << 16, 1 << 20, 1 << 22, 1 << 24)


@pytest.mark.parametrize("n", [*range(2, 12), 31, 64])
def test_everyone_meets_everyone_once_and_nobody_twice_in_a_round(n: int) -> None:
    rounds = tournament(n)
    met = Counter(itertools.chain(*rounds))
    assert met == Counter(itertools.combinations(range(n), 2))
    for some in rounds:
        nodes = list(itertools.chain(*some))
        assert len(nodes) == len(set(nodes)) == n - n % 2
    assert len(rounds) == n - 1 + n % 2


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


@given(st.floats(1e6, 1e9), st.integers(3, 5), st.floats(0.0, 0.02))
def test_a_link_that_lets_all_but_the_largest_through_is_seen(
    beta: float, count: int, share: float
) -> None:
    """As a token bucket does, where the time for the pair ends before larger sizes."""
    sizes = SIZES[:count]
    longest = sizes[-1] / beta
    seconds = [share * longest + n / (1000 * beta) for n in sizes[:-1]] + [longest]
    assert fit_line(sizes, seconds)[1] == pytest.approx(beta, rel=0.3)


def test_single_lines() -> None:
    """A bad largest size is no slow link; times that do not grow bound the bandwidth."""
    sizes = SIZES[:5]
    seconds = [1e-4 + n / 1e9 for n in sizes[:-1]] + [1.6 * (1e-4 + sizes[-1] / 1e9)]
    assert fit_line(sizes, seconds)[1] > 0.85e9
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


def test_special_clusters() -> None:
    speeds, delays = np.full((2, 2), 1e9), np.full((2, 2), 1e-5)
    assert not find(speeds, delays, hosts(2)).lines
    (line,) = find(speeds, delays, hosts(2), expected=1e10).lines
    assert line == "slow link: between node0 and node1: 1 GB/s and 1 GB/s back; expected 10 GB/s"
    (line,) = find(even(8, 1, 0.1), np.full((8, 8), 1e-5), hosts(8), expected=1e11).lines
    assert line.startswith("slow links: all of them, ")
    both = even(8, 1, 0.2)
    both[3, :] = both[:, 3] = both[5, 6] = 1e9
    found = find(both, np.full((8, 8), 1e-5), hosts(8))
    assert found.slow == Culprits(nodes=(3,), links=((5, 6),)) and len(found.lines) == 2
    many = np.full((20, 20), 1e10)
    for i in range(20):
        many[i, [(i + 1) % 20, (i + 2) % 20]] = 1e9
    lines = find(many, np.full((20, 20), 1e-5), hosts(20)).lines
    assert len(lines) == MAX_LINES + 1 and lines[-1] == "slow links: 20 more"
    unknown = np.full((4, 4), np.nan)
    found = find(unknown, unknown, hosts(4))
    assert not found.lines and math.isnan(found.bytes_per_s), "nothing known is nothing wrong"


@given(st.integers(8, 30), SEEDS)
def test_the_usual_bandwidth_is_about_the_median(n: int, seed: int) -> None:
    speeds = even(n, seed, 0.3)
    middle = np.median(speeds[~np.eye(n, dtype=bool)])
    assert middle <= usual(speeds) <= 1.2 * middle


def test_numbers_are_written_for_people() -> None:
    rates = {12.34e9: "12.3 GB/s", 999.7e6: "1 GB/s", 25e6: "25 MB/s", 1500: "1.5 kB/s", 3: "3 B/s"}
    assert {x: rate(x) for x in rates} == rates
    durations = {2.0: "2 s", 0.0035: "3.5 ms", 0.99996e-3: "1 ms", 35e-6: "35 us"}
    assert {x: duration(x) for x in durations} == durations


class VirtualWire(Wire):
    """A link of exact speed on a clock of its own, with someone at the other end who answers."""

    def __init__(self, alpha: float, beta: float) -> None:
        self.now, self.alpha, self.beta, self.shared = 0.0, alpha, beta, 1.0
        self.orders: list[tuple[int, int]] = []
        self.sent: list[int] = []

    def send(self, num_bytes: int) -> None:
        self.sent.append(num_bytes)
        self.now += self.alpha + num_bytes / self.beta

    def receive(self, num_bytes: int) -> None:
        self.now += self.alpha + num_bytes / self.beta

    def exchange(self, num_bytes: int) -> None:
        self.now += self.alpha + num_bytes / (self.shared * self.beta)

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


@pytest.mark.parametrize("share", [0.5, 0.8, 1.0])
def test_both_directions_at_once_tell_what_they_share(share: float) -> None:
    wire = VirtualWire(1e-5, 1e9)
    trips = lead(wire, SIZES, repeats=5, budget_s=1e9, clock=lambda: wire.now)
    wire.shared = share
    both = both_ways(wire, trips, leads=True, budget_s=1e9, clock=lambda: wire.now)
    here = one_way(trips, both)
    assert both[0] == SIZES[-1] and duplex(here, here) == pytest.approx(share, rel=0.05)
    # What would take too long is timed with a smaller message.
    small = both_ways(wire, trips, leads=True, budget_s=0.0, clock=lambda: wire.now)
    assert small[0] == SIZES[0] and duplex(one_way(trips), here) is None


def test_two_directions_of_different_bandwidths_may_share_nothing() -> None:
    """Both are through when the slower one is; and one end may have timed smaller messages."""
    size = 1 << 24
    slow, fast = timed(1e8), replace(timed(1e9), both_ways=(size, 1e-5 + size / 1e8))
    assert duplex(fast, slow) == pytest.approx(1.0, rel=0.01)
    short = Timed(num_bytes=SIZES[:3], seconds=slow.seconds[:3], both_ways=fast.both_ways)
    assert duplex(short, fast) == pytest.approx(1.0, rel=0.05)


def test_a_cluster_file_has_what_is_left_while_both_directions_are_used(tmp_path: Path) -> None:
    record = LinkRecord(tmp_path / "rounds.json", hosts(2), HOW)
    record.begin(resume=False)
    half = replace(timed(1e9), both_ways=(SIZES[-1], 2 * timed(1e9).seconds[-1]))
    record.add({(0, 1): half, (1, 0): half}, {})
    spec = ClusterSpec.from_json(record.cluster(preset("h100-80g:16")).to_json())
    assert spec.links is not None and spec.links.duplex == 0.5
    assert spec.links.both_ways().bytes_per_s[0][1] == spec.links.bytes_per_s[0][1] / 2
    assert spec.batch_fields("bf16")["nic_bytes_per_s"] == spec.nic_bytes_per_s / 2
    assert Timed.of(half.to_json()) == half


def timed(beta: float, alpha: float = 1e-5) -> Timed:
    return Timed(num_bytes=SIZES, seconds=tuple(alpha + n / beta for n in SIZES))


HOW = {"backend": "gloo", "sizes": list(SIZES)}


@given(st.integers(2, 6), st.integers(2, 6), st.data())
def test_of_two_measurements_each_size_has_its_least_time(
    few: int, more: int, data: st.DataObject
) -> None:
    """A slow link leaves large sizes out, so that the two may have other sizes."""

    def drawn(number: int) -> Timed:
        seconds = data.draw(st.lists(st.floats(1e-6, 1.0), min_size=number, max_size=number))
        size = SIZES[number - 1]
        both = data.draw(st.one_of(st.none(), st.floats(1e-6, 1.0).map(lambda s: (size, s))))
        return Timed(num_bytes=SIZES[:number], seconds=tuple(seconds), both_ways=both)

    one, other = drawn(few), drawn(more)
    found = least(one, other)
    assert found == least(other, one)
    for at, size in enumerate(SIZES[: max(few, more)]):
        known = [t.seconds[at] for t in (one, other) if size in t.num_bytes]
        assert found.seconds[at] == min(known)
    both = [t.both_ways for t in (one, other) if t.both_ways]
    if both:
        assert found.both_ways is not None
        assert found.both_ways[0] == max(size for size, _ in both)
        assert found.both_ways[1] == min(s for size, s in both if size == found.both_ways[0])


def recorded(path: Path, hosts: list[str], pairs: list[tuple[int, int]]) -> LinkRecord:
    record = LinkRecord(path, hosts, HOW)
    record.begin(resume=False)
    for a, b in pairs:
        record.add({(a, b): timed(1e9 * (a + 1)), (b, a): timed(1e9 * (b + 1))}, {})
    return record


def test_finished_rounds_are_taken_up_again_by_the_names_of_the_nodes(tmp_path: Path) -> None:
    path = tmp_path / "rounds.json"
    recorded(path, ["a", "b", "c"], [(0, 1), (0, 2)])
    again = LinkRecord(path, ["c", "x", "a"], HOW)
    again.begin(resume=True)
    assert again.pairs == {(0, 2)}
    assert again.known[2, 0] == timed(1e9) and again.known[0, 2] == timed(3e9)
    again.add({}, {(0, 1): "no answer"})
    third = LinkRecord(path, ["c", "x", "a"], HOW)
    third.begin(resume=True)
    assert third.pairs == {(0, 2)} and not third.silent, "a silent pair is measured again"


def test_a_table_that_takes_long_to_write_is_not_written_after_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_disk() -> frozenset[tuple[int, int]]:
        again = LinkRecord(path, ["a", "b", "c"], HOW)
        again._take(again._read(), again._read()["links"])
        return again.pairs

    path = tmp_path / "rounds.json"
    clock = itertools.count()  # a second passes at every look
    monkeypatch.setattr("copus_ext.extras.probe.record.time.monotonic", lambda: float(next(clock)))
    record = recorded(path, ["a", "b", "c"], [(0, 1), (0, 2)])
    assert on_disk() == frozenset()
    record.flush()
    assert on_disk() == {(0, 1), (0, 2)}


def test_an_interrupted_probe_is_not_lost_by_a_new_start_and_a_whole_one_begins_anew(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rounds.json"
    record = recorded(path, ["a", "b"], [(0, 1)])
    before = path.read_bytes()
    with pytest.raises(UsageError, match="--resume or delete"):
        LinkRecord(path, ["a", "b"], HOW).begin(resume=False)
    with pytest.raises(UsageError, match="sizes"):
        LinkRecord(path, ["a", "b"], {**HOW, "sizes": [1, 2]}).begin(resume=True)
    assert path.read_bytes() == before
    record.done()
    for resume in (False, True):
        new = LinkRecord(path, ["a", "b"], HOW)
        new.begin(resume=resume)
        assert not new.known
        new.done()


def test_a_record_of_nonsense_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "rounds.json"
    good = {"from": "a", "to": "b", "num_bytes": [8, 9], "seconds": [1, 2]}
    links: list[Any] = [3, {}, {**good, "seconds": [1, "x"]}, {**good, "num_bytes": 7}]
    links += [{**good, "from": []}, good]
    whole = json.dumps({"hosts": ["a", "b"], **HOW, "links": links, "done": False})
    for text in (whole, "\0{{{", "[1]", '{"done": false, "links": 3}'):
        path.write_text(text)
        record = LinkRecord(path, ["a", "b"], HOW)
        record.begin(resume=True)
        assert not record.known, "half a pair is timed again"


def test_the_cluster_file_holds_the_links_and_the_planner_reads_it(tmp_path: Path) -> None:
    hosts = ["a", "b", "c"]
    record = recorded(tmp_path / "r.json", hosts, [(0, 1), (0, 2), (1, 2)])
    spec = record.cluster(preset("h100-80g:8"))
    path = tmp_path / "cluster.json"
    path.write_text(cluster_text(spec))
    read = ClusterSpec.load(path)
    assert read == spec and read.num_nodes == 3 and read.gpus_per_node == 8
    assert read.links is not None and read.links.hosts == ("a", "b", "c")
    assert read.links.bytes_per_s[0][1] == pytest.approx(1e9, rel=0.01)
    assert read.links.bytes_per_s[2][0] == pytest.approx(3e9, rel=0.01)
    assert read.links.latency_s[1][2] == pytest.approx(1e-5, rel=0.01)
    assert max(map(len, path.read_text().splitlines())) < 100 < len(path.read_text())


@pytest.mark.parametrize("n", [2, 5, 30])
def test_the_table_names_every_node(n: int) -> None:
    speeds, delays = even(n, 1, 0.2), np.full((n, n), 2e-5)
    lines = table(speeds, delays, hosts(n)).splitlines()
    assert len(lines) == n + 2 and all(host in line for host, line in zip(hosts(n), lines[1:]))
    assert "latency 20 us in the median" in lines[-1]
    speeds[0, :] = speeds[:, 0] = np.nan
    assert "?" in table(speeds, delays, hosts(n)) or n == 2
    nothing = np.full((n, n), np.nan)
    assert table(nothing, nothing, hosts(n)) == "no link was timed"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--sizes", "8"], "--sizes 8: give 2 or more that grow"),
        (["--sizes", "8,4kiB"], "--sizes 8,4kiB: '4kiB' is not a size"),
        (["--sizes", "64KiB,8"], "give 2 or more that grow"),
        (["--sizes", "8,8GiB"], "from 1 to 4GiB"),
        (["--repeats", "0"], "--repeats 0 must be above 0"),
        (["--timeout", "nan"], "--timeout nan must be above 0"),
        (["--pair-seconds", "-1"], "--pair-seconds -1.0 must be above 0"),
        (["--expect", "fast"], "--expect fast: write a bandwidth such as 25GB/s"),
        (["--expect", "0"], "--expect 0: write"),
        (["--cluster", "h999:8"], "--cluster h999:8: unknown; known: v100-16g"),
    ],
)
def test_a_wrong_flag_is_named_with_its_fix(flags: list[str], said: str) -> None:
    args = parser().parse_args(["--output", "c.json", "--backend", "gloo", *flags])
    with pytest.raises(UsageError, match=re.escape(said)):
        settings_of(args)
        expected_of(args.expect)
        base_of(args.cluster)


@pytest.mark.parametrize("page", ["docs/uneven.md", "copus_ext/extras/probe/command.py"])
def test_the_command_of_the_pages_is_accepted(page: str) -> None:
    lines = (ROOT / page).read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("srun ") and "probe-links" in line]
    args = parser().parse_args(line.split("probe-links", 1)[1].split())
    assert base_of(args.cluster).world_size == 64


def test_the_record_needs_no_torch() -> None:
    code = "import sys; from copus_ext.extras.probe import record; "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_scipy_is_asked_for_before_anything_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert answer(parser().parse_args(["--output", "c.json"])) == 2
    assert capsys.readouterr().err.endswith('needs scipy; run: pip install -e ".[fit]"\n')
