"""Every element comes to its place whatever the messages look like."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.worker_transfer import WAYS
from tests.helpers.on_ranks import ranks_fixture

pytestmark = pytest.mark.timeout(360)

results = ranks_fixture("worker_transfer", 4, timeout_s=300)
"""By rank, all changes."""


@pytest.mark.parametrize("way", WAYS)
def test_every_element_is_where_it_belongs(results: Any, way: str) -> None:
    rows = [row for own in results for row in own if row["way"] == way]
    assert rows and [row for row in rows if not row["is_equal"]] == []


def test_parts_of_a_buffer_come_to_all(results: Any) -> None:
    for own in results:
        found = [row["is_equal"] for row in own if row["way"] == "gather"]
        assert len(found) == 12 and all(found)


def test_windows_and_buffers_were_full(results: Any) -> None:
    from copus_ext.reshard.transfer import BUFFERS, WINDOW

    def most(way: str, name: str) -> int:
        return max(row[name] for own in results for row in own if row["way"] == way)

    assert most("alone", "most_under_way") == most("many", "most_under_way") == WINDOW
    # More where a message is side by side anyway.
    assert most("small packed", "most_under_way") >= BUFFERS
    # One to each other rank.
    assert most("packed", "num_messages") <= 3 < most("small packed", "num_messages")
