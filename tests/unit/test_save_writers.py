"""The threads and the process that write a save, without a save."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint import DefaultSavePlanner

from megatron.trainer.checkpoint import (
    save,
    save_errors,
    save_write,
    writer_process,
)
from megatron.trainer.checkpoint.file_threads import FileThreads
from megatron.trainer.checkpoint.files import complete_iterations
from megatron.trainer.checkpoint.writer_process import WriterProcess
from megatron.trainer.common import file_limits
from megatron.trainer.common.child_processes import kill_children, never_collect_inherited
from megatron.trainer.common.device import use_device
from megatron.trainer.common.file_limits import (
    STALL_VARIABLE,
    Stall,
    refuse_while_stuck,
    stall_s,
)
from megatron.trainer.distributed.process_groups import destroy_groups
from megatron.trainer.train.callbacks import Callback, CallbackContext
from tests.helpers import jobs
from tests.helpers.jobs import TINY
from tests.helpers.launch import run_in_fork
from tests.helpers.one_rank import cpu_of_one, world_of_one
from tests.helpers.save_processes import left_of_saves, stop_writer

FORKED = multiprocessing.get_context("fork")
PARENT = """
import os, sys, time
from megatron.trainer.common.child_processes import end_with_parent
parent = os.getpid()
if os.fork() == 0:
    end_with_parent(parent)
    os.write(1, b"ready")
    time.sleep(1000)
time.sleep(1000)
"""
RANK = """
import time
from megatron.trainer.checkpoint.writer_process import WriterProcess
process = WriterProcess()
process.send([])
while not process.is_done():
    process.wait(1.0)
print(process.pid, flush=True)
time.sleep(1000)
"""
WAIT_S = 120


def prepared(folder: Path) -> FileSystemWriterAsync:
    """megatron-core's writer with two buckets of all kinds of items."""
    torch.manual_seed(1)
    state: dict[str, Any] = {f"weight{i}": torch.randn(300, 40 + i) for i in range(6)}
    state |= {"half": torch.randn(1000).bfloat16(), "numbers": torch.arange(9)}
    state |= {"turned": torch.randn(20, 30).t(), "part": torch.randn(50)[10:20]}
    state |= {"none": torch.zeros(0, 4), "one": torch.tensor(2.0), "object": {"a": [1] * 5000}}
    folder.mkdir()
    writer = FileSystemWriterAsync(folder, thread_count=2)
    planner = DefaultSavePlanner()
    with world_of_one():
        planner.set_up_planner(state, None, True)
        writer.set_up_storage_writer(True)
        plans, _ = planner.create_global_plan([planner.create_local_plan()])
        plan = writer.prepare_decentralized_global_plan(planner.finish_plan(plans[0]))
        writer.prepare_write_data(plan, planner)
    assert len(writer.write_buckets or ()) == 2
    return writer


def files_of(writer: FileSystemWriterAsync) -> list[tuple[Any, list[Any]]]:
    return save_write._files_of(writer.write_buckets or ())


def results(writer: FileSystemWriterAsync, outcome: Any) -> dict[int, list[Any]]:
    """What torch's index is told."""
    buckets: Any = writer.write_buckets
    return {i: save_write._results_of(buckets[i], places) for i, places in outcome.items()}


def contents(folder: Path) -> dict[str, bytes]:
    """Of all its files."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], Any]:
    """What megatron-core itself writes, and its results."""
    folder = tmp_path_factory.mktemp("core") / "save"
    writer = prepared(folder)
    with world_of_one():
        write: Any = writer.get_save_function_and_args()[0]
    results = {}
    assert writer.write_buckets is not None
    for number, bucket in enumerate(writer.write_buckets):
        done: Any = multiprocessing.Queue()
        count = multiprocessing.JoinableQueue()
        count.put(number)
        writer.write_preloaded_data(write.args[0], number, bucket, done, count, True)
        results[number] = done.get()[1]
    return contents(folder), results


@pytest.fixture(autouse=True)
def _no_results_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core's would be a process."""
    save_errors.use_own_writer()


@pytest.fixture(scope="module")
def process() -> Iterator[WriterProcess]:
    process = WriterProcess()
    yield process
    process.kill()


def wait(process: WriterProcess) -> Any:
    """What it has written."""
    for _ in range(WAIT_S):
        process.wait(1.0)
        if process.is_done():
            return process.outcome()
    raise TimeoutError


