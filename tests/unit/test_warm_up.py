"""Notes on the warm-up of a run, and rates that go up and down with the batch."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from copus_ext.goodput.lr_scaling import Ramp, RateRules, decay_timescale, decay_words
from megatron.trainer.common.step_settings import StepSettings, set_rates
from megatron.trainer.common.train_state import TrainState
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.lengths import warmup_note
from tests.helpers.jobs import TINY


def config(more: str = "") -> Any:
    return resolve(parse_args([*TINY.split(), "--train-samples", "6400", *more.split()]), 2)


def test_steps_without_an_update_do_not_move_the_schedule() -> None:
    state = TrainState()
    for updated in (True, False, True):
        state.advance(samples=8, updated=updated, finite_loss=True, flops=0.0)
    assert (state.iteration, state.skipped_iterations, state.lr_samples) == (3, 1, 16)


@pytest.mark.parametrize(
    ("more", "note"),
    [
        (
            "--lr-warmup-samples 48",
            "warms up in 6 steps; 50 or more are usual: raise --lr-warmup-s",
        ),
        ("--lr-warmup-fraction 0.0075", "in 6 steps; 50 or more are usual: raise --lr-warmup-frac"),
        ("", "does not warm up; 50 steps or more are usual: give --lr-warmup-samples"),
        ("--lr-warmup-samples 392", "warms up in 49 steps"),
        ("--rampup-batch-size 4 4 800 --lr-warmup-samples 100", "warms up in 25 steps"),
        ("--train-samples 1200 --lr-warmup-samples 8", "in 1 step; 37 or more"),
        ("--lr-warmup-samples 400", None),
        ("--train-samples 640", None),
    ],
)
def test_a_short_warm_up_is_named_with_the_flag_that_sets_it(more: str, note: str | None) -> None:
    found = warmup_note(config(more))
    assert found is None if note is None else note in (found or "")


def test_the_note_names_iterations_where_lengths_are_in_iterations() -> None:
    flags = [*TINY.split(), "--train-iters", "800"]
    few = resolve(parse_args([*flags, "--lr-warmup-iters", "6"]), 2)
    assert "in 6 steps; 50 or more are usual: raise --lr-warmup-iters" in (warmup_note(few) or "")
    assert "give --lr-warmup-iters" in (warmup_note(resolve(parse_args(flags), 2)) or "")


@pytest.mark.parametrize("lr", ["sqrt", "linear", "none"])
def test_rates_after_going_up_and_down_equal_those_of_a_run_that_never_changed(lr: Any) -> None:
    rules = RateRules(
        reference_batch=16,
        beta2=0.95,
        lr=lr,
        weight_decay="tokens",
        beta2_rule="tokens",
        ramp_steps=20,
        max_ramp_samples=math.inf,
    )
    changing, plain = optimizer_and_schedule(), optimizer_and_schedule()
    ramp: Ramp | None = None
    batch, factor = 16, 1.0
    for iteration, to in enumerate([32] * 30 + [64] * 7 + [2] * 9 + [128] * 40 + [16] * 3):
        if to != batch:
            batch, ramp = to, rules.ramp(to, iteration=iteration, start=factor)
        factor = ramp.at(iteration) if ramp else rules.lr_factor(batch)
        settings = StepSettings(global_batch_size=batch, **rules.at(batch, factor))
        for _, schedule in (changing, plain):
            schedule.step(increment=batch)
        set_rates(*changing, settings, beta2=0.95)
        group = changing[0].param_groups[0]
        assert group["betas"][1] == (0.95 if batch == 16 else settings.beta2)
    assert changing[0].param_groups == plain[0].param_groups


@pytest.mark.parametrize("batch", [8, 64])
def test_the_timescale_is_the_share_of_a_run_in_which_weights_fall_by_e(batch: int) -> None:
    """AdamW, a constant rate and no gradient; the batches that rates follow have the same."""
    flags: dict[str, float] = {"lr": 2e-3, "weight_decay": 0.5, "samples": 40_000}
    tau = decay_timescale(batch, **flags)
    weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=flags["lr"], weight_decay=flags["weight_decay"])
    for _ in range(round(tau * flags["samples"] / batch)):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    assert float(weight) == pytest.approx(math.exp(-1.0), rel=2e-3)
    rules: Any = RateRules(
        reference_batch=batch,
        beta2=0.95,
        lr="sqrt",
        weight_decay="tokens",
        beta2_rule="const",
        ramp_steps=0,
        max_ramp_samples=math.inf,
    )
    after = rules.at(4 * batch, rules.lr_factor(4 * batch))
    lr = flags["lr"] * after["lr_factor"]
    decay = flags["weight_decay"] * after["weight_decay_factor"]
    again = decay_timescale(4 * batch, lr=lr, weight_decay=decay, samples=flags["samples"])
    assert again == pytest.approx(tau)


def test_without_weight_decay_the_timescale_has_no_end() -> None:
    tau = decay_timescale(8, lr=1e-3, weight_decay=0.0, samples=100)
    assert tau == math.inf and "there is no weight decay" in decay_words(tau)
    assert "of the last 21 % of the run" in decay_words(0.2136)
    assert "decay would take 1500 times as long as the run to forget one" in decay_words(1500.0)


def test_no_least_rate_is_above_that_of_the_schedule() -> None:
    optimizer, schedule = optimizer_and_schedule()
    plain = schedule.step

    def step(increment: int) -> None:  # as of a release whose groups have a multiplier
        plain(increment)
        for group in optimizer.param_groups:
            group["lr"] *= 0.1

    schedule.step = step  # type: ignore[method-assign]
    settings = StepSettings(global_batch_size=8, lr_factor=0.5)
    for done, expected in ((9001, 1e-6), (699, 1e-4 * 0.5)):
        schedule.num_steps = done
        set_rates(optimizer, schedule, settings, beta2=0.95)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=0.01)


def optimizer_and_schedule() -> tuple[Any, Any]:
    """An optimizer without parameters under the trainer's schedule."""
    group = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "wd_mult": 1.0, "lr_mult": 1.0}
    optimizer = SimpleNamespace(param_groups=[group])
    schedule = OptimizerParamScheduler(
        optimizer,  # type: ignore[arg-type]
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=1e-5,
        lr_warmup_steps=700,
        lr_decay_steps=9000,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.2,
        wd_incr_steps=9000,
        wd_incr_style="cosine",
    )
    return optimizer, schedule
