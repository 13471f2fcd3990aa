"""A run on a virtual clock that may change the number of its ranks, node by node.

It decides as every other run does, from what it measures. Beside that it asks
`copus_ext.goodput.ranks` whether the price of progress would be lower on more or fewer nodes. Nodes
that it asks for come later, and it goes on until they do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from copus_ext.goodput.headroom import Course
from copus_ext.goodput.inputs import (
    EARLY_SHARE,
    ConfigThroughput,
    Decision,
    DecisionInputs,
    most_critical_batch_size,
)
from copus_ext.goodput.ranks import (
    ELASTIC_S,
    RankChange,
    RankDecision,
    RankInputs,
    best_row,
    choose_ranks,
    price,
    ranks_of,
)
from copus_ext.simulate.conditions import World
from copus_ext.simulate.contenders import Contender
from copus_ext.simulate.run import Run, Runner
from copus_ext.simulate.scenario import Scenario
from copus_ext.simulate.speeds import NoSpeed
from megatron.training.config.layout import Layout

NODE_WAIT_S, NODE_START_S = 300.0, 60.0
"""Assumed: seconds from the request for a node until it can join, and how many of them it counts as
held, since it starts its processes."""


class Machines:
    """One scenario on several numbers of nodes.

    Args:
        scenario: on any number.
        nodes: to choose from; those on which nothing fits are left out.
        seed: of the errors of what is known of speeds.
    """

    def __init__(self, scenario: Scenario, nodes: Sequence[int], *, seed: int = 0) -> None:
        self.by_ranks: dict[int, Scenario] = {}
        """By number of ranks."""
        for count in sorted(set(nodes)):
            cluster = dataclasses.replace(scenario.cluster, num_nodes=count)
            one = scenario.change(cluster=cluster)
            try:
                one.speeds(seed)
            except NoSpeed:
                continue
            self.by_ranks[cluster.world_size] = one
        self._pauses: dict[tuple[Layout, Layout], float] = {}
        self._most: dict[Layout, float] = {}
        self._seed = seed

    def of_nodes(self, nodes: int) -> Scenario:
        """The scenario on so many nodes.

        Raises:
            NoSpeed: nothing fits there.
        """
        for one in self.by_ranks.values():
            if one.cluster.num_nodes == nodes:
                return one
        raise NoSpeed(f"nothing fits on {nodes} nodes")

    @cached_property
    def rows(self) -> tuple[ConfigThroughput, ...]:
        """Every configuration of every number of ranks, as a run knows it."""
        return tuple(
            row for one in self.by_ranks.values() for row in one.speeds(self._seed).known.values()
        )

    def pause_s(self, before: Layout, after: Layout) -> float:
        """Seconds of a change between any two layouts. All of the state counts as moving where the
        ranks change."""
        pair = before, after
        if pair not in self._pauses:
            here, there = (self.by_ranks[layout.world_size] for layout in pair)
            if here is there:
                self._pauses[pair] = here.pause_s(*pair)
            else:
                moves = here.pauses.most_seconds(before), there.pauses.most_seconds(after)
                self._pauses[pair] = ELASTIC_S + max(moves)
        return self._pauses[pair]

    def most_pause_s(self, before: Layout) -> float:
        """Upper estimate of a change to another number of ranks, seconds; 0 if there is none."""
        if before not in self._most:
            others = [one for n, one in self.by_ranks.items() if n != before.world_size]
            speeds = [one.speeds(self._seed) for one in others]
            pauses = [self.pause_s(before, some.layouts[0]) for some in speeds]
            self._most[before] = max(pauses, default=0.0)
        return self._most[before]


@dataclass(frozen=True, kw_only=True)
class Holding:
    """From some moment on the run holds so many ranks."""

    clock_s: float
    """Seconds since the start."""
    ranks: int
    """Those of nodes that are starting included."""


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """The result of a run and what it held."""

    run: Run
    """Times and changes."""
    holdings: tuple[Holding, ...]
    """In order; the first is the start."""

    def rank_seconds(self, until_s: float) -> float:
        """Ranks times seconds from the start."""
        ends = [*(one.clock_s for one in self.holdings[1:]), until_s]
        return sum(
            one.ranks * max(min(end, until_s) - one.clock_s, 0.0)
            for one, end in zip(self.holdings, ends)
        )


def simulate_ranks(
    machines: Machines, contender: Contender, *, cost_of_time: float, seed: int
) -> RankRun:
    """Runs a contender that may change the number of its nodes. The same arguments give the same
    run, bit for bit. With one number of nodes it is the run of `simulate`.

    Args:
        machines: to choose from.
        contender: with flags of the controller.
        cost_of_time: see `copus_ext.goodput.ranks`.
        seed: of the noise that its estimates have.
    """
    runner = _RankRunner(machines, contender, cost_of_time, seed)
    return RankRun(run=runner.run(), holdings=tuple(runner.holdings))


@dataclass(frozen=True, kw_only=True)
class _Request:
    """Nodes that were asked for."""

    ranks: int
    clock_s: float
    """When they can join."""


class _RankRunner(Runner):
    """A `Runner` whose scenario is another one once its ranks change."""

    def __init__(
        self, machines: Machines, contender: Contender, cost_of_time: float, seed: int
    ) -> None:
        self.machines, self.cost_of_time, self.seed = machines, cost_of_time, seed
        self.last: RankChange | None = None
        self.request: _Request | None = None
        super().__init__(self._first(contender), contender, seed, None)
        self.holdings = [Holding(clock_s=0.0, ranks=ranks_of(self.row))]

    def _first(self, contender: Contender) -> Scenario:
        """The scenario of the first step: by the bound of the critical batch size, since nothing is
        measured yet."""
        choices = self.machines.by_ranks
        any_one = next(iter(choices.values()))
        flags, batch = contender.flags, contender.first_batch or any_one.batches[0]
        able = [n for n, one in choices.items() if batch in one.speeds(self.seed).batches]
        if not able:
            raise NoSpeed(f"no number of nodes can run a batch of {batch}")
        early = flags.copus_early_steps if flags is not None else 0.0
        if len(able) == 1 or not early:
            return choices[max(able)]
        rows = [
            row
            for row in self.machines.rows
            if row.global_batch_size == batch and ranks_of(row) in able
        ]
        trained = EARLY_SHARE * any_one.total_samples
        bound = most_critical_batch_size(trained, early, any_one.seq_length)
        return choices[ranks_of(best_row(rows, bound, self.cost_of_time))]

    def _decide(self) -> None:
        if len(self.machines.by_ranks) > 1 and self._look_at_ranks():
            self.state.record_decision(consumed_samples=self.consumed, scheduled=self._scheduled())
            self.out.decisions += 1
            return
        super()._decide()

    def _look_at_ranks(self) -> bool:
        """Asks for nodes, takes in those that came, or gives some back; whether ranks changed."""
        inputs = self._inputs()
        found = choose_ranks(self._rank_inputs(inputs))
        if self.request is not None:
            if self.clock_s < self.request.clock_s:
                return False
            return self._take_in(inputs, found)
        if not found.changes:
            return False
        if ranks_of(found.to) > ranks_of(self.row):
            self.request = _Request(ranks=ranks_of(found.to), clock_s=self.clock_s + NODE_WAIT_S)
            return False
        self._go(found.to, inputs)
        return True

    def _take_in(self, inputs: DecisionInputs, found: RankDecision) -> bool:
        """Nodes are there: goes on with them if they still pay, and else gives them back."""
        assert self.request is not None
        asked, self.request = self.request.ranks, None
        rows = [row for row in self._rank_inputs(inputs).rows if ranks_of(row) == asked]
        began = max(self.clock_s - NODE_START_S, self.holdings[-1].clock_s)
        self.holdings.append(Holding(clock_s=began, ranks=asked))
        phi = inputs.critical_batch_size
        if rows and phi is not None:
            to = best_row(rows, phi, self.cost_of_time)
            here, there = price([self.row, to], phi, self.cost_of_time).tolist()
            if there < here:
                self._go(to, inputs)
                return True
        self.holdings.append(Holding(clock_s=self.clock_s, ranks=ranks_of(self.row)))
        return False

    def _rank_inputs(self, inputs: DecisionInputs) -> RankInputs:
        here = ranks_of(self.row)
        others = [row for row in self.machines.rows if ranks_of(row) != here]
        return RankInputs.of(
            inputs,
            [*inputs.rows, *others],
            cost_of_time=self.cost_of_time,
            pause_s=self.machines.most_pause_s(self.row.layout),
            last=self.last,
        )

    def _go(self, to: ConfigThroughput, inputs: DecisionInputs) -> None:
        """Goes on with another number of ranks."""
        before, after = ranks_of(self.row), ranks_of(to)
        phi = inputs.critical_batch_size
        assert phi is not None
        self.scenario = self.machines.by_ranks[after]
        self.world = World(self.scenario, self.seed)
        self.speeds = self.world.speeds
        self.last = RankChange(before=before, after=after, critical_batch_size=phi)
        self._apply(
            Decision(
                kind="relayout",
                to=to,
                reason=f"ranks {before} -> {after}",
                gain=None,
                target_batch=None,
                batch_above_optimal=False,
                critical_batch_size=phi,
                critical_batch_size_is_bound=inputs.is_critical_batch_size_bound,
            )
        )
        if after < before:  # All of them wait in the pause.
            self.holdings.append(Holding(clock_s=self.clock_s, ranks=after))

    def _pause_s(self, before: Layout, after: Layout) -> float:
        return self.machines.pause_s(before, after)

    def _prior_s(self, before: Layout, after: Layout) -> float:
        if before.world_size == after.world_size:
            return super()._prior_s(before, after)
        return self.machines.pause_s(before, after)


def course_of(scenario: Scenario) -> Course:
    """The true course of the critical batch size up to the last target."""
    dynamics = scenario.dynamics
    edges = np.array(dynamics.edges)
    lengths = np.clip(scenario.last - edges[:-1], 0.0, np.diff(edges))
    phi = scenario.truth.noise_scale_multiplier * np.array(dynamics.phis)
    return Course(progress=lengths[lengths > 0], critical_batch_size=phi[lengths > 0])
