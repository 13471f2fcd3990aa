"""`--copus --copus-mode observe` leaves the training as it is, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.worker_observe import DAILY, RUNS
from tests.helpers.nightly import case
from tests.helpers.on_ranks import ranks_fixture

runs = ranks_fixture("worker_observe", 2, timeout_s=560, has_nightly=True)


@pytest.mark.parametrize("name", [case(name, daily=name in DAILY) for name in RUNS])
def test_an_observed_run_is_the_plain_one(runs: dict[str, Any], name: str) -> None:
    plain, observed = runs[name], runs[f"{name} observed"]
    assert len(plain["steps"]) == 4
    for before, after in zip(plain["steps"], observed["steps"], strict=True):
        noise = after.pop("noise")
        assert noise is not None and before.pop("noise") is None
        assert after == before
    told = [note for note in observed["notes"] if note not in plain["notes"]]
    is_coupled = "balance" in name or name == "capacity"
    assert len(told) == is_coupled, told
    assert all("observe leaves the training as it is" in note for note in told)
