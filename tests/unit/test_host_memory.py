"""Copies beside the computation: what waits for what on a GPU, and which room is used again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.trainer.common.host_memory import HostMemory


class Gpu:
    """Streams that note what they are told, and the pages that are locked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[tuple[str, str, str]] = []
        self.locked: list[int] = []
        self.may_lock, self.error = True, 0
        self.main = self.now = self.stream("main")
        runtime = SimpleNamespace(cudaHostRegister=self.lock, cudaHostUnregister=self.locked.remove)
        for name, value in {
            "is_initialized": lambda: True,
            "current_stream": lambda: self.now,
            "Stream": lambda: self.stream("side"),
            "Event": self.event,
            "stream": self.on,
            "cudart": lambda: runtime,
            "current_device": lambda: 0,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch, "ones", self.launch)

    def stream(self, name: str) -> Any:
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.told.append((name, "waits for", other.name)),
            wait_event=lambda event: self.told.append((name, "waits for", event.name)),
        )

    def event(self) -> Any:
        event = SimpleNamespace(name="nothing")

        def record() -> None:
            event.name = f"copies on {self.now.name}"
            self.told.append((self.now.name, "marks", event.name))

        event.record = record
        event.synchronize = lambda: self.told.append(("host", "waits for", event.name))
        return event

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before

    def lock(self, place: int, size: int, flags: int) -> int:
        assert size == 24 and flags == 0
        if self.may_lock:
            self.locked.append(place)
        self.error = 0 if self.may_lock else 2
        return self.error

    def launch(self, *shape: int, device: int) -> None:
        """As CUDA does, tells of the last error of any call, once."""
        assert device == 0
        error, self.error = self.error, 0
        if error:
            raise torch.OutOfMemoryError("CUDA error: out of memory")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_copies_wait_for_what_made_the_state_and_writing_waits_for_the_copies(gpu: Gpu) -> None:
    memory = HostMemory()
    with memory.copying():
        assert gpu.now.name == "side"
    memory.before_write()
    memory.wait()
    assert gpu.told == [
        ("side", "waits for", "main"),
        ("side", "marks", "copies on side"),
        ("main", "waits for", "copies on side"),
        ("host", "waits for", "copies on side"),
    ]


def test_room_is_locked_once_and_used_again(gpu: Gpu) -> None:
    memory = HostMemory()
    first, second = memory.empty(2, 3), memory.empty(2, 3)
    assert gpu.locked == [first.data_ptr(), second.data_ptr()]
    memory.give_back(first)
    assert memory.empty(2, 3) is first, "two are enough: one is there while the other is filled"
    assert len(gpu.locked) == 2


def test_room_of_another_layout_is_let_go_and_unlocked(gpu: Gpu) -> None:
    memory = HostMemory()
    memory.give_back(memory.empty(2, 3))
    assert len(gpu.locked) == 1
    other = memory.empty(3, 2)
    gc.collect()
    assert gpu.locked == [other.data_ptr()]


def test_room_that_cannot_be_locked_is_room(gpu: Gpu) -> None:
    gpu.may_lock = False
    room = HostMemory().empty(2, 3)
    assert room.shape == (2, 3)
    gpu.launch(1, device=0)  # of the next kernel, which has nothing to do with it
    del room
    assert gpu.locked == []


def test_without_a_gpu_room_is_new_and_copies_are_there_at_once() -> None:
    memory, source = HostMemory(), torch.arange(6.0).view(2, 3)
    room = memory.empty(2, 3)
    with memory.copying():
        room.copy_(source, non_blocking=True)
    memory.before_write()
    memory.wait()
    memory.give_back(room)
    assert torch.equal(room, source) and memory.empty(2, 3) is not room
