"""What SLURM's variables, files and commands mean; the commands are scripts on the PATH."""

from __future__ import annotations

import contextlib
import json
import math
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from copus_ext.launch import slurm, slurm_job
from copus_ext.launch.rank_side import adopt_srun
from copus_ext.launch.slurm import HOSTFILE_VARIABLE, expand_nodes
from copus_ext.launch.slurm_job import RunFacts, SlurmWatch, should_requeue, watch_of
from copus_ext.reshard.relaunch import Request, write_request
from megatron.trainer.checkpoint import files
from megatron.trainer.common.control import SIGNALLED, STOP_FILE, TIME_LIMIT
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.signals import Kind, StopReason
from megatron.trainer.common.train_state import TrainState
from megatron.trainer.config.layout import Layout
from megatron.trainer.logging.tail_reader import Tail
from megatron.trainer.resilience.exit_status import RunOutcome

TASK = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "5",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),3",
    "SLURM_STEP_NODELIST": "gpu-[07-09]",
}


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder alone on the PATH; scripts in it are the commands, `calls` what was called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def command(folder: Path, name: str, text: str) -> None:
    path = folder / name
    note = f'echo "{name} $*" >>{folder}/calls'
    path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{note}\n{text}\n")
    path.chmod(0o755)


def calls(folder: Path, name: str) -> list[str]:
    made = folder / "calls"
    lines = made.read_text().splitlines() if made.exists() else []
    return [line for line in lines if line.startswith(name)]


def test_the_place_of_a_task() -> None:
    step = slurm.read_step(TASK)
    assert step is not None
    assert (step.job, step.restarts, step.number) == ("1234", 0, 1)
    assert (step.num_nodes, step.node_rank, step.head) == (3, 2, "gpu-07")
    assert (step.num_tasks, step.rank, step.num_local_tasks, step.local_rank) == (7, 5, 3, 0)
    assert step.handle == "1234"
    step = slurm.read_step({**TASK, "SLURM_ARRAY_JOB_ID": "1234", "SLURM_ARRAY_TASK_ID": "3"})
    assert step is not None and (step.job, step.handle) == ("1234", "1234_3"), "not all the array"


def test_the_environment_stays_as_it_is() -> None:
    """In sbatch, salloc, an interactive step, a step of one task, under torchrun, in a shell."""
    changes: list[dict[str, str | None]] = [
        {"SLURM_STEP_ID": None, "SLURM_PROCID": "0"},
        {"SLURM_STEP_ID": None, "SLURM_PROCID": None},
        {"SLURM_STEP_ID": "4294967290"},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"RANK": "0", "WORLD_SIZE": "2"},
        dict.fromkeys(TASK),
    ]
    for change in changes:
        env = {name: value for name, value in {**TASK, **change}.items() if value is not None}
        before = dict(env)
        assert not adopt_srun(env) and env == before, change


def test_a_task_of_srun_becomes_a_rank(commands: Path) -> None:
    command(commands, "scontrol", "echo NodeName=gpu-07 NodeAddr=10.1.2.3 NodeHostName=x")
    env = dict(TASK)
    assert adopt_srun(env)
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == ("5", "7", "0")
    assert (env["LOCAL_WORLD_SIZE"], env["GROUP_RANK"]) == ("3", "2")
    assert env["MASTER_ADDR"] == "10.1.2.3" and 20000 <= int(env["MASTER_PORT"]) < 32000
    assert calls(commands, "scontrol") == ["scontrol show node --oneliner gpu-07"]
    for gpus, number in {"3": "0", "0,1,2": "2", "GPU-8-9": "0"}.items():
        env = {**TASK, "SLURM_LOCALID": "2", "CUDA_VISIBLE_DEVICES": gpus, "MASTER_ADDR": "mine"}
        assert adopt_srun(env)
        assert env["LOCAL_RANK"] == number and env["MASTER_ADDR"] == "mine"


def test_variables_that_make_no_sense_are_one_line() -> None:
    for name in ("SLURM_PROCID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE"):
        with pytest.raises(UsageError, match="is not ") as error:
            adopt_srun({**TASK, name: "zwei"})
        assert "\n" not in str(error.value)


def test_a_head_without_address_is_known_by_name(
    commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "_ANSWER_S", 0.3)
    assert slurm.address_of("n1") == "n1", "without the command"
    for text in ("exit 1", "echo nothing", "exec sleep 60"):
        command(commands, "scontrol", text)
        assert slurm.address_of("n1") == "n1"


