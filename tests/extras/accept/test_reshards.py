"""Changes of layout in one process keep every bit, and tell where one did not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from copus_ext.extras.accept import one, reshards
from copus_ext.reshard.ownership import all_of_layout
from copus_ext.reshard.parameters import shape_of
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.layout import Layout
from megatron.trainer.model.shards import KINDS, Shards
from tests.helpers.jobs import TINY

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def config() -> Any:
    flags = TINY.replace("--pad-vocab-for-tensor-parallel-size 4", "--padded-vocab-size 128")
    own = ["--train-iters", "2", "--use-distributed-optimizer"]
    return resolve(parse_args([*flags.split(), *own]), 1)


@pytest.fixture(scope="module")
def live(config: Any) -> Shards:
    """The state of one rank: random bits, not only numbers."""
    (records,) = all_of_layout(shape_of(config), Layout.from_text("tp1.pp1.dp1"))
    ends: dict[int, int] = {}
    for record in records:
        ends[record.shard] = max(ends.get(record.shard, 0), record.offset + record.numel)
    torch.manual_seed(1)
    tensors = [
        {
            kind: torch.randint(-(2**31), 2**31, (ends[shard],), dtype=torch.int64)
            .to(torch.int32)
            .view(torch.float32)
            for kind in KINDS
        }
        for shard in sorted(ends)
    ]
    return Shards(records=records, tensors=tensors)


def test_every_bit_comes_back(config: Any, live: Shards) -> None:
    shape, ranks = shape_of(config), [live]
    for text in one._WALK:
        records = all_of_layout(shape, Layout.from_text(text))
        ranks = reshards.moved(ranks, records, shape)
        assert len(ranks) == len(records)
    (end,) = ranks
    for own, before in zip(end.tensors, live.tensors, strict=True):
        for kind in KINDS:
            assert torch.equal(own[kind].view(torch.int32), before[kind].view(torch.int32))
    assert reshards.compared(config, live, one._WALK) == {"as_before": True, "as_on_cpu": True}


def test_what_is_forgotten_on_the_way_is_told(
    config: Any, live: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry_out, calls = reshards._carry_out, [0]

    def forget_one(*args: Any) -> None:
        calls[0] += 1
        # Of a tensor that is cut: of copies that differ it would tell otherwise.
        if calls[0] != 1:
            carry_out(*args)

    monkeypatch.setattr(reshards, "_carry_out", forget_one)
    found = reshards.compared(config, live, one._WALK[-1:])
    assert found == {"as_before": False, "as_on_cpu": False}
