"""Conditions that change while a run goes on: what they are, and what the run takes them to be."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from copus_ext.cost_model.conditions import Timings, factors_after
from copus_ext.cost_model.constants import USUAL, PartFactors
from copus_ext.cost_model.spec_file import SpecError
from copus_ext.extras.simulate.speeds import Key, Speeds, best_rows
from copus_ext.goodput.inputs import ConfigThroughput
from copus_ext.goodput.state import ControllerState
from copus_ext.planner.search import Planner

if TYPE_CHECKING:
    from copus_ext.extras.simulate.scenario import Scenario

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
    return Planner(
        planner.model,
        planner.cluster,
        constants=planner.constants.under(factors),
        limits=planner.limits,
        memory_margin=planner.memory_margin,
    )


class World:
    """The speeds of one run: as they are, and as it knows them."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._usual = scenario.speeds
        self._true = self._believed = USUAL
        self.speeds = self._usual

    def go_on(self, share: float) -> None:
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
        """Times links again if that is due, and lets the run believe what follows from it. Returns
        whether it takes conditions for others than before. The state of the controller changes."""
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
        both = [at for at in self._usual.actual if at in true and at in known]
        self.speeds = Speeds([true[at] for at in both], [known[at] for at in both])

    def _rows(self, factors: PartFactors) -> dict[Key, ConfigThroughput]:
        if factors == USUAL:
            return self._usual.known
        s = self._scenario
        return best_rows(planner_under(s.planner, factors), s.batches)
