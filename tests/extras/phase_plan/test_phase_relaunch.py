"""A run with schedules of lengths and layouts starts again: what becomes of its flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from copus_ext.launch import layout_fit
from copus_ext.launch.restart_policy import NextLaunch
from copus_ext.reshard import relaunch
from copus_ext.reshard.relaunch import lost_flags, merged
from megatron.trainer.checkpoint.resume import merge_resume_config
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.relayout import with_layout
from megatron.trainer.extras.phases.flags import flags_of, in_phase, number_at, phase_of, phases_of
from megatron.trainer.extras.phases.resume import in_layout_of_phase
from tests.extras.phases.test_phases import stored_at
from tests.unit.test_relaunch import BASE, asked
from tests.unit.test_restart_policy import Case, save

PHASED = " ".join(BASE).replace("--seq-length 32 --max-position-embeddings 32", "").split()
PHASED += ["--max-position-embeddings", "1024", "--global-batch-size", "64", "--seq-length", "64"]
PHASED += ["--seq-length-schedule", "0:64 40%:256 75%:1024"]
LAYOUT_SCHEDULE = ["--layout-schedule", "0:tp1.pp1.dp4 40%:tp1.cp2.pp1.dp2 75%:tp2.cp2.pp1.dp1"]
MICROS = ["--micro-batch-size-schedule", "0:1 75%:1"]


def phased(layout: Layout, *flags: str, blocked: Any = (), **fields: Any) -> Any:
    """The configuration of a restart, and what it loses. Phases begin at samples 256 and 448."""
    wanted, stored = asked(layout=layout, **fields), {"seq_length": 64, "train_samples": 576}
    argv = [*PHASED, *LAYOUT_SCHEDULE, *flags]
    flags_then = merged(argv, wanted, stored=stored, blocked=blocked)
    config = resolve(parse_args(flags_then), layout.world_size)
    assert merged(flags_then, wanted, stored=stored) == flags_then
    number = number_at(flags_of(config).phase_starts, wanted.consumed_samples)
    assert in_layout_of_phase(in_phase(config, number)).layout == layout
    return config, lost_flags(argv, wanted, stored=stored, blocked=blocked)


@pytest.mark.parametrize(
    ("layout", "consumed", "layouts"),
    [
        (Layout(tp=2, dp=2), 192, ("tp2.pp1.dp2", "tp1.cp2.pp1.dp2", "tp2.cp2.pp1.dp1")),
        (Layout(tp=2, dp=2), 256, ("tp1.pp1.dp4", "tp2.pp1.dp2", "tp2.cp2.pp1.dp1")),
        (Layout(tp=2, dp=2), 384, ("tp1.pp1.dp4", "tp2.pp1.dp2", "tp2.cp2.pp1.dp1")),
        (Layout(pp=4), 448, ("tp1.pp1.dp4", "tp1.cp2.pp1.dp2", "tp1.pp4.dp1")),
    ],
)
def test_the_layout_asked_for_holds_until_the_next_phase(
    layout: Layout, consumed: int, layouts: tuple[str, ...]
) -> None:
    config, lost = phased(layout, *MICROS, consumed_samples=consumed, micro_batch_size=1)
    assert flags_of(config).phase_starts == (0, 256, 448)
    assert (flags_of(config).phase_layouts, lost) == (layouts, "")
    assert flags_of(config).phase_micro_batch_sizes == (1, 1, 1)


@pytest.mark.parametrize(
    ("consumed", "left"),
    [
        (79, "25.0%:tp2.pp1.dp2 9216:tp4.pp1.dp1"),
        (80, "25.0%:tp1.pp1.dp4 9216:tp4.pp1.dp1"),
        (143, "25.0%:tp1.pp1.dp4 9216:tp4.pp1.dp1"),
        (144, "25.0%:tp2.pp1.dp2 9216:tp1.pp1.dp4"),
    ],
)
def test_positions_in_tokens_and_shares_are_passed_alike(consumed: int, left: str) -> None:
    argv = [*BASE, "--layout-schedule", "25.0%:tp2.pp1.dp2 9216:tp4.pp1.dp1"]
    argv += ["--micro-batch-size-schedule", "0:1 25%:1"]
    wanted = asked(layout=Layout(dp=4), consumed_samples=consumed)
    flags = merged(argv, wanted, stored={"seq_length": 64, "train_samples": 320})
    assert relaunch.value_of(flags, "--layout-schedule") == left


@pytest.mark.parametrize(
    ("consumed", "left"),
    [
        (168, "51%:tp2.pp1.dp2 60%:tp4.pp1.dp1"),
        (176, "51%:tp1.pp1.dp4 60%:tp4.pp1.dp1"),
        (200, "51%:tp2.pp1.dp2 60%:tp1.pp1.dp4"),
    ],
)
def test_a_phase_begins_at_its_planned_step(consumed: int, left: str) -> None:
    """Sample 164 is asked for, and steps of 16 begin the phase at 176. A controller has taken
    smaller steps, so that the checkpoint stands between."""
    argv = " ".join(BASE).replace("--train-iters 9", "--train-samples 320").split()
    argv += ["--global-batch-size", "16"]
    argv += ["--layout-schedule", "51%:tp2.pp1.dp2 60%:tp4.pp1.dp1"]
    first = resolve(parse_args(argv), 4)
    assert flags_of(first).phase_starts == (0, 176, 192)
    stored = {**first.flat(), "consumed_train_samples": consumed}
    found = layout_fit._request(Layout(dp=4), 1, batch=8, stored=stored)
    assert relaunch.value_of(merged(argv, found, stored=stored), "--layout-schedule") == left
    lost = lost_flags(argv, found, stored=stored, blocked=[Layout(tp=2, dp=2)])
    assert ("loses 51%:tp2.pp1.dp2" in lost) is (consumed < 176)


def test_layouts_of_other_ranks_and_blocked_ones_are_lost() -> None:
    config, lost = phased(Layout(dp=2))
    assert flags_of(config).phase_layouts == ()
    assert lost == (
        "--layout-schedule loses 40%:tp1.cp2.pp1.dp2 75%:tp2.cp2.pp1.dp1, where the layout stays"
    )
    assert phased(Layout(dp=2), consumed_samples=256)[1].startswith("--layout-schedule loses 75%")
    config, lost = phased(Layout(dp=4), blocked=[Layout(cp=2, dp=2)])
    assert lost == "--layout-schedule loses 40%:tp1.cp2.pp1.dp2, where the layout stays"
    assert flags_of(config).phase_layouts == ("tp1.pp1.dp4", "tp1.pp1.dp4", "tp2.cp2.pp1.dp1")
    plain = asked(layout=Layout(dp=2))
    assert lost_flags(BASE, plain) == ""


def test_micro_batches_of_phases_follow_another_first_one() -> None:
    micros = ["--micro-batch-size", "4", "--micro-batch-size-schedule", "0:4 40%:2"]
    sizes = {4: (4, 2, 1), 2: (2, 1, 1)}
    for size, wanted in sizes.items():
        config, _ = phased(Layout(dp=2), *micros, micro_batch_size=size)
        assert flags_of(config).phase_micro_batch_sizes == wanted
    assert flags_of(phased(Layout(dp=2), *micros)[0]).phase_micro_batch_sizes == (4, 2, 1)


def test_later_phases_choose_sequence_parallelism_as_without_a_restart() -> None:
    config, _ = phased(Layout(dp=4))
    later = with_layout(in_phase(config, 2), Layout(tp=2, cp=2))
    assert later.parallel.sequence_parallel
    config, _ = phased(Layout(dp=4), "--tensor-model-parallel-size", "1")
    later = with_layout(in_phase(config, 2), Layout(tp=2, cp=2))
    assert not later.parallel.sequence_parallel, "the flags name a tensor size without it"


@pytest.mark.parametrize("schedule", ["41%:tp2.pp1.dp2", "40%:nonsense", "40%", "0:tp1.pp1.dp4 x"])
def test_a_schedule_that_cannot_be_read_is_left_to_the_trainer(schedule: str) -> None:
    argv = [*PHASED, "--layout-schedule", schedule]
    flags = merged(argv, asked(layout=Layout(dp=4)))
    assert relaunch.value_of(flags, "--layout-schedule") == schedule
    assert lost_flags([*PHASED, "--layout-schedule", "x 40%:y"], asked(layout=Layout())) == ""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that saved iteration 3 before this command."""
    monkeypatch.chdir(tmp_path)
    save(Path("saved"), 3)


