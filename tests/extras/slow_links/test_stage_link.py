"""Numbers in 8 bits with a scale for each row, and which messages are shorter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.trainer.extras.slow_links.stage_link import EightBits, StageLink

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


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 9])
def test_both_ends_count_the_gradients_that_travel_alone(
    monkeypatch: pytest.MonkeyPatch, stages: int, num_microbatches: int
) -> None:
    monkeypatch.setattr(torch.distributed, "get_global_rank", lambda group, rank: rank)

    def forms(stage: int, *, is_exact: bool = False, **kinds: int) -> dict[str, list[bool]]:
        """Which of the gradients that a stage sends and gets in a step go as factors."""
        group = SimpleNamespace(rank=lambda: stage, size=lambda: stages)
        config: Any = SimpleNamespace(virtual_pipeline_model_parallel_size=None)
        link = StageLink(group, config, **kinds)
        link.begin(num_microbatches, is_exact=is_exact)
        found: dict[str, list[bool]] = {"sent": [], "received": []}
        for _ in range(num_microbatches):
            # A forward message in between counts for nothing.
            assert link._codec((8, 1, 64), sends=False, receives=False) is None
            for name, sends in (("received", False), ("sent", True)):
                codec = link._codec((8, 1, 64), sends=sends, receives=not sends)
                found[name].append(codec is not None)
        return found

    for stage in range(stages - 1):
        alone = min(stages - 1 - stage, num_microbatches)
        want = [False] * (num_microbatches - alone) + [True] * alone
        assert forms(stage, message_rank=2)["received"] == want
        assert forms(stage + 1, message_rank=2)["sent"] == want
        exact = forms(stage + 1, message_rank=2, is_exact=True)
        longer = forms(stage + 1, message_rank=8)
        assert not any(exact["sent"]) and not any(longer["sent"])
