"""The launcher of one node in an elastic run: it starts the ranks, notices deaths of ranks and
nodes, and agrees with the launchers of other nodes on who goes on.

    python -m copus_ext.extras.elastic.node OPTIONS PROGRAM FLAGS

Every launcher serves a store and is connected with every other. The lowest node that lives
announces a new generation, after it has claimed its number by making a file on the shared file
system that was not there. Two halves of a parted network cannot both claim it: the launcher that
finds the file there ends its ranks and itself.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from copus_ext.extras.elastic.messages import Generation, Kind, Member
from copus_ext.extras.elastic.peers import BEAT_S, Fenced, NotMet, Peers, local_address
from copus_ext.extras.elastic.rank_process import Place, RankProcess, failure_of
from copus_ext.extras.elastic.resize import (
    RANKS_FILE,
    RanksAsked,
    ask_cluster,
    ranks_asked,
    staying,
)
from copus_ext.launch import workers
from copus_ext.launch.failure import Failure
from copus_ext.launch.workers import FENCED, RELEASED, Launch
from megatron.trainer.common.program import tell
from megatron.trainer.resilience.env_checks import no_collection

SILENCE_S = 5.0
"""A launcher that is silent for so long is lost."""
_SETTLE_S = 0.02
"""Deaths that follow one another so closely make one generation."""
_MEET_S = 120.0
_LOOK_S = 0.05
_RUNS_PER_GENERATION = 1000
_MINORITY_S = 3.0
"""A part of less than half of the ranks waits so long before it claims, where a node was silent."""
_BROKEN_S = 1.0
"""A death is noticed within this after a rank has seen a broken world."""
_DRAIN_S = 60.0
"""Ranks may run so long after the first has left with the run."""
_END_S = 1.0
"""The store of the last generation stays so long while ranks of other nodes leave."""
_BACK_S = (1.0, 10.0, 60.0)
"""Seconds after which a rank that died is started again: the first time, the second, the third.
After that its place stays empty."""


@dataclass
class Agent:
    """One node.

    Args:
        command: program and flags of a rank.
        folder: shared by all nodes and empty at the start of the launch.
    """

    launch: Launch
    command: list[str]
    folder: Path
    generation: Generation | None = None
    """The newest that is known."""
    _dead: set[Member] = field(default_factory=set)
    """Ranks whose death this node knows of, whatever a generation on its way says."""
    _ready: set[Member] = field(default_factory=set)
    """Ranks that have done their imports, before there is a generation."""
    _gone: set[Member] = field(default_factory=set)
    """Ranks that were let go and have handed over what they held."""
    _is_broken: bool = False
    """Ranks see a broken world in which all live."""
    _was_silent: bool = False
    """A node was lost by its silence: it may live, and claim the next generation as well."""
    _ending_s: float | None = None
    """Since when ranks leave as the run ends."""
    _alive: set[Member] = field(default_factory=set)
    """Ranks of all nodes that take part, or will from the next generation on."""
    _waiting: set[Member] = field(default_factory=set)
    """Of them, those that have come since the generation."""
    _places: list[Place] = field(default_factory=list)
    _failures: dict[Member, Failure] = field(default_factory=dict)
    _due_s: float | None = None
    """When to announce the next generation, if this node has to."""
    _asked: RanksAsked | None = None
    """Ranks that the run has asked for: done, said, or of before this launcher."""
    _leaving: set[int] = field(default_factory=set)
    """Nodes that were let go and are still connected."""
    _is_released: bool = False
    """The run goes on without this node, since it asks for fewer ranks."""
    _released_s: float | None = None
    """Since when its ranks leave for that reason."""
    _first_run: int = 0
    """Number of the first ranks here: above those of this node before, in a launch that goes on."""

    def run(self) -> list[Failure]:
        """Runs the ranks of this node to their end.

        Returns:
            Failures of the ranks here that the run did not outlive.
        """
        self._select = selectors.DefaultSelector()
        self._first_run = _RUNS_PER_GENERATION * self._claimed()
        self._asked = ranks_asked(self._run_dir)
        for local in range(self.launch.num_ranks):
            self._places.append(Place())
            self._start(local)
        with no_collection():
            from copus_ext.launch.store import serve

        host = local_address(self.launch)
        self._peers = Peers(self.launch, self.folder, self._select, host)
        store = serve(host)
        self._store = f"{host}:{store.port}"
        self._peers.publish()
        try:
            (self._join_running if self._first_run else self._meet)()
            self._loop()
            self._check_not_fenced()
            self._kill_all()  # those that still wait to join a run that is lost
        except (Fenced, NotMet) as error:
            tell("launcher", f"node {self.launch.node} ends: {error}")
            self._kill_all()
            return [failure_of(-1, FENCED if isinstance(error, Fenced) else 1, f"{error}", "")]
        self._linger()
        del store
        return self._what_failed()

    def _check_not_fenced(self) -> None:
        """Ranks that have ended here may have done so because others have gone on: `Fenced`."""
        if self.generation is None or self._is_ending or self._is_released:
            return
        if (self.folder / f"generation-{self.generation.number + 1}").exists():
            raise Fenced("the other nodes have gone on without it")

    @property
    def _run_dir(self) -> Path:
        """Of the run: launchers agree in `control/elastic/<launch>` there."""
        return self.folder.parents[2]

    # Ranks of this node.

    def _start(self, local: int) -> None:
        place = self._places[local]
        member = Member(self.launch.node, local, self._first_run + place.restarts)
        place.rank = RankProcess.start(member, self.launch, self.command)
        place.start_again_at = None
        self._select.register(place.rank.lines.connection, selectors.EVENT_READ, ("rank", local))

    def _ended(self, local: int) -> None:
        """A rank's connection is at its end, and so is its process, or will be."""
        place = self._places[local]
        rank, place.rank = place.rank, None
        assert rank is not None
        self._select.unregister(rank.lines.connection)
        rank.lines.close()
        if not rank.has_left:
            # It may hang on its way out, without its connection.
            with contextlib.suppress(ProcessLookupError):
                rank.process.kill()
        code = rank.process.wait()
        if rank.was_released:
            self._released_s = self._released_s or time.monotonic()
            self._peers.tell(gone=[rank.member])
            self._forget(rank.member)
            return
        if code != 0 and (rank.has_met or not self._is_ending):
            self._failures[rank.member] = rank.failure(code, self._rank_of(rank.member))
        if rank.has_left:
            self._leave(rank.member)
            self._peers.tell(left=[rank.member])
            return
        self._lose(rank.member)
        self._peers.tell(died=[rank.member])
        if not (self._is_ending or self._is_released) and place.restarts < len(_BACK_S):
            place.start_again_at = time.monotonic() + _BACK_S[place.restarts]
            place.restarts += 1

    def _forget(self, member: Member) -> None:
        """Notes that a rank has gone that the run can do without, if it still can."""
        if self.generation is not None and member in self.generation.members:
            self._lose(member)
        self._alive.discard(member)
        self._dead.add(member)
        self._gone.add(member)

    def _leave(self, member: Member) -> None:
        """Notes that a rank has ended with the run."""
        self._alive.discard(member)
        self._ending_s = self._ending_s or time.monotonic()

    @property
    def _is_ending(self) -> bool:
        """Whether ranks leave as the run ends."""
        return self._ending_s is not None

    def _end_the_rest(self) -> None:
        """Ends ranks that have come too late for any generation, and those that hang as they
        leave."""
        since_s = self._ending_s or self._released_s
        is_late = since_s is not None and time.monotonic() - since_s > _DRAIN_S
        now = self.generation
        members = () if now is None else (*now.members, *now.released)
        for place in self._places:
            place.start_again_at = None
        for rank in (place.rank for place in self._places if place.rank is not None):
            # One that joins waits for others, who have left with the run.
            waits = self._is_ending and not rank.has_met
            if is_late or waits or rank.member not in members:
                rank.has_left, rank.was_released = self._is_ending, self._is_released
                rank.process.kill()

    def _rank_of(self, member: Member) -> int:
        members = () if self.generation is None else self.generation.members
        return members.index(member) if member in members else -1

    def _kill_all(self) -> None:
        for rank in (place.rank for place in self._places if place.rank is not None):
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(rank.process.pid).children(recursive=True):
                    child.kill()
            rank.process.kill()
            rank.process.wait()

    def _what_failed(self) -> list[Failure]:
        """A rank that died is no failure of the run if that went on without it, to its end."""
        generation = self.generation
        if self._is_released:
            return [failure_of(-1, RELEASED, "the run asks for fewer ranks", "")]
        found = [
            failure
            for member, failure in self._failures.items()
            if generation is None or not self._is_ending or member in generation.members
        ]
        if not found and not self._is_ending:
            return [failure_of(-1, 1, "no rank is left", "")]
        return found

    # Launchers of other nodes.

    def _meet(self) -> None:
        """Connects with the nodes of lower numbers, and waits for those of higher ones.

        Raises:
            NotMet: a node has not come.
        """
        deadline_s = time.monotonic() + _MEET_S
        others = [node for node in self.launch.nodes if node != self.launch.node]
        while missing := sorted(set(others) - set(self._peers.lines)):
            if time.monotonic() > deadline_s:
                raise NotMet(f"node {missing[0]} has not come")
            for node in (one for one in missing if one < self.launch.node):
                self._peers.connect(node)
            self._look()
        self._alive |= {p.rank.member for p in self._places if p.rank is not None}
        for node in others:
            self._alive |= {Member(node, local) for local in range(self._peers.ranks_of(node))}
        self._alive -= self._dead
        # While nodes met, news of ranks here went only to those that were connected already.
        news = {"died": self._dead, "is_ready": self._ready, "ready": self._waiting}
        for kind, members in news.items():
            if own := sorted(m for m in members if m.node == self.launch.node):
                self._peers.tell(**{kind: own})

    def _join_running(self) -> None:
        """Connects with the nodes that are there, in a launch that goes on.

        Raises:
            Fenced: there are none.
        """
        for node in self.launch.nodes:
            if node != self.launch.node:
                self._peers.connect(node)
        if not self._peers.lines:
            raise Fenced("no other node is there any more")

    def _claimed(self) -> int:
        """The number of generations that there were before this launcher came."""
        return len(list(self.folder.glob("generation-*")))

    def _welcome(self, node: int, connection: socket.socket) -> None:
        """Takes in a node whose hello was right."""
        if node in self._peers.lines:
            self._lose_node(node, "it has come again")
        self._peers.add(node, connection)
        lines = self._peers.lines[node]
        if self.generation is not None:
            lines.send(gone=sorted(self._gone), generation=self.generation.to_json())
        if self._is_ending:
            lines.send(left=[])

    def _lose_node(self, node: int, why: str, *, is_silent: bool = False) -> None:
        self._was_silent |= is_silent
        self._peers.drop(node)
        gone = {member for member in self._alive if member.node == node}
        if gone:
            tell("launcher", f"node {node} is lost ({why})")
        for member in gone:
            self._lose(member)

    def _lose(self, member: Member) -> None:
        """Notes that a rank is gone; the others go on with the next generation."""
        self._alive.discard(member)
        self._waiting.discard(member)
        self._dead.add(member)
        if self.generation is not None and member in self.generation.released:
            self._is_broken = True  # what it holds may not be handed over yet
        if member in self._holders:
            self._due_s = min(self._due_s or math.inf, time.monotonic() + _SETTLE_S)

    # What comes in.

    def _loop(self) -> None:
        looked_s = 0.0
        self._peers.start_to_beat()
        while self._goes_on:
            self._peers.turn()
            self._look()
            now_s = time.monotonic()
            if self.generation is None and self._alive and self._ready >= self._alive:
                self._due_s = self._due_s or now_s
            is_outside = not self._is_member and not self._is_released
            if self._first_run and not self._peers.lines and is_outside:
                raise Fenced("no other node is there any more")
            if now_s - looked_s > BEAT_S:
                looked_s = now_s
                self._resize()
            for node in self._peers.silent(SILENCE_S):
                self._lose_node(node, f"silent for {SILENCE_S:g} s", is_silent=True)
            for local, place in enumerate(self._places):
                if place.start_again_at is not None and now_s >= place.start_again_at:
                    self._start(local)
            if self._is_ending or self._is_released:
                self._end_the_rest()
            if self._due_s is not None and now_s >= self._due_s:
                self._due_s = None
                self._propose()

    @property
    def _goes_on(self) -> bool:
        """Whether there are ranks here, or the run goes on elsewhere."""
        is_here = any(place.rank is not None for place in self._places)
        if self._is_ending or self._is_released:
            return is_here
        return not self._is_without_state and (is_here or bool(self._alive))

    @property
    def _is_without_state(self) -> bool:
        """Whether no rank that it can reach holds a part of the run: those that wait hold none."""
        return self.generation is not None and not self._alive & set(self._holders)

    @property
    def _holders(self) -> tuple[Member, ...]:
        """Ranks that hold a part of the run, or held it as they were lost."""
        now = self.generation
        return (
            () if now is None else (*now.members, *(m for m in now.released if m not in self._gone))
        )

    def _look(self) -> None:
        self._peers.dismiss_late()
        for key, _ in self._select.select(_LOOK_S):
            kind, who = key.data
            if kind == "server":
                for node, connection in self._peers.accept():
                    self._welcome(node, connection)
                continue
            if kind == "stranger":
                if (found := self._peers.greet(key.fileobj)) is not None:
                    self._welcome(*found)
                continue
            rank = self._places[who].rank if kind == "rank" else None
            lines = rank.lines if rank else self._peers.lines.get(who)
            if lines is None or key.fileobj is not lines.connection:
                continue
            messages = lines.read()
            if messages is None and kind == "rank":
                self._ended(who)
            elif messages is None:
                self._lose_node(who, lines.end)
            for message in messages or ():
                if kind == "rank":
                    self._hear_rank(who, message)
                else:
                    self._hear_peer(who, message)

    def _hear_rank(self, local: int, message: dict[str, Any]) -> None:
        rank = self._places[local].rank
        assert rank is not None
        if "met" in message:
            rank.has_met = True
        if "leaving" in message:
            rank.has_left = True
        if "released" in message:
            rank.has_left = rank.was_released = True
        if "failing" in message:
            self._places[local].restarts = len(_BACK_S)
        if "broken" in message:
            self._break(message["broken"])
            self._peers.tell(broken=message["broken"])
        if "ready" in message and rank.member.run == 0:
            self._ready.add(rank.member)
            self._peers.tell(is_ready=[rank.member])
        elif "ready" in message and not self._is_released:
            self._join([rank.member])
            self._peers.tell(ready=[rank.member])

    def _hear_peer(self, node: int, message: dict[str, Any]) -> None:
        for member in message.get("died", ()):
            self._lose(Member(*member))
        for member in message.get("gone", ()):
            self._forget(Member(*member))
        if "asked" in message:
            self._asked = RanksAsked(*message["asked"])
        if "left" in message:
            self._ending_s = self._ending_s or time.monotonic()
            self._alive -= {Member(*member) for member in message["left"]}
        if "is_ready" in message:
            self._ready |= {Member(*member) for member in message["is_ready"]}
        if "broken" in message:
            self._break(message["broken"])
        if "ready" in message:
            self._join([Member(*member) for member in message["ready"]])
        if "generation" in message:
            self._take(Generation.from_json(message["generation"]))

    @property
    def _is_member(self) -> bool:
        """Whether a rank here trains in the newest generation."""
        return self.generation is not None and self.launch.node in self.generation.nodes

    def _break(self, number: int) -> None:
        """A rank has seen a broken world. If nobody has died, all go on in a new one."""
        if self.generation is not None and number == self.generation.number:
            self._is_broken = True
            self._due_s = self._due_s or time.monotonic() + _BROKEN_S

    def _join(self, members: list[Member]) -> None:
        """Ranks that have come wait for the next generation."""
        self._alive |= set(members)
        self._waiting |= set(members)
        self._due_s = self._due_s or time.monotonic() + _SETTLE_S

    # Agreement.

    def _propose(self) -> None:
        """Announces the next generation, if this is the lowest node that lives.

        Raises:
            Fenced: somebody else has its number.
        """
        before = self.generation
        # Those that have just come know of no losses, and have nothing to go on from.
        holders = self._holders
        able = self._alive if before is None else self._alive & set(holders)
        if not able or self._is_ending or min(able).node != self.launch.node:
            return
        lost = [m for m in (before.members if before else ()) if m not in self._alive]
        if before is not None and self._was_silent:
            self._was_silent = False
            if 2 * len(able) + (holders[0] in able) <= len(holders):
                self._due_s = time.monotonic() + _MINORITY_S
                return
        is_loss = bool(lost) or self._is_broken
        if before is not None and not is_loss and set(before.released) & self._alive:
            self._due_s = time.monotonic() + BEAT_S  # once they have handed over what they hold
            return
        kind: Kind = "start" if before is None else "loss" if is_loss else "join"
        if not self._announce(kind, tuple(sorted(self._alive)), lost=tuple(lost)):
            self._due_s = time.monotonic() + BEAT_S

    def _announce(
        self,
        kind: Kind,
        members: tuple[Member, ...],
        *,
        lost: tuple[Member, ...] = (),
        released: tuple[Member, ...] = (),
    ) -> bool:
        """Claims the next generation and tells all of it. Returns whether the file system let it.

        Raises:
            Fenced: somebody else has its number.
        """
        number = 1 if self.generation is None else self.generation.number + 1
        try:
            path = self.folder / f"generation-{number}"
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            raise Fenced("the other nodes have gone on without it") from None
        except OSError as error:  # the file system will be there again
            tell("launcher", f"{path} cannot be made ({error.strerror or error}): trying again")
            return False
        generation = Generation(
            number=number,
            members=members,
            store=self._store,
            kind=kind,
            lost=lost,
            released=released,
        )
        self._peers.tell(generation=generation.to_json())
        self._take(generation)
        return True

    def _resize(self) -> None:
        """Lets nodes go if the run asks for fewer ranks, and tells the cluster once they are free.
        Tells it where the run wants more. The lowest node that lives does so, once for each
        request, while nothing else is due.
        """
        now = self.generation
        if self._leaving and not self._leaving & set(self._peers.lines):
            self._leaving = set()
            if now is not None and self._asked is not None:
                ask_cluster(self._asked.ranks, now)
        if now is None or self._is_ending or self._due_s is not None or self._waiting:
            return
        if set(now.members) != self._alive or now.members[0].node != self.launch.node:
            return
        asked = ranks_asked(self._run_dir)
        if asked is None or asked == self._asked:
            return
        if not asked.ranks:
            self._asked = asked
            self._peers.tell(asked=list(asked))
            tell("launcher", f"{RANKS_FILE} must hold a number of ranks, 1 or more")
            return
        kept = staying(now.members, asked.ranks)
        released = tuple(m for m in now.members if m not in kept)
        if released and not self._announce("resize", kept, released=released):
            return
        self._asked = asked
        self._peers.tell(asked=list(asked))
        if asked.ranks > len(now.members):
            ask_cluster(asked.ranks, now)
        if released:
            self._leaving = {m.node for m in released}
            nodes = ", ".join(map(str, sorted(self._leaving)))
            tell("launcher", f"the run asks for {asked.ranks} ranks: let go is node {nodes}")

    def _take(self, generation: Generation) -> None:
        """Passes a generation on to the ranks here.

        Raises:
            Fenced: none of them is a member, and none was let go.
        """
        before, self.generation = self.generation, generation
        if before is not None and generation.number <= before.number:
            self.generation = before
            return
        self._is_broken = False
        self._waiting -= set(generation.members)
        # Those that are to leave count until they have handed over what they hold.
        taking_part = set(self._holders)
        self._alive = (taking_part | self._waiting) - self._dead
        if taking_part & self._dead:
            self._due_s = self._due_s or time.monotonic() + _SETTLE_S
        for place in self._places:
            if place.rank is not None:
                place.rank.lines.send(generation=generation.to_json())
        here = {place.rank.member for place in self._places if place.rank is not None}
        self._is_released = bool(here & set(generation.released))
        if self._is_released:
            return
        self._released_s = None
        if before is not None and here & set(before.members) - set(generation.members):
            raise Fenced("the other nodes have gone on without it")

    def _linger(self) -> None:
        """Ranks of other nodes may still use the store of this one."""
        end_s = time.monotonic() + _END_S
        while self._peers.lines and time.monotonic() < end_s:
            self._look()


def _run(launch: Launch, command: list[str]) -> list[Failure]:
    assert launch.shared is not None
    return Agent(launch=launch, command=command, folder=Path(launch.shared)).run()


if __name__ == "__main__":
    sys.exit(workers.main(sys.argv[1:], _run))
