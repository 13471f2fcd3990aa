"""The stub's NCCL below torch's own ProcessGroupNCCL."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_stub.launch import run_on_stub

WORKER = Path(__file__).with_name("worker_collectives.py")


@pytest.mark.parametrize(("ranks", "flags"), [(2, []), (4, []), (4, ["bound"])])
def test_collectives_give_what_a_cpu_computes(ranks: int, flags: list[str]) -> None:
    # No operation but those of NCCL computes here.
    env = {"STUB_KERNELS": "none"}
    result = run_on_stub([WORKER, *flags], ranks, timeout_s=300, env=env).check()
    assert result.stdout.count("all right") == ranks


def test_a_collective_of_other_sizes_is_told_and_ends(tmp_path: Path) -> None:
    program = tmp_path / "uneven.py"
    program.write_text(
        "import os, torch, torch.distributed as dist\n"
        "rank = int(os.environ['RANK'])\n"
        "torch.cuda.set_device(rank)\n"
        "dist.init_process_group('nccl')\n"
        "dist.all_reduce(torch.ones(3 + rank, device='cuda'))\n"
        "torch.cuda.synchronize()\n"
    )
    result = run_on_stub([program], 2, timeout_s=120)
    assert result.returncode != 0
    assert "all-reduce of 12 bytes" in result.stderr and "of 16" in result.stderr
