"""The processes of a save, without a save."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.api import _is_wrapped_exception

from megatron.training import agreed_save, save_process


def test_a_helper_that_is_stopped_counts_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_process, "_ANSWER_S", 1.0)
    try:
        for settle in (save_process._helper_answers, save_process.forget_results):
            save_process.start_helper()
            process = save_process._helper().helper
            os.kill(process.pid, signal.SIGSTOP)
            assert settle() is not True
            process.join(10.0)
            assert process.exitcode == -signal.SIGKILL
    finally:
        save_process._drop_helper()


def test_a_helper_that_dies_late_is_an_error_that_others_are_told_of(tmp_path: Path) -> None:
    agreed_save.register()
    writer: Any = FileSystemWriterAsync(tmp_path)
    save_process.start_helper()
    results: Any = save_process._helper()
    writer.write_buckets, writer.results_queue = [], results
    save_process._drop_helper()
    results.helper.join(10.0)
    assert _is_wrapped_exception(writer.retrieve_write_results())


def test_any_error_of_a_finalization_is_met_and_raised() -> None:
    met: list[str] = []

    def fail() -> None:
        raise EOFError("gone")

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(OSError, match="gone"):
            agreed_save._in_step(fail, lambda: met.append("met"))()
    finally:
        dist.destroy_process_group()
    assert met == ["met"]
