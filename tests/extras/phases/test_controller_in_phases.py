"""A run as its controller sees it in a phase: batches in samples of the present length, and
positions in those of the run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from copus_ext.controller import rules
from copus_ext.controller.decision_log import DecisionLog
from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.layout_changes import LayoutChangeManager
from copus_ext.controller.segments import ends_segment, flags_in_segment
from copus_ext.goodput.belief import Look
from copus_ext.goodput.config_change import ConfigChange
from copus_ext.goodput.messages import summary
from copus_ext.goodput.state import ControllerState, config_key
from megatron.trainer.common.train_state import TrainState
from megatron.trainer.config import Config
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.extras.phases.flags import in_phase
from megatron.trainer.train.callbacks import CallbackContext
from tests.extras.phases.test_phases import BASE, config_of
from tests.helpers.steps import step_info

RUN = "--train-iters 20 --global-batch-size 32 --lr-warmup-iters 2 --lr-decay-iters 18"


def context_of(config: Config, consumed_samples: int, **step: Any) -> CallbackContext:
    nothing: dict[str, Any] = dict.fromkeys(("model", "optimizer", "scheduler", "groups"))
    return CallbackContext(
        **nothing,
        config=config,
        state=TrainState(consumed_samples=consumed_samples, lr_samples=consumed_samples),
        step=step_info(consumed_samples=consumed_samples, **step),
    )


def test_batches_of_a_phase_are_those_of_a_run_of_its_length() -> None:
    seen = in_phase(config_of(RUN), 1).in_segment
    alone = RUN.replace("--global-batch-size 32", "--global-batch-size 8 --seq-length 256")
    own = resolve(parse_args([*BASE.split(), *alone.split()]), 1)
    for name in ("seq_length", "global_batch_size", "initial_global_batch_size"):
        assert getattr(seen.batch, name) == getattr(own.batch, name)
    assert seen.segment == in_phase(config_of(RUN), 1).segment
    assert seen.batch.train_samples == 4 * own.batch.train_samples, "lengths stay as they are"
    assert seen.optim == config_of(RUN).optim and in_phase(config_of(RUN), 0).in_segment.batch
    assert config_of(RUN).in_segment.batch.seq_length == 64


def test_batches_of_a_schedule_are_in_present_samples() -> None:
    flags = "--train-iters 20 --step-batch-size-schedule"
    words = [*BASE.split(), *flags.split(), "0:32 8192:64", "--seq-length", "64"]
    words += ["--seq-length-schedule", "0:64 50%:256"]
    config = in_phase(resolve(parse_args(words), 1), 1).in_segment
    assert config.batch.step_batch_size_schedule == "0:8 8192:16"
    known = rules.rules_of(CopusConfig(copus_policy="step_schedule"), config)
    assert known.schedule == ((0, 8), (128, 16)) and known.length_ratio == 4
    ramp = RUN.replace("32", "64 --rampup-batch-size 16 16 96")
    config = in_phase(config_of(ramp), 1).in_segment
    assert config.batch.rampup_batch_size == (4, 4, 96)


def test_as_many_tokens_lie_between_decisions_in_every_phase() -> None:
    config = in_phase(config_of(RUN), 1).in_segment
    state = ControllerState(last_decision_samples=400)
    act = CopusConfig(copus_policy="static", copus_interval=64 * 64.0)
    for one in (config, config_of(RUN)):
        assert rules.samples_to_decision(act, one, 8, state) == 64, "of the run"


@pytest.mark.parametrize(("consumed", "is_last"), [(224, False), (256, True)])
def test_the_last_step_of_a_phase(consumed: int, is_last: bool) -> None:
    assert ends_segment(context_of(config_of(RUN), consumed)) == is_last
    assert not ends_segment(context_of(in_phase(config_of(RUN), 2), 640))


def test_flags_give_batches_in_samples_of_the_first_phase() -> None:
    flags = CopusConfig(copus_min_global_batch_size=16, copus_batch_grid="24,32,64")
    seen = flags_in_segment(flags, 4)
    assert seen.copus_min_global_batch_size == 4 and seen.copus_batch_grid == "6,8,16"
    assert flags_in_segment(flags, 16).copus_batch_grid == "2,4"
    assert flags_in_segment(flags, 1) == flags


def test_rates_are_relative_to_as_many_tokens() -> None:
    config = config_of(RUN)
    flags = CopusConfig(copus=True, copus_mode="act")
    first = rules.rate_rules_of(flags, config)
    later = rules.rate_rules_of(flags, in_phase(config, 1).in_segment)
    assert first.lr_factor(64) == later.lr_factor(16)


def test_the_state_of_the_controller_enters_a_phase() -> None:
    state = ControllerState(
        last_decision_samples=200,
        global_batch_size=64,
        micro_batch_size=4,
        looks=[Look(samples=100.0, noise_scale=8.0, log_variance=0.1)],
        annealing_from=32,
        hold_shrinking_until_samples=400,
    )
    key = config_key("tp1.pp1.dp1", 4, 64)
    for i in range(9):
        step = {"consumed_samples": 64 * i, "batch": 64, "loss": 1.0, "seconds": 0.5}
        state.record_step(key=key, **step)
    assert state.step_times[key]
    same = ControllerState.from_json(json.loads(json.dumps(state.to_json())))
    same.enter_segment(before=4, after=4, global_batch_size=32, micro_batch_size=2)
    assert (same.global_batch_size, same.micro_batch_size) == (32, 2)
    assert same.step_times == state.step_times and same.last_decision_samples == 200
    state.enter_segment(before=1, after=4, global_batch_size=16, micro_batch_size=1)
    assert state.last_decision_samples == 200, "of the run"
    assert (state.global_batch_size, state.micro_batch_size, state.annealing_from) == (16, 1, 8)
    assert not state.step_times and not state.steps and state.watch.key == ""
    assert not state.looks and same.looks
    assert state.hold_shrinking_until_samples == 400
    assert ControllerState.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_a_step_that_changed_nothing_counts_as_the_run_does() -> None:
    state = ControllerState(last_decision_samples=100)
    step = {"key": "k", "loss": 1.0, "seconds": 0.5, "length_ratio": 4}
    state.record_step(**step, consumed_samples=132, batch=8, updated=False)
    state.record_step(**step, consumed_samples=164, batch=8)
    assert state.skipped_samples == 32
    due = {"batch": 8, "scheduled": None, "consumed_samples": 164}
    assert state.is_due(**due, every_samples=32) and not state.is_due(**due, every_samples=33)


def test_the_age_of_a_checkpoint_is_the_same_in_every_phase() -> None:
    """In tokens: a checkpoint of one phase may be committed, or grow too old, in the next."""
    flags = CopusConfig(copus_relayout_checkpoint_tokens=64 * 64.0)
    manager = LayoutChangeManager(
        flags, ControllerState(), DecisionLog(None), prior_s=lambda layout: 1.0
    )
    config = config_of(f"{RUN} --save somewhere")
    context = context_of(config, 256)
    context.checkpoint_samples = 224
    manager.on_checkpoint_saved(context)
    assert not manager.saves_first(context)
    later = context_of(in_phase(config, 1), 288)
    assert not manager.saves_first(later), "64 samples of the first length"
    later.state.consumed_samples = 292
    assert manager.saves_first(later)
    later.checkpoint_samples = 256
    manager.on_checkpoint_saved(later)
    assert not manager.saves_first(later)


def test_the_summary_needs_no_unit_of_samples() -> None:
    change: dict[str, Any] = {
        "from_batch": 8,
        "to_batch": 4,
        "from_micro_batch": 1,
        "to_micro_batch": 1,
    }
    changes = [ConfigChange(decision=1, iteration=12, consumed_samples=400, **change)]
    assert "step 12: batch 8 -> 4" in summary(changes, mode="act")
