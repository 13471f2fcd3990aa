"""Stages that are a graph train the model of one rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.extras.graph_stages.worker import PLANS, REPLICAS, STEPS
from tests.helpers.on_ranks import on_ranks

CLOSE = 1e-6


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for ranks in (1, 3, 4):
        folder = tmp_path_factory.mktemp("graph")
        found |= on_ranks("tests.extras.graph_stages.worker", folder, ranks, timeout_s=240)
    return found


@pytest.mark.parametrize("plan", [*PLANS, *REPLICAS])
def test_losses_and_gradients_are_those_of_one_rank(runs: dict[str, Any], plan: str) -> None:
    own, alone = runs[plan], runs["one rank"]
    assert len(alone["losses"]) == STEPS
    assert own["losses"] == pytest.approx(alone["losses"], rel=CLOSE, abs=CLOSE)
    assert own["gradients"].keys() == alone["gradients"].keys()
    for name, values in alone["gradients"].items():
        assert own["gradients"][name] == pytest.approx(values, rel=CLOSE, abs=CLOSE), name


def test_the_model_learns(runs: dict[str, Any]) -> None:
    losses = runs["one rank"]["losses"]
    assert 5.0 < losses[0] < 6.2 and losses[-1] < losses[0] - 0.5
    # Every branch gets a gradient through the decoder.
    for branch in ("image.0 patches.weight", "words embedding.word_embeddings.weight"):
        assert runs["one rank"]["gradients"][branch][0] > 1e-6
