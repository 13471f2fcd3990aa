"""What the figures S3 and S4 rest on: which runs come, and what becomes of their times."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import optimizers
from bench.support import RunRecord
from bench.time_to_loss import real_clock, real_clock_figures
from bench.time_to_loss.real_clock import S3, S4, Scenario, Spec, flags_of, tuned, wanted
from bench.time_to_loss.real_clock_figures import Comparison, Curve, compare
from bench.time_to_loss.results import save
from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.rules import rate_rules_of

BOTH = (S4, S3)
DP2, PP2 = "tp1.pp1.dp2", "tp1.pp2.vpp4.dp1"


def loss_of(spec: Spec) -> float:
    """Least at a rate of 2 and the long warm-up for 8, at 0 and the short one elsewhere."""
    if spec.kind == "timing":
        return 0.0
    rate, warmup = (2, 0.3) if spec.batch == 8 else (0, 0.1)
    return 2.0 + abs(spec.rate - rate) + abs(spec.warmup - warmup)


def go_on(scenarios: Sequence[Scenario], done: dict[str, float], runs: int = 10**6) -> list[Spec]:
    """Trains, one run after another, until nothing is missing."""
    trained: list[Spec] = []
    while len(trained) < runs and (spec := next(wanted(scenarios, done), None)) is not None:
        done[spec.key] = loss_of(spec)
        trained.append(spec)
    return trained


@functools.cache
def all_runs() -> list[Spec]:
    """All that a whole measurement trains, in order."""
    return go_on(BOTH, {})


def test_a_killed_command_goes_on_where_it_was() -> None:
    few = [replace(s, seeds=(2, 3), links=s.links[:1], statics=s.statics[:2]) for s in BOTH]
    whole, done = go_on(few, {}), {}
    parts = [go_on(few, done, runs=15)]
    while parts[-1]:
        done = json.loads(json.dumps(done))
        parts.append(go_on(few, done, runs=15))
    assert len(parts) > 3
    assert [spec for part in parts for spec in part] == whole
    keys = [spec.key for spec in whole]
    assert len(set(keys)) == len(keys), "no run comes twice"


def test_one_seed_of_s4_comes_first_and_every_run_comes() -> None:
    whole = all_runs()
    first = next(i for i, spec in enumerate(whole) if spec.scenario == "S3")
    early = {(s.kind, s.batch) for s in whole[:first] if s.seed == S4.seeds[0]}
    assert {("copus", b) for b in S4.starts} | {("static", b) for b in S4.statics} <= early
    for s in BOTH:
        own = [spec for spec in whole if spec.scenario == s.name and spec.seed in s.seeds]
        copus = {(x.batch, x.link, x.seed) for x in own if x.kind == "copus"}
        assert copus == {(b, link, k) for b in s.starts for link in s.links for k in s.seeds}
        timed = {(x.batch, x.link) for x in whole if (x.scenario, x.kind) == (s.name, "timing")}
        assert timed == {(b, link) for b in s.statics for link in s.links}


def test_rates_are_tuned_on_the_tuning_seed_and_used_on_the_others() -> None:
    whole = all_runs()
    again = [x for x in whole if x.kind == "static" and x.seed != 0]
    assert {(x.rate, x.warmup) for x in again if x.batch == 8} == {(2, 0.3)}, "beyond the first"
    assert {(x.rate, x.warmup) for x in again if x.batch != 8} == {(0, 0.1)}
    tuning = [x for x in whole if x.seed == 0]
    assert len([x for x in tuning if (x.scenario, x.batch) == ("S4", 64)]) == 4
    assert all(abs(x.rate) <= 2 for x in tuning)


def test_the_controller_has_rate_and_warm_up_of_the_reference_batch() -> None:
    for s in BOTH:
        done: dict[str, float] = {}
        goal = replace(real_clock._static(s, s.reference_batch), rate=1, warmup=0.3)
        while (spec := next(wanted([s], done), None)) is not None and spec.kind != "copus":
            assert spec.batch == s.reference_batch
            done[spec.key] = 2.0 + abs(spec.rate - goal.rate) + 0.3 - spec.warmup
        assert spec is not None and (spec.rate, spec.warmup) == (1, 0.3)


def test_all_runs_have_the_rates_that_the_controller_would_give_them() -> None:
    run = {"initial_global_batch_size": S4.reference_batch, "step_batch_size_schedule": None}
    config: Any = SimpleNamespace(
        batch=SimpleNamespace(**run), optim=SimpleNamespace(adam_beta2=0.95)
    )
    rules = rate_rules_of(CopusConfig(copus=True), config)
    for batch in S4.starts:
        at = rules.at(batch, rules.lr_factor(batch))
        spec = Spec(scenario="S4", kind="copus", batch=batch, link="100", seed=1, rate=1)
        flags = flags_of(S4, spec)
        value = lambda name: float(flags[flags.index(name) + 1])  # noqa: E731, B023
        assert value("--lr") == pytest.approx(2 * S4.lr * at["lr_factor"])
        assert value("--min-lr") == pytest.approx(0.2 * S4.lr * at["lr_factor"])
        assert value("--weight-decay") == pytest.approx(0.01 * at["weight_decay_factor"])


@pytest.mark.parametrize("s", BOTH, ids=lambda s: s.name)
def test_every_run_sees_the_same_held_out_samples_after_the_same_samples(s: Scenario) -> None:
    for batch in {*s.starts, *s.statics}:
        spec = Spec(scenario=s.name, kind="static", batch=batch, link="0", seed=1)
        flags = flags_of(s, spec)
        value = lambda name: int(flags[flags.index(name) + 1])  # noqa: E731, B023
        assert value("--eval-iters") * batch == s.eval_samples
        assert value("--eval-interval") * batch * s.evaluations == s.samples


def test_a_line_that_was_cut_off_spoils_no_other_and_other_sizes_do_not_count(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"key": "a", "digest": S4.digest, "spec": {"scenario": "S4"}}
    path.write_text(json.dumps(row) + "\n" + json.dumps(row)[:30])
    real_clock.append(path, {**row, "key": "b"})
    real_clock.append(path, {**row, "key": "c", "digest": replace(S4, samples=1).digest})
    assert [r["key"] for r in real_clock.rows_of(path, [S4])] == ["a", "b"]
    assert real_clock.rows_of(path, [S3]) == []


def test_the_clock_stands_while_a_run_evaluates() -> None:
    def record(kind: str, m: float, samples: int) -> dict[str, Any]:
        return {"kind": kind, "m": m, "consumed_samples": samples, "losses": {"lm loss": 2.0}}

    records = [
        record("run.start", 100.0, 0),
        record("step", 103.0, 8),
        record("eval", 113.0, 8),
        record("step", 114.5, 16),
        record("eval", 120.0, 16),
        record("eval", 125.0, 16),
    ]
    evaluations = real_clock.clocked(records)
    assert [r["clock"] for r in records if r["kind"] == "step"] == [3.0, 4.5]
    assert evaluations == [(8, 3.0, 2.0), (16, 4.5, 2.0)]


def run_of(step_s: float, *, pause_s: float = 0.0, batch: int = 4) -> dict[str, Any]:
    """The account of a run of 20 steps, half of them on another layout, after a pause."""
    records: list[dict[str, Any]] = [{"kind": "run.start", "m": 0.0}]
    m = 1.0
    for i in range(20):
        m += step_s + pause_s * (i == 10)
        layout = DP2 if i < 10 else PP2
        sizes = {"micro_batch_size": 1, "global_batch_size": batch, "layout": layout}
        about = {"kind": "step", "m": m, "seconds": step_s, "consumed_samples": batch * (i + 1)}
        records.append({**about, **sizes})
        if i % 5 == 4:
            loss = {"losses": {"lm loss": 4.0 - i / 10}}
            m += 7.0
            records.append({**loss, "kind": "eval", "m": m, "consumed_samples": batch * (i + 1)})
    steps = [r for r in records if r["kind"] == "step"]
    run = RunRecord(records=records, steps=steps, evaluations=[], journal=[])
    return real_clock.account(run)


def row_of(kind: str, batch: int, *, link: str = "0", seed: int = 1, **more: Any) -> dict[str, Any]:
    """A row of the results file."""
    spec = {"kind": kind, "batch": batch, "link": link, "seed": seed}
    return {"spec": spec, **run_of(more.pop("step_s", 1.0), batch=batch, **more)}


def test_a_slow_spell_is_not_counted_but_set_up_and_pauses_are() -> None:
    usual_s = {(DP2, 1, 4): 1.0, (PP2, 1, 4): 0.5}
    for slow in (1.0, 1.3):
        row = row_of("copus", 4, step_s=slow, pause_s=20.0)
        curve = real_clock_figures.curve_of(row, usual_s)
        assert curve.seconds == pytest.approx([6.0, 11.0, 33.5, 36.0])
    alone = real_clock_figures.curve_of(row, {})
    assert alone.seconds == pytest.approx([s for _, s, _ in row["curve"]]), "unknown: its own"


def test_a_fast_hour_makes_no_configuration_fast() -> None:
    """Three runs of a slow hour, two of a fast one, in which alone a third configuration comes."""
    ways = ((DP2, 1, 1.0), (PP2, 1, 1.1), (DP2, 2, 1.05))
    rows = []
    for pace, count in ((1.25, 2), (1.25, 2), (1.25, 2), (1.0, 3), (1.0, 3)):
        row = row_of("copus", 4, link="100")
        row["speeds"] = [
            {"layout": at, "micro_batch": mbs, "batch": 4, "steps": 10, "step_s": pace * s}
            for at, mbs, s in ways[:count]
        ]
        rows.append(row)
    usual_s = real_clock_figures.usual(rows, "100")
    factor = 1.25 ** (3 / 5) / (1 + real_clock_figures.MEASURING)
    assert usual_s == pytest.approx({(at, mbs, 4): factor * s for at, mbs, s in ways})


def timed(kind: str, *speeds: tuple[str, int, float, int], seed: int = 1) -> dict[str, Any]:
    """A run with these layouts, micro-batches, seconds and numbers of steps."""
    row = row_of(kind, 4, link="100", seed=seed)
    row["speeds"] = [
        {"layout": at, "micro_batch": mbs, "batch": 4, "steps": steps, "step_s": step_s}
        for at, mbs, step_s, steps in speeds
    ]
    return row


def test_a_mean_of_twenty_steps_counts_as_two_of_ten() -> None:
    one = timed("static", (DP2, 1, 1.0, 10), (PP2, 1, 1.0, 10))
    whole = timed("static", (DP2, 1, 1.0, 10), (PP2, 1, 1.3, 20))
    parts = timed("static", (DP2, 1, 1.0, 10), (PP2, 1, 1.3, 10), (PP2, 1, 1.3, 10))
    found = real_clock_figures.usual([one, whole], "100")
    assert found == pytest.approx(real_clock_figures.usual([one, parts], "100"))
    assert math.sqrt(1.3) < found[PP2, 1, 4] / found[DP2, 1, 4] < 1.3, "nearer to the longer mean"


def test_timings_of_a_seed_share_a_pace_and_a_run_of_one_configuration_has_none() -> None:
    """Timings are of a slow hour. One run has a configuration to itself."""
    rows = [
        timed("timing", (DP2, 1, 1.44 * 1.0, 10)),
        timed("timing", (PP2, 1, 1.44 * 0.7, 10)),
        timed("static", (DP2, 1, 1.0, 10), (DP2, 2, 3.0, 10)),
        timed("static", (DP2, 4, 5.0, 10)),
    ]
    found = real_clock_figures.usual(rows, "100")
    seconds = {(DP2, 1, 4): 1.2, (PP2, 1, 4): 0.84, (DP2, 2, 4): 3.6, (DP2, 4, 4): 5.0}
    assert found == pytest.approx(seconds)


def test_a_static_batch_counts_in_its_fastest_configuration_on_the_link() -> None:
    timings = [
        row_of("timing", 4, link="100", step_s=3.0),
        row_of("timing", 8, link="100", step_s=0.1),
        row_of("copus", 4, link="5", step_s=0.1),
    ]
    usual_s = real_clock_figures.usual(timings, "100")
    assert usual_s[DP2, 1, 4] == pytest.approx(3.0)
    row = row_of("static", 4, pause_s=20.0)
    curve = real_clock_figures.static_curve(row, {**usual_s, (PP2, 2, 4): 2.0})
    assert curve is not None and curve.seconds[-1] == pytest.approx(20 * 2.0)
    assert real_clock_figures.static_curve(row_of("static", 16), usual_s) is None


def test_the_parts_of_a_run_are_where_its_time_went() -> None:
    """Ten steps of 1 s and ten of .5 s, a pause of 20 s between them; .4 s a step was known."""
    factor = 1 + real_clock_figures.MEASURING
    usual_s = {(DP2, 1, 4): 1.0 / factor, (PP2, 1, 4): 0.5 / factor}
    row = row_of("copus", 4, step_s=1.0, pause_s=20.0)
    row["moves"] = [{"pause_s": 20.0}]
    whole_s = 1.0 + 10.0 + 20.0 + 5.0
    parts = real_clock_figures.parts_of(row, {**usual_s, (DP2, 2, 4): 0.4 / factor})
    assert sum(parts.values()) == pytest.approx(1.0)
    assert parts["fastest"] == pytest.approx(20 * 0.4 / factor / whole_s)
    assert parts["slower"] == pytest.approx((10 * 0.6 + 10 * 0.1) / factor / whole_s)
    assert parts["measuring"] == pytest.approx(15.0 * (1 - 1 / factor) / whole_s)
    assert (parts["pauses"], parts["set_up"]) == pytest.approx((20 / whole_s, 1 / whole_s))
    assert parts["other"] == pytest.approx(0.0, abs=1e-9)
    about: dict[str, Any] = {"loss": 1.0, "seconds": 1.0, "best_batch": 4, "best_s": 1.0}
    spec = row["spec"]
    one = Comparison(
        link=spec["link"], seed=spec["seed"], first_batch=spec["batch"], same_s=None, **about
    )
    rows = [row, row_of("copus", 4, seed=2)]
    usual_s = real_clock_figures.usual(rows, spec["link"])
    found = real_clock_figures.mean_parts(rows, [one])
    assert found == real_clock_figures.parts_of(row, usual_s), "the other seed does not count"


def test_what_measuring_takes_counts_for_the_controller() -> None:
    row = row_of("copus", 4, link="0", step_s=1.0)
    factor = 1 + real_clock_figures.MEASURING
    usual_s = real_clock_figures.usual([row], "0")
    assert usual_s[DP2, 1, 4] == pytest.approx(1 / factor)
    assert real_clock_figures.copus_curve(row, usual_s).seconds[-1] == pytest.approx(21.0)


def test_time_to_a_loss_lies_on_the_line_between_two_evaluations() -> None:
    c = Curve(samples=[1, 2, 3, 4], seconds=[10, 20, 30, 40], losses=[4.0, 3.0, 3.5, 1.0])
    assert c.time_to(3.25) == pytest.approx(17.5), "the first crossing counts"
    assert c.time_to(2.25) == pytest.approx(35.0)
    assert c.time_to(9.0) == 10, "met before the first evaluation"
    assert c.time_to(0.5) is None


def curve_row(
    kind: str, batch: int, drop: float, step_s: float, *, link: str = "0", seed: int = 1
) -> dict[str, Any]:
    """A run whose loss falls with the logarithm of the samples, on a straight clock."""
    samples = range(128, 4097, 128)
    curve = [(n, n / batch * step_s, 4.0 - drop * math.log(n / 100)) for n in samples]
    way = {"layout": DP2, "micro_batch": 1, "batch": batch}
    speeds = [{**way, "steps": 4096 // batch, "step_s": step_s}]
    spec = {"kind": kind, "batch": batch, "link": link, "seed": seed}
    ways = [{**way, "samples": 0}]
    return {"spec": spec, "curve": curve, "ways": ways, "speeds": speeds}


def seconds_to(drop: float, loss: float, batch: int, step_s: float) -> float:
    """Of such a run."""
    return 100 * math.exp((4.0 - loss) / drop) / batch * step_s


def test_a_run_is_compared_with_the_best_static_batch_at_the_lowest_loss_of_both() -> None:
    rows = [curve_row("static", 4, 0.6, 1.0), curve_row("static", 8, 0.5, 1.5)]
    rows += [curve_row("copus", 16, 0.4, 1.0), curve_row("copus", 2, 0.7, 0.4)]
    about: dict[str, Any] = {"starts": {1: {"0": [16, 2]}}, "batches": [4, 8]}
    seeds, (early, late) = compare(rows, **about)
    assert seeds == [1]
    end = 4.0 - 0.4 * math.log(40.96)
    assert early.loss == pytest.approx(end, abs=0.01)
    best = min(seconds_to(0.6, end, 4, 1.0), seconds_to(0.5, end, 8, 1.5))
    assert early.behind == pytest.approx(4096 / 16 / best - 1, rel=0.05)
    end = 4.0 - 0.6 * math.log(40.96)
    assert late.loss == pytest.approx(end, abs=0.01), "no static run goes lower"
    assert (late.best_batch, late.best_s) == (4, pytest.approx(1024, rel=0.01))
    assert late.saved == pytest.approx(1 - seconds_to(0.7, end, 2, 0.4) / 1024, rel=0.05)
    result = real_clock_figures.result([early, late])
    assert result["mean"] == pytest.approx(1 - (early.saved + late.saved) / 2)
    assert result["worst"] == 1 + max(early.behind, late.behind)
    low, high = result["mean_interval"]
    assert low <= result["mean"] <= high
    assert real_clock_figures.result([early])["mean_interval"] is None


def test_a_static_batch_may_have_the_length_that_is_best_for_it() -> None:
    def run(end_s: float, end: float) -> Curve:
        return Curve(samples=[1, 2], seconds=[end_s / 2, end_s], losses=[end + 1.0, end])

    whole, longer = run(100.0, 2.0), run(150.0, 1.8)
    found = functools.partial(real_clock_figures.static_time_to, [whole, longer])
    assert found(1.9) == pytest.approx(math.sqrt(100.0 * 150.0)), "between the ends"
    assert (found(2.0), found(1.8)) == pytest.approx((100.0, 150.0))
    assert found(1.7) is None
    assert found(2.5) == pytest.approx(75.0), "on the way"
    early = Curve(samples=[1, 2], seconds=[10.0, 150.0], losses=[1.9, 1.8])
    assert real_clock_figures.static_time_to([whole, early], 1.9) == found(1.9), "not at its end"
    assert real_clock_figures.static_time_to([whole], 1.9) is None


def test_runs_of_other_lengths_have_a_schedule_of_their_own() -> None:
    spec = Spec(scenario="S4", kind="static", batch=64, link="0", seed=1, warmup=0.3)
    flags = [flags_of(S4, one) for one in real_clock.compared(S4, spec, 1)]
    of = lambda name: [int(f[f.index(name) + 1]) for f in flags]  # noqa: E731
    samples = of("--train-samples")
    assert samples == [15_360, 19_200, 23_040]
    assert of("--lr-warmup-samples") == [int(0.3 * n) for n in samples]
    ends = [n % (interval * 64) for n, interval in zip(samples, of("--eval-interval"))]
    assert ends == [0, 0, 0], "the last step is evaluated"


def test_a_seed_counts_only_when_it_is_complete() -> None:
    rows = [curve_row("static", 4, 0.6, 1.0, seed=k) for k in (1, 2)]
    rows += [curve_row("copus", 4, 0.6, 1.0, link=link) for link in ("0", "5")]
    rows += [curve_row("copus", 4, 0.6, 1.0, seed=2)]
    rows += [curve_row("timing", 4, 0.6, 1.0, link="5")]
    about: dict[str, Any] = {"batches": [4]}
    seeds, found = compare(rows, {k: {"0": [4], "5": [4]} for k in (1, 2)}, **about)
    assert (seeds, len(found)) == ([1], 2)
    seeds, found = compare(rows, {k: {"0": [4]} for k in (1, 2)}, **about)
    assert (seeds, len(found)) == ([1, 2], 2)
    about["batches"] = [4, 4]
    seeds, _ = compare(rows, {k: {"0": [4]} for k in (1, 2)}, **about)
    assert not seeds, "a second length is missing"


def test_static_runs_of_the_search_do_not_count() -> None:
    done: dict[str, float] = {}
    while (spec := next(wanted([S4], done), None)) is not None:
        done[spec.key] = loss_of(spec)
    rows = [
        {"key": key, "loss": loss, "spec": {"scenario": "S4", "kind": key.split()[1]}}
        for key, loss in done.items()
    ]
    kept = [row["key"] for row in real_clock.tuned_rows(S4, rows) if " static " in row["key"]]
    assert len(kept) == (len(S4.statics) + len(S4.lengths)) * len(S4.seeds)
    assert all("rate 2 warmup 0.3" in key for key in kept if " static 8 " in key)


def test_the_time_to_adams_loss_lies_between_two_runs() -> None:
    losses = {1.0: 1.2, 2 / 3: 1.35, 1 / 2: 1.55, 1 / 3: 9.0}

    class Trained:
        def loss(self, run: optimizers.Run) -> float:
            return losses[run.share]

    runs: Any = Trained()
    spec = Spec(scenario="S4", kind="static", batch=32, link="0", seed=0)
    first = optimizers.of_seeds(runs, spec, "muon")["mean"]
    found = optimizers.same_loss(runs, spec, "muon", 1.45, first, 1.2)
    assert found == pytest.approx(1.2 * (2 / 3 + 1 / 2) / 2)
    assert optimizers.same_loss(runs, spec, "muon", 1.1, first, 1.2) is None


def test_other_scenarios_stay_in_the_summary(tmp_path: Path) -> None:
    path = tmp_path / "scenarios.json"
    save(path, {"S3": {"mean": 1.0}})
    path.write_text(json.dumps({"S1": {"mean": 0.9}, **json.loads(path.read_text())}))
    save(path, {"S3": {"mean": 0.0}})
    assert json.loads(path.read_text()) == {"S1": {"mean": 0.9}, "S3": {"mean": 0.0}}


def test_a_search_without_its_first_runs_yields_them() -> None:
    assert [spec.rate for spec in tuned(S4, 32, {})] == [-1, 0, 1]
