"""Ranks that share a sample drop what one rank with the whole sample drops."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.worker_dropout import CASES, LAYOUTS, whole_of
from tests.helpers.on_ranks import on_ranks


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder, found = tmp_path_factory.mktemp("dropout"), {}
    for ranks in LAYOUTS:
        found |= on_ranks("worker_dropout", folder, ranks, str(ranks), timeout_s=400)
    return found


@pytest.mark.parametrize(("model", "layout"), [c for c in CASES if whole_of(c[1]) != c[1]])
def test_loss_and_gradients_are_those_of_whole_samples(
    rows: dict[str, dict[str, Any]], model: str, layout: str
) -> None:
    row, whole = rows[f"{model} {layout}"], rows[f"{model} {whole_of(layout)}"]
    assert row["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    worst = max(row["distances"], key=row["distances"].__getitem__)
    assert row["distances"][worst] < 1e-6, worst


@pytest.mark.parametrize("model", ["llama", "gpt2", "latent"])
def test_something_is_dropped(rows: dict[str, dict[str, Any]], model: str) -> None:
    assert min(rows[f"{model} one"]["without dropout"].values()) > 1e-3
