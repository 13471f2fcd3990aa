"""Who takes part in a probe, and what the processes tell each other through the launch's store."""

from __future__ import annotations

import datetime
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron.training.common.errors import UsageError

_POLL_S = 0.02
_END = "end"
_T = TypeVar("_T")


class Silence(Exception):
    """Nobody said what was waited for."""


class Ended(Exception):
    """The first node has ended the probe."""


def within(seconds: float, function: Callable[[], _T]) -> _T:
    """Runs a function that may hang where no signal reaches it, and waits no longer than so.

    A function that hangs goes on doing so in a thread that does not keep the process.

    Raises:
        Silence: it has not returned.
        BaseException: what it raised.
    """
    answers: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    # The main thread stays free for signals.
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise Silence(f"no answer for {seconds:.0f} s")
    return answers[0]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a process runs."""

    rank: int
    """Among all processes of the launch."""
    world_size: int
    """Processes of the launch."""
    node: int
    """Number that the launcher gave to the node; with `every_rank` the rank."""
    host: str
    """Name of the node."""
    local_rank: int
    """GPU of the process."""


def place_of(env: Mapping[str, str], *, every_rank: bool) -> Place:
    """Reads what the launcher says of this process.

    Args:
        env: environment.
        every_rank: count every process as a node.

    Raises:
        UsageError: no launcher has started it.
    """
    try:
        rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
        local_world = max(int(env.get("LOCAL_WORLD_SIZE", "1")), 1)
        node = rank if every_rank else int(env.get("GROUP_RANK", str(rank // local_world)))
        local_rank = int(env.get("LOCAL_RANK", "0"))
    except (KeyError, ValueError):
        raise UsageError(
            "start it on every node with torchrun or srun, such as srun --ntasks-per-node 1 "
            "python tools/probe_links.py --output cluster.json"
        ) from None
    # SLURM's name is the one that its commands take.
    name = env.get("SLURMD_NODENAME") or socket.gethostname()
    host = re.sub(r"[^A-Za-z0-9.-]|^[.-]", "x", name[:253]) or "host"
    return Place(rank=rank, world_size=world, node=node, host=host, local_rank=local_rank)


def nodes_of(places: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[str]]:
    """The process of each node that probes, and the node's name.

    Args:
        places: [ranks] node and host of every process.

    Returns:
        The lowest rank of every node, growing; names, told apart by number where two are the same.
    """
    first: dict[int, int] = {}
    for rank, place in enumerate(places):
        first.setdefault(place["node"], rank)
    ranks = sorted(first.values())
    hosts = [places[rank]["host"] for rank in ranks]
    return ranks, [
        host if hosts.count(host) == 1 else f"{host}:{node}" for node, host in enumerate(hosts)
    ]


class Meeting:
    """The store of the launch, as a board.

    Args:
        store: a torch.distributed store that all processes reach.
        poll_s: seconds between two looks at it.
    """

    def __init__(self, store: Any, *, poll_s: float = _POLL_S) -> None:
        self.store, self._poll_s = store, poll_s

    def say(self, key: str, value: Any) -> None:
        """Puts something up for all."""
        self.store.set(key, json.dumps(value))

    def hear(self, key: str, seconds: float, *, after_end: bool = False) -> Any:
        """Waits for what somebody puts up.

        Args:
            key: of it.
            seconds: how long.
            after_end: wait also if the probe has ended.

        Raises:
            Silence: nobody did.
            Ended: the first node has ended the probe before.
        """
        until = time.monotonic() + seconds
        while not self.store.check([key]):
            if not after_end and self.store.check([_END]):
                raise Ended
            if time.monotonic() > until:
                raise Silence(key)
            time.sleep(self._poll_s)
        return json.loads(self.store.get(key))

    def end(self) -> None:
        """Sends everybody home."""
        self.say(_END, True)

    def dismiss(self, ranks: Sequence[int], seconds: float) -> None:
        """Sends everybody home and waits until they have gone, as the store may go with this
        process."""
        self.end()
        until = time.monotonic() + seconds
        for rank in ranks:
            try:
                self.hear(f"bye/{rank}", max(until - time.monotonic(), 0), after_end=True)
            except Silence:
                return

    def leave(self, rank: int) -> None:
        """Says that a process asks the store nothing more."""
        self.say(f"bye/{rank}", True)


def meet(seconds: float) -> Meeting:
    """Finds the launch's store.

    Raises:
        Silence: it cannot be reached.
    """
    import torch.distributed as dist

    def find() -> Any:
        limit = datetime.timedelta(seconds=seconds)
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=limit)))
        return dist.PrefixStore("probe", store)

    try:
        return Meeting(within(seconds + 5, find))
    except (Silence, RuntimeError, ValueError, OSError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise Silence(f"the first node cannot be reached at {where} in {seconds:g} s") from error
