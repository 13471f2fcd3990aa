"""The probe of links: how the processes meet, and rounds of threads over a store in memory."""

from __future__ import annotations

import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch.distributed as dist

from copus_ext.extras.probe import session
from copus_ext.extras.probe.findings import find
from copus_ext.extras.probe.record import LinkRecord
from copus_ext.extras.probe.session import Silence, tournament
from megatron.trainer.common.errors import UsageError
from tests.extras.probe.test_probe import HOW, SIZES, hosts, timed


def test_the_first_process_of_every_node_probes() -> None:
    given = [(7, "a"), (7, "a"), (3, "b"), (5, "b"), (3, "b")]
    places = [{"node": node, "host": host} for node, host in given]
    assert session.nodes_of(places) == ([0, 2, 3], ["a", "b:1", "b:2"])


def test_the_launcher_says_which_node_it_is() -> None:
    plain = {"RANK": "5", "WORLD_SIZE": "8"}
    four = {**plain, "LOCAL_WORLD_SIZE": "4"}
    grouped = {**four, "GROUP_RANK": "3"}
    cases = [(plain, False, 5), (four, False, 1), (grouped, False, 3), (grouped, True, 5)]
    for env, every_rank, node in cases:
        assert session.place_of(env, every_rank=every_rank).node == node, env


def test_without_a_launcher_it_says_how_to_start() -> None:
    for env in ({}, {"RANK": "x", "WORLD_SIZE": "2"}):
        with pytest.raises(UsageError, match="torchrun or srun"):
            session.place_of(env, every_rank=False)


SETTINGS = session.Settings(backend="gloo", sizes=SIZES, repeats=3, pair_s=0.1, timeout_s=0.1)


def at(rank: int, world_size: int = 4) -> session.Place:
    return session.Place(
        rank=rank, world_size=world_size, node=rank, host=f"node{rank}", local_rank=0
    )


def test_who_does_not_come_is_named() -> None:
    store = dist.HashStore()
    for rank in (0, 2):
        session.introduce(store, at(rank))
    with pytest.raises(Silence, match="ranks 1, 3 have not come"):
        session.gather(store, 4, 0.1)


def test_a_first_node_that_has_gone_ends_the_others() -> None:
    store = dist.HashStore()
    with pytest.raises(Silence, match="has gone"):
        session.take_part(store, at(1), 0.1)
    session.dismiss(store, 1, 0.1)
    session.take_part(store, at(1), 0.1)
    assert store.check(["bye/1"])


def play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measure: Any, n: int = 4
) -> tuple[LinkRecord, list[str], list[str]]:
    """Rounds of threads over a store in memory; what was recorded, said and lost."""
    monkeypatch.setattr(session, "_measure", measure)
    monkeypatch.setattr(session, "_MARGIN_S", 0.5)
    monkeypatch.setattr(session, "_POLL_S", 0.001)
    store, names, said = dist.HashStore(), hosts(n), []
    record = LinkRecord(tmp_path / "rounds.json", names, HOW)
    record.begin(resume=False)
    with ThreadPoolExecutor(n) as pool:
        others = [pool.submit(session.take_part, store, at(i, n), 5) for i in range(1, n)]
        session.announce(store, range(n), SETTINGS)
        leads = session.Lead(
            store=store, settings=SETTINGS, place=at(0, n), record=record, say=said.append
        )
        lost = leads.time_all(tournament(n))
        session.dismiss(store, n, 5)
        for other in others:
            other.result()
    return record, said, lost


def good(*_: Any) -> dict[str, Any]:
    return timed(1e9).to_json()


def test_all_rounds_are_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, said, lost = play(tmp_path, monkeypatch, good, n=5)
    assert record.pairs == set(itertools.combinations(range(5), 2)) and not lost
    assert [line.split(",")[0] for line in said] == [
        f"round {i} of 5: 2 pairs" for i in range(1, 6)
    ]
    assert said[-1].endswith("about 0 s left")


def test_a_link_that_was_disturbed_once_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 1 to 2 something passed, and between 2 and 4. From 0 to 3 it is slow whenever timed."""
    played: Counter[Any] = Counter()

    def measure(*args: Any) -> dict[str, Any]:
        pair, node = args[-2:]
        played[pair, node] += 1
        # A pair that is timed again must not find the keys of the first time.
        assert not args[0].check([f"seen/{node}"])
        args[0].set(f"seen/{node}", "")
        is_first = played[pair, node] == 1
        if (pair, node) == ((0, 3), 0) or ((pair, node) == ((1, 2), 1) and is_first):
            return timed(2e8).to_json()
        return timed(1e9, alpha=1e-2 if pair == (2, 4) and is_first else 1e-5).to_json()

    record, said, lost = play(tmp_path, monkeypatch, measure, n=6)
    found = find(*record.matrices(), record.hosts)
    assert not lost and found.slow.links == ((0, 3),) and not found.far
    (line,) = [line for line in said if "once more" in line]
    again = [some for some in tournament(6) if {(0, 3), (1, 2), (2, 4)}.intersection(some)]
    assert line.startswith(
        f"pairs that look slow or far: 3; rounds to run once more: {len(again)}, "
    )
    twice = {pair for (pair, _), times in played.items() if times == 2}
    assert twice == set(itertools.chain(*again)), "whole rounds, with the load of the first time"
    assert not any(times > 2 for times in played.values())


def test_many_slow_links_are_no_disturbance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those between two racks are in nearly all rounds, and are not timed again."""

    def measure(*args: Any) -> dict[str, Any]:
        (a, b), _ = args[-2:]
        return timed(2e8 if a < 5 <= b else 1e9).to_json()

    _, said, lost = play(tmp_path, monkeypatch, measure, n=8)
    assert not lost and not any("once more" in line for line in said)


def test_a_link_that_dies_when_it_is_timed_again_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: Counter[Any] = Counter()

    def measure(*args: Any) -> dict[str, Any]:
        played[args[-2:]] += 1
        if args[-2] == (1, 2) and played[args[-2:]] == 2:
            raise RuntimeError("Connection reset")
        return timed(2e8 if args[-2] == (1, 2) else 1e9).to_json()

    record, _, lost = play(tmp_path, monkeypatch, measure, n=6)
    assert not lost and set(record.silent) == {(1, 2)}
    assert (1, 2) not in record.pairs and len(record.pairs) == 14


def test_a_silent_link_is_named_and_the_others_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*args: Any) -> dict[str, Any]:
        if args[-2] == (1, 2) and args[-1] == 2:
            raise RuntimeError("Timed out waiting 30000ms\nmore")
        return good()

    record, said, lost = play(tmp_path, monkeypatch, measure)
    assert not lost and record.silent == {(1, 2): "Timed out waiting 30000ms"}
    assert len(record.pairs) == 5
    assert "no answer between node1 and node2: Timed out waiting 30000ms" in said


def test_a_link_that_hangs_ends_the_probe_with_its_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = Event()

    def measure(*args: Any) -> dict[str, Any]:
        if args[-2] == (0, 2):
            hung.wait(20)
        return good()

    record, _, lost = play(tmp_path, monkeypatch, measure)
    hung.set()
    assert lost == ["node0", "node2"] and (0, 2) in record.silent
    number = next(i for i, some in enumerate(tournament(4)) if (0, 2) in some)
    assert len(record.pairs) == 2 * number + 1, "the other pair of the round is kept"
