"""Votes are heard on every rank, silence is noticed, and the watchdog bites when it must."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from copus_ext.reconfigure.ballot import Ballot, Deadline, NoAnswer

RANKS = 3


def ballots(timeout_s: float = 5.0) -> list[Ballot]:
    store = dist.HashStore()
    return [
        Ballot(store, "one", rank=r, world_size=RANKS, timeout_s=timeout_s) for r in range(RANKS)
    ]


def together(act: Callable[[int], Any], ranks: int = RANKS) -> list[Any]:
    results: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            results[rank] = act(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(r,)) for r in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_all_hear_who_says_no() -> None:
    votes = ballots()
    assert together(lambda r: votes[r].vote("a", None)) == [[]] * RANKS
    said = together(lambda r: votes[r].vote("b", "no room" if r == 1 else None))
    assert said == [["rank 1: no room"]] * RANKS
    assert together(lambda r: votes[r].vote("c", None)) == [[]] * RANKS


def test_silence_is_no_answer() -> None:
    votes = ballots(timeout_s=0.2)
    results = together(lambda r: votes[r].vote("a", None), ranks=RANKS - 1)
    assert [type(x) for x in results] == [NoAnswer] * (RANKS - 1)


def test_rank_zero_tells() -> None:
    votes = ballots()
    heard = together(lambda r: votes[r].tell("hash", "abc" if r == 0 else None))
    assert heard == ["abc"] * RANKS


@pytest.mark.parametrize("refused", [False, True])
def test_the_watchdog_bites_a_rank_that_waits_for_one_that_gave_up(refused: bool) -> None:
    votes, reasons = ballots(timeout_s=0.1), []
    with Deadline(
        votes[0], deadline_s=60, patience_s=0.1, silence_s=60, on_expire=reasons.append
    ) as dog:
        dog.entering("build")
        if refused:
            with pytest.raises(NoAnswer):
                votes[1].vote("build", "out of memory")
        time.sleep(0.7)
    assert [("another rank failed" in r) for r in reasons] == [True] * refused


def test_the_watchdog_keeps_the_deadline() -> None:
    votes, reasons = ballots(), []
    with Deadline(votes[0], deadline_s=0.3, patience_s=9, silence_s=9, on_expire=reasons.append):
        time.sleep(0.6)
    assert reasons == ["not done after 0 s"]


def test_nothing_is_left_of_old_votes() -> None:
    store = dist.HashStore()
    votes = [Ballot(store, "x", rank=r, world_size=1, timeout_s=1) for r in range(1)]
    votes[0].vote("first", None)
    before = store.num_keys()
    for number in range(20):
        votes[0].vote(f"topic {number}", None)
    assert store.num_keys() == before


def test_the_watchdog_lets_a_rank_work_alone_while_another_has_said_no() -> None:
    votes, reasons = ballots(timeout_s=0.1), []
    with Deadline(
        votes[0], deadline_s=60, patience_s=0.1, silence_s=60, on_expire=reasons.append
    ) as dog:
        dog.entering("build")
        dog.entering("")
        with pytest.raises(NoAnswer):
            votes[1].vote("build", "out of memory")
        time.sleep(0.7)
    assert reasons == []


@pytest.mark.parametrize("leaves", [False, True])
def test_a_silent_rank_is_dead_unless_its_change_is_over(leaves: bool) -> None:
    votes, reasons = ballots(), []
    votes[1].beat()
    with Deadline(votes[0], deadline_s=60, patience_s=60, silence_s=0.6, on_expire=reasons.append):
        time.sleep(0.3)
        if leaves:
            votes[1].beat(leaves=True)
        time.sleep(1.2)
    assert reasons == [] if leaves else ["rank 1 has been silent for 1 s"]
    assert votes[2].is_given_up is not leaves


def test_a_rank_that_is_there_is_not_missed() -> None:
    votes, reasons = ballots(), []
    both = [
        Deadline(votes[r], deadline_s=60, patience_s=60, silence_s=1.5, on_expire=reasons.append)
        for r in (0, 1)
    ]
    with both[0], both[1]:
        time.sleep(2)
    assert reasons == []


def test_when_a_rank_has_left_the_others_leave() -> None:
    votes, reasons = ballots(), []
    with Deadline(votes[0], deadline_s=60, patience_s=60, silence_s=60, on_expire=reasons.append):
        votes[2].give_up()
        time.sleep(0.7)
    assert reasons == ["another rank has left"]


class Broken:
    """A store whose process has ended."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("connection reset")


def test_a_store_that_is_gone_is_no_answer() -> None:
    votes, reasons = ballots(), []
    dog = Deadline(votes[0], deadline_s=60, patience_s=60, silence_s=60, on_expire=reasons.append)
    dog._own._store = votes[0]._store = Broken()
    with pytest.raises(NoAnswer, match=r"vote on 'a'.*connection reset"):
        votes[0].vote("a", None)
    with pytest.raises(NoAnswer, match="tell"):
        votes[0].tell("b")
    votes[0].give_up()
    with dog:
        time.sleep(0.3)
    assert reasons == ["the store of the launch is gone (connection reset)"]
