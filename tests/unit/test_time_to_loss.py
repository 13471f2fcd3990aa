"""The arithmetic of the time-to-loss benchmarks."""

from __future__ import annotations

import dataclasses
import importlib
import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.rules import rate_rules_of
from copus_ext.cost_model.profile import Timing, fingerprint
from tests.helpers.launch import ROOT


def bench(name: str) -> Any:
    """A module of bench/, which is no package."""
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


pure, policies = bench("time_to_loss"), bench("time_to_loss_policies")
elsewhere = bench("time_to_loss_timed")
clocked = bench("time_to_loss_account").clocked
SAMPLES = [100 * i for i in range(1, 33)]


def curve(drop: float, *, speed: float = 10.0, start: float = 4.0) -> Any:
    """A loss that falls with the logarithm of the samples."""
    losses = [start - drop * math.log(s / 100) for s in SAMPLES]
    return pure.Curve(samples=SAMPLES, seconds=[s / speed for s in SAMPLES], losses=losses)


def test_smoothing_keeps_what_is_straight_and_takes_noise_away() -> None:
    straight, noise = curve(0.5), np.random.default_rng(0).normal(0, 0.05, len(SAMPLES))
    assert straight.smoothed().losses == pytest.approx(straight.losses)
    rough = pure.Curve(
        samples=SAMPLES,
        seconds=straight.seconds,
        losses=[x + float(e) for x, e in zip(straight.losses, noise)],
    )
    left = np.subtract(rough.smoothed().losses, straight.losses)
    assert np.std(left) < 0.7 * np.std(noise)


def test_time_to_a_target_lies_on_the_line_between_two_evaluations() -> None:
    c = pure.Curve(samples=[1, 2, 3, 4], seconds=[10, 20, 30, 40], losses=[4.0, 3.0, 3.5, 1.0])
    assert c.time_to(3.25) == pytest.approx(17.5), "the first crossing counts"
    assert c.time_to(2.25) == pytest.approx(35.0)
    assert c.time_to(9.0) == 10, "met before the first evaluation"
    assert c.time_to(0.5) is None


def test_targets_are_what_static_runs_have_in_common() -> None:
    statics = {
        "static_2": [curve(0.60), curve(0.62)],
        "static_4": [curve(0.70), curve(0.66)],
        "static_8": [curve(0.50), curve(0.55)],
        "static_16": [curve(0.20), curve(0.25)],
    }
    goals = pure.targets(statics, 5)
    assert goals == sorted(goals, reverse=True) and len(set(goals)) == 5
    assert np.diff(goals) == pytest.approx(np.diff(goals)[0])
    reach = [
        name for name, cs in statics.items() if all(c.time_to(goals[-1]) is not None for c in cs)
    ]
    assert reach == ["static_2", "static_4"], "half of them reach the lowest in every seed"
    early = [c.samples[-1] / pure.EARLIEST for c in statics["static_2"]]
    for curves in statics.values():
        assert all(c.at_samples(early[0]) >= goals[0] - 1e-12 for c in curves)
    with pytest.raises(ValueError, match="none yet"):
        pure.targets({}, 5)


def test_savings_are_over_the_fastest_baseline_of_each_target() -> None:
    found = {
        "ours": {1: [10.0, 20.0, 40.0], 2: [10.0, 22.0, 40.0]},
        "early": {1: [12.0, 50.0, None], 2: [13.0, 50.0, None]},
        "late": {1: [20.0, 40.0, 50.0], 2: [20.0, 44.0, None]},
    }
    assert pure.fastest(found, ["early", "late"]) == ["early", "late", None]
    easy = found | {"easy seed only": {1: [1.0, 2.0, 3.0]}}
    assert pure.fastest(easy, [*easy][1:]) == ["early", "late", None]
    rows = pure.saved_over_fastest(found, "ours", ["early", "late"])
    assert rows[0] == pytest.approx([1 - 10 / 12, 1 - 10 / 13])
    assert rows[1] == pytest.approx([0.5, 0.5])
    assert rows[2] == [], "a seed without the target leaves it out"
    charged = pure.saved_over_fastest(found, "ours", ["early", "late"], 10.0)
    assert charged[1] == pytest.approx([0.25, 1 - 32 / 44])
    result = pure.summary(rows)
    assert result["mean"] == pytest.approx(np.mean([*rows[0], *rows[1]]))
    assert result["best"] == pytest.approx(0.5) and result["targets"] == 2
    text = pure.table(found, [3.0, 2.0, 1.0], {"ours": "2 > 4"})
    assert [line.split()[0] for line in text.splitlines()] == ["policy", "ours", "early", "late"]
    assert text.splitlines()[2].split()[-1] == "-"


