"""Messages of 8 bits between stages are tried in the running job, and taken where they pay. The
learning rate is tested in it, and stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.worker_message_trials import AFTER, LAST, PLACE, SAVED, TESTED, WARM_UP
from tests.helpers.on_ranks import on_ranks

pytestmark = pytest.mark.timeout(640)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("trials")
    on_ranks("worker_message_trials", folder, 2, timeout_s=600)
    return json.loads((folder / "result.json").read_text())


def trial_of(result: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fork and what it said, of a run that made one trial."""
    (fork,) = [r for r in result["journal"] if r["kind"] == "fork"]
    (said,) = [r for r in result["journal"] if r["kind"] == "messages"]
    assert fork["outcome"]["kind"] == "done"
    return fork, said


def test_a_trial_that_does_not_pay_changes_no_bit(results: dict[str, Any]) -> None:
    plain, whole = results["plain"]["losses"], results["whole"]["losses"]
    fork, said = trial_of(results["whole"])
    assert said["bits"] is None and fork["outcome"]["kept"] == 0
    first, steps = fork["iteration"], fork["outcome"]["branches"][0]["steps"]
    # The run goes on from the end of the branch whose messages are whole.
    assert set(plain) - set(whole) == {str(i) for i in range(first + 1, first + steps + 1)}
    assert first + steps < LAST and all(plain[i] == loss for i, loss in whole.items())
    assert "messages stay whole" in results["whole"]["out"]


def test_a_trial_that_pays_goes_on_with_short_messages(results: dict[str, Any]) -> None:
    plain, short = results["plain"]["losses"], results["short"]["losses"]
    fork, said = trial_of(results["short"])
    assert said["bits"] == 8 and fork["outcome"]["kept"] == 1
    first, last = fork["iteration"], fork["iteration"] + fork["outcome"]["branches"][1]["steps"]
    before = {i: loss for i, loss in short.items() if int(i) <= first}
    after = {i: loss for i, loss in short.items() if int(i) > last}
    assert after and all(plain[i] == loss for i, loss in before.items())
    assert all(plain[i] != loss for i, loss in after.items())
    assert all(plain[i] == pytest.approx(loss, rel=2e-2) for i, loss in after.items())
    assert "they are taken" in results["short"]["out"]


def test_all_ranks_know_what_was_found(results: dict[str, Any]) -> None:
    for name, bits in (("whole", None), ("short", 8), ("resumed", 8)):
        one, other = results[name]["states"]
        assert one == other
        controller, settings = json.loads(one)
        assert controller["pipeline_message_bits"] == settings["pipeline_message_bits"] == bits
        assert len(controller["message_trials_at"]) == 1


def test_a_resumed_run_goes_on_as_the_one_before(results: dict[str, Any]) -> None:
    short, resumed = results["short"]["losses"], results["resumed"]["losses"]
    assert len(resumed) == LAST - SAVED
    assert all(short[i] == loss for i, loss in resumed.items())
    assert not [r for r in results["resumed"]["journal"] if r["kind"] == "fork"]


def test_without_the_setting_messages_are_whole_again(results: dict[str, Any]) -> None:
    assert all(results["resumed"]["encoded"]) and not any(results["kept"]["encoded"])
    assert results["kept"]["losses"] != results["resumed"]["losses"]
    assert "messages between stages are whole from here on" in results["kept"]["out"]
    assert not [r for r in results["kept"]["journal"] if r["kind"] == "conditions"]


def test_observing_tries_nothing(results: dict[str, Any]) -> None:
    assert results["observed"]["losses"] == results["plain"]["losses"]
    assert not [r for r in results["observed"]["journal"] if "fork" in r["kind"]]
    assert not any(results["observed"]["encoded"])


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
