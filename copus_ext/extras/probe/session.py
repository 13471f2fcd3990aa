"""A probe of all links, in rounds. The processes meet in the store of torch.distributed.

Keys of the store: `here/RANK` holds node and host of a process. The first node sets `plan`, and
`go/ROUND` to the pairs of the round, or null at the end. The others set `times/ROUND/NODE`, and
`bye/RANK` when they leave. A pair has the keys of `round/ROUND/NODE/NODE` for itself.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from copus_ext.extras.probe import pair as link
from copus_ext.extras.probe.link_fit import Timed, one_way
from copus_ext.extras.probe.record import LinkRecord, Pair
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.outside import parse_json

_POLL_S = 0.02
_MARGIN_S = 10.0
"""For everything but messages: threads that start, the store."""
_FEW_ROUNDS = 3
"""So many may always be run once more."""
_T = TypeVar("_T")
Round = tuple[Pair, ...]
"""Pairs that are timed at the same time; no node is in two of them."""


class Silence(Exception):
    """Nobody said what was waited for."""


@dataclass(frozen=True, kw_only=True)
class Place:
    rank: int
    world_size: int
    node: int
    """The launcher's number of the node; with `every_rank` the rank."""
    host: str
    local_rank: int


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How links are timed; see `copus_ext.extras.probe.pair.measure`."""

    backend: str
    sizes: tuple[int, ...]
    repeats: int
    pair_s: float
    timeout_s: float

    @property
    def max_s(self) -> float:
        """Seconds after which a pair is given up."""
        return self.pair_s + self.timeout_s + _MARGIN_S / 2


def tournament(num_nodes: int) -> tuple[Round, ...]:
    """The fewest rounds in which every pair of nodes meets once: n - 1, or n for an odd n.

    The circle method: one place stays, and the others move on by one after every round.

    Raises:
        ValueError: fewer than two nodes.
    """
    if num_nodes < 2:
        raise ValueError(f"{num_nodes} node has no link; a probe needs 2 nodes or more")
    places = num_nodes + num_nodes % 2
    circle = list(range(1, places))
    rounds = []
    for _ in range(places - 1):
        row = [0, *circle]
        met = zip(row[: places // 2], reversed(row[places // 2 :]))
        rounds.append(tuple(sorted((min(p), max(p)) for p in met if max(p) < num_nodes)))
        circle = [circle[-1], *circle[:-1]]
    return tuple(rounds)


def without(rounds: Sequence[Round], done: Set[Pair]) -> tuple[Round, ...]:
    """The same rounds without some pairs; empty rounds are left out."""
    left = (tuple(pair for pair in pairs if pair not in done) for pairs in rounds)
    return tuple(pairs for pairs in left if pairs)


def place_of(env: Mapping[str, str], *, every_rank: bool) -> Place:
    """Reads the launcher's variables of this process.

    Args:
        every_rank: count every process as a node.

    Raises:
        UsageError: no launcher has started it.
    """
    try:
        rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
        local_world = max(int(env.get("LOCAL_WORLD_SIZE", "1")), 1)
        node = rank if every_rank else int(env.get("GROUP_RANK", str(rank // local_world)))
        local_rank = int(env.get("LOCAL_RANK", "0"))
    except (KeyError, ValueError):
        raise UsageError(
            "start it on every node with torchrun or srun --ntasks-per-node 1"
        ) from None
    # SLURM's name is the one that its commands take.
    name = env.get("SLURMD_NODENAME") or socket.gethostname()
    host = re.sub(r"[^A-Za-z0-9.-]|^[.-]", "x", name[:253]) or "host"
    return Place(rank=rank, world_size=world_size, node=node, host=host, local_rank=local_rank)


def nodes_of(places: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[str]]:
    """The first process of each node, and the name of the node, with its number where two nodes
    have the same.

    Args:
        places: [ranks] node and host of every process.
    """
    first: dict[int, int] = {}
    for rank, place in enumerate(places):
        first.setdefault(place["node"], rank)
    ranks = sorted(first.values())
    hosts = [places[rank]["host"] for rank in ranks]
    named = [h if hosts.count(h) == 1 else f"{h}:{node}" for node, h in enumerate(hosts)]
    return ranks, named


def within(seconds: float, function: Callable[[], _T]) -> _T:
    """Runs a function that may hang in a thread, and waits so long for it. The main thread stays
    free for signals, and a thread that hangs does not keep the process.

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
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise Silence(f"no answer for {seconds:.0f} s")
    return answers[0]