def test_the_clock_stands_while_a_run_evaluates() -> None:
    def record(kind: str, m: float, samples: int, **more: Any) -> dict[str, Any]:
        return {"kind": kind, "m": m, "consumed_samples": samples, **more}

    loss = {"losses": {"lm loss": 2.0}}
    steps, evaluations = clocked(
        [
            record("run.start", 100.0, 0),
            record("step", 103.0, 8),
            record("eval", 113.0, 8, **loss),
            record("step", 114.5, 16),
            record("eval", 120.0, 16, **loss),
        ]
    )
    assert [s["clock"] for s in steps] == [3.0, 4.5]
    assert evaluations == [(8, 3.0, 2.0), (16, 4.5, 2.0)]


def recipe(**values: Any) -> Any:
    known = {
        "batches": (2, 4, 8, 16),
        "first_batch": 4,
        "samples": 1024,
        "lr": 1e-3,
        "min_lr_part": 0.1,
        "decay": "cosine",
        "warmup_part": 0.03,
        "weight_decay": 0.01,
        "beta2": 0.95,
        "eval_samples": 32,
        "evaluations": 8,
        "calibration": 2.0,
    }
    return policies.Recipe(**{**known, **values})


def test_static_batches_have_the_rates_that_the_controller_would_give_them() -> None:
    run = {"initial_global_batch_size": 4, "step_batch_size_schedule": None}
    config: Any = SimpleNamespace(
        batch=SimpleNamespace(**run), optim=SimpleNamespace(adam_beta2=0.95)
    )
    for batch in (2, 4, 16):
        rules = rate_rules_of(CopusConfig(copus=True), config)
        at = rules.at(batch, rules.lr_factor(batch))
        words = dict(zip(recipe().rates(batch)[::2], recipe().rates(batch)[1::2]))
        assert float(words["--lr"]) == pytest.approx(1e-3 * at["lr_factor"])
        assert float(words["--min-lr"]) == pytest.approx(1e-4 * at["lr_factor"])
        assert float(words["--weight-decay"]) == pytest.approx(0.01 * at["weight_decay_factor"])
        when = dict(zip(recipe().evaluating(batch)[::2], recipe().evaluating(batch)[1::2]))
        assert int(when["--eval-interval"]) * batch == 128
        assert int(when["--eval-iters"]) * batch == 32
    with pytest.raises(ValueError, match="multiple"):
        recipe(samples=1000)


def timing(pp: int, micro: int, count: int, step_s: float) -> Timing:
    return Timing(
        tp=1, pp=pp, dp=2 // pp, micro_batch_size=micro, num_microbatches=count, step_s=step_s
    )


def test_every_batch_gets_its_fastest_configuration_of_those_timed_at_it() -> None:
    lines = [timing(1, 1, 2, 1.2), timing(1, 1, 4, 1.4), timing(2, 1, 2, 0.4), timing(2, 1, 4, 0.8)]
    profile = policies.Profile(lines)
    assert [profile.best(b).pp for b in (2, 16)] == [2, 1]
    assert profile.speed(2) == pytest.approx(5.0)
    assert profile.seconds(lines[0].line, 8) == pytest.approx(1.8)
    again = policies.Profile([*lines, timing(2, 1, 16, 1.5), timing(1, 1, 8, 1.9)])
    assert again.best(16).pp == 2, "what was timed counts, not the line through other times"
    assert again.ranked(16, only_measured=True)[0][0] == pytest.approx(16 / 1.5)
    small = policies.flags_of("adaptive", recipe(), profile, "store")
    assert small[small.index("--pipeline-model-parallel-size") + 1] == "2"
    large = policies.flags_of("cbs_large", recipe(), profile, "store")
    assert large[large.index("--pipeline-model-parallel-size") + 1] == "1"


def test_a_policy_that_needs_the_noise_does_not_start_where_none_is_seen() -> None:
    lines = [timing(2, 1, 4, 0.5), timing(2, 4, 1, 0.3), timing(2, 2, 2, 0.4)]
    profile = policies.Profile(lines)
    assert profile.best(4).is_blind
    assert profile.best(4, sees_noise=True).micro_batch_size == 2
    only = policies.Profile(lines[1:2])
    assert only.best(4, sees_noise=True).is_blind, "better than nothing"


