"""Stopped and started again, a run is the run that was never stopped."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import load_plain_tensors

from megatron.trainer.checkpoint import files
from tests.helpers.jobs import ENDLESS, losses_of, steps_of, train
from tests.helpers.one_rank import cpu_of_one

N = 2
BATCH = 8
STEPS = 24
"""Of a run that is stopped on its way."""
STOPPED = [*ENDLESS, "--exit-interval", str(STEPS)]
SAME_LAYOUT = {
    "dp2-bf16-dropout": [
        *("--bf16", "--hidden-dropout", "0.1", "--attention-dropout", "0.1"),
        *("--overlap-grad-reduce", "--overlap-param-gather", "--async-save"),
    ],
    "tp2-sp-bf16-dropout": [
        *("--bf16", "--hidden-dropout", "0.1", "--attention-dropout", "0.1"),
        *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
        *("--recompute-granularity", "full", "--recompute-method", "uniform"),
        *("--recompute-num-layers", "1"),
    ],
    "pp2-fp16": ["--fp16", "--initial-loss-scale", "65536", "--pipeline-model-parallel-size", "2"],
}


def long_run(num_steps: int, save: Path) -> list[str]:
    few = ["--global-batch-size", "4", "--train-iters", str(num_steps)]
    return ["--use-distributed-optimizer", *few, "--save", str(save)]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    with cpu_of_one():
        loaded = load_plain_tensors(str(folder))
    return {key: value for key, value in loaded.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("name", SAME_LAYOUT)
def test_save_exit_load_is_bit_equal_to_no_interruption(tmp_path: Path, name: str) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = SAME_LAYOUT[name]
    train([*long_run(2 * N, whole), *flags], 2, whole).check()
    first = [*long_run(2 * N, parts), *flags]
    train([*first, "--exit-interval", str(N)], 2, parts).check()
    assert files.read_latest(parts) == N
    train([*first, "--load", str(parts)], 2, parts).check()
    fields = ("losses", "grad_norm", "learning_rate", "loss_scale", "consumed_samples")
    uninterrupted, resumed = (
        [[step[field] for field in fields] for step in steps_of(run)] for run in (whole, parts)
    )
    assert len(uninterrupted) == 2 * N
    assert resumed == uninterrupted
    a = tensors(files.folder_of(whole, 2 * N))
    b = tensors(files.folder_of(parts, 2 * N))
    assert a.keys() == b.keys() and len(a) > 20
    assert [key for key in a if not torch.equal(a[key], b[key])] == []


class Sender(threading.Thread):
    """Sends a signal to rank 0 of a run once it has taken some steps."""

    def __init__(self, run_dir: Path, number: signal.Signals, *, after: int) -> None:
        super().__init__(daemon=True)
        self.file, self.number, self.after = run_dir / "metrics.jsonl", number, after
        self.sent_after: int | None = None

    def run(self) -> None:
        pid, deadline = None, time.monotonic() + 200
        while time.monotonic() < deadline:
            lines = self.file.read_text().splitlines() if self.file.exists() else []
            records: list[dict[str, Any]] = [json.loads(line) for line in lines if line[-1:] == "}"]
            pid = next((r["pid"] for r in records if r["kind"] == "run.start"), None)
            done = max((r["iteration"] for r in records if r["kind"] == "step"), default=0)
            if pid is not None and done >= self.after:
                os.kill(pid, self.number)
                self.sent_after = done
                return
            time.sleep(0.02)


def test_a_signal_to_one_rank_saves_and_the_run_goes_on_under_another_world(
    tmp_path: Path, uninterrupted: list[float]
) -> None:
    run, save = tmp_path / "run", tmp_path / "save"
    flags = [*STOPPED, "--save", str(save), "--load", str(save)]
    sender = Sender(run, signal.SIGTERM, after=2)
    sender.start()
    result = train(flags, 2, run).check()
    sender.join(5)
    assert sender.sent_after is not None
    stopped = files.read_latest(save)
    assert stopped is not None and sender.sent_after <= stopped < STEPS
    assert f"stopped after iteration {stopped}: SIGTERM" in result.stdout
    result = train([*flags, "--tensor-model-parallel-size", "2"], 4, run).check()
    assert f"(iteration {stopped})" in result.stdout
    assert [s["consumed_samples"] for s in steps_of(run)] == [
        BATCH * i for i in range(1, STEPS + 1)
    ]
    assert losses_of(run) == pytest.approx(uninterrupted[:STEPS], rel=2e-5)


def test_killed_without_warning_it_goes_on_from_the_last_committed_checkpoint(
    tmp_path: Path, uninterrupted: list[float]
) -> None:
    run, save = tmp_path / "run", tmp_path / "save"
    flags = [*STOPPED, "--save", str(save), "--load", str(save)]
    flags += ["--save-interval", "4", "--async-save"]
    sender = Sender(run, signal.SIGKILL, after=9)
    sender.start()
    killed = train(flags, 2, run)
    assert killed.returncode != 0 and killed.orphans == 0
    latest = files.read_latest(save)
    assert latest is not None and latest % 4 == 0
    assert files.damage(files.folder_of(save, latest)) == []
    result = train(flags, 2, run).check()
    assert f"(iteration {latest})" in result.stdout
    assert losses_of(run) == pytest.approx(uninterrupted[:STEPS], rel=2e-5)


def test_skip_train_evaluates_what_was_loaded_and_saves_nothing(tmp_path: Path) -> None:
    save = tmp_path / "save"
    trained = train([*long_run(2, save), "--eval-iters", "2"], 1, tmp_path / "first").check()
    before = sorted(p.name for p in save.iterdir())
    # The same samples in batches of half the size.
    smaller = ["--eval-iters", "4", "--eval-global-batch-size", "2"]
    flags = [*long_run(2, save), *smaller, "--load", str(save), "--skip-train"]
    result = train([*flags, "--eval-interval", "1"], 1, tmp_path / "second").check()
    assert sorted(p.name for p in save.iterdir()) == before
    assert not steps_of(tmp_path / "second")
    lines = [line for line in trained.stdout.splitlines() if "lm loss value" in line]
    assert len(lines) == 2
    assert [line for line in result.stdout.splitlines() if "lm loss value" in line] == lines
