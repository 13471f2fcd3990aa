"""What a supervisor is told when a run ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from copus_ext.reshard.relaunch import (
    REQUEST_FILE,
    Request,
    exit_code,
    read_request,
    report_exit,
    write_request,
)
from megatron.training.common.errors import Relaunch, TrainingFailure
from megatron.training.common.signals import StopReason
from megatron.training.common.train_state import TrainState
from megatron.training.config.layout import Layout
from megatron.training.resilience.exit_status import RunOutcome

LAUNCH = "job.0.3"
SIGNAL = StopReason(kind="signal", signal="SIGUSR1")
FULL = TrainingFailure("the disk is full")
ENDS = [
    (None, None, "saved", "done", 0, "complete"),
    (StopReason(kind="interval"), None, "saved", "done", 0, "--exit-interval"),
    (StopReason(kind="duration"), None, None, "done", 0, "--exit-duration-in-mins"),
    (StopReason(kind="callback", text="enough"), None, "saved", "done", 0, "enough"),
    (SIGNAL, None, "saved", "requeue", 85, "SIGUSR1"),
    (StopReason(kind="file"), None, "saved", "requeue", 85, "control/stop"),
    (StopReason(kind="time-limit"), None, "saved", "requeue", 85, "time limit"),
    (SIGNAL, None, None, "done", 0, "nothing of it is kept without --save"),
    (None, FULL, "saved", "abort", None, "the disk is full"),
    (None, TrainingFailure("a link", restart_helps=True), "saved", None, None, ""),
    (None, Relaunch("a rank is dead"), "saved", None, None, ""),
    (StopReason(kind="relayout", text="to tp2"), None, "saved", None, 0, ""),
]


@pytest.fixture(params=ENDS, ids=lambda end: f"{end[0] or end[1] or 'done'}-{end[2]}")
def end(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[RunOutcome, str | None, int, str]:
    reason, failure, save, kind, code, words = request.param
    outcome = RunOutcome(
        state=TrainState(iteration=7, consumed_samples=56),
        run_dir=tmp_path,
        layout=Layout(tp=2, pp=1, vpp=1, dp=1),
        save=save,
        reason=reason,
        failure=failure,
    )
    return outcome, kind, code, words


def test_a_supervisor_is_told_why(
    end: tuple[RunOutcome, str | None, int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome, kind, code, words = end
    monkeypatch.setenv("COPUS_LAUNCH", LAUNCH)
    report_exit(outcome)
    found = read_request(outcome.run_dir, launch=LAUNCH)
    assert (found and found.kind) == kind
    if found is not None:
        assert words in found.line and found.iteration == 7 and found.consumed_samples == 56
        assert found.checkpoint == outcome.save and found.layout == outcome.layout
    if outcome.failure is None:
        assert exit_code(outcome) == code


def test_without_one_nothing_changes(
    end: tuple[RunOutcome, str | None, int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COPUS_LAUNCH", raising=False)
    report_exit(end[0])
    assert not (end[0].run_dir / REQUEST_FILE).exists()
    assert exit_code(end[0]) == 0


def test_a_controllers_own_request_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPUS_LAUNCH", LAUNCH)
    layout = Layout(tp=1, pp=2, vpp=1, dp=1)
    own = Request(
        launch=LAUNCH,
        kind="relayout",
        iteration=7,
        consumed_samples=56,
        reason="faster",
        layout=layout,
        checkpoint="saved",
    )
    write_request(tmp_path, own)
    reason = StopReason(kind="relayout", text="faster")
    report_exit(
        RunOutcome(state=TrainState(), run_dir=tmp_path, layout=layout, save="saved", reason=reason)
    )
    assert read_request(tmp_path, launch=LAUNCH) == own


def test_that_it_cannot_be_told_fails_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("COPUS_LAUNCH", LAUNCH)
    (tmp_path / "control").write_text("no directory")
    layout = Layout(tp=1, pp=1, vpp=1, dp=1)
    report_exit(RunOutcome(state=TrainState(), run_dir=tmp_path, layout=layout, save=None))
    assert "complete" in caplog.text
