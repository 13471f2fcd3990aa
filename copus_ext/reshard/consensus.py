"""Votes of all ranks through the store of the launch, since a collective cannot report the failure
of its own group."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_POLL_S = 0.25
_STOP_S = 5.0
_LEFT = 1 << 40
"""Added to the beats of a rank whose change is over."""


class NoAnswer(RuntimeError):
    """A rank did not vote in time, or the store is out of reach."""


class Consensus:
    """The votes of one change of layout. Every rank makes one and votes on the same topics in the
    same order.

    Args:
        store: reaches all ranks, and outlives the groups.
        name: of the change, not used before in this launch.
        timeout_s: for one vote.
    """

    def __init__(
        self, store: Any, name: str, *, rank: int, world_size: int, timeout_s: float
    ) -> None:
        self._store: Any = dist.PrefixStore(f"copus-consensus/{name}", store)
        self.rank, self.world_size = rank, world_size
        self._timeout_s = timeout_s
        self._before: str | None = None

    def vote(self, topic: str, problem: str | None) -> list[str]:
        """Waits for every rank's vote.

        Args:
            topic: of this vote, not used before.
            problem: why this rank has failed, or None.

        Returns:
            The problems of all ranks that have failed, in the order of ranks.

        Raises:
            NoAnswer: a rank has not voted within the time-out.
        """
        with _reaching(f"not all ranks came to the vote on {topic!r}"):
            if problem is not None:
                self._store.set(f"{topic}/no/{self.rank}", problem)
                self._store.add(f"{topic}/failed", 1)
            if self._store.add(f"{topic}/votes", 1) == self.world_size:
                self._store.set(f"{topic}/done", "1")
            self._store.wait([f"{topic}/done"], timedelta(seconds=self._timeout_s))
            problems = []
            if self.failed_ranks(topic):
                voters = range(self.world_size)
                said = [r for r in voters if self._store.check([f"{topic}/no/{r}"])]
                texts = [self._store.get(f"{topic}/no/{r}").decode() for r in said]
                problems = [f"rank {r}: {text}" for r, text in zip(said, texts)]
            self._tidy_up(topic)
        return problems

    def share(self, topic: str, text: str | None = None) -> str:
        """Rank 0's text on every rank.

        Raises:
            NoAnswer: it did not come within the time-out.
        """
        with _reaching(f"rank 0 did not share {topic!r}"):
            if text is not None:
                self._store.set(f"shared/{topic}", text)
                return text
            self._store.wait([f"shared/{topic}"], timedelta(seconds=self._timeout_s))
            return self._store.get(f"shared/{topic}").decode()

    def carry_out(
        self,
        topic: str,
        act: Callable[[], Result],
        *,
        deadline: Deadline,
        is_collective: bool,
    ) -> tuple[Result | None, list[str]]:
        """Does a part of a work; all ranks do it and vote on it.

        Args:
            topic: of the vote.
            act: the part; what it raises is a vote against.
            is_collective: whether a rank may wait for the others inside.

        Returns:
            What `act` returned, or None if it failed on any rank; and the problems of all ranks.

        Raises:
            NoAnswer: a rank has not voted.
        """
        deadline.entering(topic if is_collective else "")
        result = problem = None
        try:
            result = act()
        except Exception as error:  # memory, a group, a message: each is a vote against
            logger.debug("%s failed", topic, exc_info=True)
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        # Outside of the handler, so that the traceback does not keep what `act` has allocated.
        problems = self.vote(topic, problem)
        return (None if problems else result), problems

    def failed_ranks(self, topic: str) -> int:
        """How many ranks have voted against so far."""
        return int(self._store.add(f"{topic}/failed", 0))

    def abort(self) -> None:
        """Announces that this rank leaves, so that the change can only end in a relaunch."""
        with contextlib.suppress(RuntimeError):
            self._store.add("aborted", 1)

    @property
    def is_aborted(self) -> bool:
        """Whether any rank has left."""
        return int(self._store.add("aborted", 0)) > 0

    def beat(self, *, leaves: bool = False) -> None:
        """Shows that this rank is alive, or that its change is over."""
        self._store.add(f"beats/{self.rank}", _LEFT if leaves else 1)

    def beats(self, rank: int) -> int | None:
        """A number that grows while a rank is alive; None before and after the change."""
        found = int(self._store.add(f"beats/{rank}", 0))
        return found if 0 < found < _LEFT else None

    def _tidy_up(self, topic: str) -> None:
        """Removes the vote before this one, which every rank has read."""
        before, self._before = self._before, topic
        if before is not None and self.rank == 0:
            for name in ("votes", "done", "failed"):
                self._store.delete_key(f"{before}/{name}")

    def for_thread(self) -> Consensus:
        """The same votes on a connection of their own, for another thread."""
        store = self._store.clone()
        twin = Consensus.__new__(Consensus)
        twin.__dict__.update({**self.__dict__, "_store": store})
        return twin


@contextlib.contextmanager
def _reaching(what: str) -> Iterator[None]:
    """Turns the store's errors, the end of its process among them, into `NoAnswer`."""
    try:
        yield
    except RuntimeError as error:
        raise NoAnswer(f"{what}: {error}") from error


class Deadline:
    """Ends this process if a change of layout cannot: it takes too long, another rank is dead or
    has left, or another rank has failed while this one waits for it in a collective, which nothing
    can cancel.

    Args:
        deadline_s: seconds that all of it may take.
        patience_s: seconds that this rank may stay in a collective after another has failed.
        silence_s: a rank is dead after so many seconds without a sign. Each rank watches the next.
        on_expire: called with the reason, from a thread; must end the process.
    """

    def __init__(
        self,
        consensus: Consensus,
        *,
        deadline_s: float,
        patience_s: float,
        silence_s: float,
        on_expire: Callable[[str], None],
    ) -> None:
        self._own = consensus.for_thread()
        self._deadline_s, self._patience_s = deadline_s, patience_s
        self._silence_s, self._on_expire = silence_s, on_expire
        self._topic = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relayout-watchdog", daemon=True)

    def entering(self, topic: str) -> None:
        """Call before a collective, with the topic of the next vote; with an empty text before work
        of this rank alone, which ends by itself."""
        self._topic = topic

    def __enter__(self) -> Deadline:
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
        reason = None
        try:
            reason = self._watch()
            if reason is None:
                self._own.beat(leaves=True)
        except RuntimeError as error:
            if not self._stop.is_set():
                reason = f"the store of the launch is gone ({error})"
        if reason is not None:
            self._own.abort()
            self._on_expire(reason)

    def _watch(self) -> str | None:
        """Returns why this process must end, or None once the change is over."""
        started = heard_at = time.monotonic()
        beats: int | None = None
        topic, refused_at = "", None
        next_rank = (self._own.rank + 1) % self._own.world_size
        while not self._stop.wait(_POLL_S):
            now = time.monotonic()
            if now - started > self._deadline_s:
                return f"not done after {self._deadline_s:.0f} s"
            if self._own.is_aborted:
                return "another rank has left"
            self._own.beat()
            heard = self._own.beats(next_rank)
            if heard is None or heard != beats:
                beats, heard_at = heard, now
            if now - heard_at > self._silence_s:
                return f"rank {next_rank} has been silent for {self._silence_s:.0f} s"
            if self._topic != topic:
                topic, refused_at = self._topic, None
            if topic and refused_at is None and self._own.failed_ranks(topic):
                refused_at = now
            if refused_at is not None and now - refused_at > self._patience_s:
                return f"another rank failed at {topic!r} and this one waits for it"
        return None
