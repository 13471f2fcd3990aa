"""Votes are heard on every rank, silence is noticed, and the watchdog bites when it must."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from copus_ext.reconfigure.ballot import Ballot, NoAnswer, Watchdog

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
    with Watchdog(
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
    with Watchdog(votes[0], deadline_s=0.3, patience_s=9, silence_s=9, on_expire=reasons.append):
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
