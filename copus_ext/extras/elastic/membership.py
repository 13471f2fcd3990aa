"""A rank's part in an elastic run: it knows the newest generation, gets out of a world that has
lost a member, and enters the next.

A rank that waits for a dead peer sees an error at once. One that waits for a living peer, which has
itself seen an error, would hang: no call of torch ends a wait of gloo. What does is to shut down
the connections of the process. So every rank that sees an error, or hears of a newer generation,
does that, and all others see it within milliseconds.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from copus_ext.extras.elastic.messages import FROM_LAUNCHER, Generation, JsonSocket, Member
from megatron.trainer.common.collectives import barrier
from megatron.trainer.common.control import GENERATION_VARIABLE
from megatron.trainer.common.device import use_own_gpu
from megatron.trainer.common.errors import Relaunch
from megatron.trainer.distributed import process_groups
from megatron.trainer.resilience.watchdog import exit_immediately

FIRST_S = 600.0
"""Seconds to wait for the first generation: all nodes have to come."""
AGREE_S = 15.0
"""Seconds in which the launchers have to announce a generation, after an error of this world."""
DOUBT_S = 1.0
"""The same after an error that tells nothing of the world."""
ENTER_S, JOIN_S = 90.0, 900.0
"""Seconds in which all members have to meet in a new world. One that joins waits for the others to
come to a step boundary."""
_NOTICE_S, _LEAVE_S = 60.0, 12.0
"""A rank that has not noticed by then that its world is over, or has not left it, ends itself and
counts as lost: before the others give up meeting it. It notices at its next collective."""
_SHUT_AGAIN_S = 0.05
_SLICE = datetime.timedelta(seconds=0.25)
_MESSAGES = {12, 13, 14}
"""torch's numbers of send, receive, and receive from anyone: those cannot be waited for again."""
_OF_WORLD = re.compile(
    r"connection|broken pipe|socket|gloo|timed out|nccl|store|process group|peer", re.IGNORECASE
)


class WorldChanged(RuntimeError):
    """A newer generation is known."""


