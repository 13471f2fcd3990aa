"""Clipping without Transformer Engine and apex: the numbers of megatron-core, and no second
gradient."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from megatron.trainer.optim import optimizer

utils: Any = importlib.import_module("megatron.core.utils")


@pytest.fixture
def gradients() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(7)
    return [torch.randn(size, generator=draw) for size in (3, 70, 1)]


def test_products_are_those_of_megatron_core_and_in_place(gradients: list[torch.Tensor]) -> None:
    wanted = [tensor.clone() for tensor in gradients]
    places = [tensor.data_ptr() for tensor in gradients]
    utils.local_multi_tensor_scale(1, None, [wanted, wanted], 0.3)
    optimizer._scale(1, torch.zeros(1), [gradients, gradients], 0.3)
    assert all(map(torch.equal, gradients, wanted))
    assert [tensor.data_ptr() for tensor in gradients] == places


def test_another_list_gets_the_products_and_the_first_one_stays(
    gradients: list[torch.Tensor],
) -> None:
    before = [tensor.clone() for tensor in gradients]
    written = [torch.zeros_like(tensor) for tensor in gradients]
    optimizer._scale(1, torch.zeros(1), [gradients, written], 0.5)
    assert all(map(torch.equal, gradients, before))
    assert all(torch.equal(w, 0.5 * b) for w, b in zip(written, before))


def test_megatron_core_takes_it(gradients: list[torch.Tensor]) -> None:
    optimizer.use_clipping_on_device()
    clip_grads: Any = importlib.import_module("megatron.core.optimizer.clip_grads")
    assert clip_grads.multi_tensor_scale_impl is optimizer._scale
