"""Conditions that change while a run goes on: what they are, and what the run takes them to be."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from copus_ext.cost_model.conditions import Timings, factors_after
from copus_ext.cost_model.constants import USUAL, PartFactors
from copus_ext.cost_model.spec_file import SpecError
from copus_ext.goodput.inputs import ConfigThroughput
from copus_ext.goodput.state import ControllerState
from copus_ext.planner.search import Planner
from copus_ext.simulate.speeds import Key, Speeds, best_rows

if TYPE_CHECKING:
    from copus_ext.simulate.scenario import Scenario

_PARTS = {"network": "across"}
"""What an event calls a part whose factor has another name."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """From some point on a part of the machine is faster or slower."""

    at: float
    """Samples trained, as a share of the run's."""
    part: str
    """`network` between nodes, `within` nodes, or a part of a step: `compute`, `tp`, `pp`, `dp`."""
    speed: float
    """Its speed is multiplied by this."""

    def __post_init__(self) -> None:
        names = [f.name for f in dataclasses.fields(PartFactors)]
        if _PARTS.get(self.part, self.part) not in names or self.part == "across":
            raise SpecError(f"event: part {self.part!r} is unknown; use network or compute")
        if not 0 <= self.at <= 1 or not 0 < self.speed < 1e6:
            raise SpecError(f"event: {self.part} {self.speed:g} at {self.at:g} of the samples")

    @property
    def factors(self) -> PartFactors:
        """What it does to the parts of a step."""
        return PartFactors(**{_PARTS.get(self.part, self.part): 1 / self.speed})


def factors_at(events: tuple[Event, ...], share: float) -> PartFactors:
    """The parts after some of the samples."""
    now = USUAL
    for event in events:
        if event.at <= share:
            now = now.times(event.factors)
    return now


def planner_under(planner: Planner, factors: PartFactors) -> Planner:
    """The same machine under other conditions."""
    return Planner(
        planner.model,
        planner.cluster,
        constants=planner.constants.under(factors),
        limits=planner.limits,
        memory_margin=planner.memory_margin,
    )


class World:
    """The speeds of one run: as they are, and as it knows them.

    Args:
        scenario: with its events.
        seed: of the errors of what is known.
    """

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._scenario = scenario
        self._usual = scenario.speeds(seed)
        self._true = self._believed = USUAL
        self.speeds = self._usual
        """Of now."""

    def go_on(self, share: float) -> None:
        """Brings the conditions to a point of the run."""
        true = factors_at(self._scenario.events, share)
        if true != self._true:
            self._true = true
            self._renew()

    def timings(self, factors: PartFactors | None = None) -> Timings:
        """What is timed by itself, in arbitrary units."""
        now = self._true if factors is None else factors
        one = self._scenario.cluster.num_nodes == 1
        ring = now.within if one else now.across
        return Timings(ring_s=ring, compute_s=now.compute, is_one_node=one)

    def look(self, row: ConfigThroughput, state: ControllerState, key: str) -> bool:
        """Times links again if that is due, and lets the run believe what follows from it.

        Args:
            row: the present configuration.
            state: of the controller, which is changed.
            key: of the present configuration.

        Returns:
            Whether the run takes conditions for others than before.
        """
        shift, conditions = state.take_shift(), state.conditions
        if shift is None and (not conditions.is_check_due or state.watch.is_unsure):
            return False
        conditions.timed(0.0)
        factors = factors_after(
            lambda f: self._scenario.planner.raw_step_s(row.configuration, f),
            ratio=shift and shift.ratio,
            now=conditions.factors,
            timings=self.timings(),
            usual=self.timings(USUAL),
        )
        if not state.set_conditions(factors, {}, present=key, shift=shift):
            return False
        self._believed = factors
        self._renew()
        return True

    def _renew(self) -> None:
        true, known = (self._rows(f) for f in (self._true, self._believed))
        usual = self._usual
        rows: dict[str, list[Any]] = {"true": [], "known": []}
        for at, row in usual.actual.items():
            if at not in true or at not in known:
                continue
            error = row.samples_per_s / usual.known[at].samples_per_s
            is_true = true[at]
            speed = is_true.samples_per_s * error
            rows["true"].append(dataclasses.replace(is_true, samples_per_s=speed))
            rows["known"].append(known[at])
        self.speeds = Speeds(rows["true"], rows["known"])

    def _rows(self, factors: PartFactors) -> dict[Key, ConfigThroughput]:
        if factors == USUAL:
            return self._usual.known
        s = self._scenario
        return best_rows(planner_under(s.planner, factors), s.batches, known_sd=s.known_sd)