class Membership:
    """What a rank and its launcher know of each other."""

    def __init__(self, connection: socket.socket, member: Member, launch: str) -> None:
        self.member, self._launch = member, launch
        self._lines = JsonSocket(connection, FROM_LAUNCHER)
        self._changed = threading.Condition()
        self.latest: Generation | None = None
        """The newest generation that is known."""
        self.entered = 0
        """Number of the one that this rank is in, or was in last."""
        self.timeout_s = ENTER_S
        """Seconds that a collective of this world may take."""
        self._own: Generation | None = None
        self._is_out, self._is_meeting, self._out_s = True, False, 0.0
        self._backend = ""
        self._before: set[str] = set()
        _wait_in_slices(self)
        threading.Thread(target=self._listen, name="membership", daemon=True).start()

    @classmethod
    def of(cls, env: Mapping[str, str], *, variable: str, launch: str) -> Membership:
        """Takes the place that the launcher has put into the environment."""
        number, *place = (int(word) for word in env[variable].split(":"))
        return cls(socket.socket(fileno=number), Member(*place), launch)

    def _listen(self) -> None:
        while (messages := self._lines.read()) is not None:
            for message in messages:
                if "generation" not in message:
                    continue
                generation = Generation.from_json(message["generation"])
                if self.member not in (*generation.members, *generation.released):
                    continue  # it was announced before this rank was ready
                with self._changed:
                    self.latest = generation
                    self._changed.notify_all()
                if self.has_lost or self._is_meeting:
                    number = (generation.number,)
                    threading.Thread(target=self._get_out, args=number, daemon=True).start()
        exit_immediately(1)  # without a launcher the node counts as lost

    def _get_out(self, number: int) -> None:
        """Frees the main thread from a world that has lost a member, or where not all meet."""
        began_s = time.monotonic()
        while self.entered < number:
            if not self._is_out:
                self.shut_connections()
            time.sleep(_SHUT_AGAIN_S)
            limit_s = _LEAVE_S if self._is_out else _NOTICE_S
            if time.monotonic() - max(began_s, self._out_s) > limit_s:
                faulthandler.dump_traceback(all_threads=True)
                print(
                    f"copus: rank {self.member.local} of node {self.member.node} cannot leave "
                    f"generation {self.entered}",
                    file=sys.stderr,
                    flush=True,
                )
                exit_immediately(1)

    @property
    def is_over(self) -> bool:
        """Whether a newer generation is known than the one that this rank is in."""
        return self.latest is not None and self.latest.number > self.entered

    @property
    def has_lost(self) -> bool:
        """Whether the world of this rank has lost a member, or is broken."""
        latest, own = self.latest, self._own
        if latest is None or own is None or latest.number <= own.number:
            return False
        is_broken = latest.kind == "loss" and not latest.lost
        return is_broken or not set(own.members) <= {*latest.members, *latest.released}

    @property
    def is_released(self) -> bool:
        """Whether the run goes on without this rank, since it asks for fewer."""
        return self.latest is not None and self.member in self.latest.released

    @property
    def is_gloo(self) -> bool:
        """Whether this rank is in a world of gloo, whose waits may be tried again."""
        return self.entered > 0 and self._backend == "gloo"

    def ready(self) -> None:
        """Tells the launcher that this rank can enter a generation."""
        self._lines.send(ready=1)

    def failing(self) -> None:
        """Tells the launcher that an error of this rank ends it, which a new start would meet
        again."""
        self._lines.send(failing=1)

    def leaving(self, *, released: bool = False) -> None:
        """Tells the launcher that this process ends and is not lost: with the run, or because that
        goes on without it."""
        self._lines.send(**{"released" if released else "leaving": 1})

    def wait_newer(self, timeout_s: float) -> Generation:
        """The newest generation, once there is one after that of this rank.

        Raises:
            Relaunch: none was announced in time.
        """

        def is_newer() -> bool:
            return self.is_over

        with self._changed:
            if not self._changed.wait_for(is_newer, timeout_s):
                raise Relaunch(
                    f"the launchers have announced no generation after {self.entered} "
                    f"within {timeout_s:g} s"
                )
            assert self.latest is not None
            return self.latest

    def enter(self, generation: Generation, *, backend: str, timeout_minutes: float) -> None:
        """Meets the other members in a new world, and describes it in the environment.

        Raises:
            RuntimeError: the members did not meet, or the world has changed again.
            UsageError: this node has fewer GPUs than ranks.
        """
        is_newcomer = self.entered == 0 and generation.kind != "start"
        self._before, self._own = _connections(), generation
        self.timeout_s = JOIN_S if is_newcomer else ENTER_S
        self._backend, self._is_meeting = backend, True
        self.entered, self._is_out = generation.number, False
        if self.is_over:
            raise WorldChanged("a newer generation was announced")
        assert self.member in generation.members, (self.member, generation)
        rank, size = generation.members.index(self.member), len(generation.members)
        host, _, port = generation.store.rpartition(":")
        here = generation.ranks_of(self.member.node)
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_WORLD_SIZE=str(len(here)),
            MASTER_ADDR=host,
            MASTER_PORT=port,
        )
        os.environ[GENERATION_VARIABLE] = f"{self._launch}/{generation.number}"
        # The first collectives come before `pretrain` takes a device: all would use the first GPU.
        if backend == "nccl":
            use_own_gpu(int(os.environ["LOCAL_RANK"]))
        # Of a world that did not come about torch keeps the count, which is part of the next name.
        dist.distributed_c10d._world.group_count = 0
        meeting = datetime.timedelta(seconds=self.timeout_s)
        store = dist.TCPStore(host, int(port), is_master=False, timeout=meeting)
        named = dist.PrefixStore(f"generation-{generation.number}", store)
        dist.init_process_group(backend, store=named, rank=rank, world_size=size, timeout=meeting)
        barrier()
        self._is_meeting = False
        self._lines.send(met=1)
        usual = datetime.timedelta(minutes=timeout_minutes)
        self.timeout_s = usual.total_seconds()
        store.set_timeout(usual)
        dist.distributed_c10d._set_pg_timeout(usual, None)

    def after_error(self, error: BaseException) -> bool:
        """Whether the world of this rank is over, so that an error came of that. Frees the others
        where it may be. Waits a while for the launchers."""
        self._is_out, self._out_s = True, time.monotonic()
        self._is_meeting = False
        is_of_world = any(_OF_WORLD.search(str(one)) for one in _chain(error))
        if is_of_world or self.has_lost:
            self.shut_connections()
        if is_of_world:
            self._lines.send(broken=self.entered)
        try:
            self.wait_newer(AGREE_S if is_of_world else DOUBT_S)
        except Relaunch:
            return False
        return True

    def leave(self, *, wait: bool) -> None:
        """Takes down the groups of a world that is over. Nothing may refer to them any more.

        Args:
            wait: for all its members first, since they all live.
        """
        self._is_out, self._out_s = True, time.monotonic()
        if wait and not self.has_lost:
            with contextlib.suppress(Exception):
                process_groups.destroy_groups()
                dist.destroy_process_group()
                return
        process_groups.destroy_broken_world()

    def shut_connections(self) -> None:
        """Ends all waits of this process for other ranks: shuts down the TCP connections that were
        made since it entered its world. Needs no answer of anybody."""
        process_groups.abort_world()  # first: NCCL takes shut connections for an error of its own
        for name in _connections() - self._before:
            _shut_down(name)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it came of."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _connections() -> set[str]:
    """File number and identity of every socket of this process."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")
            if target.startswith("socket:"):
                found.add(f"{number} {target}")
    return found


def _shut_down(name: str) -> None:
    """Shuts down a socket if it is a TCP connection. One that listens is left alone: gloo ends the
    process where its listener fails."""
    number = int(name.split()[0])
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
        if one.family in (socket.AF_INET, socket.AF_INET6):
            one.getpeername()
            one.shutdown(socket.SHUT_RDWR)


def _wait_in_slices(membership: Membership) -> None:
    """Lets waits for collectives look for a newer generation. gloo may lose the end of a connection
    while it sends, and would wait for its time-out."""
    plain: Any = dist.Work.wait

    def wait(work: Any, *timeout: Any, **named: Any) -> Any:
        is_sliced = membership.is_gloo and work._get_op_type() not in _MESSAGES
        if timeout or named or not is_sliced:
            return plain(work, *timeout, **named)
        deadline_s = time.monotonic() + membership.timeout_s
        while True:
            try:
                return plain(work, _SLICE)
            except RuntimeError as error:
                if "timed out" not in str(error).lower():
                    raise
                if membership.has_lost:
                    raise WorldChanged("the process group has lost a member") from None
                if time.monotonic() > deadline_s:
                    raise

    dist.Work.wait = wait  # pyright: ignore[reportAttributeAccessIssue]
