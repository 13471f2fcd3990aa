"""The parts of the supervisor around its decisions: causes, messages between nodes, its command
line, signals, what it kills."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from copus_ext.launch import board as board_module
from copus_ext.launch import stored
from copus_ext.launch.board import NodeRendezvous
from copus_ext.launch.cause import (
    MOST_TEXT,
    Failure,
    first_line,
    root_of,
    shortened,
    told_apart,
)
from copus_ext.launch.head import ending_of, next_number
from copus_ext.launch.messages import Ended, NodeHeartbeat, Plan, shares_of
from copus_ext.launch.options import read_options, visible_gpus
from copus_ext.launch.progress import progress_of, saved_with
from copus_ext.launch.rank_side import leave_error
from copus_ext.launch.stops import Stops
from copus_ext.launch.workers import end_launch
from copus_ext.reshard.relaunch import LAUNCH_VARIABLE
from megatron.training.common.control import STOP_FILE, SUPERVISOR_VARIABLE
from megatron.training.common.errors import UsageError
from megatron.training.common.program import running_as
from megatron.training.config.layout import Layout
from megatron.training.logging.tracker import Tracker
from tests.unit.test_slurm import TASK


def failed(code: int, error: str = "", time_s: float = 0.0, **more: Any) -> Failure:
    return Failure(rank=0, host="h", code=code, error=error, time_s=time_s, **more)


KILL, TERM, ABORT = -signal.SIGKILL, -signal.SIGTERM, -signal.SIGABRT
ORDER = [
    failed(KILL, time_s=9),
    failed(85, time_s=8),
    failed(86, time_s=7),
    failed(2, time_s=6),
    failed(1, "ValueError: boom", time_s=4),
    failed(1, "KeyError: later", time_s=5),
    failed(1, time_s=3),
    failed(1, "RuntimeError: Connection closed by peer", time_s=2),
    failed(TERM, time_s=1),
]


def test_the_cause_is_found_in_any_order() -> None:
    for first, second in itertools.permutations(range(len(ORDER)), 2):
        assert root_of([ORDER[first], ORDER[second]]) == ORDER[min(first, second)]
    assert root_of([]) is None


def test_who_aborts_for_want_of_peers_is_no_cause() -> None:
    first = failed(1, "ValueError: boom", time_s=2)
    assert root_of([failed(ABORT, time_s=1), first]) == first


def test_a_rank_that_had_to_be_killed_at_the_end_is_no_cause() -> None:
    watchdog, killed = failed(86, time_s=1000.7), failed(KILL, time_s=1031)
    assert told_apart([killed, watchdog]) == ([watchdog], [killed])
    by_someone = [failed(KILL, time_s=1001), failed(1, "RuntimeError: Connection reset", 1001.2)]
    assert told_apart(by_someone) == (by_someone, [])
    assert told_apart([killed]) == ([killed], []) and told_apart([]) == ([], [])


def test_what_ended_on_account_of_another_node_tells_nothing() -> None:
    own = failed(1, "ValueError: boom")
    told = Ended(launch="j.0.0", node=1, code=137, told=True, failure=failed(KILL))
    reports = [told, Ended(launch="j.0.0", node=0, code=1, failure=own)]
    ending = ending_of(reports, None)
    assert (ending.code, ending.failure) == (1, own)
    assert ending_of([told], None).code == 137, "nobody else to ask"
    assert ending_of([Ended(launch="j.0.0", node=0, code=0)], None).code == 0


@given(st.text(), st.text(max_size=10))
def test_any_message_fits_and_is_printable(text: str, more: str) -> None:
    long = (text + more * 2000)[: 3 * MOST_TEXT]
    found = failed(1, first_line(long), traceback=shortened(long))
    assert found.line.isprintable()
    assert all(c.isprintable() or c in "\n\t" for c in found.traceback)
    assert Failure.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_errors_that_differ_in_numbers_are_the_same() -> None:
    one, two = (failed(1, f"OSError: {n} at 0x{n:x}") for n in (7, 1234))
    assert one.signature == two.signature != failed(1).signature


def test_a_rank_leaves_its_error_in_torchs_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from copus_ext.launch.ranks import _failure

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    for is_told in (False, True):
        try:
            raise ValueError("boom")
        except ValueError as error:
            leave_error(error, is_told=is_told)
        seen = ProcessFailure(
            local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error.json")
        )
        found = _failure(3, seen)
        assert (found.rank, found.code) == (3, 1) and abs(found.time_s - time.time()) < 600
        assert found.error == ("boom" if is_told else "ValueError: boom")
        assert ("leave_error" not in found.traceback) and bool(found.traceback) != is_told


PLAN = Plan(
    launch="j.0.3",
    number=3,
    tokens={"0": "a", "1": "b"},
    shares={"0": 2, "1": 1},
    flags=["--lr", "1"],
    barred=["tp2.pp1.dp1"],
)
ENDED = Ended(launch="j.0.3", node=1, code=1, failure=failed(1, "ValueError: boom"))
HERE = NodeHeartbeat(node=1, token="b", processes=2, host="h")
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)


def test_an_error_is_left_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(value: object, file: IO[str]) -> None:
        file.write('{"message": ')
        raise OSError

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr("copus_ext.launch.rank_side.json.dump", half)
    leave_error(ValueError("no room"))
    assert not (tmp_path / "error.json").exists()


@given(anything, st.text(max_size=8))
def test_any_json_is_a_message_or_an_error_in_one_line(value: Any, name: str) -> None:
    for good in (PLAN, ENDED, HERE, failed(1)):
        kind, data = type(good), json.loads(json.dumps(asdict(good)))
        assert kind.from_json(data) == good
        variants = [value, {**data, name: value}, *({**data, field: value} for field in data)]
        for variant in [*variants, *({k: v for k, v in data.items() if k != f} for f in data)]:
            try:
                assert isinstance(kind.from_json(variant), kind)
            except ValueError as error:
                assert len(str(error)) < 300


@pytest.mark.parametrize(
    "changes",
    [
        {"launch": "../x"},
        {"number": True},
        {"tokens": {"x": "a"}},
        {"shares": {"0": 0}},
        {"shares": {}},
        {"flags": ["a\0b"]},
        {"flags": "--lr"},
        {"barred": ["tp2"]},
        {"leave": 256},
        {"extra": 1},
    ],
    ids=str,
)
def test_a_plan_that_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Plan.from_json({**asdict(PLAN), **changes})


@given(st.integers(1, 40), st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_nodes_are_filled_in_their_order(ranks: int, sizes: list[int]) -> None:
    places = dict(enumerate(sizes))
    if ranks > sum(sizes):
        with pytest.raises(ValueError, match="more than"):
            shares_of(ranks, places)
        return
    shares = shares_of(ranks, places)
    assert sum(shares.values()) == ranks and list(shares) == [str(n) for n in range(len(shares))]
    assert all(shares[str(n)] == sizes[n] for n in range(len(shares) - 1))


@pytest.fixture
def boards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[NodeRendezvous, NodeRendezvous]:
    """Of the head, and of the one other node."""
    monkeypatch.setattr(board_module, "_LOOK_S", 0.0)
    monkeypatch.setattr(board_module, "_TOUCH_S", 0.0)
    head, other = (
        NodeRendezvous(tmp_path, node=node, num_nodes=2, processes=2, lost_s=60) for node in (0, 1)
    )
    return head, other


def plan_for(head: NodeRendezvous, number: int) -> Plan:
    tokens = {str(node): one.token for node, one in head.there.items()}
    return Plan(launch=f"j.0.{number}", number=number, tokens=tokens, shares={"0": 2, "1": 2})


def test_two_supervisors_find_each_other_and_the_plan(
    boards: tuple[NodeRendezvous, NodeRendezvous],
) -> None:
    head, other = boards
    head.clear()
    assert head.missing() == [1]
    other.tick()
    assert head.missing() == [] and head.there[1] == other.me
    plan = plan_for(head, 0)
    head.publish(plan)
    assert other.plan_after(-1) == plan and other.plan_after(0) is None
    assert not other.has_failed("j.0.0")
    other.report(Ended(launch="j.0.0", node=1, code=1, failure=failed(1, "boom")))
    assert head.has_failed("j.0.0") and not head.is_over("j.0.0")
    assert [report.code for report in head.reports(plan)] == [1]
    head.publish(plan_for(head, 1))
    assert not head.has_failed("j.0.0") and head.reports(plan) == [], "cleared"
    other.report(Ended(launch="j.0.1", node=1, code=85))
    assert head.is_over("j.0.1") and not head.has_failed("j.0.1")


def test_files_of_another_job_are_ignored_and_removed(
    boards: tuple[NodeRendezvous, NodeRendezvous], tmp_path: Path
) -> None:
    head, other = boards
    other.tick()
    head.missing()
    head.publish(plan_for(head, 7))
    late = NodeRendezvous(tmp_path, node=1, num_nodes=2, processes=2, lost_s=60)
    assert late.plan_after(-1) is None, "for the one that was there before"
    head.clear()
    left = [path.name for path in (tmp_path / "control").rglob("*") if path.is_file()]
    assert left == []


def test_damaged_messages_are_said_once_and_ignored(
    boards: tuple[NodeRendezvous, NodeRendezvous],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    head, other = boards
    other.tick()
    head.missing()
    head.publish(plan_for(head, 0))
    (tmp_path / "control/next.json").write_text('{"launch": 7}')
    assert other.plan_after(-1) is None and other.plan_after(-1) is None
    said = capsys.readouterr().err
    assert said.count("next.json is damaged") == 1 and len(said.splitlines()) == 1


def test_a_silent_node_is_lost_by_the_clock_of_the_files(
    boards: tuple[NodeRendezvous, NodeRendezvous], tmp_path: Path
) -> None:
    head, other = boards
    for board in boards:
        board.tick()
    head.missing()
    assert head.lost() == [] == other.lost()
    folder = tmp_path / "control/nodes"
    now = (folder / "0.json").stat().st_mtime
    os.utime(folder / "1.json", (now, now - 61))
    assert head.lost() == [1]
    os.utime(folder / "0.json", (now, now - 200))
    assert head.lost() == [] and other.lost() == [0]


def test_a_node_alone_writes_no_file(tmp_path: Path) -> None:
    board = NodeRendezvous(tmp_path, node=0, num_nodes=1, processes=2, lost_s=0)
    board.clear()
    board.tick()
    plan = Plan(launch="j.0.0", number=0, shares={"0": 2})
    board.publish(plan)
    board.report(Ended(launch="j.0.0", node=0, code=1))
    assert (board.missing(), board.lost(), board.reports(plan)) == ([], [], [])
    assert not board.has_failed("j.0.0") and list(tmp_path.iterdir()) == []


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "program.py").touch()
    return str(tmp_path / "program.py")


def test_the_command_line(program: str) -> None:
    alone = read_options(["--", "pretrain_gpt.py", "--save", "s"], {"CUDA_VISIBLE_DEVICES": ""})
    assert (alone.nnodes, alone.node_rank, alone.processes) == (1, 0, 1)
    assert Path(*alone.program).is_file() and alone.run_dir == Path("s") and not alone.has_gpu
    words = ["--nnodes=2", "--node-rank=1", "--rdzv-endpoint=h", "--max-crashes=1"]
    words += ["--restart-wait", "0"]
    flags = ["--lr", "a b", "--run-dir=r", "--", "--nnodes"]
    some = read_options([*words, "--", program, *flags], {"CUDA_VISIBLE_DEVICES": "0,1,2"})
    assert (some.nnodes, some.node_rank, some.processes) == (2, 1, 3)
    assert some.endpoint == "h:29500" and some.flags == tuple(flags)
    assert some.limits.per_run == 1 and some.limits.waits_s == (0,)
    assert some.run_dir == Path("r")
    assert some.command.endswith(
        f"--restart-wait 0 -- {program} --lr 'a b' --run-dir=r -- --nnodes"
    )
    assert alone.command.endswith("-- pretrain_gpt.py --save s --load s")


def test_the_trainer_needs_no_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unnamed = read_options(["--nproc-per-node", "2", "--", "--save", "s", "--lr=1"])
    assert unnamed.program == ("-m", "copus_ext.commands.pretrain")
    assert unnamed.flags == ("--save", "s", "--lr=1") and unnamed.run_dir == Path("s")
    assert unnamed.command.endswith("--nproc-per-node 2 -- --save s --lr=1 --load s")
    with running_as("copus launch"):
        assert read_options(["--", "--lr", "1"]).command == "copus launch -- --lr 1"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("copus_ext.launch.options._ROOT", tmp_path)
    assert read_options(["--", "pretrain_gpt.py", "--lr", "1"]).program == unnamed.program


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--nnodes 2",
        "--nnodes two -- P",
        "--nnodes 0 -- P",
        "--nnodes 2 -- P",
        "--node-rank 1 -- P",
        "--nproc-per-node 0 -- P",
        "--nnodes 2 --rdzv-endpoint h:x -- P",
        "--rdzv-endpoint :1 -- P",
        "--restart-wait -1 -- P",
        "--max-crashes -1 -- P",
        "--stop-margin-s nan -- P",
        "--what 1 -- P",
        "-- nowhere.py",
    ],
)
def test_a_wrong_command_line_is_said_in_one_line(words: str, program: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_options([program if word == "P" else word for word in words.split()], {})
    assert "\n" not in str(raised.value)


def test_under_srun_nodes_and_address_come_from_slurm(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # no scontrol: the name of the node has to do
    env = {**TASK, "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)"}
    found = read_options(["--", program], env)
    assert (found.nnodes, found.node_rank) == (3, 2)
    assert found.step is not None and found.endpoint == f"gpu-07:{found.step.port}"
    own = ["--nnodes", "2", "--rdzv-endpoint", "h:1", "--", program]
    assert (read_options(own, env).nnodes, read_options(own, env).node_rank) == (2, 0)
    with pytest.raises(UsageError, match="ntasks-per-node=1"):
        read_options(["--", program], TASK)


@pytest.mark.parametrize(
    ("listed", "gpus"),
    [("", 0), ("0", 1), ("0,1,2,3", 4), ("-1", 0), ("0,-1,1", 1), ("GPU-a,GPU-b", 2)],
)
def test_gpus_are_counted_as_cuda_does(listed: str, gpus: int) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": listed}) == gpus


def test_the_record_says_how_far_a_launch_came(tmp_path: Path) -> None:
    layouts = Layout(dp=2), Layout(pp=2)
    for name, begin in (("j.0.0", 0), ("j.0.1", 4)):
        with Tracker(tmp_path, launch=name) as tracker:
            tracker.event("run.start", begin, 0, layout=str(layouts[0]))
            for i in range(begin + 1, begin + 4):
                tracker.event("step", i, 8 * i)
            tracker.event("layout", begin + 3, 0, layout=str(layouts[1]))
            tracker.event("step", begin + 4, 0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "launch": "j.0.1", "iterat')
    found = progress_of(tmp_path, "j.0.1")
    assert (found.step, found.entered) == (8, [(layouts[0], 4), (layouts[1], 7)])
    assert progress_of(tmp_path, "j.0.2").step is None
    assert progress_of(tmp_path / "no", "j.0.1").entered == []


def test_the_record_says_how_a_checkpoint_was_saved(tmp_path: Path) -> None:
    config = {"save": str(tmp_path / "saved"), "global_batch_size": 8, "data_parallel_size": 2}
    with Tracker(tmp_path, launch="j.0.0") as tracker:
        tracker.event("checkpoint.commit", 1, 0)
        tracker.event("run.start", 1, 0, config=config, layout="tp1.pp1.dp2")
        for _ in range(3000):  # more than is read of the end of the record
            tracker.event("step", 1, 0, text="x" * 200)
        tracker.event("checkpoint.commit", 2, 0)
        tracker.event("layout", 3, 0, layout="tp2.pp1.dp1")
        tracker.event("checkpoint.commit", 4, 0)
        tracker.event("run.start", 4, 0, config={"save": None}, layout="tp1.pp1.dp2")
        tracker.event("checkpoint.commit", 5, 0)
    found = [saved_with(tmp_path, tmp_path / "saved", i) for i in range(6)]
    assert [f and f["tensor_model_parallel_size"] for f in found] == [None, None, 1, None, 2, None]
    assert found[4] and found[4]["data_parallel_size"] == 1 and found[4]["global_batch_size"] == 8
    assert saved_with(tmp_path, tmp_path, 2) is None, "of another folder"


def test_a_checkpoint_is_read_while_the_head_goes_on() -> None:
    ticks: list[None] = []
    program = "import sys; print('x' * 200000); print('y', file=sys.stderr); sys.exit(3)"
    code, output, errors = stored._run(
        [sys.executable, "-c", program], time.monotonic() + 60, lambda: ticks.append(None)
    )
    assert (code, len(output), errors) == (3, 200001, b"y\n") and ticks
    with pytest.raises(TimeoutError):
        stored._run([sys.executable, "-c", "import time; time.sleep(60)"], 0.0, lambda: None)


def test_numbers_of_launches_go_on_over_requeues() -> None:
    previous = ["7.0.0", "7.0.3", "7.1.0", "77.0.9", "7.0.x"]
    assert [next_number(p, previous) for p in ("7.0", "7.1", "7.2", "77.0")] == [4, 1, 0, 10]


class Ranks:
    """Notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def ask_to_stop(self) -> None:
        self.asked.append("stop")

    def end(self) -> None:
        self.asked.append("end")


