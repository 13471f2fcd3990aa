"""The processes of a save, without a save."""

from __future__ import annotations

import os
import signal

import pytest

from megatron.training import save_process


def test_a_helper_that_is_stopped_counts_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_process, "_ANSWER_S", 1.0)
    try:
        for settle in (save_process._helper_answers, save_process.forget_results):
            save_process.start_helper()
            process = save_process._helper()._manager._process
            os.kill(process.pid, signal.SIGSTOP)
            assert settle() is not True
            process.join(10.0)
            assert process.exitcode == -signal.SIGKILL
    finally:
        save_process._drop_helper()
