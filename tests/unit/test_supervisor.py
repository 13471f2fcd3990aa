"""The supervisor around its decisions: first failures, messages between nodes, command line,
signals, the processes that it ends."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from copus_ext.launch import checkpoint_flags, rendezvous
from copus_ext.launch.checkpoint_flags import recorded_flags
from copus_ext.launch.failure import (
    MAX_TRACEBACK,
    Failure,
    error_line,
    first_failure,
    split_hung,
    traceback_end,
)
from copus_ext.launch.options import read_options
from copus_ext.launch.rank_side import leave_error
from copus_ext.launch.rendezvous import (
    LaunchPlan,
    LaunchResult,
    NodeHeartbeat,
    NodeRendezvous,
    assign_ranks,
)
from copus_ext.launch.restart_policy import progress_of
from copus_ext.launch.supervisor import StopSignals, failure_of, next_number
from copus_ext.launch.workers import _failure, end_launch
from copus_ext.reshard.relaunch import LAUNCH_VARIABLE
from megatron.trainer.common.control import STOP_FILE, SUPERVISOR_VARIABLE
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.program import running_as
from megatron.trainer.config.layout import Layout
from megatron.trainer.logging.tracker import Tracker
from tests.unit.test_slurm import TASK


def failed(code: int, error: str = "", time_s: float = 0.0, **more: Any) -> Failure:
    return Failure(rank=0, host="h", code=code, error=error, time_s=time_s, **more)


KILL, TERM, ABORT = -signal.SIGKILL, -signal.SIGTERM, -signal.SIGABRT
BOOM = failed(1, "ValueError: boom", time_s=4)
ORDER = [
    failed(KILL, time_s=9),
    failed(85, time_s=8),
    failed(86, time_s=7),
    failed(2, time_s=6),
    BOOM,
    failed(1, "KeyError: later", time_s=5),
    failed(1, time_s=3),
    failed(1, "RuntimeError: Connection closed by peer", time_s=2),
    failed(TERM, time_s=1),
]


def test_the_first_failure_is_found_in_any_order() -> None:
    for first, second in itertools.permutations(range(len(ORDER)), 2):
        assert first_failure([ORDER[first], ORDER[second]]) == ORDER[min(first, second)]
    assert first_failure([]) is None
    assert first_failure([failed(ABORT, time_s=1), BOOM]) == BOOM, "aborted for want of peers"
    watchdog, killed = failed(86, time_s=1000.7), failed(KILL, time_s=1031)
    assert split_hung([killed, watchdog]) == ([watchdog], [killed])
    by_someone = [failed(KILL, time_s=1001), failed(1, "RuntimeError: Connection reset", 1001.2)]
    assert split_hung(by_someone) == (by_someone, [])
    assert split_hung([killed]) == ([killed], []) and split_hung([]) == ([], [])
    told = LaunchResult(launch="j.0.0", node=1, code=137, was_killed=True, failure=failed(KILL))
    assert failure_of([told, LaunchResult.of("j.0.0", 0, BOOM)]) == BOOM, "another node's"
    assert failure_of([told]) == failed(KILL), "nobody else to ask"
    assert failure_of([LaunchResult.of("j.0.0", 0, None)]) is None
    one, two = (failed(1, f"OSError: {n} at 0x{n:x}") for n in (7, 1234))
    assert one.signature == two.signature != failed(1).signature


@given(st.text(), st.text(max_size=10))
def test_any_message_fits_and_is_printable(text: str, more: str) -> None:
    long = (text + more * 2000)[: 3 * MAX_TRACEBACK]
    found = failed(1, error_line(long), traceback=traceback_end(long))
    assert found.line.isprintable()
    assert all(c.isprintable() or c in "\n\t" for c in found.traceback)
    assert Failure.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_rank_leaves_its_error_whole_in_torchs_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    for message_only in (False, True):
        try:
            raise ValueError("boom")
        except ValueError as error:
            leave_error(error, message_only=message_only)
        seen = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
        found = _failure(3, seen)
        assert (found.rank, found.code) == (3, 1) and abs(found.time_s - time.time()) < 600
        assert found.error == ("boom" if message_only else "ValueError: boom")
        assert ("leave_error" not in found.traceback) and bool(found.traceback) != message_only
    path.unlink()

    def half(value: object, file: IO[str]) -> None:
        file.write('{"message": ')
        raise OSError

    monkeypatch.setattr("copus_ext.launch.rank_side.json.dump", half)
    leave_error(ValueError("no room"))
    assert not path.exists(), "half a file"


PLAN = LaunchPlan(
    launch="j.0.3",
    number=3,
    tokens={"0": "a", "1": "b"},
    num_ranks={"0": 2, "1": 1},
    flags=["--lr", "1"],
    blocked_layouts=["tp2.pp1.dp1"],
)
RESULT = LaunchResult(launch="j.0.3", node=1, code=1, failure=BOOM)
HERE = NodeHeartbeat(node=1, token="b", num_ranks=2, host="h")
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)


@given(anything, st.text(max_size=8))
def test_any_json_is_a_message_or_an_error_in_one_line(value: Any, name: str) -> None:
    for good in (PLAN, RESULT, HERE, failed(1)):
        kind, data = type(good), json.loads(json.dumps(good.to_json()))
        assert kind.from_json(data) == good
        variants = [value, {**data, name: value}, *({**data, field: value} for field in data)]
        for variant in [*variants, *({k: v for k, v in data.items() if k != f} for f in data)]:
            try:
                assert isinstance(kind.from_json(variant), kind)
            except ValueError as error:
                assert len(str(error)) < 300


def test_a_plan_that_makes_no_sense_is_refused() -> None:
    for changes in (
        {"launch": "../x"},
        {"number": True},
        {"tokens": {"x": "a"}},
        {"num_ranks": {"0": 0}},
        {"num_ranks": {}},
        {"flags": ["a\0b"]},
        {"flags": "--lr"},
        {"blocked_layouts": ["tp2"]},
        {"exit_code": 256},
        {"extra": 1},
    ):
        with pytest.raises(ValueError):
            LaunchPlan.from_json({**PLAN.to_json(), **changes})


@given(st.integers(1, 40), st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_nodes_are_filled_in_their_order(ranks: int, sizes: list[int]) -> None:
    available = dict(enumerate(sizes))
    if ranks > sum(sizes):
        with pytest.raises(ValueError, match="more than"):
            assign_ranks(ranks, available)
        return
    assigned = assign_ranks(ranks, available)
    assert sum(assigned.values()) == ranks
    assert list(assigned) == [str(n) for n in range(len(assigned))]
    assert all(assigned[str(n)] == sizes[n] for n in range(len(assigned) - 1))


Nodes = tuple[NodeRendezvous, NodeRendezvous]


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """The leader and the one other node."""
    monkeypatch.setattr(rendezvous, "_LOOK_S", 0.0)
    monkeypatch.setattr(rendezvous, "_BEAT_S", 0.0)
    leader, other = (
        NodeRendezvous(tmp_path, node=node, num_nodes=2, num_ranks=2, lost_s=60) for node in (0, 1)
    )
    return leader, other


def plan_of(number: int) -> LaunchPlan:
    return LaunchPlan(launch=f"j.0.{number}", number=number, num_ranks={"0": 2, "1": 2})


def test_two_supervisors_find_each_other_and_the_plan(nodes: Nodes, tmp_path: Path) -> None:
    leader, other = nodes
    leader.clear()
    assert leader.missing() == [1]
    other.tick()
    assert leader.missing() == [] and leader.there[1] == other.me
    leader.publish(plan_of(0))
    found = other.plan_after(-1)
    assert found is not None and found.num_ranks == plan_of(0).num_ranks
    assert other.plan_after(0) is None and not other.has_failed("j.0.0")
    other.report(LaunchResult.of("j.0.0", 1, BOOM))
    assert leader.has_failed("j.0.0") and not leader.is_over("j.0.0")
    assert [result.code for result in leader.results(plan_of(0))] == [1]
    leader.publish(plan_of(1))
    assert not leader.has_failed("j.0.0") and leader.results(plan_of(0)) == [], "cleared"
    other.report(LaunchResult(launch="j.0.1", node=1, code=85))
    assert leader.is_over("j.0.1") and not leader.has_failed("j.0.1")
    late = NodeRendezvous(tmp_path, node=1, num_nodes=2, num_ranks=2, lost_s=60)
    assert late.plan_after(-1) is None, "for the one that was there before"
    leader.clear()
    assert [path.name for path in (tmp_path / "control").rglob("*") if path.is_file()] == []


def test_damaged_messages_are_said_once_and_ignored(
    nodes: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leader, other = nodes
    leader.publish(plan_of(0))
    (tmp_path / "control/next.json").write_text('{"launch": 7}')
    assert other.plan_after(-1) is None and other.plan_after(-1) is None
    said = capsys.readouterr().err
    assert said.count("next.json is damaged") == 1 and len(said.splitlines()) == 1


def test_a_silent_node_is_lost_by_the_clock_of_the_files(nodes: Nodes, tmp_path: Path) -> None:
    leader, other = nodes
    for node in nodes:
        node.tick()
    leader.missing()
    assert leader.lost() == [] == other.lost()
    folder = tmp_path / "control/nodes"
    now = (folder / "0.json").stat().st_mtime
    os.utime(folder / "1.json", (now, now - 61))
    assert leader.lost() == [1]
    os.utime(folder / "0.json", (now, now - 200))
    assert leader.lost() == [] and other.lost() == [0]


def test_a_supervisor_that_was_started_again_takes_part_in_the_next_launch(
    nodes: Nodes, tmp_path: Path
) -> None:
    leader, other = nodes
    for node in nodes:
        node.tick()
    leader.missing()
    leader.publish(plan_of(4))
    assert other.plan_after(-1) is not None and leader.restarted() == [] == other.restarted()
    again, new_leader = (
        NodeRendezvous(tmp_path, node=node, num_nodes=2, num_ranks=2, lost_s=60) for node in (1, 0)
    )
    again.tick()
    assert leader.restarted() == [1] and leader.lost() == []
    assert leader.newcomers(now=True) == [1] and leader.restarted() == []
    leader.publish(plan_of(5))
    assert again.plan_after(-1) is not None
    new_leader.clear()
    for node in (again, new_leader):
        node.tick()
    assert again.restarted() == [0] and again.plan_after(5) is None
    assert new_leader.missing() == []
    new_leader.publish(plan_of(0))
    found = again.plan_after(5)
    assert found is not None and found.number == 0, "its numbers begin again"
    assert again.plan_after(0) is None and again.restarted() == []


def test_a_node_alone_writes_no_file(tmp_path: Path) -> None:
    alone = NodeRendezvous(tmp_path, node=0, num_nodes=1, num_ranks=2, lost_s=0)
    alone.clear()
    alone.tick()
    plan = LaunchPlan(launch="j.0.0", number=0, num_ranks={"0": 2})
    alone.publish(plan)
    alone.report(LaunchResult(launch="j.0.0", node=0, code=1))
    assert (alone.missing(), alone.lost(), alone.results(plan)) == ([], [], [])
    assert not alone.has_failed("j.0.0") and list(tmp_path.iterdir()) == []


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "program.py").touch()
    return str(tmp_path / "program.py")


def test_the_command_line(program: str) -> None:
    alone = read_options(["--", "pretrain_gpt.py", "--save", "s"], {"CUDA_VISIBLE_DEVICES": ""})
    assert (alone.nnodes, alone.node_rank, alone.nproc_per_node) == (1, 0, 1)
    assert Path(*alone.program).is_file() and alone.run_dir == Path("s") and not alone.has_gpu
    words = ["--nnodes=2", "--node-rank=1", "--rdzv-endpoint=h", "--max-crashes=1"]
    words += ["--restart-wait", "0"]
    flags = ["--lr", "a b", "--run-dir=r", "--", "--nnodes"]
    some = read_options([*words, "--", program, *flags], {"CUDA_VISIBLE_DEVICES": "0,1,2"})
    assert (some.nnodes, some.node_rank, some.nproc_per_node) == (2, 1, 3)
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
        installed = read_options(["--", "--lr", "1"])
    assert installed.command == "copus launch -- --lr 1"
    assert installed.program == ("-m", "copus_ext.commands.main", "pretrain")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("copus_ext.launch.options._ROOT", tmp_path)
    assert read_options(["--", "pretrain_gpt.py", "--lr", "1"]).program == unnamed.program


def test_a_wrong_command_line_is_said_in_one_line(program: str) -> None:
    for words in (
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
        "--restart-wait nan -- P",
        "--max-crashes -1 -- P",
        "--max-crashes-per-hour -1 -- P",
        "--stop-margin-s nan -- P",
        "--what 1 -- P",
        "-- nowhere.py",
    ):
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
        tracker.event("checkpoint.commit", 4, 32)
        tracker.event("run.start", 4, 0, config={"save": None}, layout="tp1.pp1.dp2")
        tracker.event("checkpoint.commit", 5, 0)
    found = [recorded_flags(tmp_path, tmp_path / "saved", i) for i in range(6)]
    assert [f and f["tensor_model_parallel_size"] for f in found] == [None, None, 1, None, 2, None]
    assert found[4] and found[4]["data_parallel_size"] == 1 and found[4]["global_batch_size"] == 8
    assert found[4]["consumed_train_samples"] == 32, "as the checkpoint itself has it"
    assert recorded_flags(tmp_path, tmp_path, 2) is None, "of another folder"


def test_a_checkpoint_is_read_while_the_leader_goes_on() -> None:
    ticks: list[None] = []
    program = "import sys; print('x' * 200000); print('y', file=sys.stderr); sys.exit(3)"
    code, output, errors = checkpoint_flags._run(
        [sys.executable, "-c", program], time.monotonic() + 60, lambda: ticks.append(None)
    )
    assert (code, len(output), errors) == (3, 200001, b"y\n") and ticks
    with pytest.raises(TimeoutError):
        checkpoint_flags._run(
            [sys.executable, "-c", "import time; time.sleep(60)"], 0.0, lambda: None
        )


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
    ("margin_s", "apart_s", "numbers", "asked"),
    [
        (600, 1, [signal.SIGTERM], ["stop"]),
        (600, 1, [signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM], ["stop"]),
        (600, 1, [signal.SIGINT, signal.SIGINT], ["stop", "end"]),
        (0, 1, [signal.SIGTERM, signal.SIGTERM], ["stop", "end"]),
        # `timeout` hands a terminal's Ctrl-C on once more.
        (600, 0.1, [signal.SIGINT, signal.SIGINT], ["stop"]),
        (600, 0.1, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ["stop"]),
        (0, 0.1, [signal.SIGTERM, signal.SIGTERM], ["stop"]),
    ],
    ids=str,
)
def test_a_second_signal_ends_the_ranks_after_the_margin(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    margin_s: float,
    apart_s: float,
    numbers: list[signal.Signals],
    asked: list[str],
) -> None:
    moments = itertools.count(100.0, apart_s)
    monkeypatch.setattr("copus_ext.launch.supervisor.time.monotonic", lambda: next(moments))
    before = {number: signal.getsignal(number) for number in numbers}
    stops, ranks = StopSignals(tmp_path, margin_s), Ranks()
    workers: Any = ranks
    try:
        stops.install()
        assert stops.asked is None
        for number in numbers:
            os.kill(os.getpid(), number)
            stops.act(workers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ranks.asked == asked and stops.asked == numbers[0]
    assert (tmp_path / STOP_FILE).exists() and stops.is_final == ("end" in asked)
    assert ("again: ends the ranks at once" in capfd.readouterr().err) == stops.is_final
    later = StopSignals(tmp_path, margin_s)
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
