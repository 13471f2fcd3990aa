"""The CPU stand-in answers megatron-core's CUDA questions and leaves nothing behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from megatron.core.fusions import fused_softmax
from megatron.core.tensor_parallel import random as core_random

from megatron.trainer.common.device import use_device
from megatron.trainer.distributed import process_groups
from megatron.trainer.model.gpt import _let_go_of_values
from tests.helpers.one_rank import cpu_of_one

PATCHED = [
    (torch.cuda, "current_device"),
    (torch.cuda, "Event"),
    (torch.cuda, "synchronize"),
    (torch.cuda, "empty_cache"),
    (torch.cuda, "get_rng_state"),
    (torch.cuda, "set_rng_state"),
    (torch.cuda, "manual_seed"),
    (torch.cuda.random, "get_rng_state"),
    (core_random, "_get_cuda_rng_state"),
    (core_random, "_set_cuda_rng_state"),
    (dist.ProcessGroupGloo, "__init__"),
    (fused_softmax, "get_default_causal_mask"),
    (fused_softmax, "get_sliding_window_causal_mask"),
]


@pytest.fixture
def world() -> Iterator[Any]:
    with cpu_of_one():
        yield dist.new_group([0], timeout=timedelta(seconds=77))


def test_a_gloo_group_runs_one_collective_at_a_time(world: Any) -> None:
    options = world._get_backend(torch.device("cpu")).options
    assert options._threads == 1 and options._timeout == timedelta(seconds=77)
    ones = torch.ones(3)
    works: list[Any] = [dist.all_reduce(ones, group=world, async_op=True) for _ in range(4)]
    assert all(work.wait() for work in works) and ones.tolist() == [1.0] * 3


def test_a_gloo_group_listens_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(names: str) -> Any:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
        return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=9))

    with use_device("cpu"):
        assert len(make("lo").options._devices) == 1
        assert len(make("lo,lo").options._devices) == 2
        with pytest.raises(RuntimeError, match="nosuch0"):
            make("nosuch0")


def test_gloo_groups_share_one_thread_for_their_sockets(world: Any) -> None:
    first, before = dist.new_group([0]), psutil.Process().num_threads()
    more = [dist.new_group([0]) for _ in range(5)]
    # One each for collectives.
    assert psutil.Process().num_threads() <= before + 5
    for group in (first, *more):
        ones = torch.ones(3)
        dist.all_reduce(ones, group=group)
        assert ones.tolist() == [1.0] * 3


def test_cuda_means_cpu_inside_and_nothing_stays_outside() -> None:
    before = [getattr(owner, name) for owner, name in PATCHED]
    with use_device("cpu") as device:
        assert device.backend == "gloo" and not device.is_cuda
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        time.sleep(0.01)
        end.record()
        end.synchronize()
        assert begin.elapsed_time(end) >= 10
        tensor = torch.zeros(2)
        assert tensor.cuda() is tensor
        assert tensor.to("cuda:0").device.type == "cpu"
        assert tensor.type() == "torch.cuda.FloatTensor"
        assert tensor.to(torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())
    assert [getattr(owner, name) for owner, name in PATCHED] == before
    assert torch.zeros(2).type() == "torch.FloatTensor"


def test_masks_of_layers_that_are_computed_again_are_on_the_cpu() -> None:
    masks: list[torch.Tensor] = []

    class Again(torch.autograd.Function):
        """Makes masks in its backward pass."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            masks.append(fused_softmax.get_default_causal_mask(3))
            masks.append(fused_softmax.get_sliding_window_causal_mask(3, 3, (1, 0)))
            return grad

    with use_device("cpu"):
        torch.autograd.backward(Again.apply(torch.ones(1, requires_grad=True)))
    causal, window = (mask.int().tolist() for mask in masks)
    assert causal == [[0, 1, 1], [0, 0, 1], [0, 0, 0]]
    assert window == [[0, 1, 1], [0, 0, 1], [1, 0, 0]]


def test_everything_is_restored_after_an_error() -> None:
    before = [getattr(owner, name) for owner, name in PATCHED]
    with pytest.raises(KeyError), use_device("cpu"):
        raise KeyError
    assert [getattr(owner, name) for owner, name in PATCHED] == before


@pytest.mark.parametrize(("kind", "backend"), [("tpu", None), ("cpu", "nccl")])
def test_what_cannot_be_is_refused(kind: str, backend: str | None) -> None:
    with pytest.raises(ValueError, match="--d"), use_device(kind, backend=backend):
        pass


def test_groups_that_linger_are_waited_for_later() -> None:
    may_end, ended = threading.Event(), threading.Event()

    class Slow:
        """Ends as a gloo group does: when its thread has noticed."""

        def __del__(self) -> None:
            assert may_end.wait(30)
            ended.set()

    process_groups._let_go([Slow()], linger=True)
    assert not ended.is_set()
    may_end.set()
    process_groups.await_closed()
    assert ended.is_set()


def test_weights_that_nobody_has_set_take_no_memory() -> None:
    layer = torch.nn.Linear(64, 32)
    layer.bias.requires_grad_(False)
    weight, bias = layer.weight, layer.bias.clone()
    _let_go_of_values(layer)
    assert layer.weight is weight and weight.shape == (32, 64)
    assert weight.untyped_storage().nbytes() == weight.element_size()
    assert torch.equal(layer.bias, bias)
