"""A probe, round by round: the first node leads and keeps the record, the others follow."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from copus_ext.probe.line import one_way
from copus_ext.probe.meeting import Ended, Meeting, Place, Silence, nodes_of, within
from copus_ext.probe.record import Outcome, Record, json_of, timed_of
from copus_ext.probe.rounds import Pair, Round, partner
from copus_ext.probe.talk import follow, lead

_MARGIN_S = 10.0
"""For what is no measurement: threads that start, the store."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How links are timed; the first node's are everybody's."""

    backend: str
    """`gloo` or `nccl`."""
    sizes: tuple[int, ...]
    """Bytes of the messages, growing; the first is that of answers and gives the latency."""
    repeats: int
    """Messages of a size, at most."""
    pair_s: float
    """Seconds that a pair may measure, both directions."""
    timeout_s: float
    """Seconds without an answer after which a link counts as silent."""

    @property
    def most_s(self) -> float:
        """Seconds after which a pair is given up."""
        return self.pair_s + self.timeout_s + _MARGIN_S / 2

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Settings:
        """Reads a dictionary of the fields."""
        return cls(**{**data, "sizes": tuple(data["sizes"])})


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the first node has decided."""

    ranks: tuple[int, ...]
    """[nodes] the process that probes."""
    hosts: tuple[str, ...]
    """[nodes] names."""
    rounds: tuple[Round, ...]
    """What is to be timed."""
    settings: Settings
    """How."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Plan:
        """Reads a dictionary of the fields."""
        rounds = tuple(tuple((a, b) for a, b in some) for some in data["rounds"])
        return cls(
            ranks=tuple(data["ranks"]),
            hosts=tuple(data["hosts"]),
            rounds=rounds,
            settings=Settings.of(data["settings"]),
        )


def introduce(meeting: Meeting, place: Place) -> None:
    """Tells the first node that a process is there."""
    meeting.say(f"here/{place.rank}", {"node": place.node, "host": place.host})


def gather(meeting: Meeting, world_size: int, seconds: float) -> tuple[list[int], list[str]]:
    """On the first node: who probes, and the names of the nodes.

    Raises:
        Silence: processes have not come; their ranks are in the message.
    """
    until = time.monotonic() + seconds
    places, missing = [], []
    for rank in range(world_size):
        try:
            places.append(meeting.hear(f"here/{rank}", max(until - time.monotonic(), 0)))
        except Silence:
            missing.append(str(rank))
    if missing:
        raise Silence(f"ranks {', '.join(missing[:20])} have not come in {seconds:g} s")
    return nodes_of(places)


def run_round(
    meeting: Meeting, plan: Plan, place: Place, node: int, number: int
) -> dict[str, Any] | None:
    """A node's part of a round; None if it rests.

    Returns:
        The direction from this node, or `why` there is none; `stuck` if this process can measure
        no other link.
    """
    pair = _pair_of(plan.rounds[number], node)
    if pair is None:
        return None
    settings = plan.settings
    try:
        return within(settings.most_s, lambda: _measure(meeting, settings, place, pair, node))
    except Silence as error:
        return {"why": str(error), "stuck": True}
    except Exception as error:
        line = (str(error) or type(error).__name__).splitlines()[0]
        return {"why": line[:200]}


def _pair_of(some: Round, node: int) -> Pair | None:
    other = partner(some, node)
    return None if other is None else (min(node, other), max(node, other))


def _measure(
    meeting: Meeting, settings: Settings, place: Place, pair: Pair, node: int
) -> dict[str, Any]:
    import torch.distributed as dist

    from copus_ext.probe.wire import torch_wire

    # One pair is never timed twice in a probe, so that its keys are its own.
    store = dist.PrefixStore(f"pair/{pair[0]}/{pair[1]}", meeting.store)
    trips: dict[int, list[float]] = {}
    with torch_wire(
        store,
        pair.index(node),
        backend=settings.backend,
        device_number=place.local_rank,
        most_bytes=settings.sizes[-1],
        timeout_s=settings.timeout_s,
    ) as wire:
        for leader in pair:
            if leader == node:
                trips = lead(
                    wire,
                    settings.sizes,
                    repeats=settings.repeats,
                    budget_s=settings.pair_s / 2,
                )
            else:
                follow(wire, settings.sizes[0])
    return json_of(one_way(trips))


def lead_all(
    meeting: Meeting,
    plan: Plan,
    place: Place,
    record: Record,
    say: Callable[[str], None],
) -> list[str]:
    """On the first node: runs all rounds and keeps the record.

    Args:
        meeting: the board.
        plan: what is to be timed.
        place: of this process.
        record: takes every round as soon as it is done.
        say: takes a line on how far it is after every round.

    Returns:
        Names of the nodes that have gone or can no longer measure; the rounds behind are left out.
    """
    began = time.monotonic()
    for number, some in enumerate(plan.rounds):
        meeting.say(f"go/{number}", True)
        until = time.monotonic() + plan.settings.most_s + _MARGIN_S
        answers = {0: run_round(meeting, plan, place, 0, number)}
        for node in sorted(node for pair in some for node in pair if node):
            try:
                left = max(until - time.monotonic(), 0)
                answers[node] = meeting.hear(f"said/{number}/{node}", left)
            except Silence:
                answers[node] = {"why": f"{plan.hosts[node]} has gone", "stuck": True}
        outcomes = [_outcome(pair, answers) for pair in some]
        record.add(outcomes)
        say(_progress(number, len(plan.rounds), len(some), time.monotonic() - began))
        for one in outcomes:
            if not one.is_known:
                a, b = (plan.hosts[node] for node in one.pair)
                say(f"no answer between {a} and {b}: {one.why}")
        if lost := [plan.hosts[n] for n, a in sorted(answers.items()) if a and a.get("stuck")]:
            return lost
    return []


def _outcome(pair: Pair, answers: Mapping[int, Any]) -> Outcome:
    found = []
    for node in pair:
        try:
            found.append(timed_of(answers[node]))
        except (KeyError, TypeError, ValueError):
            found.append(None)
    whys = [answers[node].get("why", "") for node in pair]
    return Outcome(pair=pair, there=found[0], back=found[1], why=next(filter(None, whys), ""))


def _progress(number: int, num_rounds: int, num_pairs: int, seconds: float) -> str:
    left = seconds / (number + 1) * (num_rounds - number - 1)
    return (
        f"round {number + 1} of {num_rounds}: {num_pairs} pair{'s' * (num_pairs > 1)}, "
        f"{seconds:.0f} s so far, "
        f"about {left:.0f} s left"
    )


def follow_all(meeting: Meeting, plan: Plan, place: Place, node: int) -> None:
    """On the other nodes: takes part in every round until the first node ends the probe.

    Raises:
        Silence: it says nothing any more.
    """
    patience = 2 * (plan.settings.most_s + _MARGIN_S)
    try:
        for number in range(len(plan.rounds)):
            meeting.hear(f"go/{number}", patience)
            answer = run_round(meeting, plan, place, node, number)
            if answer is not None:
                meeting.say(f"said/{number}/{node}", answer)
        # Its end comes after the record is written.
        meeting.hear("end", patience)
    except Ended:
        return


def plan_json(plan: Plan) -> dict[str, Any]:
    """Plain JSON types."""
    return asdict(plan)
