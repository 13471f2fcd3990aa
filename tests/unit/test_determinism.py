"""`--deterministic-mode` reaches torch, NCCL, cuBLAS and Transformer Engine."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.trainer.common.errors import UsageError
from megatron.trainer.config import Config
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.resilience import determinism
from megatron.trainer.train.callbacks import Callback, CallbackContext
from megatron.trainer.train.pretrain import pretrain
from tests.helpers.jobs import TINY
from tests.helpers.launch import run_in_fork

pytestmark = pytest.mark.unit

VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(determinism, "_set_here", {})
    for name in VARIABLES:
        # Set first, so that what a test leaves is taken back.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def config(*flags: str, cuda: bool = False, engine: bool = False) -> Config:
    args = parse_args([*TINY.split(), "--train-iters", "2", *flags])
    return resolve(args, 1, cuda_available=cuda, transformer_engine_available=engine)


def test_what_is_unset_on_gpus_is_set_with_a_note_also_in_a_second_run() -> None:
    asked = config("--deterministic-mode", cuda=True, engine=True)
    before = asked.runtime.notes
    for _ in range(2):
        notes = determinism.prepare(asked).runtime.notes
        assert [os.environ[name] for name in VARIABLES] == [":4096:8", "Ring", "0"]
        assert notes[: len(before)] == before
        assert [note.split()[1] for note in notes[len(before) :]] == list(VARIABLES)


def test_values_of_the_user_stay_without_a_note() -> None:
    for algorithm in ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS"):
        env: dict[str, str] = dict(zip(VARIABLES, (":16:8", algorithm, "0")))
        given = dict(env)
        assert determinism.set_environment(on_gpus=True, with_engine=True, env=env) == []
        assert env == given


def test_values_that_the_flag_excludes_are_refused_with_a_line_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in zip(VARIABLES, (":0:0", "NVLS", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as refused:
        pretrain(config("--deterministic-mode", cuda=True, engine=True))
    lines = str(refused.value).splitlines()
    assert [line.split()[2].rstrip(";") for line in lines] == [
        "CUBLAS_WORKSPACE_CONFIG=:0:0",
        "NCCL_ALGO=NVLS",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO=1",
    ]
    assert "Ring, Tree, CollnetDirect, CollnetChain, ^NVLS" in lines[1]
    # Layers that are not Transformer Engine's do not look at its variable.
    with pytest.raises(UsageError) as refused:
        pretrain(config("--deterministic-mode", cuda=True))
    assert len(str(refused.value).splitlines()) == 2


@pytest.mark.parametrize(("flags", "cuda"), [((), True), (("--deterministic-mode",), False)])
def test_without_the_flag_or_without_gpus_nothing_is_set(
    flags: tuple[str, ...], cuda: bool
) -> None:
    given = config(*flags, cuda=cuda, engine=cuda)
    assert determinism.prepare(given) is given
    assert not set(VARIABLES) & set(os.environ)


@pytest.mark.parametrize("device", ["auto", "cuda", "cpu"])
def test_a_rank_that_joins_its_world_early_is_ready_for_nccl(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    determinism.prepare_early(argparse.Namespace(deterministic_mode=False, device=device))
    assert "NCCL_ALGO" not in os.environ
    determinism.prepare_early(argparse.Namespace(deterministic_mode=True, device=device))
    assert os.environ.get("NCCL_ALGO") == (None if device == "cpu" else "Ring")


class Looks(Callback):
    """Notes in every step whether torch uses deterministic algorithms, and only warns."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool]] = []

    def on_grads_ready(self, context: CallbackContext, *_: Any, **__: Any) -> None:
        on = torch.are_deterministic_algorithms_enabled()
        self.seen.append((on, torch.is_deterministic_algorithms_warn_only_enabled()))


def seen_in_a_run(folder: Path, *flags: str) -> tuple[list[tuple[bool, bool]], bool]:
    looks = Looks()
    pretrain(config(*flags, "--run-dir", str(folder)), [looks])
    return looks.seen, torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("flags", "expected"), [(("--deterministic-mode",), (True, False)), ((), (False, False))]
)
def test_torch_uses_deterministic_algorithms_while_the_run_lasts(
    tmp_path: Path, flags: tuple[str, ...], expected: tuple[bool, bool]
) -> None:
    steps, after = run_in_fork(seen_in_a_run, tmp_path, *flags)
    assert steps == [expected] * 2 and after is False