def test_threads_write_the_bytes_that_megatron_core_writes(
    tmp_path: Path, written: tuple[dict[str, bytes], Any]
) -> None:
    writer = prepared(tmp_path / "save")
    threads = FileThreads(files_of(writer))
    assert results(writer, threads.outcome()) == written[1]
    assert contents(tmp_path / "save") == written[0]
    assert threads.written >= sum(map(len, written[0].values()))


def test_the_process_writes_the_bytes_that_megatron_core_writes_from_copies(
    tmp_path: Path, written: tuple[dict[str, bytes], Any], process: WriterProcess
) -> None:
    for name in ("first", "second"):
        writer = prepared(tmp_path / name)
        os.kill(process.pid, signal.SIGSTOP)
        copies = process.send(files_of(writer))
        for _, _, (_, tensors) in writer.write_buckets or ():
            for _, tensor in tensors:
                tensor.zero_()  # training goes on
        assert not process.is_done()
        os.kill(process.pid, signal.SIGCONT)
        assert results(writer, wait(process)) == written[1]
        assert contents(tmp_path / name) == written[0]
        for path in (tmp_path / name).iterdir():
            path.write_bytes(b"torn")
        assert results(writer, FileThreads(copies, anew=True).outcome()) == written[1]
        assert contents(tmp_path / name) == written[0]


def test_where_memory_has_no_files_a_temporary_file_does(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    written: tuple[dict[str, bytes], Any],
    process: WriterProcess,
) -> None:
    def refuse(name: str) -> int:
        raise PermissionError(name)

    monkeypatch.setattr(os, "memfd_create", refuse, raising=False)
    writer = prepared(tmp_path / "save")
    process.send(files_of(writer))
    assert results(writer, wait(process)) == written[1]


def test_without_room_for_copies_the_rank_is_told_and_lives(process: WriterProcess) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 21, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            process.send([("nowhere", [torch.zeros(1 << 20)])])
        with pytest.raises(MemoryError, match="are free"):
            process.send([("nowhere", [torch.zeros(1).expand(1 << 50)])])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    process.send([])
    assert wait(process) == {}


def test_an_error_of_the_file_system_comes_back(tmp_path: Path, process: WriterProcess) -> None:
    found = files_of(prepared(tmp_path / "save"))
    Path(found[1][0]).symlink_to("/dev/full")
    process.send(found)
    for outcome in (wait(process), FileThreads(found).outcome()):
        assert isinstance(outcome, OSError) and "No space left" in str(outcome)


@contextlib.contextmanager
def begun(folder: Path) -> Iterator[save_write.SaveWrite]:
    """An asynchronous save of one rank."""
    writer = prepared(folder)
    with cpu_of_one():
        function, preload, args = writer.get_save_function_and_args()
        assert preload is not None
        request = AsyncRequest(function, tuple(args), [], preload_fn=preload)
        write = save_write.SaveWrite(request, in_background=True)
        try:
            yield write
        finally:
            write.end()
            writer_process.end_writer_process()


