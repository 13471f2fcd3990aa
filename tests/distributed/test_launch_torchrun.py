"""The launcher of the distributed tests with torchrun: a collective, and one that hangs."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.helpers.launch import RanksHung, run_ranks

PROGRAM = """
import os
import time

import torch
import torch.distributed as dist

pytestmark = pytest.mark.waits

dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
print("sum", int(value))

def stays_away():
    time.sleep(600)

if os.environ.get("HANG") == os.environ["RANK"]:
    stays_away()
dist.all_reduce(value)
dist.destroy_process_group()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return path


def test_ranks_find_each_other(program: Path) -> None:
    result = run_ranks(program, 2, timeout_s=120, launcher="torchrun").check()
    assert result.stdout.count("sum 2") == 2


def test_a_hung_collective_shows_who_stays_away(program: Path) -> None:
    with pytest.raises(RanksHung) as hung:
        run_ranks(program, 2, timeout_s=30, env={"HANG": "1"}, launcher="torchrun")
    message = str(hung.value)
    assert message.count("sum 2") == 2
    assert "in stays_away" in message.split("stacks of rank1")[1]
    assert "in all_reduce" in message.split("stacks of rank0")[1].split("--- stacks")[0]
