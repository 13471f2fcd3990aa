"""Ranks that cannot meet end with one line that names the variable and the fix."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.trainer.common.device import use_device
from megatron.trainer.common.errors import TrainingFailure, UsageError
from megatron.trainer.distributed.meeting import meeting_error
from megatron.trainer.distributed.process_groups import init_distributed
from megatron.trainer.resilience.env_checks import rank_problem

REPOSITORY = Path(__file__).parents[2]
FLAGS = """--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8
    --max-position-embeddings 8 --micro-batch-size 1 --global-batch-size 1 --lr 1e-3 --train-iters 1
    --mock-data --tokenizer-type ByteLevelTokenizer --device cpu"""
LISTEN = "The server socket has failed to listen on any local network address. port: 1, code: "


@pytest.fixture
def port() -> Iterator[str]:
    """One that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        yield str(free.getsockname()[1])


def meet(monkeypatch: pytest.MonkeyPatch, **env: str) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", **env}.items():
        monkeypatch.setenv(name, value)
    with use_device("cpu") as device:
        init_distributed(device, timeout_minutes=0.02)


def test_a_port_that_is_taken_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(UsageError, match=f"^MASTER_PORT {port} is in use on this machine; uns"):
            meet(monkeypatch, MASTER_PORT=port, RANK="0", WORLD_SIZE="1")
        with pytest.raises(UsageError, match=f"^MASTER_PORT {port} is in use.*give all ranks anot"):
            meet(monkeypatch, MASTER_PORT=port, RANK="0", WORLD_SIZE="2")


def test_ranks_that_do_not_come_are_counted(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        own = str(free.getsockname()[1])
    with pytest.raises(TrainingFailure, match=r"within 0\.02 min \(1/2 clients joined\.\); start "):
        meet(monkeypatch, MASTER_PORT=own, RANK="0", WORLD_SIZE="2")


def test_a_rank_that_finds_no_rank_0_says_where_it_looked(
    monkeypatch: pytest.MonkeyPatch, port: str
) -> None:
    said = f"rank 1 of 2 has met no rank 0 at MASTER_ADDR 127.0.0.1, MASTER_PORT {port} within"
    with pytest.raises(TrainingFailure, match=re.escape(said)):
        meet(monkeypatch, MASTER_PORT=port, RANK="1", WORLD_SIZE="2")


@pytest.mark.parametrize(
    ("text", "address", "kind", "said"),
    [
        (f"{LISTEN}-98, name: EADDRINUSE, message: address", "a", UsageError, "is in use"),
        (f"{LISTEN}-13, name: EACCES, message: permission", "a", UsageError, "may not be opened"),
        (f"{LISTEN}-99, name: EADDRNOTAVAIL", "a", UsageError, "cannot be opened"),
        ("Ping failed, invalid value returned", "127.0.0.1", UsageError, "another program answers"),
        ("The client socket has timed out", "no host", UsageError, "MASTER_ADDR no host is not"),
        ("The client socket has timed out", "127.0.0.1", TrainingFailure, "whether rank 0 runs"),
        ("Connection refused", "127.0.0.1", TrainingFailure, "whether rank 0 runs"),
        ("Broken pipe\nException raised from", "127.0.0.1", TrainingFailure, "6: Broken pipe"),
        ("", "127.0.0.1", TrainingFailure, "RuntimeError"),
    ],
)
def test_what_torch_says_is_told_by_the_variables(
    text: str, address: str, kind: type[Exception], said: str
) -> None:
    env = {"MASTER_ADDR": address, "MASTER_PORT": "6", "RANK": "1", "WORLD_SIZE": "2"}
    error = meeting_error(RuntimeError(text), env, timeout_minutes=10)
    assert type(error) is kind and said in str(error) and "\n" not in str(error)
    assert error.exit_code == (2 if kind is UsageError else 1)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({}, None),
        ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_PORT": "29500"}, None),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK is ''"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT is 'abc'"),
        ({"MASTER_PORT": "99999"}, "at most 65535"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "less than WORLD_SIZE"),
    ],
)
def test_variables_that_describe_no_rank_are_refused(env: dict[str, str], said: str | None) -> None:
    problem = rank_problem(env)
    assert problem is None if said is None else problem is not None and said in problem


def test_the_command_ends_with_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        env = {**os.environ, "MASTER_PORT": port, "PYTHONPATH": str(REPOSITORY)}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            env.pop(name, None)
        command = [sys.executable, str(REPOSITORY / "pretrain_gpt.py"), *FLAGS.split()]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "MASTER_PORT" in line]
    assert line.startswith(f"pretrain_gpt.py: error: MASTER_PORT {port} is in use")
    assert "Traceback" not in done.stderr
