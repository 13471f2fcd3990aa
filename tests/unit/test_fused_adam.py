"""Our Adam against torch's, the shape of its state, and our norm of gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from megatron.core.utils import local_multi_tensor_l2_norm

from megatron.trainer.common.device import use_device
from megatron.trainer.optim.fused_adam import FusedAdam
from megatron.trainer.optim.optimizer import _l2_norm


def two_parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.nn.Parameter(torch.randn(5, 3, generator=generator)),
        torch.nn.Parameter(torch.randn(4, generator=generator)),
    ]


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_steps_equal_torch(adam_w_mode: bool) -> None:
    ours, theirs = two_parameters(), two_parameters()
    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    mine = FusedAdam(ours, adam_w_mode=adam_w_mode, **options)
    reference_class = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    reference = reference_class(theirs, foreach=False, **options)
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        mine.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_it_goes_on_from_a_state_of_torch() -> None:
    ours, theirs = two_parameters(), two_parameters()
    mine, reference = FusedAdam(ours, lr=0.01), torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.0)
    generator = torch.Generator().manual_seed(3)
    for i in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        reference.step()
        if i > 2:
            mine.step()
            continue
        for a, b in zip(ours, theirs, strict=True):
            a.data.copy_(b.data)
        mine.load_state_dict(copy.deepcopy(reference.state_dict()))
        assert mine.param_groups[0]["step"] == i + 1
        assert set(mine.state[ours[0]]) == {"exp_avg", "exp_avg_sq"}
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_state_holds_two_moments_and_the_group_an_integer_step() -> None:
    params = two_parameters()
    optimizer = FusedAdam(params)
    params[0].grad = torch.ones(5, 3)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1
    assert set(optimizer.state[params[0]]) == {"exp_avg", "exp_avg_sq"}
    assert all(s.shape == (5, 3) for s in optimizer.state[params[0]].values())
    assert params[1] not in optimizer.state


def test_the_step_rises_in_empty_groups_and_empty_shards_are_left_alone() -> None:
    empty = torch.nn.Parameter(torch.empty(0))
    empty.grad = torch.empty(0)
    optimizer = FusedAdam([{"params": []}, {"params": [empty]}])
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]


def test_options_it_does_not_honour_are_refused() -> None:
    with pytest.raises(ValueError, match="amsgrad"):
        FusedAdam(two_parameters(), amsgrad=True)
    with pytest.raises(ValueError, match="bias"):
        FusedAdam(two_parameters(), bias_correction=False)


def test_the_norm_is_that_of_megatron_core_bit_for_bit() -> None:
    torch.manual_seed(0)
    for count in (1, 5, 50):
        grads = [torch.randn(37 * i + 1) * 10.0 ** (i % 5 - 2) for i in range(count)]
        with use_device("cpu"):
            wanted, _ = local_multi_tensor_l2_norm(0, None, [grads], False)
        found, _ = _l2_norm(0, torch.zeros(1), [grads], False)
        assert found.shape == wanted.shape and found.dtype == wanted.dtype
        assert found.item() == wanted.item()
