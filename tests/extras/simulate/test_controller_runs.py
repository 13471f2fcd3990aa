"""What the controller does in whole runs: it anneals, and follows conditions that change."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.pause_prior import PausePrior, machine_of
from copus_ext.cost_model.cluster_spec import preset as machine_preset
from copus_ext.cost_model.constants import USUAL
from copus_ext.cost_model.megatron_flags import spec_of_arguments
from copus_ext.cost_model.spec_file import SpecError
from copus_ext.extras.simulate.conditions import Event, World, factors_at
from copus_ext.extras.simulate.contenders import Contender, contenders
from copus_ext.extras.simulate.run import Run, simulate
from copus_ext.extras.simulate.scenario import Scenario
from copus_ext.extras.simulate.scenario import preset as scenario_of
from copus_ext.planner.space import Limits
from megatron.trainer.config.layout import Layout
from tests.unit.test_controller_parts import config, flags


def changing_network(batch: int, steps: int) -> Scenario:
    """Four nodes whose network falls to a quarter of its speed for the middle half of a run."""
    events = (
        Event(at=0.25, part="network", speed=0.25),
        Event(at=0.75, part="network", speed=4.0),
    )
    return scenario_of("8xh100-3b").change(
        batches=(batch,),
        total_samples=steps * batch,
        warmup_samples=100 * batch,
        events=events,
        step_noise=0.05,
        targets={"none": float(steps * batch)},  # out of reach
    )


def fixed(s: Scenario) -> dict[str, float]:
    """Seconds of the whole run by layout."""
    world, batch, seconds = World(s), s.batches[0], {}
    edges = [0.0, *(event.at for event in s.events), 1.0]
    for start, end in itertools.pairwise(edges):
        world.go_on(start)
        for layout in world.speeds.layouts:
            row = world.speeds.at(layout, batch)
            if row is not None:
                part = (end - start) * s.total_samples / row.samples_per_s
                seconds[str(layout)] = seconds.get(str(layout), 0.0) + part
    return seconds


def run_of(share: float) -> Run:
    """A run of a quadratic under a constant rate."""
    batches = (64, 128, 512)
    s = scenario_of("32xh100-32b").change(lr_schedule="constant", batches=batches)
    s = s.with_noisy_quadratic().change(targets={"none": 0.0})
    flags = contenders(batches)["adaptive"].flags
    assert flags is not None
    flags = dataclasses.replace(flags, copus_anneal_by_batch=share)
    return simulate(s, Contender(name="copus", flags=flags, first_batch=64), seed=0)


def test_where_nothing_else_anneals_the_end_is_lower() -> None:
    with_it, without = run_of(0.1), run_of(0.0)
    assert with_it.last_loss is not None and without.last_loss is not None
    assert with_it.last_loss < without.last_loss - 0.004
    assert with_it.seconds <= without.seconds
    last = with_it.changes[-1]
    assert last.batch == 512 and last.consumed_samples > 0.9 * 150_000
    assert max(c.batch for c in without.changes) < 512


def test_events_multiply_speeds() -> None:
    down, up = Event(at=0.25, part="network", speed=0.25), Event(at=0.75, part="network", speed=4)
    assert factors_at((down, up), 0.2) == USUAL == factors_at((down, up), 0.8)
    assert factors_at((down, up), 0.25) == replace(USUAL, across=4.0)
    assert Event(at=0.0, part="dp", speed=0.5).factors == replace(USUAL, dp=2.0)
    for wrong in ({"part": "disk"}, {"at": 1.5}, {"speed": 0.0}):
        with pytest.raises(SpecError):
            Event(**{"at": 0.5, "part": "network", "speed": 0.5, **wrong})


@pytest.mark.parametrize(("batch", "saved"), [(32, 0.15), (64, 0.05)])
def test_the_run_leaves_a_layout_that_a_slow_network_hurts_and_comes_back(
    batch: int, saved: float
) -> None:
    """A step of more samples waits less for the network."""
    s = changing_network(batch, steps=6_000)
    layouts = fixed(s)
    flags = CopusConfig(copus=True, copus_policy="static", copus_layouts="all")
    run = simulate(s, Contender(name="controller", flags=flags), seed=11)
    healthy = str(s.speeds.fastest(batch).layout)
    assert run.seconds <= (1 - saved) * layouts[healthy]
    assert run.seconds <= 0.96 * min(layouts.values())
    assert run.changes[0].layout == run.changes[-1].layout == healthy
    shares = [c.consumed_samples / s.total_samples for c in run.changes[1:]]
    # On the way back it may try another layout that is nearly as fast.
    assert 0.25 <= shares[0] < 0.27 and 0.75 <= shares[1] < 0.78 and shares[-1] < 0.83


def test_without_events_noise_of_steps_changes_no_layout() -> None:
    s = changing_network(32, steps=3_000).change(events=())
    flags = CopusConfig(copus=True, copus_policy="static", copus_layouts="all")
    run = simulate(s, Contender(name="controller", flags=flags), seed=2)
    assert run.relayouts == 0 and run.seconds > 0


@pytest.mark.parametrize("sharded", [True, False])
def test_the_run_and_the_simulator_predict_a_change_alike(sharded: bool) -> None:
    """For the same model and machine: from its flags, and from the planner's description."""
    more = "--use-distributed-optimizer" if sharded else ""
    run = config(more).replace(padded_vocab_size=512, data_parallel_size=4)
    described = replace(machine_preset("h100-80g:4"), gpus_per_node=2, num_nodes=2)
    machine = machine_of(run, described, None)
    prior = PausePrior(run, flags(copus_layouts="all"), machine)
    spec = replace(spec_of_arguments(SimpleNamespace(**run.flat())), vocab_size=512)
    s = scenario_of("8xh100-3b").change(
        cluster=described, limits=Limits(use_distributed_optimizer=(sharded,))
    )
    s.__dict__["planner"] = SimpleNamespace(model=spec)
    others = [Layout(tp=2, dp=2), Layout(pp=2, dp=2), Layout(tp=2, pp=2)]
    s.__dict__["speeds"] = SimpleNamespace(layouts=[run.layout, *others])
    for to in others:
        live = prior.to_s(to)
        assert live == s.pause_s(run.layout, to)
    assert prior.of_layouts([*others, run.layout]) == {to: prior.to_s(to) for to in others}