@given(st.integers(0, 10**7))
def test_a_time_is_read_as_squeue_writes_it(seconds: int) -> None:
    days, rest = divmod(seconds, 86400)
    h, m, s = rest // 3600, rest // 60 % 60, rest % 60
    text = f"{days}-{h:02}:{m:02}:{s:02}" if days else f"{h}:{m:02}:{s:02}" if h else f"{m}:{s:02}"
    assert slurm.seconds_of(f"{text}\n") == seconds
    assert slurm.seconds_of("UNLIMITED\n") == math.inf
    for other in (None, "", "NOT_SET", "INVALID", "slurm_load_jobs error", "12", "1-2", "-1:00"):
        assert slurm.seconds_of(other) is None


def write(path: Path, *records: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(r) + "\n" for r in records)


def start(layout: str = "tp2.pp1.dp4", **config: Any) -> dict[str, Any]:
    return {"kind": "run.start", "layout": layout, "config": config, "t": 1000.0}


def step_of(batch: int, seconds: float = 1.0) -> dict[str, Any]:
    return {"kind": "step", "global_batch_size": batch, "elapsed_per_iteration_ms": 1e3 * seconds}


MOVES = {"copus": True, "copus_mode": "act", "copus_layouts": "all", "copus_relayout": "inprocess"}


def test_the_lead_time_is_of_what_was_measured(tmp_path: Path, commands: Path) -> None:
    def lead_s() -> float:
        # Closed, so that its thread asks nothing in the tests after this one.
        with contextlib.closing(SlurmWatch("1", tmp_path, clock=lambda: 0.0)) as watch:
            watch.tick()
            return watch.facts.lead_s

    assert lead_s() == 2 * 60 + 60, "nothing is known yet"
    saves = [{"kind": "checkpoint.commit", "seconds": s} for s in (30.0, 100.0, 20.0)]
    write(tmp_path / "metrics.jsonl", start(), step_of(8, 5.0), step_of(8, 3.0), *saves)
    assert lead_s() == 2 * 100 + 2 * 5 + 60
    write(tmp_path / "metrics.jsonl", start(**MOVES))
    assert lead_s() == 2 * 100 + 60 + 60, "the save of the launch before counts"
    write(tmp_path / "journal.jsonl", {"kind": "relayout.requested", "predicted_s": 9.0})
    assert lead_s() == 2 * 100 + 60 + 60, "asked for before this launch"


class Clock:
    """A clock that is set, with a watch that ticks by it."""

    def __init__(self, run: Path, **more: Any) -> None:
        self.now = 0.0
        self.said: list[str] = []
        self.watch = SlurmWatch("77", run, clock=lambda: self.now, say=self.said.append, **more)

    def run(self, seconds: int) -> None:
        """Ticks each second; what was asked gets the time to answer."""
        for _ in range(seconds):
            self.watch.tick()
            for asking in (self.watch._asking, self.watch._publishing):
                if asking is not None:
                    wait([asking], 10)
            self.now += 1


def test_the_run_stops_when_the_time_left_is_under_the_lead_time(
    tmp_path: Path, commands: Path
) -> None:
    (tmp_path / "left").write_text("16:40")
    command(commands, "squeue", f"cat {tmp_path}/left")
    clock = Clock(tmp_path)
    clock.run(800)
    stop = tmp_path / "control" / "stop"
    assert not stop.exists() and not clock.watch.is_ending
    assert calls(commands, "squeue") == ["squeue -h -j 77 -o %L"] * 14, "once a minute"
    clock.run(10)
    assert not stop.exists(), "the answer is the same as at first: the limit was put off"
    (tmp_path / "left").write_text("3:20")
    clock.run(80)
    assert stop.read_text().strip() == "time limit" and clock.watch.is_ending
    stop.unlink()
    clock.run(70)
    assert not stop.exists(), "asked once"
    (line,) = clock.said
    assert "job 77" in line and "180 s" in line


def test_a_short_job_gets_half_of_its_time(tmp_path: Path, commands: Path) -> None:
    command(commands, "squeue", f"[ -e {tmp_path}/asked ] || echo 2:00; echo >{tmp_path}/asked")
    clock = Clock(tmp_path, granted_s=900.0)
    clock.run(59)
    assert not clock.watch.is_ending
    assert len(clock.said) == 1 and "shorter --signal" in clock.said[0]
    clock.run(4)
    assert clock.watch.is_ending
    for number, answer in enumerate(("exit 127", "echo UNLIMITED", "exit 1", "echo gibberish")):
        command(commands, "squeue", answer)
        clock = Clock(tmp_path / str(number))
        clock.run(150)
        assert not (tmp_path / str(number)).exists() and not clock.said, "unknown or endless"


