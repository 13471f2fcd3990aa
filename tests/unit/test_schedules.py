"""Users' own learning rate schedules: as megatron-core has them, and what the controller does."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from megatron.core import num_microbatches_calculator as calculators
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from copus_ext.controller.callback import Controller
from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.rules import rate_rules_of, rules_of
from megatron.trainer.common.core_version import since
from megatron.trainer.common.step_settings import StepSettings, set_rates
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.batch_schedule import BatchSchedule
from megatron.trainer.optim.optimizer import build_scheduler
from tests.helpers.jobs import TINY
from tests.helpers.scaled_commands import grouped

BATCH = 8
WSD = "--lr-decay-style WSD --min-lr 1e-5"
SCHEDULES = [
    "--train-iters 60 --lr-warmup-iters 10 --lr-decay-style cosine --min-lr 1e-4",
    "--train-iters 60 --lr-warmup-iters 10 --lr-decay-style linear",
    "--train-iters 60 --lr-decay-style cosine --min-lr 3e-5",
    "--train-iters 60 --lr-warmup-fraction 0.013 --lr-decay-style cosine --min-lr 1e-5",
    "--train-iters 60 --lr-warmup-fraction 0.1 --lr-decay-style linear --min-lr 5e-4",
    "--train-iters 60 --lr-warmup-iters 6 --lr-decay-style inverse-square-root --min-lr 1e-5",
    "--train-iters 60 --lr-warmup-iters 6 --lr-decay-style constant --min-lr 1e-5",
    "--train-iters 60 --lr-decay-style constant",
    f"--train-iters 60 --lr-warmup-iters 4 {WSD} --lr-wsd-decay-iters 15",
    f"--train-iters 60 --lr-warmup-iters 4 {WSD} --lr-wsd-decay-style linear "
    "--lr-wsd-decay-iters 15",
    f"--train-samples 480 --lr-warmup-samples 44 {WSD} --lr-wsd-decay-style cosine "
    "--lr-wsd-decay-samples 99",
    f"--train-samples 480 --lr-warmup-samples 44 {WSD} --lr-wsd-decay-style minus_sqrt "
    "--lr-wsd-decay-samples 99",
    "--train-samples 480 --lr-warmup-samples 77 --lr-decay-style cosine --min-lr 1e-4",
    "--train-samples 480 --lr-warmup-samples 50 --lr-warmup-init 1e-5 --lr-decay-style linear "
    "--min-lr 1e-4",
    "--train-iters 60 --lr-decay-iters 40 --lr-warmup-iters 5 --lr-decay-style cosine "
    "--min-lr 1e-4",
    "--train-iters 60 --lr-decay-iters 90 --lr-warmup-iters 5 --lr-decay-style cosine "
    "--min-lr 1e-4",
    "--train-samples 480 --lr-decay-samples 333 --lr-warmup-fraction 0.07 "
    "--lr-decay-style inverse-square-root --min-lr 2e-4",
    "--train-samples 480 --lr-warmup-samples 60 --rampup-batch-size 2 2 90 "
    "--lr-decay-style cosine --min-lr 1e-4",
    "--train-samples 480 --lr-warmup-fraction 0.2 --rampup-batch-size 4 4 200 "
    "--lr-decay-style linear",
    f"--train-samples 480 --lr-warmup-samples 30 {WSD} --lr-wsd-decay-samples 64 "
    "--rampup-batch-size 2 6 33",
    "--train-iters 60 --lr-warmup-iters 12 --lr-decay-style cosine --min-lr 1e-4 "
    "--weight-decay-incr-style cosine --start-weight-decay 0.01 --end-weight-decay 0.1",
    "--train-iters 60 --lr-warmup-iters 12 --lr-decay-style cosine --min-lr 1e-4 "
    "--decoupled-lr 5e-3 --decoupled-min-lr 1e-3",
]
MAX_STRETCH = 0.05
"""Of the decay."""


def config_of(more: str) -> Any:
    return resolve(parse_args([*TINY.split(), *more.split()]), 2)


def groups_of(config: Any, *, is_apart: bool = False) -> Any:
    group = {"is_decoupled_lr": is_apart, "wd_mult": 1.0, "betas": (0.9, config.optim.adam_beta2)}
    return SimpleNamespace(param_groups=[group])


def as_megatron_lm(more: str) -> tuple[OptimizerParamScheduler, Any]:
    """The schedule and the number of micro-batches as Megatron-LM sets them up from flags."""
    words = {flag: " ".join(values) for flag, values in grouped(more.split()).items()}

    def number(flag: str, default: float = 0.0) -> float:
        return float(words.get(flag, default))

    unit = "iters" if "--train-iters" in words else "samples"
    size = BATCH if unit == "iters" else 1
    total = int(words[f"--train-{unit}"])
    decay = int(words.get(f"--lr-decay-{unit}", total)) * size
    warmup: float = int(words.get(f"--lr-warmup-{unit}", 0)) * size
    if "--lr-warmup-fraction" in words:
        warmup = float(words["--lr-warmup-fraction"]) * decay
    last = words.get(f"--lr-wsd-decay-{unit}")
    peak, least = number("--decoupled-lr", 1e-3), number("--decoupled-min-lr", 0.0)
    if "--decoupled-lr" not in words:
        least = number("--min-lr")
    optimizer: Any = SimpleNamespace(
        param_groups=[{"max_lr": peak, "min_lr": least, "wd_mult": 1.0}]
    )
    start, end = number("--start-weight-decay", 0.01), number("--end-weight-decay", 0.01)
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=number("--lr-warmup-init"),
        max_lr=1e-3,
        min_lr=number("--min-lr"),
        lr_warmup_steps=warmup,  # type: ignore[arg-type]
        lr_decay_steps=decay,
        lr_decay_style=words["--lr-decay-style"],
        start_wd=start,
        end_wd=end,
        wd_incr_steps=total * size,
        wd_incr_style=words.get("--weight-decay-incr-style", "constant"),
        wsd_decay_steps=None if last is None else int(last) * size,
        lr_wsd_decay_style=words.get("--lr-wsd-decay-style", "exponential"),
    )
    ramp = words.get("--rampup-batch-size")
    if ramp is None:
        return schedule, None
    first, step, samples = map(int, ramp.split())
    if since("0.19"):  # which has steps in place of the ramp
        count = (BATCH - first) // step
        steps = [(math.ceil(k * samples / count), first + k * step) for k in range(count + 1)]
        words_of = " ".join(f"{at}:{batch}" for at, batch in steps)
        newer: Any = calculators
        return schedule, newer.StepBatchsizeNumMicroBatchesCalculator(1, 2, False, 0, words_of)
    return schedule, calculators.RampupBatchsizeNumMicroBatchesCalculator(
        BATCH, 1, 2, False, 0, first, step, samples
    )


@pytest.mark.parametrize("more", SCHEDULES)
def test_every_step_has_the_rates_that_megatron_lm_would_give_it(more: str) -> None:
    config = config_of(more)
    ours = groups_of(config, is_apart="--decoupled-lr" in more)
    schedule = build_scheduler(config, ours, lr_samples=0)
    theirs, calculator = as_megatron_lm(more)
    batches, consumed, seen = BatchSchedule.of(config), 0, []
    for _ in range(config.batch.train_samples):
        batch = batches.at(consumed)
        if consumed + batch > config.batch.train_samples:
            break
        if calculator is not None:
            calculator.update(consumed, True)
            assert batch == calculator.get_current_global_batch_size()
        group, own = theirs.optimizer.param_groups[0], ours.param_groups[0]
        assert (own["lr"], own["weight_decay"]) == (group["lr"], group["weight_decay"]), consumed
        seen.append(own["lr"])
        schedule.step(increment=batch)
        theirs.step(increment=batch)
        consumed += batch
    assert len(seen) >= 60 and max(seen) > 0.9e-3, "the peak"


@dataclass
class Driven:
    """A run whose batch somebody else changes, with the controller's rates.

    Args:
        more: flags of the run.
        flags: of the controller.
    """

    more: str
    flags: CopusConfig
    rates: list[tuple[int, int, float, float]] = field(default_factory=list)
    """Samples before each step, its batch, learning rate and weight decay."""

    def __post_init__(self) -> None:
        self.config = config_of(self.more)
        self.optimizer = groups_of(self.config, is_apart="--decoupled-lr" in self.more)
        self.scheduler = build_scheduler(self.config, self.optimizer, lr_samples=0)
        self.controller = one = Controller(self.flags)
        one.config, one.rules = self.config, rules_of(self.flags, self.config)
        one.rates = rate_rules_of(self.flags, self.config)
        self.counters = SimpleNamespace(
            settings=StepSettings(), iteration=0, consumed_samples=0, callbacks={}
        )
        self.context: Any = SimpleNamespace(config=self.config, state=self.counters)
        one.state.global_batch_size, one.state.micro_batch_size = one.rules.first_batch, 1
        self.adopt()

    @property
    def batch(self) -> int:
        batch = self.controller.state.global_batch_size
        assert batch is not None
        return batch

    def adopt(self) -> None:
        """Sets the rates of the next step, as the trainer does."""
        self.counters.settings = self.controller._wanted_settings(self.context)
        beta2 = self.config.optim.adam_beta2
        set_rates(self.optimizer, self.scheduler, self.counters.settings, beta2=beta2)

    def step(self, then: int | None = None) -> None:
        group = self.optimizer.param_groups[0]
        consumed, batch = self.counters.consumed_samples, self.batch
        self.rates.append((consumed, batch, group["lr"], group["weight_decay"]))
        self.scheduler.step(increment=batch)
        self.counters.iteration += 1
        self.counters.consumed_samples += batch
        if then not in (None, batch):
            assert then is not None
            self.controller.state.ramp = self.controller._new_ramp(then, self.context)
            self.controller.state.global_batch_size = then
        self.adopt()


def plain_rate(more: str, consumed: int) -> float:
    """The rate of the schedule after so many samples, from megatron-core's own."""
    schedule, _ = as_megatron_lm(more)
    schedule.step(increment=consumed)
    return schedule.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("more", [more for more in SCHEDULES if "rampup" not in more])
