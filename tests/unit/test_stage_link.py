"""Numbers in 8 bits with a scale for each row."""

from __future__ import annotations

import torch

from megatron.training.distributed.stage_link import EightBits

CODEC = EightBits()


def test_an_entry_is_off_by_half_a_part_at_most() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(5, 2, 64) * torch.logspace(-20, 3, 5).view(5, 1, 1)
    message = CODEC.encode(tensor)
    assert message.dtype == torch.int8 and message.shape == (10, 68)
    again = CODEC.decode(message, tensor.shape, torch.float32)
    part = tensor.abs().amax(dim=-1, keepdim=True) / 127
    assert ((again - tensor).abs() <= part / 2 * 1.0001).all()
    assert torch.equal(CODEC.encode(again), message), "rounded numbers stay"


def test_zeros_and_what_is_not_finite() -> None:
    tensor = torch.zeros(3, 8)
    tensor[1, 2], tensor[2, 3] = torch.nan, torch.inf
    again = CODEC.decode(CODEC.encode(tensor), tensor.shape, torch.bfloat16)
    assert again.dtype == torch.bfloat16 and not again[0].any()
    assert again[1:3].isnan().all()