PHASES = [*PHASED, "--load", "saved", "--train-iters", "15", *LAYOUT_SCHEDULE]
"""Phases from samples 0, 384 and 768 on, under `ASKED`."""
ASKED = Layout(dp=4), Layout(cp=2, dp=2), Layout(tp=2, cp=2)


@pytest.fixture
def in_phases(folder: None) -> Case:
    return Case(PHASES)


def saved_at(case: Case, consumed_samples: int, layout: Layout, iteration: int) -> None:
    """The checkpoint that the next restart finds."""
    save(Path("saved"), iteration)
    config = resolve(parse_args(PHASES), 4)
    assert flags_of(config).phase_starts == (0, 384, 768)
    case.stored = {**config.flat(), **layout.to_arguments()}
    case.stored["consumed_train_samples"] = consumed_samples


def starts_as(case: Case, following: NextLaunch) -> tuple[Layout, ...]:
    """The layout that the ranks take once they have read the checkpoint, then those of the phases
    that are to come."""
    assert following.exit_code is None, following.line
    config = resolve(parse_args(following.flags), following.num_ranks)
    consumed = case.stored["consumed_train_samples"]
    first = resolve(parse_args(PHASES), 4)
    merged = merge_resume_config(config, stored_at(consumed, first), vocab_size=128)
    later = phases_of(merged)[phase_of(merged).number + 1 :]
    layouts = [Layout.from_text(one.layout) if one.layout else merged.layout for one in later]
    return merged.layout, *layouts


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_crash_in_a_phase_goes_on_under_its_layout(in_phases: Case, number: int) -> None:
    for iteration, more in ((4, 0), (5, 64)):
        # At a boundary the checkpoint is saved before the layout changes.
        before = ASKED[max(number - (more == 0), 0)]
        saved_at(in_phases, 384 * number + more, before, iteration)
        following = in_phases.crash(entered=[(before, 0)], step=iteration + 30)
        assert starts_as(in_phases, following) == ASKED[number:]
        assert "loses" not in following.line