def test_a_run_on_another_link_differs_by_the_seconds_of_its_steps_alone() -> None:
    here = policies.Profile([timing(2, 2, 2, 0.5), timing(2, 2, 4, 0.8), timing(2, 2, 8, 1.4)])
    there = policies.Profile([timing(1, 2, 1, 0.2), timing(1, 2, 2, 0.3), timing(1, 2, 4, 0.6)])
    ways = [(0, 4), (400, 8), (800, 16)]
    run = {
        "policy": "doubling",
        "link": "a",
        "seed": 1,
        "set_up_s": 7.0,
        "commit": "",
        "flags": [],
        "steps": 164,
        "decisions": [],
        "deciding_s": 0.0,
        "seconds": 0.0,
        "moves": [],
        "ways": [{"samples": n, "seconds": 0.0, "batch": batch} for n, batch in ways],
        # The clock of a link on which steps take what `here` says.
        "evaluations": [
            (200, 7 + 50 * 0.5, 3.0),
            (600, 7 + 100 * 0.5 + 25 * 0.8, 2.0),
            (1024, 7 + 100 * 0.5 + 50 * 0.8 + 14 * 1.4, 1.0),
        ],
    }
    clock = {("tp1.pp2.dp1", 2, b): s for b, s in ((4, 0.5), (8, 0.8), (16, 1.4))}
    same = elsewhere.timed(run, elsewhere.places(run, recipe(), here, clock), clock)
    assert same["evaluations"] == [pytest.approx(e) for e in run["evaluations"]]
    clock = {("tp1.pp1.dp2", 2, b): s for b, s in ((4, 0.2), (8, 0.3), (16, 0.6))}
    at = elsewhere.places(run, recipe(), there, clock)
    other = elsewhere.timed(run, at, clock)
    clocks = [7 + 50 * 0.2, 7 + 100 * 0.2 + 25 * 0.3, 7 + 100 * 0.2 + 50 * 0.3 + 14 * 0.6]
    assert [e[1] for e in other["evaluations"]] == pytest.approx(clocks)
    assert [(e[0], e[2]) for e in other["evaluations"]] == [(200, 3.0), (600, 2.0), (1024, 1.0)]
    assert [w["layout"] for w in other["ways"]] == ["tp1.pp1.dp2"] * 3
    deciding = {**run, "decisions": [{"samples": 400}], "deciding_s": 2.0}
    later = [e[1] for e in elsewhere.timed(deciding, at, clock)["evaluations"]]
    assert later == pytest.approx([clocks[0], clocks[1] + 2, clocks[2] + 2])
    measuring = elsewhere.timed({**run, "flags": ["--copus"]}, at, clock)
    longer = np.subtract([e[1] for e in measuring["evaluations"]], 7) / np.subtract(clocks, 7)
    assert longer == pytest.approx(1 + elsewhere.MEASURING), "what is timed has no noise scale"


