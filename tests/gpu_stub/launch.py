"""Starts ranks on the stub of CUDA."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.gpu_stub import on_stub
from tests.helpers.jobs import TINY
from tests.helpers.launch import ROOT, RanksResult, run_ranks

SITE = Path(__file__).with_name("site")


def variables(gpus: int) -> dict[str, str]:
    """The environment in which a program of the Python of `on_stub.venv`, and all that it starts,
    run on the stub."""
    path = os.pathsep.join([str(SITE), str(ROOT)])
    return {**on_stub.libraries(), "STUB_GPUS": str(gpus), "PYTHONPATH": path}


def run_on_stub(
    args: Sequence[str | Path],
    ranks: int,
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> RanksResult:
    """Runs a Python program on ranks that have a GPU of the stub each; see `run_ranks`."""
    own = {"STUB_GPUS": str(ranks), **(env or {})}
    program = [Path(on_stub.__file__), *args]
    return run_ranks(program, ranks, timeout_s=timeout_s, env=own, launcher="fresh")


def train_on_stub(
    flags: Iterable[str],
    ranks: int,
    run_dir: Path,
    *,
    base: str = TINY,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 480,
    program: Path = ROOT / "pretrain_gpt.py",
) -> RanksResult:
    """Runs `pretrain_gpt.py`, or a program that takes its flags, as `train` of
    `tests/helpers/jobs.py` does, with NCCL on GPUs of the stub."""
    args = [program, *base.split(), *flags, "--run-dir", run_dir]
    return run_on_stub(args, ranks, timeout_s=timeout_s, env=env)
