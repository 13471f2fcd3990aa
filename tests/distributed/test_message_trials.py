"""The learning rate is tested in the running job, and stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.worker_message_trials import AFTER, PLACE, TESTED, WARM_UP
from tests.helpers.on_ranks import on_ranks

pytestmark = pytest.mark.timeout(640)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("trials")
    on_ranks("worker_message_trials", folder, 2, timeout_s=600)
    return json.loads((folder / "result.json").read_text())


def test_a_test_of_the_learning_rate_changes_no_bit(results: dict[str, Any]) -> None:
    plain, tested = results["plain warming"]["losses"], results["tested"]["losses"]
    (fork,) = [r for r in results["tested"]["journal"] if r["kind"] == "fork"]
    (said,) = [r for r in results["tested"]["journal"] if r["kind"] == "lr_test"]
    factors = [b["branch"]["lr_factor"] for b in fork["outcome"]["branches"]]
    first, steps = fork["iteration"], fork["outcome"]["branches"][0]["steps"]
    assert fork["outcome"]["kind"] == "done" and fork["outcome"]["kept"] == 0
    assert factors == [1.0, 0.5, 2.0]
    assert first >= PLACE[0] * WARM_UP and first + steps <= WARM_UP
    # The run goes on from the end of its own branch, with its own rate.
    assert set(plain) - set(tested) == {str(i) for i in range(first + 1, first + steps + 1)}
    assert len(tested) == AFTER - steps
    assert all(plain[i] == loss for i, loss in tested.items())
    losses = said["verdict"]["losses"]
    assert len(set(losses)) == 3, "each branch has its own rate"
    assert said["line"] in results["tested"]["out"]


def test_it_is_not_made_again_after_a_resume(results: dict[str, Any]) -> None:
    resumed, tested = results["tested, resumed"], results["tested"]
    assert not [r for r in resumed["journal"] if r["kind"] in ("fork", "lr_test")]
    decided = [r["iteration"] for r in resumed["journal"] if r["kind"] == "decision"]
    assert any(TESTED < i <= PLACE[1] * WARM_UP for i in decided), "it could be made again"
    assert len(resumed["losses"]) == AFTER - TESTED
    assert all(tested["losses"][i] == loss for i, loss in resumed["losses"].items())
    one, other = tested["states"]
    assert one == other and json.loads(one)[0]["lr_tested_at"]