def test_all_that_runs_had_on_a_link_or_would_have_had_is_timed_there() -> None:
    def records(pp: int) -> dict[str, Any]:
        times = [timing(pp, 2, 8 // (2 // pp) // 2, 0.5), timing(pp, 2, 4 // (2 // pp) // 2, 0.3)]
        machine = {"world_size": 2}
        key = {"fingerprint": fingerprint(machine)}
        lines = [{"machine": machine, **key}, *({**key, **dataclasses.asdict(t)} for t in times)]
        return {"profile": {"seconds": 1.0, "records": lines}}

    def run(policy: str, link: str, *had: tuple[int, int]) -> dict[str, Any]:
        way = {"layout": "tp1.pp2.dp1", "micro_batch": 2}
        speeds = [{**way, "batch": batch, "steps": steps} for batch, steps in had]
        return {"policy": policy, "link": link, "seed": 1, "speeds": speeds}

    of = recipe(batches=(4, 8))
    result = {
        "links": {"a": records(2), "b": records(1)},
        "runs": [
            run("static_4", "a", (4, 256)),
            run("adaptive", "a", (8, 100), (6, 2), (4, 1)),
            run("adaptive", "b", (8, 9)),
        ],
    }
    plain, whole = ("tp1.pp1.dp2", 1, 4), ("tp1.pp1.dp2", 2, 4)
    here, there = elsewhere.needed(result, of, "a"), elsewhere.needed(result, of, "b")
    assert here == [plain, whole, ("tp1.pp2.dp1", 2, 4), ("tp1.pp2.dp1", 2, 8)]
    assert there == [plain, whole, ("tp1.pp2.dp1", 2, 8)]


def test_a_static_batch_counts_where_it_is_fastest_by_the_clock_that_counts() -> None:
    """A profile of another hour may have chosen another configuration for it."""
    way = {"layout": "tp1.pp2.dp1", "micro_batch": 2, "batch": 4}
    run = {
        "policy": "static_4",
        "link": "a",
        "seed": 1,
        "set_up_s": 5.0,
        "flags": [],
        "ways": [{**way, "samples": 0}],
        "speeds": [{**way, "steps": 100, "median_s": 0.9}],
        "moves": [],
        "decisions": [],
        "deciding_s": 0.0,
        "seconds": 150.0,
        "evaluations": [(200, 99.0, 3.0), (400, 150.0, 2.5)],
    }
    rounds = [
        ["tp1.pp2.dp1", 2, 4, [1.0] * 4],
        ["tp1.pp1.dp2", 2, 4, [0.5] * 4],
        ["tp1.pp1.dp2", 1, 4, [2.0] * 4],
        ["tp1.pp1.dp2", 2, 8, [0.1] * 4],
    ]
    known = {"clock": {"ways": rounds}, "profile": {"records": []}}
    result = {"links": {"a": known, "b": known}, "runs": [run]}
    profile = policies.Profile([timing(2, 2, 2, 0.9)])
    found = elsewhere.with_timed(result, recipe(), {"a": profile, "b": profile})
    seconds = {(r["link"], r["policy"]): r["evaluations"][-1][1] for r in found}
    assert seconds == {
        ("a", "static_4"): pytest.approx(55.0),
        ("b", "static_4*"): pytest.approx(55.0),
        **{(link, "plain*"): pytest.approx(205.0) for link in "ab"},
        **{(link, "plain_whole*"): pytest.approx(55.0) for link in "ab"},
    }
    own = next(r for r in found if r["policy"] == "static_4")
    assert own["as_it_ran_s"] / own["seconds"] == pytest.approx(150 / 105), "as slow as it ran"


def test_a_slow_spell_of_the_machine_is_not_counted_but_pauses_are() -> None:
    way = {"layout": "tp1.pp1.dp2", "micro_batch": 2}
    run = {
        "set_up_s": 5.0,
        "flags": [],
        "ways": [{**way, "samples": 0, "batch": 4}, {**way, "samples": 400, "batch": 8}],
        "speeds": [{**way, "batch": 4, "median_s": 0.5}, {**way, "batch": 8, "median_s": 0.75}],
        "moves": [{"consumed_samples": 400, "pause_s": 3.0}],
        "decisions": [{"samples": 400}, {"samples": 600}],
        "deciding_s": 0.5,
        "seconds": 200.0,
        "evaluations": [(200, 99.0, 3.0), (400, 120.0, 2.5), (800, 200.0, 2.0)],
    }
    steady = elsewhere.steadied(run, {})
    before = 5 + 100 * 0.5
    clocks = [5 + 50 * 0.5, before, before + 3 + 0.25 + 50 * 0.75 + 0.25]
    assert [e[1] for e in steady["evaluations"]] == pytest.approx(clocks)
    assert (steady["seconds"], steady["as_it_ran_s"]) == (pytest.approx(clocks[-1]), 200.0)
    fast = elsewhere.steadied(run, {("tp1.pp1.dp2", 2, 8): 0.25})
    clocks[2] -= 50 * 0.5
    assert [e[1] for e in fast["evaluations"]] == pytest.approx(clocks), "as timed on the link"
    assert fast["speeds"][1]["median_s"] == 0.25


def test_what_was_measured_has_the_name_that_a_run_gives_it_and_is_its_clock() -> None:
    clock = bench("time_to_loss_clock")
    timed = clock.Timed()
    for seconds in (0.3, 0.9, 0.4):
        timed.add(timing(2, 2, 4, seconds))
    rows = [[*way, some] for way, some in timed.seconds.items()]
    alone = clock.clock_of({"clock": {"ways": rows}})
    assert alone == {("tp1.pp2.dp1", 2, 8): pytest.approx(0.4)}
    assert clock.clock_of({}) == {}
    again = clock.configuration_of("tp1.pp2.dp1", 2)
    assert (again.pp, again.dp, again.micro_batch_size) == (2, 1, 2)


def test_a_round_slow_for_all_and_a_disturbed_configuration_change_no_ratio() -> None:
    truth, rounds = [1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 1.2, 1.1]
    rows = [["tp1.pp1.dp2", 1, n, [t * r for r in rounds]] for n, t in enumerate(truth)]
    rows[1][-1][-1] *= 4
    clock, known = bench("time_to_loss_clock"), {"clock": {"ways": rows}}
    found = list(clock.clock_of(known).values())
    assert [t / found[0] for t in found] == pytest.approx(truth)
    assert clock.scatter_of(known) == pytest.approx(math.log(4) / 15**0.5)
    assert clock.scatter_of({}) is None
    assert clock.scatter_of({"clock": {"ways": [["tp1.pp1.dp2", 1, 4, [0.1]]]}}) is None
    rows[0][-1].append(1.0)
    with pytest.raises(ValueError, match="different rounds"):
        clock.clock_of(known)
    with pytest.raises(ValueError, match="different rounds"):
        clock.drawn_again(known, np.random.default_rng(0))


def test_rounds_are_drawn_again_for_all_configurations_alike() -> None:
    clock = bench("time_to_loss_clock")
    rows = [["tp1.pp1.dp2", n, 8, [n + 10.0 * r for r in range(1, 9)]] for n in (1, 2)]
    known = {"profile": 1, "clock": {"ways": rows, "date": ""}}
    draw = np.random.default_rng(5)
    several = [clock.drawn_again(known, draw) for _ in range(20)]
    assert all(again["profile"] == 1 and again["clock"]["date"] == "" for again in several)
    picked = [[some for *_, some in again["clock"]["ways"]] for again in several]
    assert all(np.subtract(b, a).tolist() == [1.0] * 8 for a, b in picked)
    assert all(set(a) <= set(rows[0][-1]) for a, _ in picked)
    assert len({tuple(a) for a, _ in picked}) == 20, "drawn, not copied"
    assert clock.drawn_again({}, draw)["clock"]["ways"] == []


def test_an_interval_is_as_wide_as_the_timing_is_unsure() -> None:
    doubt = bench("time_to_loss_doubt")

    def intervals(rounds: list[float]) -> tuple[float, float]:
        way = {"layout": "tp1.pp1.dp2", "micro_batch": 2, "samples": 0}
        evaluations = [(n, n / 10, 4 - n / 100) for n in (100, 200, 300)]
        each = {"link": "a", "seed": 1, "set_up_s": 0.0, "moves": [], "decisions": []}
        each |= {"evaluations": evaluations, "deciding_s": 0.0, "seconds": 1.0, "flags": []}
        names = (("static_4", 4), ("adaptive_unprofiled", 8))
        runs = [
            {**each, "policy": name, "ways": [{**way, "batch": b}], "speeds": []}
            for name, b in names
        ]
        clock = [["tp1.pp1.dp2", 2, 4, [1.0] * 4], ["tp1.pp1.dp2", 2, 8, rounds]]
        clock.append(["tp1.pp1.dp2", 1, 4, [2.0] * 4])
        machine = {"world_size": 2}
        key = {"fingerprint": fingerprint(machine)}
        row = dataclasses.asdict(timing(1, 2, 1, 1.0))
        profile = {"records": [{"machine": machine, **key}, {**key, **row}]}
        known = {"clock": {"ways": clock}, "profile": profile}
        found = doubt.intervals({"links": {"a": known}, "runs": runs}, recipe(), [2.0])
        assert set(found["a"]) == {
            f"adaptive_unprofiled saves over {name}"
            for name in (
                "static_4",
                "plain",
                "plain_whole",
                "the fastest static batch at each target",
            )
        }
        return found["a"]["adaptive_unprofiled saves over plain"]

    untimed = {"links": {"a": {"clock": {"ways": []}}}, "runs": []}
    assert doubt.intervals(untimed, recipe(), [2.0]) == {}
    assert intervals([1.0] * 4) == pytest.approx((0.75, 0.75), abs=0.01)
    low, high = intervals([0.8, 1.0, 1.0, 1.2])
    assert low < 0.74 and high > 0.76
