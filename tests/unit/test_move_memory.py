"""What a change of layout needs on GPUs, and what it took, with the figures of an allocator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from copus_ext.megatron_lm import move_memory
from copus_ext.reshard import saved_state
from copus_ext.reshard.peak import MovePeak
from copus_ext.reshard.saved_state import TooLarge, check_memory, free_bytes, num_communicators
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.layout import Layout
from tests.helpers.jobs import TINY

GB = 10**9


class Gpu:
    """The counters of one GPU of 80 GB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.outside, self.reserved, self.allocated, self.most = 1 * GB, 60 * GB, 40 * GB, 60 * GB
        self.holes = 2 * GB
        for name, value in {
            "is_initialized": lambda: True,
            "mem_get_info": lambda: (80 * GB - self.outside - self.reserved, 80 * GB),
            "memory_reserved": lambda: self.reserved,
            "memory_allocated": lambda: self.allocated,
            "max_memory_reserved": lambda: self.most,
            "reset_peak_memory_stats": self.forget,
            "empty_cache": self.give_back,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def forget(self) -> None:
        self.most = self.reserved

    def give_back(self) -> None:
        self.reserved = self.allocated + self.holes

    def take(self, reserved: int, outside: int, most: int | None = None) -> None:
        self.reserved, self.outside, self.most = reserved, outside, most or max(self.most, reserved)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def job() -> Any:
    return SimpleNamespace(
        device=SimpleNamespace(is_cuda=True), model=SimpleNamespace(chunks=[]), features=[]
    )


def test_holes_of_the_allocator_are_not_free(gpu: Gpu) -> None:
    assert free_bytes(is_cuda=True) == 80 * GB - 1 * GB - 42 * GB
    assert gpu.reserved == 42 * GB, "what it keeps for nothing is given back first"


def test_buffers_of_nccl_count(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A move that fits but for them would end out of memory, with the old groups gone."""
    gpu.outside, gpu.allocated, gpu.holes = 1 * GB, 76 * GB, 0
    monkeypatch.setattr(saved_state.dist, "get_rank", lambda: 0)
    plan: Any = SimpleNamespace(source=[[]], target=[[]], target_bytes=[int(0.5 * GB)])
    flags = [*TINY.split(), "--train-iters", "1", "--tensor-model-parallel-size", "2"]
    config = resolve(parse_args(flags), 4)
    monkeypatch.setattr(saved_state.dist, "get_backend", lambda: "gloo")
    check_memory(job(), plan, config)
    monkeypatch.setattr(saved_state.dist, "get_backend", lambda: "nccl")
    with pytest.raises(TooLarge, match=r"^3\.11 GB are needed .* 3\.00 GB are free"):
        check_memory(job(), plan, config)


def test_a_checkout_is_refused_a_change_that_does_not_fit(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.outside, gpu.allocated, gpu.holes = 1 * GB, 76 * GB, 0
    monkeypatch.setattr(saved_state.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(saved_state.dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(move_memory, "free_bytes", lambda is_cuda: free_bytes(is_cuda=True))
    flags = [*TINY.split(), "--train-iters", "1", "--tensor-model-parallel-size", "2"]
    target: Any = resolve(parse_args(flags), 4)
    with pytest.raises(TooLarge, match=r"^2\.61 GB are needed .* 2\.50 GB are free"):
        gpu.outside += GB // 2
        move_memory.check_memory(target, [])
    gpu.outside -= GB // 2
    move_memory.check_memory(target, [])


@pytest.mark.parametrize(
    ("layout", "number"),
    [(Layout(), 0), (Layout(dp=8), 2), (Layout(tp=4, pp=2), 3), (Layout(tp=2, cp=2, dp=2), 4)],
    ids=str,
)
def test_each_kind_of_group_has_a_communicator(layout: Layout, number: int) -> None:
    assert num_communicators(layout) == number


def test_the_peak_of_a_move_has_what_nccl_took_and_gave_back(gpu: Gpu) -> None:
    peak = MovePeak()
    gpu.take(reserved=70 * GB, outside=1 * GB)
    peak.look()
    # The old groups are gone: the highest of before must not meet the buffers of now.
    gpu.take(reserved=50 * GB, outside=8 * GB)
    gpu.forget()
    peak.look()
    assert peak.bytes == 71 * GB
    gpu.take(reserved=60 * GB, outside=8 * GB, most=66 * GB)
    peak.look()
    assert peak.bytes == 74 * GB


def test_a_process_without_a_gpu_has_no_peak() -> None:
    peak = MovePeak()
    peak.look()
    assert peak.bytes == 0.0
