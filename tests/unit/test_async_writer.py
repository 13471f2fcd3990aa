"""The processes of a save, without a save."""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron.training.checkpoint import save_errors
from megatron.training.checkpoint.async_writer import WriteResults
from megatron.training.common.child_processes import kill_children, never_collect_inherited

FORKED = multiprocessing.get_context("fork")
PARENT = """
import os, sys, time
from megatron.training.common.child_processes import end_with_parent
parent = os.getpid()
if os.fork() == 0:
    end_with_parent(parent)
    os.write(1, b"ready")
    time.sleep(1000)
time.sleep(1000)
"""


def test_a_forked_process_hands_over_more_than_a_pipe_holds() -> None:
    results, sent = WriteResults(), {0: ["x" * 10_000_000]}
    process = FORKED.Process(target=results.put, args=(sent,))
    process.start()
    process.join(60)
    assert process.exitcode == 0 and results.get_nowait() == sent


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


def test_half_of_what_was_written_is_nothing() -> None:
    def write() -> None:
        results.put({0: ["x" * 1000]})
        os.ftruncate(results._file.fileno(), 500)
        os.kill(os.getpid(), signal.SIGKILL)

    results = WriteResults()
    process = FORKED.Process(target=write)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    with pytest.raises(queue.Empty):
        results.get_nowait()
    with pytest.raises(queue.Empty):
        WriteResults().get_nowait()


def test_where_memory_has_no_files_a_temporary_file_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise PermissionError(name)

    monkeypatch.setattr(os, "memfd_create", refuse, raising=False)
    results = WriteResults()
    results.put([1])
    assert results.get_nowait() == [1]


def test_each_save_of_megatron_core_gets_results_of_its_own() -> None:
    save_errors.use_agreed_saves()
    get: Any = filesystem_async._get_write_results_queue
    first, second = get(), get()
    assert isinstance(first, WriteResults)
    first.put([1])
    with pytest.raises(queue.Empty):
        second.get_nowait()


def test_a_child_of_a_killed_process_ends_and_lets_go_of_its_output() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None and parent.stdout.read(5) == b"ready"
    parent.kill()
    assert parent.communicate(timeout=60)[0] == b""


def test_a_child_whose_parent_went_before_it_could_ask_ends_too() -> None:
    module = "megatron.training.common.child_processes"
    code = f"from {module} import end_with_parent; end_with_parent(2**30)"
    done = subprocess.run([sys.executable, "-c", code], timeout=60)
    assert done.returncode == -signal.SIGKILL


def test_any_error_of_a_finalization_is_met_and_raised() -> None:
    met: list[str] = []

    def fail() -> None:
        raise EOFError("gone")

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(OSError, match="gone"):
            save_errors._agreed(fail, lambda: met.append("met"))()
    finally:
        dist.destroy_process_group()
    assert met == ["met"]
