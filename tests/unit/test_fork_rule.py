"""When a fork test is made, what it says, and what it costs a simulated run."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from copus_ext.goodput import fork_rule
from copus_ext.goodput.decide import decide
from copus_ext.goodput.fork_rule import ForkEvidence, Trial, multiplier
from copus_ext.goodput.inputs import ConfigThroughput, DecisionInputs
from copus_ext.planner.configuration import Configuration
from copus_ext.simulate.contenders import contenders
from copus_ext.simulate.run import simulate
from copus_ext.simulate.scenario import preset
from megatron.training.config.layout import Layout
from tests.helpers import recorded
from tests.helpers.recorded import shipped_rules

pytestmark = pytest.mark.unit


def row(batch: int) -> ConfigThroughput:
    layout = Layout(tp=1, pp=1, dp=1)
    return ConfigThroughput(
        configuration=Configuration(layout=layout, micro_batch_size=1, global_batch_size=batch),
        samples_per_s=100.0 * batch / (batch + 64),
        relative_sd=0.0,
        source="measured",
    )


def situation(**more: Any) -> DecisionInputs:
    """At 3 % of a long run, batch 32 of 8 to 512."""
    values: dict[str, Any] = {
        "consumed_samples": 300_000,
        "total_samples": 10_000_000,
        "elapsed_s": 10_000.0,
        "iteration": 10_000,
        "half_life_samples": 1000.0,
        "switch_cost_s": 60.0,
        **more,
    }
    return DecisionInputs(
        rules=shipped_rules(),
        noise=recorded.noise(64.0, spread=1.2),
        rows=tuple(row(batch) for batch in (8, 16, 32, 64, 128, 256, 512)),
        current=2,
        **values,
    )


def due(s: DecisionInputs, *, spent_s: float = 0.0, tests_at: tuple = ()) -> Trial | None:
    return fork_rule.trial(s, spent_s=spent_s, tests_at=tests_at)


def test_a_test_is_due_once_at_each_share_and_never_while_rates_move() -> None:
    found = due(situation())
    assert found is not None and (found.batch, found.width) == (32, 4)
    assert found.samples % 128 == 0 and found.samples >= fork_rule.MIN_STEPS * 128
    assert due(situation(), tests_at=(0.01,)) is not None
    assert due(situation(), tests_at=(0.031,)) is None
    for moving in ("in_warmup", "in_ramp", "paused"):
        assert due(dataclasses.replace(situation(), **{moving: True})) is None
    assert due(situation(consumed_samples=50_000)) is None, "before the first share"
    assert due(situation(consumed_samples=5_000_000)) is None, "long after the last"


def test_all_tests_stay_within_the_budget() -> None:
    s = situation()
    run_s = s.elapsed_s + (s.total_samples - s.consumed_samples) / s.now.samples_per_s
    found = due(s)
    assert found is not None and found.seconds <= fork_rule.BUDGET * run_s
    assert due(s, spent_s=fork_rule.BUDGET * run_s) is None
    short = situation(consumed_samples=3_000, total_samples=100_000, elapsed_s=100.0)
    assert due(short) is None, "30 steps would cost a short run too much"


def test_no_test_where_another_batch_saves_nothing() -> None:
    flat = [dataclasses.replace(one, samples_per_s=50.0) for one in situation().rows]
    small = [one for one in flat if one.global_batch_size >= 32]
    s = dataclasses.replace(situation(), rows=tuple(small), current=0)
    assert due(s) is None


@pytest.mark.parametrize("phi", [3.0, 32.0, 1000.0])
@pytest.mark.parametrize("width", [2, 4])
def test_a_ratio_and_its_critical_batch_size_are_inverse(phi: float, width: int) -> None:
    ratio = fork_rule.ratio_of(phi, batch=32, width=width)
    assert fork_rule.critical_batch_size(ratio, batch=32, width=width) == pytest.approx(phi)
    assert fork_rule.critical_batch_size(1.0, batch=32, width=width) == math.inf
    assert fork_rule.critical_batch_size(0.9 / width, batch=32, width=width) == 0.0


def evidence(c: float, *, sd: float = 0.02, at: int = 1000, batch: int = 64) -> ForkEvidence:
    """An exact test whose noise scale is 16."""
    return ForkEvidence(
        consumed_samples=at,
        seconds=1.0,
        batch=batch,
        width=2,
        ratio=float(fork_rule.ratio_of(16 * c, batch=batch, width=2)),
        ratio_sd=sd,
        noise_scale=16.0,
    )


def test_tests_pull_c_from_the_prior_as_far_as_they_are_sure() -> None:
    assert multiplier([], prior=8.0, consumed_samples=1000) is None
    for true in (2.0, 4.0, 20.0):
        found, sd = multiplier([evidence(true)] * 3, prior=8.0, consumed_samples=1000) or (0, 0)
        assert found == pytest.approx(true, rel=0.25) and sd < fork_rule.PRIOR_SD / 2
        unsure, wide = multiplier([evidence(true, sd=9.0)], prior=8.0, consumed_samples=1000) or (
            0,
            0,
        )
        assert unsure == pytest.approx(8.0, rel=0.02)
        assert wide == pytest.approx(fork_rule.PRIOR_SD, rel=0.02)
        old, _ = multiplier([evidence(true)], prior=8.0, consumed_samples=10**12) or (0, 0)
        assert abs(math.log(old / 8.0)) < abs(math.log(found / 8.0)), "age counts"


@pytest.mark.parametrize("ratio", [-1.0, 0.2, 1.0, 1.7])
def test_no_test_sends_c_to_an_end(ratio: float) -> None:
    one = dataclasses.replace(evidence(8.0), ratio=ratio, ratio_sd=0.1)
    found, _ = multiplier([one], prior=8.0, consumed_samples=1000) or (0, 0)
    assert 8.0 / 20 < found < 8.0 * 20


def test_losses_that_did_not_fall_say_nothing() -> None:
    made = due(situation())
    assert made is not None
    about: Any = {"noise_scale": 16.0, "consumed_samples": 300_000, "seconds": 1.0}
    assert fork_rule.evidence(made, losses=(3.0, 2.999, 2.998), **about) is None
    assert fork_rule.evidence(made, losses=(3.0, 2.8, math.nan), **about) is None
    found = fork_rule.evidence(made, losses=(3.0, 2.8, 2.9), **about)
    assert found is not None and found.ratio == pytest.approx(0.5, abs=0.03)
    assert ForkEvidence(**found.to_json()) == found


def test_a_loss_that_falls_with_the_logarithm_of_samples_is_read_without_bias() -> None:
    """From n samples on, B makes n/2 and w B makes n/4 progress."""
    wide = row(128)
    made = Trial(batch=32, wide=wide, samples=1280, seconds=1.0)
    losses = 3.0, 3.0 - 0.1 * math.log(1 + 1.0), 3.0 - 0.1 * math.log(1 + 0.4)
    found = fork_rule.evidence(
        made, losses=losses, noise_scale=16.0, consumed_samples=1280, seconds=1.0
    )
    assert found is not None and found.ratio == pytest.approx(0.4)


def test_decisions_go_by_what_was_measured() -> None:
    late: dict[str, Any] = {"consumed_samples": 9_000_000}
    s = fork_rule.with_multiplier(situation(**late), [evidence(1.0, at=9_000_000)] * 4)
    assert s.measured_multiplier is not None and s.measured_multiplier < 2.0
    assert s.critical_batch_size == pytest.approx(64.0 * s.measured_multiplier)
    plain = decide(situation(**late)).critical_batch_size
    assert decide(s).critical_batch_size == s.critical_batch_size
    assert plain is not None and s.critical_batch_size is not None
    assert s.critical_batch_size < plain
    again = DecisionInputs.from_json(s.to_json())
    assert again == s
    old = {k: v for k, v in s.to_json().items() if k != "measured_multiplier"}
    assert DecisionInputs.from_json(old).measured_multiplier is None


def test_a_simulated_run_pays_for_its_tests_and_learns_from_them() -> None:
    """Ten times the preset's length; the noise scale is half of what c = 8 expects."""
    s = preset("32xmi210-7b").recalibrated(16.0)
    longer = {name: 10 * at for name, at in s.targets.items()}
    s = s.change(total_samples=10 * s.total_samples, targets=longer, average_error=0.003)
    plain = contenders(s.batches)["adaptive_goodput_forward"]
    run = simulate(s, dataclasses.replace(plain, first_batch=32, fork_tests=True), seed=0)
    assert run.fork_tests
    spent = sum(test.seconds for test in run.fork_tests)
    assert spent <= run.forked_s <= 2 * fork_rule.BUDGET * run.seconds
    found = multiplier(run.fork_tests, prior=8.0, consumed_samples=s.total_samples)
    assert found is not None and found[0] > 8.0
