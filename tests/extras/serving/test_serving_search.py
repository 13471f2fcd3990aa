"""The search for bits and stages finds what trying everything finds."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from copus_ext.extras.serving.loss_tables import LossTables
from copus_ext.extras.serving.problem import (
    Objective,
    Phase,
    ServingProblem,
    Stage,
    costs_of,
    pipeline_objective,
)
from copus_ext.extras.serving.relaxation import relax
from copus_ext.extras.serving.search import Search, find_best


def a_problem(seed: int) -> ServingProblem:
    """A few layers on a few unlike devices; limits of loss and memory that bite in most."""
    draw = np.random.default_rng(seed)
    layers, devices, bits = (int(draw.integers(1, n)) for n in (6, 4, 4))
    loss = np.sort(draw.random((layers, bits)), axis=1)[:, ::-1] * draw.random((layers, 1))
    speed = draw.choice([1.0, 2.5, 0.7], devices)

    def phase() -> Phase:
        of_bits = np.sort(draw.random(bits)) + 0.3
        first, last = draw.random(2) * 0.3
        hop = 0.05 * draw.integers(0, 3, devices)
        layer = of_bits[None] / speed[:, None]
        return Phase(layer_s=layer, first_s=first / speed, last_s=last / speed, p2p_time_s=hop)

    sizes = {name: int(draw.integers(1, 5)) for name in ("prefill", "decode")}
    sizes |= {"prompts": int(draw.integers(1, 12)), "tokens": int(draw.integers(1, 6))}
    objective = pipeline_objective(**sizes, theta=(0.0, 1.0)[seed % 2])
    if seed % 3 == 2:  # one line of decoding, as LLM-PQ counts it
        objective = dataclasses.replace(objective, decode=objective.decode[-1:])
    least, most = loss.min(axis=1).sum(), loss.max(axis=1).sum()
    share = (None, 0.2, 0.5, 0.05)[seed % 4]
    return ServingProblem(
        bits=(3, 4, 8)[:bits],
        loss_increase=loss,
        prefill=phase(),
        decode=phase(),
        layer_bytes=np.sort(draw.random(bits)) + 0.2,
        first_bytes=0.1,
        last_bytes=0.15,
        capacity_bytes=draw.choice([1.0, 2.0, 3.0], devices) * layers / devices * 0.7 + 0.3,
        objective=objective,
        max_loss_increase=None if share is None else least + share * (most - least),
    )


def all_plans(p: ServingProblem) -> list[tuple[Stage, ...]]:
    found = []
    for where in itertools.combinations_with_replacement(range(p.num_devices), p.num_layers):
        starts = {device: where.index(device) for device in where}
        for bits in itertools.product(p.bits, repeat=p.num_layers):
            stages = (
                Stage(device=d, start=s, bits=bits[s : s + where.count(d)])
                for d, s in starts.items()
            )
            found.append(tuple(stages))
    return found


def min_of_all(p: ServingProblem) -> float:
    costs = (costs_of(p, stages) for stages in all_plans(p))
    return min((c.objective for c in costs if c.fits), default=math.inf)


@pytest.mark.parametrize("seed", range(36))
def test_the_plan_is_the_best_of_all(seed: int) -> None:
    problem = a_problem(seed)
    found, least = Search(problem).run(), min_of_all(problem)
    assert (found.costs.objective if found else math.inf) == pytest.approx(least, rel=1e-6)
    if found is not None:
        assert found.costs == costs_of(problem, found.stages) and found.costs.fits
        assert relax(problem).bound <= least * (1 + 1e-9)
        assert Search(problem).run(cutoff=0.99 * least) is None


def test_some_of_those_problems_have_no_plan_and_most_have_one() -> None:
    fitting = [math.isfinite(relax(a_problem(seed)).bound) for seed in range(36)]
    assert 20 <= sum(fitting) < 36


def test_the_best_of_several_micro_batches_is_found() -> None:
    base = a_problem(6)
    objectives = [Objective(max_prefill=m, decode=((3.0, m), (1.0, 4.0))) for m in (4.0, 1.0, 2.0)]
    problems = [dataclasses.replace(base, objective=one) for one in objectives]
    answer = find_best(problems)
    assert answer is not None and answer[0] == 1
    assert answer[1].costs.objective == pytest.approx(min(map(min_of_all, problems)), rel=1e-6)
    tight = [dataclasses.replace(p, capacity_bytes=p.capacity_bytes * 0) for p in problems]
    assert find_best(tight) is None


@pytest.mark.parametrize("ends_only", [False, True])
def test_the_tables_of_loss_hold_the_least_of_all_ways(ends_only: bool) -> None:
    loss = np.random.default_rng(1).random((5, 3))
    tables = LossTables(loss, ends_only=ends_only)
    tables.grow(5)
    for length in range(1, 6):
        starts = tables.starts(length).tolist()
        assert starts == (sorted({0, 5 - length}) if ends_only else list(range(6 - length)))
        for (row, start), (at, counts) in itertools.product(
            enumerate(starts), enumerate(tables.counts[length])
        ):
            ways = [
                sum(loss[start + i, b] for i, b in enumerate(way))
                for way in itertools.product(range(3), repeat=length)
                if [way.count(b) for b in range(3)] == counts.tolist()
            ]
            assert tables.least[length][row, at] == pytest.approx(min(ways))
            way = tables.bits_of(start, length, at)
            assert sum(loss[start + i, b] for i, b in enumerate(way)) == pytest.approx(min(ways))


def played(stages: list[float], micro_batches: int, rounds: int) -> float:
    """Seconds of a pipeline that is played pass by pass, each micro-batch again and again."""
    free, done = [0.0] * len(stages), [0.0] * micro_batches
    for _ in range(rounds):
        for m in range(micro_batches):
            at = done[m]
            for i, seconds in enumerate(stages):
                at = free[i] = max(at, free[i]) + seconds
            done[m] = at
    return max(done)


def test_the_objective_is_the_time_of_a_pipeline() -> None:
    draw = np.random.default_rng(3)
    for _ in range(60):
        stages = draw.random(int(draw.integers(1, 6))).tolist()
        prompts, size = int(draw.integers(1, 9)), int(draw.integers(1, 4))
        tokens = int(draw.integers(1, 7))
        how = {"prompts": prompts, "prefill": size, "decode": size, "tokens": tokens}
        objective = pipeline_objective(**how)
        count = math.ceil(prompts / size)
        assert objective.value(stages, [0.0], 0.0) == pytest.approx(played(stages, count, 1))
        if tokens > 1:
            decoding = played(stages, count, tokens - 1)
            assert objective.value([0.0], stages, 0.0) == pytest.approx(decoding)
