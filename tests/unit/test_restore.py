"""Which checkpoint a run goes on from, and what it must not meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.training import checkpoint_files as files
from megatron.training.data_identity import changes, identity_of
from megatron.training.errors import TrainingFailure
from megatron.training.restore import choices


def make(root: Path, iteration: int) -> Path:
    """A checkpoint without contents that was written to the end, and is the latest."""
    folder = files.begin(root, iteration)
    (folder / files.CORE_MARK).write_text("{}")
    files.finish(root, iteration, {})
    return folder


@pytest.fixture
def save(tmp_path: Path) -> Path:
    for iteration in (2, 4, 6):
        make(tmp_path, iteration)
    return tmp_path


def test_the_latest_comes_first_and_older_ones_stand_in_for_it(save: Path) -> None:
    assert choices(save, step=None, fallback=True) == ([6, 4, 2], [])
    assert choices(save, step=None, fallback=False) == ([6], [])
    assert choices(save, step=4, fallback=True) == ([4], [])
    files.write_atomically(save / files.TRACKER, "4\n")
    assert choices(save, step=None, fallback=True) == ([4, 2], []), "6 is no history of 4"


def test_what_is_half_written_or_missing_is_passed_over_or_refused(save: Path) -> None:
    (files.folder_of(save, 6) / files.CORE_MARK).unlink()
    tries, problems = choices(save, step=None, fallback=True)
    assert tries == [4, 2] and "half-written" in problems[0]
    with pytest.raises(TrainingFailure, match=r"half-written.*--ckpt-step 4"):
        choices(save, step=None, fallback=False)
    with pytest.raises(TrainingFailure, match=r"half-written.*--ckpt-step 4"):
        choices(save, step=6, fallback=True)
    with pytest.raises(TrainingFailure, match=r"missing.*--ckpt-step 4"):
        choices(save, step=5, fallback=True)


@pytest.mark.parametrize("tracker", [None, "6O"])
def test_without_a_tracker_the_newest_complete_one_is_the_latest(
    save: Path, tracker: str | None
) -> None:
    (save / files.TRACKER).unlink()
    if tracker is not None:
        (save / files.TRACKER).write_text(tracker)
    tries, problems = choices(save, step=None, fallback=True)
    assert tries == [6, 4, 2] and files.TRACKER in problems[0]
    with pytest.raises(TrainingFailure, match="--ckpt-step 6"):
        choices(save, step=None, fallback=False)


def test_a_run_starts_from_scratch_only_where_nothing_was_ever_saved(tmp_path: Path) -> None:
    assert choices(tmp_path / "nowhere", step=None, fallback=True) == ([], [])
    folder = files.begin(tmp_path, 2)
    (folder / files.CORE_MARK).write_text("{}")
    files.write_manifest(folder, 2, {})
    assert choices(tmp_path, step=None, fallback=True) == ([], []), "a first save, cut short"
    files.finish(tmp_path, 2, {})
    (folder / files.CORE_MARK).unlink()
    for tracker in (True, False):
        if not tracker:
            (tmp_path / files.TRACKER).unlink()
        with pytest.raises(TrainingFailure, match="no complete checkpoint"):
            choices(tmp_path, step=None, fallback=True)


def test_saving_again_what_was_passed_over_replaces_it(save: Path) -> None:
    (files.folder_of(save, 6) / files.CORE_MARK).unlink()
    make(save, 6)
    assert choices(save, step=None, fallback=True) == ([6, 4, 2], [])


def data_set(prefix: Path, *, documents: int, text: bytes = b"text") -> str:
    Path(f"{prefix}.idx").write_bytes(b"MMIDIDX" + bytes(documents))
    Path(f"{prefix}.bin").write_bytes(text)
    return str(prefix)


def test_a_changed_data_set_is_named_and_a_moved_one_is_the_same(tmp_path: Path) -> None:
    a, b = data_set(tmp_path / "a", documents=5), data_set(tmp_path / "b", documents=9)
    stored = identity_of([a, b])
    assert changes(stored, identity_of([a, b])) == []
    (tmp_path / "new").mkdir()
    assert changes(stored, identity_of([data_set(tmp_path / "new/a", documents=5), b])) == []
    assert changes(stored, identity_of([b, a])) != []
    assert "1 data sets instead of 2" in changes(stored, identity_of([a]))[0]
    data_set(tmp_path / "b", documents=9, text=b"other text")
    assert changes(stored, identity_of([a, b])) == [f"{b}.bin has 10 bytes instead of 4"]
    data_set(tmp_path / "b", documents=10)
    assert changes(stored, identity_of([a, b])) == [f"{b}.idx has 17 bytes instead of 16"]
    Path(f"{b}.idx").write_bytes(b"MMIDIDX" + bytes(8) + b"1")
    assert changes(stored, identity_of([a, b])) == [f"{b}.idx has other documents"]


def test_an_index_larger_than_what_is_read_shows_changes_at_both_ends(tmp_path: Path) -> None:
    name = data_set(tmp_path / "large", documents=6_000_000)
    stored = identity_of([name])
    for at in (10, -10):
        data_set(tmp_path / "large", documents=6_000_000)
        with Path(f"{name}.idx").open("r+b") as file:
            file.seek(at, 0 if at > 0 else 2)
            file.write(b"1")
        assert changes(stored, identity_of([name])) == [f"{name}.idx has other documents"]