def test_a_rank_that_cannot_read_the_answer_of_its_process_writes_itself(
    tmp_path: Path, written: tuple[dict[str, bytes], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(process: WriterProcess) -> None:
        raise TypeError("an error with two arguments")

    monkeypatch.setattr(WriterProcess, "outcome", refuse)
    with begun(tmp_path / "save") as write:
        assert not write.holds_training_up and write.is_written(blocking=True)
        assert "two arguments" in str(write.note)
    assert contents(tmp_path / "save") == written[0]


def test_a_rank_that_cannot_write_itself_says_so_and_leaves_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    process = writer_process.writer_process()
    stop_writer(process.pid)
    with begun(tmp_path / "save") as write:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        os.kill(process.pid, signal.SIGKILL)
        assert write.is_written(blocking=True)
        assert "new thread" in str(write._outcome) and isinstance(write._outcome, OSError)


def test_a_rank_without_memory_for_copies_keeps_others_asking_and_not_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
    writer = prepared(tmp_path / "other")
    held = tmp_path / "save" / Path(files_of(writer)[0][0]).name
    real = save_write.FileThreads

    def start(files: Any) -> FileThreads:
        os.mkfifo(held)  # its thread waits in the kernel
        return real(files)

    monkeypatch.setattr(save_write, "FileThreads", start)
    with begun(tmp_path / "save") as write:
        assert write.holds_training_up and "memory are free" in str(write.note)
        assert not write.is_written(blocking=False)
        reader = os.open(held, os.O_RDONLY)
        with contextlib.closing(os.fdopen(reader, "rb")) as stream:
            drain = threading.Thread(target=stream.read)
            drain.start()
            assert write.is_written(blocking=True)
            drain.join(WAIT_S)


def test_a_rank_with_many_files_open_hears_its_process(process: WriterProcess) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("no file numbers from 1024 on")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        number = fcntl.fcntl(process._socket, fcntl.F_DUPFD_CLOEXEC, 1024)
        process._socket.close()
        process._socket = socket.socket(fileno=number)
        process._socket.setblocking(False)
        process.send([])
        assert wait(process) == {}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_killed_process_is_known_to_be_dead_and_another_takes_its_place(tmp_path: Path) -> None:
    first = writer_process.writer_process()
    assert writer_process.writer_process() is first
    os.kill(first.pid, signal.SIGSTOP)
    first.send(files_of(prepared(tmp_path / "save")))
    os.kill(first.pid, signal.SIGKILL)
    first.wait(WAIT_S)
    with pytest.raises(ChildProcessError, match="-9"):
        first.is_done()
    assert not psutil.pid_exists(first.pid), "a zombie"
    second = writer_process.writer_process()
    assert second.pid != first.pid
    writer_process.end_writer_process()
    assert not psutil.pid_exists(second.pid)


def test_the_process_has_nothing_of_its_rank_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as other:
        for one in (listening, other):
            one.set_inheritable(True)
        process = WriterProcess()
        try:
            handles = Path(f"/proc/{process.pid}/fd")
            first = Path(f"/proc/{process.pid}/cmdline")
            while b"writer_process" not in first.read_bytes():
                pass  # it has not become the new interpreter yet
            found = {entry.name: os.readlink(entry) for entry in handles.iterdir()}
            assert found["0"] == found["1"] == "/dev/null"
            inherited = {os.readlink(f"/proc/self/fd/{s.fileno()}") for s in (listening, other)}
            assert not inherited & set(found.values())
        finally:
            process.kill()


def test_the_process_ends_with_its_rank_however_that_ends() -> None:
    rank = subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE)
    assert rank.stdout is not None
    process = psutil.Process(int(rank.stdout.readline()))
    process.suspend()
    rank.kill()
    rank.communicate(timeout=WAIT_S)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.wait(WAIT_S)


def test_a_write_that_the_file_system_holds_is_given_up_and_writes_nothing_more(
    tmp_path: Path,
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # a thread that opens it waits in the kernel
    threads = FileThreads([(pipe, [b"text"])])
    stall = Stall(0.05)
    while not stall.is_over(threads.written):
        assert not threads.is_done(0.01)
    threads.end()
    with pytest.raises(TimeoutError, match="earlier save"):
        refuse_while_stuck(0.0)
    reader = os.open(pipe, os.O_RDONLY)  # now it goes on
    refuse_while_stuck(WAIT_S)
    assert os.read(reader, 1) == b"" and threads.outcome() == {}
    os.close(reader)


def test_a_count_that_grows_never_stalls_and_a_pause_of_the_whole_run_counts_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(file_limits.time, "monotonic", lambda: now[0])
    stall = Stall(60.0)

    def look(after_s: float, count: int) -> bool:
        now[0] += after_s
        return stall.is_over(count)

    assert not any(look(59.0, count) for count in range(100))
    assert not look(1000.0, 99), "stopped and continued"
    assert [look(10.0, 99) for _ in range(5)] == [False] * 4 + [True]


def test_the_limit_is_a_constant_unless_the_environment_says_otherwise() -> None:
    assert stall_s({}) == file_limits.STALL_S == 60.0
    assert stall_s({STALL_VARIABLE: "0.5"}) == 0.5


def _fork_with_a_group_in_the_garbage(store: str) -> None:
    """Its threads are in this process alone: a collection in a child would wait for their end."""
    never_collect_inherited()
    gc.disable()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    group = dist.distributed_c10d._get_default_group()
    garbage: list[Any] = [group._get_backend(torch.device("cpu"))]
    garbage.append(garbage)
    dist.destroy_process_group()
    del group, garbage
    gc.enable()
    if (child := os.fork()) == 0:
        gc.collect()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    os._exit(status)


def test_a_forked_process_does_not_collect_the_groups_of_its_parent(tmp_path: Path) -> None:
    process = FORKED.Process(target=_fork_with_a_group_in_the_garbage, args=(tmp_path / "store",))
    process.start()
    process.join(20)
    kill_children(process.pid or 0)
    process.kill()
    process.join()
    assert process.exitcode == 0


def test_a_child_of_a_killed_process_ends_and_lets_go_of_its_output() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None and parent.stdout.read(5) == b"ready"
    parent.kill()
    assert parent.communicate(timeout=60)[0] == b""


def test_a_child_whose_parent_went_before_it_could_ask_ends_too() -> None:
    module = "megatron.trainer.common.child_processes"
    code = f"from {module} import end_with_parent; end_with_parent(2**30)"
    done = subprocess.run([sys.executable, "-c", code], timeout=60)
    assert done.returncode == -signal.SIGKILL


def test_any_error_of_a_finalization_is_met_and_raised() -> None:
    met: list[str] = []

    def fail() -> None:
        raise EOFError("gone")

    with world_of_one(), pytest.raises(OSError, match="gone"):
        save_errors._agreed(fail, lambda: met.append("met"))()
    assert met == ["met"]


def test_an_error_of_the_common_state_on_rank_0_is_met_whatever_it_is(tmp_path: Path) -> None:
    with world_of_one(), pytest.raises(OSError, match="pickle"):
        save_errors._write_common({"args": lambda: None}, tmp_path)


def async_flags(folder: Path) -> str:
    """Of a run on real text that saves every other step."""
    return f"{TINY} --split 1,0,0 --save {folder / 'save'} --save-interval 2 --async-save"


def _without_memory(folder: Path) -> list[list[int]]:
    """The complete checkpoints at the start of each step."""
    jobs.prepare()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    psutil.virtual_memory = lambda: SimpleNamespace(available=0)
    found = []

    class Looks(Callback):
        def on_train_step_start(self, context: CallbackContext) -> None:
            found.append(complete_iterations(folder / "save"))

    jobs.run(["--train-iters", "4"], folder / "run", [Looks()], base=async_flags(folder))
    return found


def test_training_waits_for_a_save_that_no_process_can_take_over(tmp_path: Path) -> None:
    found = run_in_fork(_without_memory, tmp_path, timeout_s=WAIT_S)
    assert found == [[], [], [2], [2]]


def _alone(folder: Path) -> list[dict[str, Any]]:
    """What a process has of saves before and after one in which another rank has gone."""
    jobs.prepare()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    found = [left_of_saves()]

    def gather(answer: Any) -> None:
        found.append(left_of_saves())
        raise RuntimeError("a peer has gone")

    class Stops(Callback):
        def on_train_step_start(self, context: CallbackContext) -> None:
            if context.state.iteration == 1:
                stop_writer(writer_process.writer_process().pid)

    save.all_gather_object = gather
    with pytest.raises(RuntimeError, match="a peer"):
        jobs.run(["--train-iters", "4"], folder / "run", [Stops()], base=async_flags(folder))
    return [*found, left_of_saves()]


def test_a_save_that_others_do_not_begin_leaves_nothing(tmp_path: Path) -> None:
    before, under_way, after = run_in_fork(_alone, tmp_path, timeout_s=WAIT_S)
    assert under_way["writers"] == before["writers"] + 1
    assert after == before


def _abandoned(folder: Path) -> dict[str, Any]:
    """What a process has after an error while a save was under way, and the losses of a run in the
    same process, which goes on from nothing."""
    jobs.prepare()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    base = async_flags(folder)

    class Fails(Callback):
        """In the third step, while nothing is written."""

        def on_train_step_start(self, context: CallbackContext) -> None:
            if context.state.iteration == 1:
                stop_writer(writer_process.writer_process().pid)
            if context.state.iteration == 2:
                found.append(left_of_saves())
                raise OSError("a peer has gone")

    found: list[Any] = [left_of_saves()]  # inherited from the process of the tests
    with pytest.raises(OSError, match="a peer"):
        jobs.run(["--train-iters", "4"], folder / "run", [Fails()], base=base)
    found.append(left_of_saves())
    with use_device("cpu"):
        destroy_groups()
    steps = jobs.run(["--train-iters", "4"], folder / "run2", base=base)
    found.append(left_of_saves())
    return {"found": found, "steps": len(steps), "saved": complete_iterations(folder / "save")}


def test_an_abandoned_save_leaves_no_process_no_memory_and_no_thread(tmp_path: Path) -> None:
    result = run_in_fork(_abandoned, tmp_path, timeout_s=WAIT_S)
    before, under_way, abandoned, ended = result["found"]
    assert under_way["writers"] == before["writers"] + 1
    assert under_way["handles"] > before["handles"] and under_way["maps"] == before["maps"] + 1
    assert abandoned == ended == before and before["zombies"] == 0
    assert result["steps"] == 4 and result["saved"] == [2, 4]
