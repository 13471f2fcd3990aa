"""What is asked of a run by files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.trainer.common.control import (
    SAVE_FILE,
    STOP_FILE,
    TIME_LIMIT,
    Control,
    job_of,
    remove_stale,
    supervised_launch,
)
from megatron.trainer.common.signals import stop_reason


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / STOP_FILE).parent.mkdir()
    return tmp_path


def reason(control: Control) -> str | None:
    """Why a rank would leave."""
    found = stop_reason(
        iteration=1,
        elapsed_s=0,
        exit_interval=None,
        exit_duration_in_mins=None,
        received=None,
        stop_file=control.stop_asked(),
    )
    return None if found is None else found.kind


@pytest.mark.parametrize(
    ("text", "kind"), [("", "file"), (f"{TIME_LIMIT}\n", "time-limit"), ("maintenance", "file")]
)
def test_a_stop_file_is_seen_and_stays_seen(run: Path, text: str, kind: str) -> None:
    control = Control(run, look_s=0)
    assert reason(control) is None
    (run / STOP_FILE).write_text(text)
    assert reason(control) == kind
    control.stop_obeyed()
    assert not (run / STOP_FILE).exists()
    assert reason(control) == kind, "ranks look at different times"


def test_a_rank_looks_at_most_so_often(run: Path) -> None:
    control = Control(run, sees_save=True, look_s=1000)
    assert control.stop_asked() is None
    (run / STOP_FILE).touch()
    (run / SAVE_FILE).touch()
    assert control.stop_asked() is None and not control.save_asked()
    assert Control(run).stop_asked() == ""


def test_a_save_is_asked_for_once(run: Path) -> None:
    control, other = Control(run, sees_save=True, look_s=0), Control(run, look_s=0)
    assert not control.save_asked()
    (run / SAVE_FILE).touch()
    assert control.save_asked() and not other.save_asked()
    other.save_obeyed()
    assert control.save_asked(), "the rank that sees it takes it away"
    control.save_obeyed()
    assert not (run / SAVE_FILE).exists() and not control.save_asked()
    (run / SAVE_FILE).mkdir()
    assert control.save_asked()
    control.save_obeyed()
    assert not control.save_asked(), "what cannot be taken away asks no second time"


def test_odd_stop_files_hold_nobody_up(run: Path) -> None:
    os.mkfifo(run / STOP_FILE)
    assert Control(run).stop_asked() == ""
    (run / STOP_FILE).unlink()
    (run / STOP_FILE).symlink_to("/etc/hostname")
    assert Control(run).stop_asked() == ""
    assert Control(run / "nowhere").stop_asked() is None
    assert Control().stop_asked() is None


def test_what_an_earlier_run_was_asked_goes(run: Path) -> None:
    assert remove_stale(run) == []
    (run / STOP_FILE).touch()
    (run / SAVE_FILE).touch()
    assert remove_stale(run) == [str(STOP_FILE), str(SAVE_FILE)]
    assert list((run / STOP_FILE).parent.iterdir()) == []


def test_names_of_launches() -> None:
    assert supervised_launch({"COPUS_LAUNCH": "123.0.1"}) == "123.0.1"
    assert supervised_launch({"COPUS_LAUNCH": "no/name"}) is None
    assert supervised_launch({}) is None
    assert job_of("a.b-7.0.12") == "a.b-7"