def find_store(seconds: float) -> Any:
    """The store of the launch.

    Raises:
        Silence: it cannot be reached.
    """
    import torch.distributed as dist

    def find() -> Any:
        limit = datetime.timedelta(seconds=seconds)
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=limit)))
        return dist.PrefixStore("probe", store)

    try:
        return within(seconds + 5, find)
    except (Silence, RuntimeError, ValueError, OSError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise Silence(f"the first node cannot be reached at {where} in {seconds:g} s") from error


def wait_for(store: Any, keys: Sequence[str], seconds: float) -> list[str]:
    """Waits for keys, and returns those that are still missing after so many seconds. The store's
    own `wait` would let no signal through."""
    until = time.monotonic() + seconds
    while keys and not store.check(list(keys)):
        if time.monotonic() > until:
            return [key for key in keys if not store.check([key])]
        time.sleep(_POLL_S)
    return []


def introduce(store: Any, place: Place) -> None:
    """Tells the first node that a process is there."""
    store.set(f"here/{place.rank}", json.dumps({"node": place.node, "host": place.host}))


def gather(store: Any, world_size: int, seconds: float) -> tuple[list[int], list[str]]:
    """On the first node: the processes that probe, and the names of the nodes.

    Raises:
        Silence: processes have not come; their ranks are in the message.
    """
    keys = [f"here/{rank}" for rank in range(world_size)]
    if missing := wait_for(store, keys, seconds):
        ranks = ", ".join(key.removeprefix("here/") for key in missing[:20])
        raise Silence(f"ranks {ranks} have not come in {seconds:g} s")
    return nodes_of([parse_json(store.get(key)) for key in keys])


@dataclass(kw_only=True)
class Lead:
    """The part of the first node, which runs the rounds and keeps the record."""

    store: Any
    """Of the launch."""
    settings: Settings
    place: Place
    """Of this process."""
    record: LinkRecord
    """Takes every round as soon as it is done."""
    say: Callable[[str], None]
    """Takes a line of progress after every round."""
    num_run: int = 0
    """Rounds that were run so far; the number of the next one in the store."""

    def time_all(self, rounds: Sequence[Round], *, expected: float | None = None) -> list[str]:
        """Runs all rounds, and then those once more that have a single link that looks slow or far.
        They are run whole, because the pairs of a round may share a relayout. Where more than a
        quarter of the rounds has one, nothing that passed is the cause.

        Args:
            expected: bandwidth that every link should have; None compares them with each other.

        Returns:
            Names of the nodes that have gone or can measure no more; later rounds are left out.
        """
        lost = self._run(rounds)
        if lost or self.record.silent:
            return lost
        pairs = self.record.unexplained_pairs(expected)
        every = tournament(len(self.record.hosts))
        again = [some for some in every if pairs.intersection(some)]
        if not 0 < len(again) <= max(_FEW_ROUNDS, len(every) // 4):
            return []
        self.say(
            f"pairs that look slow or far: {len(pairs)}; rounds to run once more: {len(again)}, "
            f"{len(again) * self.settings.max_s:.0f} s at most"
        )
        return self._run(again)

    def _run(self, rounds: Sequence[Round]) -> list[str]:
        """Runs some rounds; returns as `time_all`."""
        began = time.monotonic()
        hosts = self.record.hosts
        for number, pairs in enumerate(rounds, start=1):
            answers = self._answers(pairs)
            silent = _add_round(self.record, pairs, answers)
            spent = time.monotonic() - began
            left = spent / number * (len(rounds) - number)
            plural = "s" * (len(pairs) > 1)
            self.say(
                f"round {number} of {len(rounds)}: {len(pairs)} pair{plural}, {spent:.0f} s so "
                f"far, about {left:.0f} s left"
            )
            for (a, b), why in silent.items():
                self.say(f"no answer between {hosts[a]} and {hosts[b]}: {why}")
            if lost := [hosts[n] for n, a in sorted(answers.items()) if a and a.get("stuck")]:
                return lost
        return []

    def _answers(self, pairs: Round) -> dict[int, Any]:
        """Runs a round; returns what each of its nodes answers, by node."""
        number, self.num_run = self.num_run, self.num_run + 1
        until = time.monotonic() + self.settings.max_s + _MARGIN_S
        self.store.set(f"go/{number}", json.dumps(pairs))
        answers = {0: _play(self.store, number, pairs, self.settings, self.place, 0)}
        keys = {node: f"times/{number}/{node}" for pair in pairs for node in pair if node}
        missing = wait_for(self.store, list(keys.values()), max(until - time.monotonic(), 0))
        for node, key in keys.items():
            gone = {"why": f"{self.record.hosts[node]} has gone", "stuck": True}
            answers[node] = gone if key in missing else parse_json(self.store.get(key))
        return answers


def _add_round(record: LinkRecord, pairs: Round, answers: Mapping[int, Any]) -> dict[Pair, str]:
    """Records the pairs of a round; returns those without an answer and why."""
    known: dict[tuple[int, int], Timed] = {}
    silent: dict[Pair, str] = {}
    for a, b in pairs:
        try:
            both = Timed.of(answers[a]), Timed.of(answers[b])
        except (KeyError, TypeError, ValueError):
            whys = [(answers[node] or {}).get("why", "") for node in (a, b)]
            silent[a, b] = next(filter(None, whys), "")
        else:
            known[a, b], known[b, a] = both
    record.add(known, silent)
    return silent


def follow_rounds(store: Any, settings: Settings, place: Place, node: int) -> None:
    """On the other nodes: takes part in every round until the first node ends the probe.

    Raises:
        Silence: the first node says nothing any more.
    """
    patience = 2 * (settings.max_s + _MARGIN_S)
    for number in itertools.count():
        if wait_for(store, [f"go/{number}"], patience):
            raise Silence("the first node has gone")
        if (pairs := parse_json(store.get(f"go/{number}"))) is None:
            return
        pairs = tuple((a, b) for a, b in pairs)
        if (answer := _play(store, number, pairs, settings, place, node)) is not None:
            store.set(f"times/{number}/{node}", json.dumps(answer))


def dismiss(store: Any, world_size: int, seconds: float) -> None:
    """On the first node: ends the probe for all, and waits until they have gone, since the store
    ends with this process."""
    if not store.check(["plan"]):
        store.set("plan", "null")
    for number in itertools.count():
        if not store.check([f"go/{number}"]):
            store.set(f"go/{number}", "null")
            break
    wait_for(store, [f"bye/{rank}" for rank in range(1, world_size)], seconds)


def take_part(store: Any, place: Place, seconds: float) -> None:
    """On all but the first node: waits for the plan, does its part and leaves.

    Raises:
        Silence: the first node says nothing.
    """
    if wait_for(store, ["plan"], seconds):
        raise Silence("the first node has gone")
    plan = parse_json(store.get("plan"))
    if plan is not None and place.rank in plan["ranks"]:
        settings = Settings(**{**plan["settings"], "sizes": tuple(plan["settings"]["sizes"])})
        follow_rounds(store, settings, place, plan["ranks"].index(place.rank))
    store.set(f"bye/{place.rank}", "")


def announce(store: Any, ranks: Sequence[int], settings: Settings) -> None:
    """On the first node: tells the others who takes part and how links are timed."""
    store.set("plan", json.dumps({"ranks": list(ranks), "settings": asdict(settings)}))


def _play(
    store: Any, number: int, pairs: Round, settings: Settings, place: Place, node: int
) -> dict[str, Any] | None:
    """A node's part of a round; None if it rests.

    Returns:
        The direction from this node, or `why` there is none; `stuck` if this process can measure
        no other link.
    """
    mine = next((pair for pair in pairs if node in pair), None)
    if mine is None:
        return None
    try:
        own = _keys_of(store, number, mine)
        return within(settings.max_s, lambda: _measure(own, settings, place, mine, node))
    except Silence as error:
        return {"why": str(error), "stuck": True}
    except Exception as error:
        line = (str(error) or type(error).__name__).splitlines()[0]
        return {"why": line[:200]}


def _keys_of(store: Any, number: int, pair: Pair) -> Any:
    """The part of the store that a pair of a round has for itself."""
    import torch.distributed as dist

    return dist.PrefixStore(f"round/{number}/{pair[0]}/{pair[1]}", store)


def _measure(store: Any, settings: Settings, place: Place, pair: Pair, node: int) -> dict[str, Any]:
    trips, both = link.measure(store, pair.index(node), gpu=place.local_rank, **asdict(settings))
    return one_way(trips, both).to_json()