def test_a_batch_that_never_changes_has_the_rates_of_a_plain_run(more: str) -> None:
    run = Driven(more, CopusConfig(copus=True))
    while run.counters.consumed_samples < run.config.batch.train_samples:
        run.step()
    assert all(rate == plain_rate(more, consumed) for consumed, _, rate, _ in run.rates)
    assert len(run.rates) == 60


CHANGES = st.lists(
    st.tuples(st.integers(1, 12), st.sampled_from([1, 2, 4, 8, 16, 32])), min_size=1, max_size=8
)


@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize("more", SCHEDULES)
@settings(deadline=None, max_examples=12)
@given(changes=CHANGES)
@example(changes=[(1, 1)])
@example(changes=[(3, 2), (12, 8)])
@example(changes=[(1, 32), (1, 1), (1, 32), (4, 2)])
def test_whatever_the_batch_does_the_schedule_is_the_users(
    more: str, beta2: float, changes: list[tuple[int, int]]
) -> None:
    run = Driven(f"{more} --adam-beta2 {beta2}", CopusConfig(copus=True))
    config, total = run.config, run.config.batch.train_samples
    then = [batch for steps, batch in changes for batch in [None] * (steps - 1) + [batch]]
    while run.counters.consumed_samples < total:
        run.step(then.pop(0) if then else None)
    warmup, most = config.optim.lr_warmup_samples, MAX_STRETCH * config.optim.lr_decay_samples
    group = run.optimizer.param_groups[0]
    of_flags, changed, before = BatchSchedule.of(config), 0, run.rates[0][1]
    for consumed, batch, rate, weight_decay in run.rates:
        if batch != before:
            changed, before = consumed, batch
        plain, reference = plain_rate(more, consumed), BATCH
        if config.batch.rampup_batch_size is not None:
            reference = of_flags.at(consumed)
        # The rule's rate, and the least one: of the same schedule with the peak --min-lr.
        rule = plain * (batch / reference) ** 0.5
        is_warm = consumed >= warmup
        least = group["min_lr"] if is_warm else plain * group["min_lr"] / group["max_lr"]
        assert least * (1 - 1e-12) <= rate <= max(rule, least) * (1 + 1e-12), consumed
        if consumed - changed >= most:
            assert rate == pytest.approx(max(rule, least), rel=1e-12), consumed
        if "incr-style" not in more:
            # The decay of a sample is that of the plain run, also where --min-lr raises the rate.
            own = rate * weight_decay * reference / batch
            assert own == pytest.approx(0.01 * plain, rel=1e-9), consumed