def test_a_layout_that_a_controller_chose_in_a_phase_stays_until_the_next(in_phases: Case) -> None:
    own = Layout(tp=2, dp=2)
    saved_at(in_phases, 448, own, 7)
    assert starts_as(in_phases, in_phases.crash(entered=[(own, 6)], step=40)) == (own, ASKED[2])


def test_fewer_ranks_train_all_phases_under_one_layout(in_phases: Case) -> None:
    saved_at(in_phases, 448, ASKED[1], 7)
    in_phases.ranks = 2
    following = in_phases.crash(entered=[(ASKED[1], 6)], step=40)
    assert following.num_ranks == 2
    assert starts_as(in_phases, following) == (Layout(cp=2),) * 2
    lost = "--layout-schedule loses 75%:tp2.cp2.pp1.dp1, where the layout stays"
    assert following.line.endswith(lost) and "\n" not in following.line
    first = Case(PHASES).policy.first(2)
    assert flags_of(resolve(parse_args(first.flags), 2)).phase_layouts == ()
    assert "loses 40%:tp1.cp2.pp1.dp2 75%:tp2.cp2.pp1.dp1" in first.line
    assert Case(PHASES).policy.first(4).flags == PHASES


@pytest.mark.usefixtures("folder")
def test_a_phase_whose_layout_crashes_when_entered_goes_on_under_the_one_before() -> None:
    """Whether the checkpoint lies before the boundary or on it."""
    first, other, last = ASKED
    for consumed, once, twice in (
        (320, ASKED, (first, first, last)),
        (384, (other, last), (first, last)),
    ):
        case = Case(PHASES)
        for iteration, wanted in ((consumed, once), (consumed + 1, twice)):
            saved_at(case, consumed, first, iteration)
            entered = [(first, 0), (other, iteration)]
            following = case.crash(entered=entered, step=iteration + 5)
            assert starts_as(case, following) == wanted
        assert following.blocked_layouts == (other,)
        assert ("loses 40%" in following.line) is (consumed < 384)


@pytest.mark.usefixtures("folder")
def test_a_restart_keeps_the_layouts_of_smaller_batches() -> None:
    """Two samples of the first stage of a ramp do not divide over four replicas of the second."""
    flags = [*BASE, "--train-samples", "64", "--tensor-model-parallel-size", "2"]
    del flags[flags.index("--train-iters") : flags.index("--train-iters") + 2]
    flags += ["--step-batch-size-schedule", "0:2 512:8", "--layout-schedule", "25%:tp1.pp1.dp4"]
    case, first = Case(flags), resolve(parse_args(flags), 4)
    assert flags_of(first).phase_starts == (0, 16)
    save(Path("saved"), 9)
    case.stored = {**first.flat(), **Layout(dp=4).to_arguments(), "consumed_train_samples": 24}
    following = case.crash(entered=[(Layout(dp=4), 8)], step=40)
    assert following.exit_code is None, following.line
    config = resolve(parse_args(following.flags), following.num_ranks)
    merged = merge_resume_config(config, stored_at(24, first), vocab_size=128)
    assert merged.layout == Layout(dp=4) and config.layout == Layout(tp=2, dp=2)
