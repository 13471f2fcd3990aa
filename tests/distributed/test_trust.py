"""A checkpoint runs no code and leads nowhere else, and a run goes on with its own data."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.on_ranks import ranks_fixture

ALL = [1, 2, 3, 4]

told = ranks_fixture("worker_trust", 1, timeout_s=600)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("index", ["TrainingFailure", "/index/", ".metadata", "io.open"]),
        ("common", ["TrainingFailure", "/common/", "common.pt"]),
        ("common arguments", ["/common/", "common.pt"]),
        ("places", ["TrainingFailure", "/places/", "outside"]),
        ("link", ["TrainingFailure", "/link/", "outside"]),
        ("weighted", ["UsageError", "--data-path names 1 data set of weights 3 instead of 1"]),
        ("twice", ["UsageError", "2 data sets instead of 1"]),
        ("by split", ["UsageError", "--split"]),
        ("weights", ["TrainingFailure", "no state of the optimizer", "--no-load-optim"]),
        ("other split", ["UsageError", "--split is 80,20,0 % instead of 100,0,0 %", "--allow-ch"]),
        ("same size", ["UsageError", "data.bin has other contents", "--allow-changed-data"]),
        ("other data", ["UsageError", "data.bin has", "--allow-changed-data"]),
    ],
)
def test_what_somebody_tampered_with_is_refused_by_name(
    told: dict[str, dict[str, Any]], name: str, words: list[str]
) -> None:
    assert isinstance(told[name]["result"], str)
    assert [word for word in words if word not in told[name]["result"]] == [], told[name]


def test_nothing_in_a_checkpoint_is_run(told: dict[str, dict[str, Any]]) -> None:
    touched = {name for name, case in told.items() if case["touched"]}
    assert touched == {"control index", "control common", "control objects"}


@pytest.mark.parametrize(
    "name",
    [
        *("objects", "of Megatron-LM", "same data", "moved", "linked", "relative", "same split"),
        "other split allowed",
        "weights, new moments",
        *("same size allowed", "other data allowed", "other data, another run"),
    ],
)
def test_what_does_no_harm_is_loaded(told: dict[str, dict[str, Any]], name: str) -> None:
    assert told[name]["result"][-2:] == ALL[-2:], told[name]


@pytest.mark.parametrize("name", ["moved", "linked", "relative", "same split"])
def test_where_data_lies_changes_nothing(told: dict[str, dict[str, Any]], name: str) -> None:
    assert told[name]["losses"] == told["same data"]["losses"] != []
    assert not [x for x in told[name]["notes"] if "data" in x]


def test_data_that_is_changed_by_leave_is_told(told: dict[str, dict[str, Any]]) -> None:
    (note,) = [x for x in told["other split allowed"]["notes"] if "the data is not" in x]
    assert "--split is 80,20,0 % instead of 100,0,0 %" in note


def test_a_checkpoint_that_tells_nothing_of_its_data_is_loaded(
    told: dict[str, dict[str, Any]],
) -> None:
    assert told["old checkpoint"]["result"] == ALL
    (note,) = (x for x in told["old checkpoint"]["notes"] if "data" in x)
    assert "does not say what data it was trained on" in note
    assert not [x for x in told["same data"]["notes"] if "data" in x]
