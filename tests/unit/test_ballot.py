"""Votes are heard on every rank, silence is noticed, and the watchdog bites when it must."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from copus_ext.reshard import consensus
from copus_ext.reshard.consensus import Consensus, Deadline, NoAnswer

RANKS = 3


def ballots(timeout_s: float = 5.0) -> list[Consensus]:
    store = dist.HashStore()
    return [
        Consensus(store, "one", rank=r, world_size=RANKS, timeout_s=timeout_s) for r in range(RANKS)
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
    votes = ballots(timeout_s=0.05)
    results = together(lambda r: votes[r].vote("a", None), ranks=RANKS - 1)
    assert [type(x) for x in results] == [NoAnswer] * (RANKS - 1)


def test_rank_zero_tells() -> None:
    votes = ballots()
    heard = together(lambda r: votes[r].share("hash", "abc" if r == 0 else None))
    assert heard == ["abc"] * RANKS


class Rounds:
    """Stands in for the event that ends watchdogs, and for their clock: it goes on when all have
    looked, so that nothing waits and no machine is too slow.

    Args:
        num: watchdogs.
        seconds: after which they end.
        half_way: called once on the way.
    """

    def __init__(
        self, num: int, seconds: float, half_way: Callable[[], None] = lambda: None
    ) -> None:
        self.now, self.end, self.half_way = 0.0, seconds, half_way
        self.barrier = threading.Barrier(num, self.tick, timeout=20)

    def monotonic(self) -> float:
        return self.now

    def tick(self) -> None:
        before, self.now = self.now, self.now + consensus._POLL_S
        if before < self.end / 2 <= self.now:
            self.half_way()

    def wait(self, seconds: float) -> bool:
        assert seconds == consensus._POLL_S
        self.barrier.wait()
        return self.now >= self.end

    def is_set(self) -> bool:
        return self.now >= self.end


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets watchdogs look until the rounds are over or one has bitten."""

    def run(rounds: Rounds, *dogs: Deadline) -> None:
        monkeypatch.setattr(consensus, "time", rounds)
        for dog in dogs:
            monkeypatch.setattr(dog, "_stop", rounds)
        assert together(lambda i: dogs[i]._run(), ranks=len(dogs)) == [None] * len(dogs)

    return run


LONG = {"deadline_s": 60.0, "patience_s": 60.0, "silence_s": 60.0}


@pytest.mark.parametrize("refused", [False, True])
def test_the_watchdog_bites_a_rank_that_waits_for_one_that_gave_up(
    refused: bool, watch: Callable[..., None]
) -> None:
    votes, reasons = ballots(timeout_s=0.01), []
    dog = Deadline(votes[0], **{**LONG, "patience_s": 1.0}, on_expire=reasons.append)
    dog.entering("build")
    if refused:
        with pytest.raises(NoAnswer):
            votes[1].vote("build", "out of memory")
    watch(Rounds(1, 5.0), dog)
    assert [("another rank failed" in r) for r in reasons] == [True] * refused


def test_the_watchdog_keeps_the_deadline() -> None:
    votes, told = ballots(), threading.Event()
    reasons: list[str] = []

    def expire(reason: str) -> None:
        reasons.append(reason)
        told.set()

    with Deadline(votes[0], **{**LONG, "deadline_s": 0.1}, on_expire=expire):
        assert told.wait(20)
    assert reasons == ["not done after 0 s"]


def test_a_change_that_is_over_is_watched_no_more() -> None:
    votes, reasons = ballots(), []
    votes[0].beat()
    with Deadline(votes[0], **LONG, on_expire=reasons.append) as dog:
        assert votes[1].beats(0) == 1
    assert not dog._thread.is_alive() and reasons == []
    assert votes[1].beats(0) is None, "the others need not wait for it"


def test_nothing_is_left_of_old_votes() -> None:
    store = dist.HashStore()
    votes = [Consensus(store, "x", rank=r, world_size=1, timeout_s=1) for r in range(1)]
    votes[0].vote("first", None)
    before = store.num_keys()
    for number in range(20):
        votes[0].vote(f"topic {number}", None)
    assert store.num_keys() == before


def test_the_watchdog_lets_a_rank_work_alone_while_another_has_said_no(
    watch: Callable[..., None],
) -> None:
    votes, reasons = ballots(timeout_s=0.01), []
    dog = Deadline(votes[0], **{**LONG, "patience_s": 1.0}, on_expire=reasons.append)
    dog.entering("build")
    dog.entering("")
    with pytest.raises(NoAnswer):
        votes[1].vote("build", "out of memory")
    watch(Rounds(1, 5.0), dog)
    assert reasons == []


@pytest.mark.parametrize("leaves", [False, True])
def test_a_silent_rank_is_dead_unless_its_change_is_over(
    leaves: bool, watch: Callable[..., None]
) -> None:
    votes, reasons = ballots(), []
    votes[1].beat()
    dog = Deadline(votes[0], **{**LONG, "silence_s": 4.0}, on_expire=reasons.append)
    watch(Rounds(1, 6.0, lambda: votes[1].beat(leaves=True) if leaves else None), dog)
    assert reasons == [] if leaves else ["rank 1 has been silent for 4 s"]
    assert votes[2].is_aborted is not leaves


def test_a_rank_that_is_there_is_not_missed(watch: Callable[..., None]) -> None:
    votes, reasons = ballots(), []
    both = [
        Deadline(votes[r], **{**LONG, "silence_s": 1.0}, on_expire=reasons.append) for r in (0, 1)
    ]
    beats: list[int | None] = []
    watch(Rounds(2, 5.0, lambda: beats.extend(votes[2].beats(r) for r in (0, 1))), *both)
    assert reasons == [] and all(beats)


def test_when_a_rank_has_left_the_others_leave(watch: Callable[..., None]) -> None:
    votes, reasons = ballots(), []
    dog = Deadline(votes[0], **LONG, on_expire=reasons.append)
    watch(Rounds(1, 5.0, votes[2].abort), dog)
    assert reasons == ["another rank has left"]


class Broken:
    """A store whose process has ended."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("connection reset")


def test_a_store_that_is_gone_is_no_answer(watch: Callable[..., None]) -> None:
    votes, reasons = ballots(), []
    dog = Deadline(votes[0], **LONG, on_expire=reasons.append)
    dog._own._store = votes[0]._store = Broken()
    with pytest.raises(NoAnswer, match=r"vote on 'a'.*connection reset"):
        votes[0].vote("a", None)
    with pytest.raises(NoAnswer, match="share"):
        votes[0].share("b")
    votes[0].abort()
    watch(Rounds(1, 1.0), dog)
    assert reasons == ["the store of the launch is gone (connection reset)"]
