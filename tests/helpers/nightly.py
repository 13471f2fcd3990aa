"""Cases of a test that only the part `nightly` runs, and launches of ranks that leave them out."""

from __future__ import annotations

from typing import Any

import pytest

ALL = "all"
"""What a worker is told when it is to run every case."""


def case(*values: Any, daily: bool, id: str | None = None) -> Any:
    """Parameters of a test, with the mark `nightly` unless every commit runs them."""
    return pytest.param(*values, marks=() if daily else pytest.mark.nightly, id=id)


def words_of(request: pytest.FixtureRequest) -> list[str]:
    """`ALL` if a test that was chosen from this module is nightly; for a worker."""
    own = [item for item in request.session.items if item.path == request.path]
    return [ALL] if any(item.get_closest_marker("nightly") for item in own) else []
