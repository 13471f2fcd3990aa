"""What follows a launch: requests, crashes and their budget, layouts that fit or are blocked."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from copus_ext.controller.flags import CopusConfig
from copus_ext.launch import restart_policy
from copus_ext.launch.failure import Failure
from copus_ext.launch.layout_fit import LayoutFit, NoFit, layouts_for
from copus_ext.launch.restart_policy import (
    CrashBudget,
    CrashLimits,
    LaunchEnd,
    LayoutHistory,
    NextLaunch,
    Progress,
    RestartPolicy,
)
from megatron.trainer.checkpoint import files
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.layout import Layout
from tests.helpers.jobs import TINY
from tests.unit.test_relaunch import BASE, asked

STORED = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": 1,
    "data_parallel_size": 4,
    "global_batch_size": 8,
    "micro_batch_size": 4,
}
KILLED = Failure(rank=1, host="h", code=-signal.SIGKILL)


def raised(text: str = "ValueError: boom 3") -> Failure:
    return Failure(rank=0, host="h", code=1, error=text)


def save(root: Path, iteration: int) -> None:
    files.begin(root, iteration)
    (files.folder_of(root, iteration) / files.CORE_MARK).touch()
    files.finish(root, iteration, {})


class Case:
    """A policy over a real checkpoint folder, with a clock of its own."""

    def __init__(self, flags: Sequence[str], stored: Any = STORED, **limits: Any) -> None:
        self.stored, self.now_s, self.ranks = stored, 0.0, 4
        self.policy = RestartPolicy(flags, limits=CrashLimits(**limits), stored=self.read)

    def read(self, folder: Path) -> Any:
        return self.stored

    def end(self, code: int = 0, **end: Any) -> NextLaunch:
        return self.policy.after(
            LaunchEnd(code=code, **end), num_ranks=self.ranks, now_s=self.now_s
        )

    def crash(self, failure: Failure = KILLED, **progress: Any) -> NextLaunch:
        found = Progress(**progress)
        return self.end(failure.exit_code, failure=failure, progress=found)


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """Of a run that saved iteration 3 before this command."""
    monkeypatch.chdir(tmp_path)
    save(Path("saved"), 3)
    return Case([*BASE, "--load", "saved"])


def layout_of(following: NextLaunch) -> Layout:
    return resolve(parse_args(following.flags), following.num_ranks).layout


def test_the_file_decides_and_then_the_code(case: Case) -> None:
    ends = {"done": 0, "requeue": 85, "abort": 1}
    for code in (0, 1, 85, 137):
        left = [case.end(code, request=asked(kind=kind)) for kind in ends]
        assert [one.exit_code for one in left] == list(ends.values())
        assert [one.gives_up for one in left] == [False, False, True]
    assert [case.end(code).exit_code for code in (0, 2)] == [0, 2]
    for code in (1, 7, 85, 86, 139):
        assert Case([*BASE, "--load", "saved"]).end(code).exit_code is None, "a crash"


def test_a_stop_ends_the_run_unless_it_says_how(case: Case) -> None:
    for number, code in {15: 143, 2: 130, 0: 85}.items():
        assert case.end(137, stopped_by=number).exit_code == code
        assert case.end(0, stopped_by=number).exit_code == (code if number else 0)
        for kind, left in {"done": 0, "requeue": 85, "abort": 1, "relayout": 85}.items():
            assert case.end(85, stopped_by=number, request=asked(kind=kind)).exit_code == left


def test_a_relaunch_starts_the_ranks_of_its_layout(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(Path("saved"), 12)
    following = case.end(85, request=asked(reason="  faster\n\x1b[2J "))
    assert (following.exit_code, following.num_ranks, following.wait_s) == (None, 2, 0)
    assert following.line == "start again under tp1.pp2.dp1 from iteration 12: faster [2J"
    assert layout_of(following) == Layout(pp=2) and case.policy.budget.num_crashes == 0
    save(Path("saved"), 13)
    assert case.end(85, request=asked()).exit_code is None
    following = case.end(85, request=asked())
    assert following.exit_code == 1 and "twice" in following.line, "without a checkpoint between"
    assert "\n" not in following.line
    for wanted, said in (({"layout": Layout(dp=5)}, "4 ranks"), ({"checkpoint": "x"}, "saves in")):
        save(Path("saved"), 14)
        following = case.end(0, request=asked(**wanted))
        assert following.exit_code == 1 and said in following.line and following.gives_up
    monkeypatch.setattr(restart_policy, "MAX_LAUNCHES", 4)
    left = []
    for iteration in (15, 16):
        save(Path("saved"), iteration)
        left.append(case.end(85, request=asked()).exit_code)
    assert left == [None, 1], "launches are counted"


def test_a_crash_goes_on_under_the_layout_of_the_checkpoint(case: Case) -> None:
    first = case.crash()
    assert (first.flags, first.num_ranks) == (case.policy.flags, 4), "nothing of this run is saved"
    save(Path("saved"), 6)
    following = case.crash(step=8)
    assert following.exit_code is None and "from iteration 6" in following.line
    assert layout_of(following) == Layout(dp=4)
    batch = resolve(parse_args(following.flags), following.num_ranks).batch
    assert batch.micro_batch_size == 2, "the largest that fits"


def test_crashes_run_out(case: Case) -> None:
    crashes = [case.crash(step=i) for i in range(4)]
    assert [one.exit_code for one in crashes] == [None, None, None, 137]
    assert [one.wait_s for one in crashes[:3]] == [5, 15, 45]
    assert crashes[3].gives_up and "4 crashes in an hour" in crashes[3].line
    assert "rank 1 on h was ended by SIGKILL" in crashes[3].line


def test_the_same_error_twice_at_a_step_ends_the_run(case: Case) -> None:
    assert case.crash(raised(), step=7).exit_code is None
    save(Path("saved"), 9)
    assert case.crash(raised(), step=8).exit_code is None, "another step"
    following = case.crash(raised("ValueError: boom 4"), step=8)
    assert following.exit_code == 1 and "at step 8 with the same error" in following.line
    saved = Case(BASE)
    assert saved.crash(raised(), step=8).exit_code is None
    save(Path("saved"), 8)
    assert saved.crash(raised(), step=8).exit_code is None, "goes on behind it"
    again = Case([*BASE, "--load", "saved"])
    assert [again.crash().exit_code for _ in range(2)] == [None, None], (
        "a kill before the first step"
    )


OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGQUIT")
OWN = ("SIGSEGV", "SIGABRT", "SIGFPE", "SIGILL", "SIGBUS", "SIGSYS", "SIGTRAP")


@pytest.mark.parametrize("name", [*OUTSIDE, *OWN])
@pytest.mark.parametrize("wrapped", [False, True])
def test_only_a_rank_s_own_fault_counts_as_the_same_error(
    case: Case, name: str, wrapped: bool
) -> None:
    number = int(signal.Signals[name])
    ended = Failure(rank=1, host="h", code=128 + number if wrapped else -number)
    assert case.crash(ended, step=80).exit_code is None
    following = case.crash(ended, step=80)
    if name in OWN:
        assert following.exit_code is not None and "with the same error" in following.line
        return
    assert following.exit_code is None and following.wait_s > 0
    assert case.crash(ended, step=80).exit_code is None
    following = case.crash(ended, step=80)
    assert following.gives_up and "4 crashes in an hour" in following.line, "there is an end"


@pytest.mark.parametrize("name", [*OUTSIDE, *OWN])
def test_so_does_that_of_a_process_that_reads_data(case: Case, name: str) -> None:
    word = signal.strsignal(signal.Signals[name])
    for pid in (23304, 30303):  # as torch says it
        text = f"RuntimeError: DataLoader worker (pid {pid}) is killed by signal: {word}. "
        following = case.crash(raised(text), step=80)
    assert (following.exit_code is not None) == (name in OWN), following


def test_an_exit_code_above_those_of_signals_is_an_error_of_the_program(case: Case) -> None:
    ended = Failure(rank=1, host="h", code=255)
    assert case.crash(ended, step=80).exit_code is None
    following = case.crash(ended, step=80)
    assert following.exit_code is not None and "with the same error" in following.line


def test_a_checkpoint_that_cannot_be_gone_on_from_ends_the_run(case: Case) -> None:
    save(Path("saved"), 6)
    bad = {"micro_batch_size": None}, {"data_parallel_size": 0}
    for changes, words in zip(bad, ("does not say micro_batch_size", "dp"), strict=True):
        case.stored = {**STORED, **changes}
        following = case.crash()
        assert following.exit_code == 137 and words in following.line and following.gives_up
    (Path("saved") / files.TRACKER).write_text("x")
    assert "should hold" in case.crash(step=1).line


def test_fewer_ranks_than_the_checkpoint_had_keep_the_batch(case: Case) -> None:
    save(Path("saved"), 6)
    case.ranks = 2
    following = case.crash(step=7)
    config = resolve(parse_args(following.flags), following.num_ranks)
    assert (following.num_ranks, config.layout) == (2, Layout(dp=2))
    assert config.batch.global_batch_size == 8
    case.ranks, case.stored = 3, {**STORED, "global_batch_size": 9}
    # 4 layers, 4 heads and 9 samples: only data parallelism can be 3.
    assert layout_of(case.crash(step=8)) == Layout(dp=3)
    case.stored = STORED
    assert "no layout of 3 is legal" in case.crash(step=9).line


def test_without_a_folder_nothing_can_go_on() -> None:
    case = Case(TINY.split())
    assert case.crash().num_ranks == 4
    assert case.end(85, request=asked()).exit_code == 1
    from_scratch = asked(iteration=0, checkpoint=None)
    assert case.end(85, request=from_scratch).exit_code is None
    assert case.end(85, request=from_scratch).exit_code == 1


def test_a_layout_that_crashes_when_entered_is_blocked(case: Case) -> None:
    """Entered in the processes; the checkpoint before it is of the layout before."""
    case.stored = {**STORED, "global_batch_size": 16}
    first, other = Layout(dp=4), Layout(tp=2, dp=2)
    save(Path("saved"), 90)
    one = case.crash(entered=[(first, 0), (other, 100)], step=105)
    assert layout_of(one) == first and one.blocked_layouts == ()
    save(Path("saved"), 95)
    two = case.crash(raised(), entered=[(first, 90), (other, 110)], step=131)
    assert two.blocked_layouts == () and layout_of(two) == first, "21 steps are not at once"
    three = case.crash(entered=[(first, 90), (other, 110)], step=129)
    assert three.blocked_layouts == (other,) and "tp2.pp1.dp2 is not taken again" in three.line
    save(Path("saved"), 200)
    assert case.crash(entered=[(first, 95)], step=201).blocked_layouts == (other,)


def test_going_back_to_a_layout_is_not_entering_it(case: Case) -> None:
    first, other = Layout(dp=4), Layout(tp=2, dp=2)
    save(Path("saved"), 90)
    assert case.crash(entered=[(first, 0), (other, 100)], step=105).blocked_layouts == ()
    save(Path("saved"), 91)
    for step in (92, 93):
        assert case.crash(entered=[(first, 91)], step=step).blocked_layouts == ()


def test_a_blocked_layout_of_a_checkpoint_gives_way_to_the_one_before(case: Case) -> None:
    """Entered in new processes, which saved before they crashed."""
    first, other = Layout(dp=4), Layout(pp=2)
    save(Path("saved"), 12)
    assert case.end(85, request=asked(), progress=Progress(entered=[(first, 0)], step=12))
    case.stored = {**STORED, "pipeline_model_parallel_size": 2, "data_parallel_size": 1}
    save(Path("saved"), 14)
    assert layout_of(case.crash(entered=[(other, 12)], step=15)) == other
    last = case.crash(entered=[(other, 14)], step=16)
    assert layout_of(last) == first and last.blocked_layouts == (other,)


def test_a_launch_that_comes_nowhere_counts_against_its_layout(case: Case) -> None:
    first, other = Layout(dp=4), Layout(pp=2)
    for iteration in (12, 13):
        save(Path("saved"), iteration)
        case.end(85, request=asked(), progress=Progress(entered=[(first, 0)], step=iteration))
        following = case.crash()
    assert following.blocked_layouts == (other,)


crashes = st.lists(
    st.tuples(
        st.floats(0, 4000),
        st.none() | st.integers(0, 3),
        st.none() | st.sampled_from("ab"),
        st.booleans(),
    ),
    max_size=40,
)
limits = st.builds(
    CrashLimits,
    per_hour=st.integers(0, 5),
    per_run=st.integers(0, 12),
    waits_s=st.lists(st.floats(0, 100), min_size=1, max_size=4).map(tuple),
)


@given(limits, crashes)
def test_the_budget_holds_whatever_happens(limits: CrashLimits, crashes: list[Any]) -> None:
    budget, now_s, gone_on, last = CrashBudget(limits), 0.0, list[float](), None
    for pause_s, step, error, progressed in crashes:
        now_s += pause_s
        why = budget.add(now_s=now_s, step=step, error=error, progressed=progressed)
        is_same = error is not None and (step, error) == last and not progressed
        last = (step, error)
        if is_same:
            assert why is not None and "same error" in why
        if why is not None:
            counted = [*gone_on, now_s]
            lately = [t for t in counted if now_s - t < 3600]
            is_spent = len(counted) > limits.per_run or len(lately) > limits.per_hour
            assert is_same or (not progressed and is_spent)
            return
        assert budget.wait_s in limits.waits_s
        if progressed:
            assert budget.wait_s == limits.waits_s[0]
        else:
            gone_on.append(now_s)
    assert len(gone_on) == budget.num_counted <= limits.per_run
    assert all(sum(t <= u < t + 3600 for u in gone_on) <= limits.per_hour for t in gone_on)


@given(st.lists(st.tuples(st.sampled_from("ABC"), st.integers(0, 40), st.booleans())))
def test_no_block_leaves_the_run_without_a_layout(events: list[Any]) -> None:
    history, layouts = LayoutHistory(), {"A": Layout(), "B": Layout(dp=2), "C": Layout(tp=2)}
    for name, step, crashes in events:
        history.enter(layouts[name], step)
        if crashes:
            history.crash(step)
        instead = history.instead_of(layouts[name])
        assert instead == layouts[name] or layouts[name] in history.blocked
    entered = {layouts[name] for name, _, _ in events}
    assert not entered or entered - set(history.blocked)


def of_flags(flags: str, stored: Any = None) -> LayoutFit:
    def read(folder: Path) -> Any:
        if stored is None:
            raise ValueError("none")
        return stored

    return LayoutFit([*BASE, *flags.split()], stored=read)


def test_other_ranks_get_a_layout_with_the_batch_kept(tmp_path: Path) -> None:
    fit = of_flags("--tensor-model-parallel-size 4")
    flags, line = fit.first_flags(2)
    config = resolve(parse_args(flags), 2)
    assert config.layout == Layout(tp=2) and config.batch.global_batch_size == 8
    assert "start 2 ranks under tp2.pp1.dp1: world size 2" in line
    save(tmp_path, 3)
    stored = {**STORED, "pipeline_model_parallel_size": 4, "data_parallel_size": 1}
    fit = of_flags(f"--tensor-model-parallel-size 8 --load {tmp_path}", stored)
    assert resolve(parse_args(fit.first_flags(4)[0]), 4).layout == Layout(pp=4), (
        "as the checkpoint has it"
    )


def test_a_batch_that_is_still_to_be_chosen_fits_any_layout() -> None:
    """The launch takes a multiple of what its layout can cut, whatever the ranks are."""
    flags = "--tensor-model-parallel-size 2 --copus --global-batch-size auto"
    fit = of_flags(flags)
    assert fit.first_flags(2) == (fit.flags, "")
    less, line = fit.first_flags(1)
    assert "start 1 ranks under tp1.pp1.dp1: world size 1" in line
    args = parse_args(less, {"copus controller": CopusConfig})
    assert args.global_batch_size == "auto" and args.tensor_model_parallel_size == 1


def test_flags_that_fit_stay_and_ranks_that_no_layout_can_use_are_refused() -> None:
    fit = of_flags("--tensor-model-parallel-size 2")
    for ranks in (2, 4):
        assert fit.first_flags(ranks) == (fit.flags, "")
    for flags in ("--no-such-flag 1", "--lr-decay-style nonsense", "--num-layers 0"):
        broken = of_flags(flags)
        assert broken.first_flags(3) == (broken.flags, ""), "for the trainer to say"
    with pytest.raises(NoFit, match="no layout of 3 ranks"):
        fit.first_flags(3)
    refused = RestartPolicy(fit.flags, stored=lambda save: {}).first(3)
    assert refused.exit_code == 2 and "world size 3" in refused.line and not refused.gives_up


PREFERRED = [
    Layout(),
    Layout(tp=4, pp=2),
    Layout(pp=2, vpp=2),
    Layout(tp=2, cp=4),
    Layout(pp=2, layer_partition=(3, 1)),
    Layout(tp=2, pp=2, vpp=2, layer_partition=(0, 2, 1, 1)),
]


@given(st.integers(1, 64), st.sampled_from(PREFERRED))
def test_all_layouts_come_once_and_the_preferred_first(ranks: int, prefer: Layout) -> None:
    found = list(layouts_for(ranks, prefer))
    assert len(set(found)) == len(found) and all(one.world_size == ranks for one in found)
    sizes = {(one.tp, one.cp, one.pp) for one in found}
    every = {
        (t, c, p)
        for t in range(1, 65)
        for c in range(1, prefer.cp + 1)
        for p in range(1, 65)
        if ranks % (t * c * p) == 0 and prefer.cp % c == 0
    }
    assert sizes == every
    if ranks % (prefer.tp * prefer.cp * prefer.pp) == 0:
        assert found[0].layer_partition == prefer.layer_partition
        assert (found[0].tp, found[0].cp, found[0].pp) == (prefer.tp, prefer.cp, prefer.pp)
        assert found[0].vpp == prefer.vpp
