"""Where the copies of a fork test lie, what memory they are said to need, and that it comes back.
Stand-ins count the memory of a GPU, which this machine lacks."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from copus_ext.controller import fork_test, peak_memory
from copus_ext.controller.fork_test import run_fork
from copus_ext.controller.peak_memory import PeakMemoryCallback, step_bytes
from copus_ext.reshard import kept_state
from copus_ext.reshard.kept_state import goes_to_host
from copus_ext.reshard.saved_state import TooLarge
from megatron.training.model.shards import KINDS, Shards
from tests.unit.test_peak_memory import context_of, on_gpus

JOB: Any = SimpleNamespace(device=SimpleNamespace(is_cuda=True), micro_batch_size=1)


class Gpu:
    """Bytes of a GPU and of its host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used = self.peak = 10_000
        self.free, self.host = 40_000.0, 10_000.0
        for name, call in {
            "memory_allocated": lambda: self.used,
            "max_memory_allocated": lambda: self.peak,
            "reset_peak_memory_stats": self.reset,
            "empty_cache": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, call)
        monkeypatch.setattr(kept_state, "free_bytes", lambda job: self.free)
        memory = lambda: SimpleNamespace(available=self.host)  # noqa: E731
        monkeypatch.setattr(kept_state.psutil, "virtual_memory", memory)
        monkeypatch.setattr(kept_state, "local_ranks", lambda: 1)
        monkeypatch.setattr(peak_memory, "_step_bytes_before", 0)

    def reset(self) -> None:
        self.peak = self.used

    def step(self, needs: int) -> None:
        self.peak = max(self.peak, self.used + needs)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def shards(*sizes: int) -> Shards:
    return Shards(
        records=[],
        tensors=[{kind: torch.zeros(size) for kind in KINDS} for size in sizes],
    )


def on_host(live: Shards, states: int = 1, micro_batch_size: int = 1) -> bool:
    return goes_to_host(
        JOB, live, states=states, micro_batch_size=micro_batch_size, step_bytes=step_bytes()
    )


def test_page_locked_copies_count_as_large_as_torch_makes_them(gpu: Gpu) -> None:
    """It takes the next power of two for each tensor."""
    gpu.free, live = 0.0, shards(257, 64)  # 1028 bytes, which take 2048, and 256
    needed = 4 * 2048 + 4 * 256
    gpu.host = needed
    assert on_host(live)
    gpu.host = needed - 1
    with pytest.raises(TooLarge):
        on_host(live)
    gpu.host = 7 * 2048 + 7 * 256  # of any number of states there is one average of the weights
    assert on_host(live, states=2)


def test_copies_on_the_gpu_count_as_they_are(gpu: Gpu) -> None:
    live = shards(257, 64)
    gpu.free = 4 * (257 + 64) * 4
    assert not on_host(live)
    gpu.free -= 1
    assert on_host(live)


def test_a_step_keeps_its_memory_when_its_peak_is_forgotten(gpu: Gpu) -> None:
    """The peak is forgotten at the end of a step, and a fork test may follow at once."""
    live = shards(64)
    gpu.step(39_000)
    assert on_host(live)
    peak_memory.forget_peaks()
    assert gpu.peak == gpu.used and on_host(live)
    peak_memory.forget_peaks()
    gpu.step(100)  # not a step, but a tensor of a callback
    assert on_host(live)


def test_what_an_earlier_configuration_needed_is_replaced_by_what_was_measured(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peak_memory, "broadcast_from_rank0", lambda value: value)
    monkeypatch.setattr(peak_memory, "peak_bytes_here", lambda: 0.0)
    monkeypatch.setattr(peak_memory.dist, "get_rank", lambda: 1)
    callback, live, here = PeakMemoryCallback(), shards(64), context_of(None, 1, run=on_gpus())
    here.run_dir = "a directory"
    callback.on_setup_start(here)
    gpu.step(39_000)  # of a larger micro-batch, or of a move
    callback.on_train_step_end(here)
    assert on_host(live)
    found = []
    for _ in range(3):
        gpu.step(1000)
        callback.on_train_step_end(here)
        found.append(on_host(live))
    assert found == [True, True, False]
    assert on_host(live, micro_batch_size=40), "in proportion to the micro-batch"


@pytest.mark.parametrize("lies_on_host", [True, False])
@pytest.mark.parametrize("is_built_for_gpus", [True, False])
def test_page_locked_memory_goes_back_to_the_system_after_a_fork_test(
    monkeypatch: pytest.MonkeyPatch, lies_on_host: bool, is_built_for_gpus: bool
) -> None:
    """torch would keep it. Nothing may use it any more by then."""
    left, found = list[Any](), list[int]()

    def run(fork: Any) -> str:
        one = [torch.zeros(1) for _ in range(3)]
        left[:] = map(weakref.ref, one)
        fork._on_host = lies_on_host
        fork._start, fork._average, fork._ends[0] = one
        forks.append(fork)
        return "result"

    def empty_cache() -> None:
        found.append(sum(one() is not None for one in left))

    forks: list[Any] = []  # whoever may still refer to them
    monkeypatch.setattr(fork_test._Fork, "run", run)
    for name in ("Consensus", "Deadline", "replace", "dist", "_seconds_of_rank_0"):
        monkeypatch.setattr(fork_test, name, mock.MagicMock())
    if is_built_for_gpus:
        monkeypatch.setattr(torch._C, "_host_emptyCache", empty_cache, raising=False)
    else:
        monkeypatch.delattr(torch._C, "_host_emptyCache", raising=False)
    run_fork(mock.MagicMock(), mock.MagicMock())
    assert [one() for one in left] == [None] * 3
    assert found == ([0] if lies_on_host and is_built_for_gpus else [])
