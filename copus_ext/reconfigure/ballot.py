"""Votes of all ranks, through the store of the launch: collectives cannot vote about the death of
their own groups."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

_POLL_S = 0.2
_STOP_S = 5.0


class NoAnswer(RuntimeError):
    """A rank did not vote in time."""


class Ballot:
    """One change's votes; every rank makes one and votes on the same topics in the same order.

    Args:
        store: reaches all ranks, and outlives the groups.
        name: of the change, not used before in this launch.
        rank: of this process.
        world_size: of the job.
        timeout_s: for one vote.
    """

    def __init__(
        self, store: Any, name: str, *, rank: int, world_size: int, timeout_s: float
    ) -> None:
        self._store = dist.PrefixStore(f"copus-ballot/{name}", store)
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self._before: str | None = None
        self.topic = ""
        """What is voted on, or was last."""

    def vote(self, topic: str, problem: str | None) -> list[str]:
        """Waits for every rank's vote.

        Args:
            topic: of this vote, not used before.
            problem: why this rank says no, or None for yes.

        Returns:
            What the ranks that say no say, by rank; empty if all say yes.

        Raises:
            NoAnswer: a rank has not voted within the time-out.
        """
        self.topic = topic
        if problem is not None:
            self._store.set(f"{topic}/no/{self._rank}", problem)
            self._store.add(f"{topic}/noes", 1)
        if self._store.add(f"{topic}/votes", 1) == self._world_size:
            self._store.set(f"{topic}/done", "1")
        try:
            self._store.wait([f"{topic}/done"], timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise NoAnswer(f"not all ranks came to the vote on {topic!r}: {error}") from error
        problems = []
        if self.noes(topic):
            said = [r for r in range(self._world_size) if self._store.check([f"{topic}/no/{r}"])]
            problems = [f"rank {r}: {self._store.get(f'{topic}/no/{r}').decode()}" for r in said]
        self._tidy_up(topic)
        return problems

    def tell(self, topic: str, text: str | None = None) -> str:
        """Rank 0's text on every rank.

        Raises:
            NoAnswer: it did not come within the time-out.
        """
        if text is not None:
            self._store.set(f"told/{topic}", text)
            return text
        try:
            self._store.wait([f"told/{topic}"], timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise NoAnswer(f"rank 0 did not tell {topic!r}: {error}") from error
        return self._store.get(f"told/{topic}").decode()

    def noes(self, topic: str) -> int:
        """Votes against so far."""
        return int(self._store.add(f"{topic}/noes", 0))

    def _tidy_up(self, topic: str) -> None:
        """Removes the vote before this one: every rank has read it."""
        before, self._before = self._before, topic
        if before is not None and self._rank == 0:
            for name in ("votes", "done", "noes"):
                self._store.delete_key(f"{before}/{name}")

    def watch(self) -> Ballot:
        """The same ballot on a connection of its own, for another thread."""
        store = self._store.clone()
        twin = Ballot.__new__(Ballot)
        twin.__dict__.update({**self.__dict__, "_store": store})
        return twin


class Watchdog:
    """Ends this process when a change of layout cannot: when it takes too long, or when another
    rank has given up while this one waits for it in a collective that nothing can cancel.

    Args:
        ballot: of the change.
        deadline_s: seconds that all of it may take.
        patience_s: seconds that this rank may go on after another has said no.
        on_expire: called with the reason, from a thread; must end the process.
    """

    def __init__(
        self,
        ballot: Ballot,
        *,
        deadline_s: float,
        patience_s: float,
        on_expire: Callable[[str], None],
    ) -> None:
        self._ballot, self._own = ballot, ballot.watch()
        self._deadline_s, self._patience_s = deadline_s, patience_s
        self._on_expire = on_expire
        self._topic = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="switch-watchdog", daemon=True)

    def entering(self, topic: str) -> None:
        """The next vote will be on this topic."""
        self._topic = topic

    def __enter__(self) -> Watchdog:
        """Starts to watch."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Watches no more."""
        self._stop.set()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        started = time.monotonic()
        topic, refused_at = "", None
        while not self._stop.wait(_POLL_S):
            now = time.monotonic()
            if now - started > self._deadline_s:
                self._on_expire(f"not done after {self._deadline_s:.0f} s")
                return
            if self._topic != topic:
                topic, refused_at = self._topic, None
            if topic and refused_at is None and self._own.noes(topic):
                refused_at = now
            if refused_at is not None and now - refused_at > self._patience_s:
                self._on_expire(f"another rank failed at {topic!r} and this one waits for it")
                return
