"""The sizes that a launch begins with, from those of a checkpoint."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from types import SimpleNamespace
from typing import Any

import pytest

from copus_ext.controller import callback, first_step, out_of_memory
from copus_ext.controller.callback import Controller
from copus_ext.controller.first_step import STATE_KEY, restored_state
from copus_ext.controller.rules import rate_rules_of, rules_of
from copus_ext.goodput.config_change import ConfigChange
from copus_ext.goodput.loss_watch import LossWatch
from copus_ext.goodput.lr_scaling import Ramp
from copus_ext.goodput.state import VERSION, ControllerState
from megatron.trainer.common.step_settings import StepSettings
from megatron.trainer.config.arguments import parse_args, resolve
from tests.helpers.jobs import TINY
from tests.unit.test_controller_parts import config, flags

ITERATION, SAMPLES = 100, 3200


class Launch:
    """Begins with the sizes of a checkpoint; the run's first batch was 8.

    Args:
        batch: of the checkpoint.
        micro: of the checkpoint.
        run: configuration of the launch.
        layout: that the last change led to; None: that of the launch.
        given: flags of the controller.
    """

    def __init__(
        self,
        batch: int,
        micro: int = 1,
        *,
        run: Any = None,
        layout: str | None = None,
        **given: Any,
    ) -> None:
        run = run or config()
        self.controller = one = Controller(flags(**given))
        one.config, one.rules = run, rules_of(one.flags, run)
        one.rates = rate_rules_of(one.flags, run)
        self.before = one.rates.lr_factor(batch)
        sizes: dict[str, Any] = {
            "from_batch": 8,
            "to_batch": batch,
            "from_micro_batch": 1,
            "to_micro_batch": micro,
        }
        where = str(run.layout) if layout is None else layout
        change = ConfigChange(decision=3, **sizes, from_layout=where, to_layout=where)
        one.state.global_batch_size, one.state.micro_batch_size = batch, micro
        one.state.open_change, one.state.num_changes = change, 1
        one.state.loss_watch = LossWatch(
            decision=3,
            from_batch=8,
            to_batch=batch,
            loss_before=None,
            loss_sd_before=None,
            num_losses_before=0,
        )
        one.state.ramp = Ramp(start_iteration=0, num_steps=10, start=1.0, end=self.before)
        settings = StepSettings(
            global_batch_size=batch, micro_batch_size=micro, lr_factor=self.before
        )
        state = SimpleNamespace(
            settings=settings,
            iteration=ITERATION,
            consumed_samples=SAMPLES,
            lr_samples=SAMPLES,
        )
        context: Any = SimpleNamespace(config=run, state=state, run_dir=None)
        out = io.StringIO()
        with redirect_stdout(out):
            one._set_first_step(context)
        self.told, self.settings, self.state = (
            out.getvalue().splitlines(),
            state.settings,
            one.state,
        )

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """Of the first step."""
        return self.settings.global_batch_size, self.settings.micro_batch_size


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (callback, out_of_memory):
        monkeypatch.setattr(module.dist, "get_rank", lambda: 0)
        monkeypatch.setattr(module, "broadcast_from_rank0", lambda value: value)


def test_a_lower_maximum_holds_from_the_first_step_on() -> None:
    launch = Launch(32, copus_max_global_batch_size=16)
    assert launch.sizes == (16, 1)
    assert (launch.state.global_batch_size, launch.state.micro_batch_size) == (16, 1)
    assert launch.told == ["copus: batch 16 in place of 32, as --copus-max-global-batch-size is 16"]
    assert launch.settings.lr_factor == pytest.approx(2**0.5), "a shrinking batch takes it at once"
    assert launch.settings.weight_decay_factor == pytest.approx(2 / 2**0.5)


def test_a_higher_minimum_holds_too_and_the_learning_rate_follows() -> None:
    launch = Launch(2, copus_min_global_batch_size=4)
    assert launch.sizes == (4, 1)
    assert launch.told == ["copus: batch 4 in place of 2, as --copus-min-global-batch-size is 4"]
    ramp = launch.state.ramp
    assert ramp is not None and (ramp.start, ramp.end) == (0.5, 0.5**0.5)
    assert ramp.start_iteration == ITERATION
    assert 0.5 < launch.settings.lr_factor < 0.5**0.5, "it rises over some steps"


def test_what_was_measured_of_the_batch_before_ends_with_it() -> None:
    state = Launch(32, copus_max_global_batch_size=16).state
    assert state.open_change is None and [one.decision for one in state.changes] == [3]
    assert state.loss_watch is None
    assert state.steps_after_change == 0


def test_an_outcome_takes_no_steps_of_another_layout_or_micro_batch() -> None:
    assert Launch(16).state.open_change is not None
    for state in (
        Launch(16, layout="tp1.pp2.dp1").state,
        Launch(16, 2, run=config(), layout="tp2.pp1.dp1").state,
    ):
        assert state.open_change is None and [one.decision for one in state.changes] == [3]


@pytest.mark.parametrize(
    ("batch", "given"),
    [
        (32, {}),
        (32, {"copus_max_global_batch_size": 32}),
        (2, {"copus_min_global_batch_size": 2}),
        # No policy that keeps or grows the batch undoes what another one has shrunk.
        (2, {"copus_policy": "static"}),
        (2, {"copus_policy": "copus"}),
        # A batch that is not a size of the grid, as phases or lost ranks leave one, may be kept.
        (26, {"copus_max_global_batch_size": 32}),
    ],
)
def test_a_batch_within_the_bounds_stays_with_its_rates(batch: int, given: dict[str, Any]) -> None:
    launch = Launch(batch, **given)
    assert launch.sizes == (batch, 1) and launch.told == []
    assert launch.settings.lr_factor == launch.before
    assert launch.state.open_change is not None and launch.state.loss_watch is not None


def test_the_usual_bounds_hold_as_well() -> None:
    assert Launch(1024).sizes == (512, 1)
    assert Launch(64, copus_policy="static", copus_max_global_batch_size=32).sizes == (32, 1)


def test_the_nearest_size_that_the_layout_can_cut_is_taken() -> None:
    assert Launch(32, copus_max_global_batch_size=30).sizes == (16, 1)
    grid = {"copus_batch_grid": "24", "copus_max_global_batch_size": 30}
    assert Launch(32, **grid).sizes == (24, 1)
    # Two replicas: micro-batches of 16 cut 32 samples, and at most of 8 cut 16.
    assert Launch(32, 16, copus_max_global_batch_size=16).sizes == (16, 8)
    one_replica = config("--pipeline-model-parallel-size 2")
    assert Launch(32, 32, run=one_replica, copus_max_global_batch_size=16).sizes == (16, 16)


def test_a_trainer_that_keeps_its_micro_batch_takes_a_batch_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Controller, "changes_micro_batch", False)
    given = {"copus_batch_grid": "24", "copus_max_global_batch_size": 30}
    assert Launch(32, 8, **given).sizes == (16, 8), "two replicas cannot cut 24 into eights"
    assert Launch(32, 16, **given).sizes == (32, 16), "none can be cut"


def test_a_schedule_knows_its_own_batches() -> None:
    steps = ["--step-batch-size-schedule", "0:4 2K:8"]
    run = resolve(parse_args([*TINY.split(), "--train-samples", "6400", *steps]), 2)
    launch = Launch(16, run=run, copus_policy="step_schedule", copus_max_global_batch_size=8)
    assert launch.sizes == (16, 1) and launch.told == []


def test_an_error_of_the_table_ends_the_decisions_and_not_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    controller = Controller(flags())
    controller.table = object()  # type: ignore[assignment]

    def broken() -> Any:
        raise LookupError("no package")

    controller._renew_table(broken)
    assert controller.table is None and "controller disabled: no package" in caplog.text


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"version": VERSION - 1}, f"it has version {VERSION - 1}, and this copus reads {VERSION}"),
        ({"steps": [3]}, "TypeError"),
    ],
)
def test_a_state_that_cannot_be_read_is_one_line_and_starts_empty(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: dict[str, Any],
    told: str,
) -> None:
    monkeypatch.setattr(first_step.dist, "get_rank", lambda: 0)
    stored = ControllerState(elapsed_s=7.0).to_json()
    state = SimpleNamespace(iteration=40, callbacks={STATE_KEY: stored})
    context: Any = SimpleNamespace(state=state)
    assert restored_state(context).elapsed_s == 7.0 and not caplog.records
    state.callbacks = {STATE_KEY: {**stored, **change}}
    assert restored_state(context) == ControllerState()
    (record,) = caplog.records
    begin = "the controller's state in the checkpoint of iteration 40 cannot be read: "
    assert record.getMessage().startswith(begin + told)
    assert record.getMessage().endswith("go on as saved, and the controller measures anew")
