"""Votes are heard on every rank, silence is noticed, and a rank that cannot go on is ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from copus_ext.reshard import consensus
from copus_ext.reshard.consensus import Consensus, Deadline, NoAnswer
from copus_ext.reshard.inprocess import limits_s

RANKS = 3


def voters(timeout_s: float = 5.0) -> list[Consensus]:
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


def test_all_ranks_hear_who_has_failed_and_what_rank_0_shares() -> None:
    votes = voters()
    assert together(lambda r: votes[r].vote("a", None)) == [[]] * RANKS
    said = together(lambda r: votes[r].vote("b", "no room" if r == 1 else None))
    assert said == [["rank 1: no room"]] * RANKS
    assert together(lambda r: votes[r].vote("c", None)) == [[]] * RANKS
    heard = together(lambda r: votes[r].share("hash", "abc" if r == 0 else None))
    assert heard == ["abc"] * RANKS


def test_silence_is_no_answer() -> None:
    votes = voters(timeout_s=0.05)
    results = together(lambda r: votes[r].vote("a", None), ranks=RANKS - 1)
    assert [type(x) for x in results] == [NoAnswer] * (RANKS - 1)


def carried_out(votes: list[Consensus], rank: int, *, fails: bool) -> Any:
    def act() -> int:
        if fails:
            raise MemoryError("no room")
        return rank

    how: Any = {"deadline": SimpleNamespace(entering=lambda topic: None), "is_collective": True}
    return votes[rank].carry_out("part", act, **how)


def test_a_part_that_fails_on_a_rank_has_failed_on_all() -> None:
    votes = voters()
    done = together(lambda r: carried_out(votes, r, fails=False))
    assert done == [(0, []), (1, []), (2, [])]
    votes = voters()
    failed = together(lambda r: carried_out(votes, r, fails=r == 2))
    assert failed == [(None, ["rank 2: MemoryError: no room"])] * RANKS


def test_nothing_is_left_of_old_votes() -> None:
    store = dist.HashStore()
    alone = Consensus(store, "x", rank=0, world_size=1, timeout_s=1)
    alone.vote("first", None)
    before = store.num_keys()
    for number in range(20):
        alone.vote(f"topic {number}", None)
    assert store.num_keys() == before


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

    def run(rounds: Rounds, *deadlines: Deadline) -> None:
        monkeypatch.setattr(consensus, "time", rounds)
        for deadline in deadlines:
            monkeypatch.setattr(deadline, "_stop", rounds)
        assert together(lambda i: deadlines[i]._run(), ranks=len(deadlines)) == [None] * len(
            deadlines
        )

    return run


LONG = {"deadline_s": 60.0, "patience_s": 60.0, "silence_s": 60.0}


@pytest.mark.parametrize(
    ("topics", "has_failed", "expires"),
    [(["build"], True, True), (["build"], False, False), (["build", ""], True, False)],
    ids=["in a collective", "no failure", "working alone"],
)
def test_a_rank_is_ended_that_waits_in_a_collective_for_one_that_has_failed(
    topics: list[str], has_failed: bool, expires: bool, watch: Callable[..., None]
) -> None:
    votes, reasons = voters(timeout_s=0.01), []
    deadline = Deadline(votes[0], **{**LONG, "patience_s": 1.0}, on_expire=reasons.append)
    for topic in topics:
        deadline.entering(topic)
    if has_failed:
        with pytest.raises(NoAnswer):
            votes[1].vote("build", "out of memory")
    watch(Rounds(1, 5.0), deadline)
    assert [("another rank failed" in r) for r in reasons] == [True] * expires


def test_a_wait_on_the_gpu_for_a_rank_that_has_failed_ends_sooner() -> None:
    """Nothing ends it but the process. A rank that is busy is dead no sooner."""
    (gloo, gloo_silence), (nccl, nccl_silence) = (limits_s(None, b) for b in ("gloo", "nccl"))
    assert nccl < gloo < gloo_silence == nccl_silence
    assert limits_s(2.0, "nccl") == limits_s(2.0, "gloo") == (2.0, 6.0)


def test_the_watchdog_keeps_the_deadline() -> None:
    votes, told = voters(), threading.Event()
    reasons: list[str] = []

    def expire(reason: str) -> None:
        reasons.append(reason)
        told.set()

    with Deadline(votes[0], **{**LONG, "deadline_s": 0.1}, on_expire=expire):
        assert told.wait(20)
    assert reasons == ["not done after 0 s"]


def test_a_change_that_is_over_is_watched_no_more() -> None:
    votes, reasons = voters(), []
    votes[0].beat()
    with Deadline(votes[0], **LONG, on_expire=reasons.append) as deadline:
        assert votes[1].beats(0) == 1
    assert not deadline._thread.is_alive() and reasons == []
    assert votes[1].beats(0) is None, "the others need not wait for it"


@pytest.mark.parametrize("leaves", [False, True])
def test_a_silent_rank_is_dead_unless_its_change_is_over(
    leaves: bool, watch: Callable[..., None]
) -> None:
    votes, reasons = voters(), []
    votes[1].beat()
    deadline = Deadline(votes[0], **{**LONG, "silence_s": 4.0}, on_expire=reasons.append)
    watch(Rounds(1, 6.0, lambda: votes[1].beat(leaves=True) if leaves else None), deadline)
    assert reasons == [] if leaves else ["rank 1 has been silent for 4 s"]
    assert votes[2].is_aborted is not leaves


def test_a_rank_that_is_there_is_not_missed_and_one_that_leaves_is_followed(
    watch: Callable[..., None],
) -> None:
    votes, reasons = voters(), []
    both = [
        Deadline(votes[r], **{**LONG, "silence_s": 1.0}, on_expire=reasons.append) for r in (0, 1)
    ]
    beats: list[int | None] = []
    watch(Rounds(2, 5.0, lambda: beats.extend(votes[2].beats(r) for r in (0, 1))), *both)
    assert reasons == [] and all(beats)
    deadline = Deadline(votes[0], **LONG, on_expire=reasons.append)
    watch(Rounds(1, 5.0, votes[2].abort), deadline)
    assert reasons == ["another rank has left"]


class Broken:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("connection reset")


def test_a_store_that_is_gone_is_no_answer(watch: Callable[..., None]) -> None:
    votes, reasons = voters(), []
    deadline = Deadline(votes[0], **LONG, on_expire=reasons.append)
    deadline._own._store = votes[0]._store = Broken()
    with pytest.raises(NoAnswer, match=r"vote on 'a'.*connection reset"):
        votes[0].vote("a", None)
    with pytest.raises(NoAnswer, match="share"):
        votes[0].share("b")
    votes[0].abort()
    watch(Rounds(1, 1.0), deadline)
    assert reasons == ["the store of the launch is gone (connection reset)"]
