"""Users' own schedules in real runs on real text: a run with `--copus` keeps what was asked for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from megatron.trainer.config.batch_schedule import BatchSchedule
from tests.distributed.worker_schedules import RAMP, SCHEDULES, SHRUNK, SIXTY
from tests.helpers.on_ranks import ranks_fixture
from tests.unit.test_schedules import config_of, plain_rate

pytestmark = pytest.mark.timeout(600)

runs = ranks_fixture("worker_schedules", 2, timeout_s=560)


def column(run: dict[str, Any], name: str) -> list[Any]:
    return [step[name] for step in run["steps"]]


def batches(run: dict[str, Any]) -> list[int]:
    return column(run, "global_batch_size")


def told(run: dict[str, Any], word: str) -> list[str]:
    return [line for line in run["told"] if word in line]


@pytest.mark.parametrize("name", [*SCHEDULES, "ramp"])
def test_an_observed_run_is_the_plain_run_bit_for_bit(runs: dict[str, Any], name: str) -> None:
    assert runs[f"{name} observed"]["steps"] == runs[name]["steps"]
    flags = {**SCHEDULES, "ramp": RAMP}[name]
    # The rate of a record is that of the next step.
    expected = [plain_rate(flags, consumed) for consumed in column(runs[name], "consumed_samples")]
    assert column(runs[name], "learning_rate") == expected


def check_rates(
    run: dict[str, Any], flags: str, *, least: float, reference: int | None = None
) -> None:
    """Checks that all rates are between the least and the rule's, and reach the latter. The rates
    of the flags are those of a reference batch, or of the batch of the flags at that place."""
    config = config_of(flags)
    of_flags, most = BatchSchedule.of(config), 0.05 * config.optim.lr_decay_samples
    # A record has the rate of the next step.
    steps, changed = run["steps"], 0
    for step, after in itertools.pairwise(steps):
        consumed, batch = step["consumed_samples"], after["global_batch_size"]
        if after is steps[-1]:
            break  # it takes what is left
        changed = consumed if batch != step["global_batch_size"] else changed
        plain = plain_rate(flags, consumed)
        rule = plain * (batch / (reference or of_flags.at(consumed))) ** 0.5
        own = least if consumed >= config.optim.lr_warmup_samples else plain * least / 1e-3
        rate = step["learning_rate"]
        assert own * (1 - 1e-12) <= rate <= max(rule, own) * (1 + 1e-12), consumed
        if consumed - changed >= most:
            assert rate == pytest.approx(max(rule, own), rel=1e-12), consumed


def test_ten_steps_of_warm_up_stay_ten_steps(runs: dict[str, Any]) -> None:
    plain, acting, kept = (runs[name] for name in ("sixty", "sixty acting", "sixty kept"))
    for name in ("consumed_samples", "global_batch_size", "learning_rate"):
        assert column(kept, name) == column(plain, name), "a batch that stays changes no rate"
    # The micro-batch may change, and with it the order of sums.
    assert column(kept, "loss") == pytest.approx(column(plain, "loss"), rel=1e-6)
    assert len(batches(plain)) == 60 and column(plain, "learning_rate")[9] == 1e-3
    check_rates(acting, SIXTY, least=1e-4)
    assert acting["steps"][-1]["consumed_samples"] == plain["steps"][-1]["consumed_samples"] == 480
    rates = column(acting, "learning_rate")
    # A record has the rate of the next step.
    peaks = [rate * (8 / b) ** 0.5 for rate, b in zip(rates, batches(acting)[1:])]
    assert max(peaks) == pytest.approx(1e-3, rel=1e-3), "the peak, by the rule of roots"
    print("held-out losses, plain and acting:", plain["evaluations"], acting["evaluations"])
    assert not told(acting, "warms up")


def test_a_batch_that_shrinks_in_the_warm_up_leaves_it_as_it_is(runs: dict[str, Any]) -> None:
    run = runs["shrunk"]
    assert batches(run) == [8] * 3 + [2] * 12 + [4] * 24 + [16] * 9
    check_rates(run, SHRUNK, least=2e-4, reference=8)
    rates = dict(zip(column(run, "consumed_samples"), column(run, "learning_rate"), strict=True))
    # The peak of the present batch at the end of the user's warm-up, and the least rate at the end.
    assert rates[72] == max(rates[at] for at in rates if at < 144) == 1e-3 * (4 / 8) ** 0.5
    assert rates[24] == pytest.approx(1e-3 * 24 / 72 * (2 / 8) ** 0.5)
    assert rates[288] == pytest.approx(2e-4 * (16 / 8) ** 0.5)


def test_lengths_in_iterations_are_said_once_in_samples(runs: dict[str, Any]) -> None:
    line = (
        "copus: lengths stay in samples when the batch changes: --train-iters 60 is 480 samples, "
        "--lr-warmup-iters 10 is 80 samples, --eval-interval 20 is 160 samples; other "
        "intervals count steps"
    )
    assert told(runs["sixty acting"], "lengths stay") == [line]
    assert not told(runs["sixty"], "480 samples") and not told(runs["sixty kept"], "lengths stay")
    line = (
        "note: --global-batch-size is 16 and was 8 at the first launch, in whose steps iterations "
        "are counted: the run trains 96 samples, warms up over 24 and decays over 96"
    )
    assert told(runs["lengths resumed"], "note: --global-batch-size") == [line]
    assert batches(runs["lengths resumed"]) == [16] * 4
    flags = SCHEDULES["cosine"]
    expected = [plain_rate(flags, n) for n in column(runs["lengths resumed"], "consumed_samples")]
    assert column(runs["lengths resumed"], "learning_rate") == expected


def test_iterations_of_a_ramp_are_the_iterations_asked_for(runs: dict[str, Any]) -> None:
    exact = runs["exact"]
    assert batches(exact) == [2] * 4 + [4, 4, 6, 6, 8]
    rates = column(exact, "learning_rate")
    assert rates[3] == max(rates) == 1e-3 and rates[-1] == 0.0, "4 steps of warm-up, 9 in all"
    line = (
        "note: iterations count the steps of --rampup-batch-size: --train-iters 9 is 36 samples, "
        "--lr-warmup-iters 4 is 8 samples"
    )
    assert told(exact, "note: iterations count") == [line]


def test_a_ramp_is_where_the_controller_begins(runs: dict[str, Any]) -> None:
    acting = runs["ramp acting"]
    assert batches(acting)[0] == 2 and max(batches(acting)) <= 8
    assert acting["steps"][-1]["consumed_samples"] == 96
    check_rates(acting, RAMP, least=1e-4)
    assert told(acting, "first batch") == [
        "copus: the first batch is 2, where --rampup-batch-size begins; the controller chooses all "
        "later ones"
    ]
    # A plain run would not have stayed at the first batch.
    assert "staying" not in acting["saved"]


def test_a_run_resumes_in_the_middle_of_a_ramp(runs: dict[str, Any]) -> None:
    assert runs["ramp resumed observed"]["steps"] == runs["ramp"]["steps"][6:], "bit-equal"
    acting, resumed = runs["ramp acting"]["steps"], runs["ramp acting resumed"]["steps"]
    # Later decisions go by step times, which no two runs have alike.
    assert resumed[0] == acting[6], "bit-equal"
    # What was plain until then goes on at the batch that the ramp has there.
    begun = runs["ramp resumed acting"]
    assert batches(begun)[0] == batches(runs["ramp"])[6] == 6
    check_rates(begun, RAMP, least=1e-4)