def test_a_command_that_hangs_is_ended_and_holds_up_nothing(
    tmp_path: Path, commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(commands, "squeue", f"echo $$ >{tmp_path}/pid; exec sleep 600")
    monkeypatch.setattr(slurm, "_ANSWER_S", 0.5)
    clock = Clock(tmp_path)
    clock.watch.tick()
    asking = clock.watch._asking
    clock.watch.tick()
    assert asking is not None and clock.watch._asking is asking
    assert asking.result(20) is None and not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    clock.watch.tick()
    assert clock.watch._asking is None and clock.watch.left_s is None
    clock.now = 61.0
    clock.watch.tick()
    assert clock.watch._asking is not None
    clock.watch.close()


def test_the_end_does_not_wait_for_a_command_that_hangs(
    tmp_path: Path, commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(commands, "squeue", "exec sleep 600")
    monkeypatch.setattr(slurm, "_ANSWER_S", 600.0)
    clock = Clock(tmp_path)
    clock.watch.tick()
    asking = clock.watch._asking
    assert asking is not None
    while not calls(commands, "squeue"):
        assert not asking.done()
    clock.watch.close()
    assert asking.result(20) is None, "it was ended, and its thread with it"


def test_the_comment_follows_layout_and_batch(tmp_path: Path, commands: Path) -> None:
    command(commands, "squeue", "echo UNLIMITED")
    command(commands, "scontrol", "exit 1")
    clock = Clock(tmp_path)
    write(tmp_path / "metrics.jsonl", start(), step_of(256))
    clock.run(200)
    prefix = "scontrol update JobId=77 Comment="
    assert calls(commands, "scontrol") == [f"{prefix}tp2.pp1.dp4 B=256"]
    at = "2026-01-01T00:00:00.000+00:00"
    moved = {"kind": "relayout", "to": "tp1.pp2.dp4", "outcome": {"kind": "moved"}, "time": at}
    back = {"kind": "relayout", "to": "tp8.pp1.dp1", "outcome": {"kind": "back"}, "time": at}
    write(tmp_path / "journal.jsonl", moved, back)
    for batch in range(300, 380):
        write(tmp_path / "metrics.jsonl", step_of(batch))
        clock.run(1)
    clock.run(70)
    made = calls(commands, "scontrol")[1:]
    assert 2 <= len(made) <= 3, "at most once a minute"
    assert made[-1] == f"{prefix}tp1.pp2.dp4 B=379"
    write(tmp_path / "metrics.jsonl", step_of(512))
    clock.watch.close()
    assert calls(commands, "scontrol")[-1] == f"{prefix}tp1.pp2.dp4 B=512", "and at the end"


def test_it_says_once_when_the_signal_comes_too_late(tmp_path: Path) -> None:
    clock = Clock(tmp_path, granted_s=200.0)
    clock.run(30)
    assert clock.said == []
    write(tmp_path / "metrics.jsonl", {"kind": "checkpoint.commit", "seconds": 100})
    clock.run(60)
    (line,) = clock.said
    assert "--signal=B:USR1@260" in line and "COPUS_SIGNAL_LEAD_S=260" in line


def test_only_the_first_node_watches(tmp_path: Path) -> None:
    assert watch_of(None, tmp_path, {}) is None
    assert watch_of(slurm.read_step(TASK), tmp_path, {}) is None
    first = slurm.read_step({**TASK, "SLURM_NODEID": "0"})
    watch = watch_of(first, tmp_path, {"COPUS_SIGNAL_LEAD_S": "900"})
    assert watch is not None and watch.left_s is None


def test_a_file_is_followed_in_bounded_bites(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path)
    assert list(tail.records()) == []
    path.write_text("x" * (1 << 20) + '\n{"a": 1}\n[2]\n{"a": 3}\n{"a": ')
    assert list(tail.records()) == [{"a": 1}, {"a": 3}], "from near the end, whole lines"
    with path.open("a") as file:
        file.write("4}\n" + "y" * (3 << 20))
    assert list(tail.records()) == [{"a": 4}]
    assert [list(tail.records()) for _ in range(3)] == [[], [], []]
    with path.open("a") as file:
        file.write('\n{"a": 5}\n')
    assert list(tail.records()) == [{"a": 5}]
    path.write_text('{"a": 6}\n')
    assert list(tail.records()) == [{"a": 6}], "a file that was replaced is read from its start"


@given(
    st.dictionaries(
        st.sampled_from(
            ["layout", "config", "seconds", "outcome", "time", "t", "to", "predicted_s"]
        )
        | st.sampled_from(["global_batch_size", "elapsed_per_iteration_ms"]),
        st.none() | st.text() | st.floats() | st.integers() | st.dictionaries(st.text(), st.text()),
    ),
    st.sampled_from(["run.start", "step", "checkpoint.commit", "relayout", "relayout.requested"]),
)
def test_records_of_any_shape_do_no_harm(record: dict[str, Any], kind: str) -> None:
    from collections import deque

    facts = RunFacts(
        steps_s=deque(maxlen=3), layout="tp1.pp1.dp1", global_batch_size=1, relayout_s=60.0
    )
    facts.add_metric({**record, "kind": kind})
    facts.add_decision({**record, "kind": kind})
    assert 60 <= facts.lead_s < math.inf and isinstance(facts.comment, str)


def request(run: Path, kind: str, launch: str) -> None:
    made: Any = {"launch": launch, "kind": kind, "iteration": 0, "consumed_samples": 0}
    write_request(run, Request(**made, reason="the test"))


JOB = {"SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": "2"}


def test_the_request_of_this_start_decides(tmp_path: Path) -> None:
    for number, (kind, launch, code, state, again) in enumerate(
        [
            ("requeue", "5.2.0", 85, "RUNNING", True),
            ("requeue", "5.2.3", 143, "RUNNING", True),
            ("requeue", "5.2.0", 85, None, True),
            (None, "", 85, "RUNNING", True),
            ("done", "5.2.0", 85, "RUNNING", False),
            ("done", "5.2.0", 0, "RUNNING", False),
            ("abort", "5.2.0", 1, "RUNNING", False),
            ("requeue", "5.1.0", 1, "RUNNING", False),
            ("requeue", "5.22.0", 1, "RUNNING", False),
            (None, "", 143, "RUNNING", True),
            (None, "", 138, "RUNNING", True),
            (None, "", 143, "COMPLETING", False),
            (None, "", 137, "RUNNING", False),
            ("requeue", "5.2.0", 85, "COMPLETING", False),
        ]
    ):
        run = tmp_path / str(number)
        if kind is not None:
            request(run, kind, launch)
        assert should_requeue(run, run, code, JOB, state)[0] is again, (kind, launch, code, state)


def test_who_stops_a_run_by_hand_gets_no_other(tmp_path: Path) -> None:
    made: Any = {"launch": "5.2.0", "kind": "requeue", "iteration": 0, "consumed_samples": 0}
    cases: list[tuple[Kind, bool]] = [("file", False), ("time-limit", True), ("signalled", True)]
    for kind, again in cases:
        outcome = RunOutcome(
            state=TrainState(),
            run_dir=tmp_path,
            layout=Layout(),
            save="x",
            reason=StopReason(kind=kind),
        )
        write_request(tmp_path, Request(**made, reason=outcome.line))
        assert should_requeue(tmp_path, tmp_path, 85, JOB, "RUNNING")[0] is again
    env = {**JOB, slurm_job.MAX_REQUEUES: "9"}
    for text, again in {"": False, "maintenance": False, TIME_LIMIT: True, SIGNALLED: True}.items():
        request(tmp_path, "requeue", "5.2.0")
        (tmp_path / STOP_FILE).write_text(text)  # and nobody has obeyed
        assert should_requeue(tmp_path, tmp_path, 85, env, "RUNNING")[0] is again


def test_it_gives_up_when_nothing_gets_saved(tmp_path: Path) -> None:
    def again(job: str = "5", most: str = "2") -> bool:
        env = {"SLURM_JOB_ID": job, slurm_job.MAX_REQUEUES: most}
        return should_requeue(tmp_path, tmp_path, 85, env, "RUNNING")[0]

    assert [again() for _ in range(4)] == [True, True, False, False]
    (tmp_path / files.TRACKER).write_text("10")
    assert [again() for _ in range(3)] == [True, True, False]
    assert again(job="6"), "another job starts anew"
    assert not again(job="7", most="0")
    (tmp_path / "control" / "requeues.json").write_text("{")
    assert again()
    path = tmp_path / "control" / "requeues.json"
    spent = json.dumps({"job": "5", "iteration": 10, "count": 99})
    path.write_text(spent + " " * (1 << 17))
    assert again(), "more than is read"
    path.write_text(spent)
    assert not again()
    path.unlink()
    request(tmp_path, "abort", "5.0.0")
    (tmp_path / "control" / "request.json").rename(tmp_path / "elsewhere")
    (tmp_path / "control" / "request.json").symlink_to(tmp_path / "elsewhere")
    assert again(), "no link is followed"
    (tmp_path / files.TRACKER).write_text("gibberish")
    assert not again()


def test_a_job_is_asked_for_its_state(
    tmp_path: Path, commands: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    argv = [str(tmp_path), str(tmp_path), "85"]
    command(commands, "squeue", "echo RUNNING")
    assert slurm_job.main(argv) == 0
    command(commands, "squeue", "echo COMPLETING")
    assert slurm_job.main(argv) == 1
    assert calls(commands, "squeue") == ["squeue -h -j 5 -o %T"] * 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_between_two_looks_a_tick_reads_no_file_and_asks_nothing(
    tmp_path: Path, commands: Path
) -> None:
    command(commands, "squeue", "echo UNLIMITED")
    clock = Clock(tmp_path)
    clock.run(3)
    write(tmp_path / "metrics.jsonl", start(), step_of(8))
    before = len(calls(commands, "squeue"))
    for _ in range(1000):
        clock.watch.tick()
    assert len(calls(commands, "squeue")) == before and clock.watch.facts.global_batch_size == 0


EVEN = {**TASK, "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}


def hosts_file(folder: Path, text: str) -> dict[str, str]:
    path = folder / "hosts"
    path.write_text(text)
    return {HOSTFILE_VARIABLE: str(path)}


def test_a_list_of_nodes_is_expanded() -> None:
    for nodes, names in {
        "a": ["a"],
        "n[1-3]": ["n1", "n2", "n3"],
        "gpu-[07-09,12],login": ["gpu-07", "gpu-08", "gpu-09", "gpu-12", "login"],
        "a[1-2]b,c": ["a1b", "a2b", "c"],
        "r[1-2]n[1-2],x": ["r1n1", "r1n2", "r2n1", "r2n2", "x"],
        "n[098-101]": ["n098", "n099", "n100", "n101"],
    }.items():
        assert expand_nodes(nodes) == names
    for nodes in ("n[1-]x", "n[a-b]", "n[0-99999999999]"):
        with pytest.raises(UsageError, match="not a list of nodes"):
            expand_nodes(nodes)


@pytest.mark.parametrize(
    "order", [("gpu-07", "gpu-09", "gpu-08"), ("gpu-09", "gpu-07", "gpu-08")], ids=str
)
def test_ranks_are_numbered_along_the_file(tmp_path: Path, order: tuple[str, ...]) -> None:
    more = hosts_file(tmp_path, "# by plan.py\n" + "\n".join(order) + "\n")
    ranks = {}
    for node, name in enumerate(["gpu-07", "gpu-08", "gpu-09"]):
        for local in range(2):
            place = {"SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
            place["SLURM_PROCID"] = str(2 * node + local)
            own = {} if node == 1 else {"SLURMD_NODENAME": name}
            step = slurm.read_step({**EVEN, **more, **place, **own})
            assert step is not None and step.head == order[0]
            assert order[step.node_rank] == name and step.num_local_tasks == 2
            ranks[step.rank] = (name, local)
    assert [ranks[r] for r in range(6)] == [(name, i) for name in order for i in range(2)]


def test_other_nodes_come_behind_and_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = hosts_file(tmp_path, "gpu-09\nelsewhere\n")
    places = {"SLURM_PROCID": "4", "SLURM_NODEID": "2", "SLURMD_NODENAME": "gpu-09"}
    step = slurm.read_step({**EVEN, **more, **places})
    assert step is not None and (step.rank, step.node_rank) == (0, 0)
    assert expand_nodes(step.nodes) == ["gpu-09", "gpu-07", "gpu-08"]
    said = capsys.readouterr().err
    assert "gpu-07, gpu-08 not in the file" in said and "elsewhere not in this job" in said
    assert slurm.read_step({**EVEN, "SLURM_NODEID": "1"}) == slurm.read_step(
        {**EVEN, "SLURM_NODEID": "1", HOSTFILE_VARIABLE: ""}
    )


def test_an_order_that_cannot_be(tmp_path: Path) -> None:
    cases: list[tuple[str | None, dict[str, str], str]] = [
        ("gpu-07\ngpu-07\n", EVEN, "names gpu-07 twice"),
        (None, EVEN, "No such file"),
        ("gpu-08\n", TASK, "different numbers of tasks"),
    ]
    for text, env, words in cases:
        name = {HOSTFILE_VARIABLE: str(tmp_path / "none")}
        more = name if text is None else hosts_file(tmp_path, text)
        with pytest.raises(UsageError, match=words) as error:
            slurm.read_step({**env, **more})
        assert "\n" not in str(error.value)
