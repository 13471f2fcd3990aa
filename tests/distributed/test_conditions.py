"""Ranks agree on what has become slow."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.on_ranks import on_ranks


def test_ranks_time_links_together_and_come_to_the_same_conditions(tmp_path: Path) -> None:
    one, other = on_ranks("worker_conditions", tmp_path, 2, timeout_s=120)
    assert one == other
    assert len(one["changed"]) == 1 and 45 < one["changed"][0] < 70
    assert one["usual"]["ring_s"] > 0 and one["usual"]["compute_s"] > 0
    assert not one["usual"]["is_one_node"] and one["link"] > 0
    assert '"kind": "conditions"' in (tmp_path / "journal.jsonl").read_text()
