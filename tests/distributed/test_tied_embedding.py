"""The tied embedding goes between the ends of a pipeline by shards: the same bits, fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.worker_tied_embedding import CASES, STEPS
from tests.helpers.on_ranks import ranks_fixture

rows = ranks_fixture("worker_tied_embedding", 4, timeout_s=400)


@pytest.mark.timeout(480)
@pytest.mark.parametrize("name", CASES)
def test_shards_give_the_same_bits_with_fewer_bytes(rows: dict[str, Any], name: str) -> None:
    whole, shards = rows[f"{name} whole"], rows[f"{name} shards"]
    assert len(shards["numbers"]) == STEPS and shards["numbers"] == whole["numbers"]
    # 512 rows of 32, and what fills the bucket up to its alignment.
    assert whole["elements"] == 512 * 32
    assert whole["elements"] / 2 <= shards["elements"] <= whole["elements"] / 2 + 512