@pytest.mark.parametrize(
    ("margin_s", "numbers", "asked"),
    [
        (600, [signal.SIGTERM], ["stop"]),
        (600, [signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM], ["stop"]),
        (600, [signal.SIGINT, signal.SIGINT], ["stop", "end"]),
        (0, [signal.SIGTERM, signal.SIGTERM], ["stop", "end"]),
    ],
    ids=str,
)
def test_a_second_signal_ends_the_ranks_after_the_margin(
    tmp_path: Path, margin_s: float, numbers: list[signal.Signals], asked: list[str]
) -> None:
    before = {number: signal.getsignal(number) for number in numbers}
    stops, ranks = Stops(tmp_path, margin_s), Ranks()
    try:
        stops.install()
        assert stops.asked is None
        for number in numbers:
            os.kill(os.getpid(), number)
            stops.obey(ranks)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ranks.asked == asked and stops.asked == numbers[0]
    assert (tmp_path / STOP_FILE).exists() and stops.is_final == ("end" in asked)
    later = Stops(tmp_path, margin_s)
    assert later.asked == 0, "by the file alone"
    later.clear()
    assert later.asked is None


def test_what_is_left_of_a_launch_is_ended() -> None:
    name = f"test-{os.getpid()}.0.0"
    command = [sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"]
    env = {**os.environ, LAUNCH_VARIABLE: name, SUPERVISOR_VARIABLE: "1"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.read(1)
        end_launch(name + "0", "1")
        end_launch(name, "0")
        assert child.poll() is None, "of another launch, of another supervisor"
        end_launch(name, "1")
        child.wait(timeout=20)
