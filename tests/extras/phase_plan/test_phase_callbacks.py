"""Which callbacks a run of phases has, and with which controller it cannot run."""

from __future__ import annotations

from typing import Any

import pytest

from copus_ext.commands.pretrain import controllers
from copus_ext.controller import rules
from copus_ext.controller.flags import CopusConfig
from copus_ext.extras.phase_plan.layouts import PhaseLayouts
from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.arguments import parse_args, resolve
from tests.extras.phases.test_phases import BASE, THREE
from tests.helpers.jobs import EIGHT

RUN = "--seq-length 64 --train-iters 20 --global-batch-size 32 --seq-length-schedule"


def callbacks_of(flags: str, *, lengths: str = THREE, world_size: int = 1) -> list[Any]:
    words = [*BASE.split(), *RUN.split(), lengths, *flags.split()]
    args = parse_args(words, {"copus controller": CopusConfig})
    return controllers(args, resolve(args, world_size))


@pytest.mark.parametrize(("own", "name"), [("", "NoneType"), ("--copus", "Controller")])
def test_a_schedule_of_layouts_has_a_callback_that_knows_the_controller(
    own: str, name: str
) -> None:
    found = callbacks_of(f"{own} --layout-schedule 40%:tp2.pp1.dp1", world_size=2)
    (schedule,) = (one for one in found if isinstance(one, PhaseLayouts))
    assert type(schedule._controller).__name__ == name
    assert not any(isinstance(one, PhaseLayouts) for one in callbacks_of(own))


@pytest.mark.parametrize(
    ("layout", "is_fine"),
    [("tp2.pp1.dp2", True), ("tp1.cp2.pp1.ep2.dp2", True), ("tp1.cp2.pp1.dp2", False)],
)
def test_experts_of_every_layout_of_the_schedule_are_measured(layout: str, is_fine: bool) -> None:
    flags = f"{EIGHT} --disable-bias-linear --sequence-parallel --moe-balance lagged --copus "
    flags += f"--layout-schedule 40%:{layout}"
    if is_fine:
        callbacks_of(flags, world_size=4)
    else:
        with pytest.raises(UsageError, match=r"1 x 1, a multiple of tensor x context, 1 x 2"):
            callbacks_of(flags, world_size=4)
    callbacks_of(f"{flags} --copus-mode observe", world_size=4)


def test_a_dense_run_may_share_samples() -> None:
    callbacks_of("--copus --layout-schedule 40%:tp1.cp2.pp1.dp1", world_size=2)


def test_new_processes_cannot_take_a_run_through_phases() -> None:
    flags = "--copus --copus-layouts all --copus-relayout relaunch --save somewhere"
    with pytest.raises(UsageError, match="use --copus-relayout inprocess"):
        callbacks_of(flags)
    callbacks_of(flags, lengths="0:64")


def test_the_controller_takes_a_dense_run_of_phases() -> None:
    words = [*BASE.split(), *RUN.split(), THREE, "--context-parallel-size", "2"]
    config = resolve(parse_args(words), 2)
    rules.check_run(CopusConfig(copus=True, copus_mode="act"), config)
