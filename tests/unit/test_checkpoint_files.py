"""Which checkpoint is complete, latest, intact: on plain files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.trainer.checkpoint import files


def make(root: Path, iteration: int, *, complete: bool = True, manifest: bool = True) -> Path:
    folder = files.folder_of(root, iteration)
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(bytes(range(256)) * 40 + bytes([iteration % 256]))
    (folder / "common.pt").write_bytes(b"common")
    if complete:
        (folder / files.CORE_MARK).write_text("{}")
    if manifest:
        sums = files.checksums(folder, files.data_files(folder))
        files.write_manifest(folder, iteration, sums)
    return folder


def test_latest_is_what_was_written_last_and_a_number(tmp_path: Path) -> None:
    assert files.read_latest(tmp_path) is None
    for iteration in (5, 12):
        files.write_atomically(tmp_path / files.TRACKER, f"{iteration}\n")
        assert files.read_latest(tmp_path) == iteration
    assert [p.name for p in tmp_path.iterdir()] == [files.TRACKER]
    for text in ("release", "9" * 100_000, "²", "-3", ""):
        (tmp_path / files.TRACKER).write_text(text)
        with pytest.raises(ValueError, match=files.TRACKER):
            files.read_latest(tmp_path)


def test_a_stray_mark_beside_a_complete_checkpoint_makes_it_no_less(tmp_path: Path) -> None:
    for iteration in (10, 20, 30):
        folder = make(tmp_path, iteration, manifest=iteration != 30)
        folder.with_name(f"{folder.name}.unfinished").touch()
    assert files.complete_iterations(tmp_path) == [10, 20]
    assert files.damage(files.folder_of(tmp_path, 20)) == []
    (line,) = files.damage(files.folder_of(tmp_path, 30))
    assert "iter_0000030.unfinished" in line and "no manifest.json" in line
    assert files.CORE_MARK not in line, "a file that is there"
    assert files.retire(tmp_path, newest=20, retain_interval=None) == [30]
    assert files.complete_iterations(tmp_path) == [10, 20]
    assert not list(tmp_path.glob("*.unfinished"))


def test_an_intact_checkpoint_has_no_damage_and_every_flip_is_found(tmp_path: Path) -> None:
    folder = make(tmp_path, 3)
    assert files.damage(folder) == []
    data = folder / "__0_0.distcp"
    good = data.read_bytes()
    for at in (0, 5000, len(good) - 1):
        data.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        assert data.name in files.damage(folder)[0]
        assert files.damage(folder, contents=False) == []
    data.write_bytes(good[:-1])
    assert data.name in files.damage(folder, contents=False)[0]
    data.unlink()
    assert "missing" in files.damage(folder)[0]


def test_ranks_together_read_each_file_once_and_find_all_damage(tmp_path: Path) -> None:
    names = [f"f{i}" for i in range(7)]
    for world_size in range(1, 10):
        shares = [files.share(names, rank, world_size) for rank in range(world_size)]
        assert sorted(name for part in shares for name in part) == names
    folder = make(tmp_path, 3)
    (folder / "common.pt").write_bytes(b"commom")
    found = [files.damage(folder, rank=rank, world_size=3) for rank in range(3)]
    assert sum(map(len, found)) == 1


def begun(root: Path, iteration: int) -> Path:
    """A save that was killed on the way."""
    folder = files.begin(root, iteration)
    (folder / "__0_0.distcp").write_bytes(b"half")
    return folder


def test_a_save_is_nothing_until_it_is_finished(tmp_path: Path) -> None:
    folder = begun(tmp_path, 7)
    assert files.complete_iterations(tmp_path) == [] and files.damage(folder)
    (folder / files.CORE_MARK).write_text("{}")
    assert files.complete_iterations(tmp_path) == []
    assert "unfinished" in files.damage(folder)[0]
    files.finish(tmp_path, 7, files.checksums(folder, files.data_files(folder)))
    assert files.complete_iterations(tmp_path) == [7] and files.read_latest(tmp_path) == 7
    assert files.damage(folder) == []
    assert {p.name for p in tmp_path.iterdir()} == {folder.name, files.TRACKER}


def test_beginning_again_replaces_and_the_tracker_steps_back(tmp_path: Path) -> None:
    for iteration in (2, 4):
        make(tmp_path, iteration)
        files.write_atomically(tmp_path / files.TRACKER, f"{iteration}\n")
    folder = begun(tmp_path, 4)
    assert files.read_latest(tmp_path) == 2
    assert files.complete_iterations(tmp_path) == [2]
    assert [p.name for p in files.begin(tmp_path, 4).iterdir()] == []
    files.discard(tmp_path, 4)
    assert not folder.exists()
    files.discard(tmp_path, 2)
    assert files.complete_iterations(tmp_path) == [2]
    files.begin(tmp_path, 2)
    assert files.read_latest(tmp_path) is None
    (make(tmp_path, 6) / files.CORE_MARK).unlink()
    assert [p.name for p in files.begin(tmp_path, 6).iterdir()] == []


def test_what_we_did_not_write_stays(tmp_path: Path) -> None:
    foreign = tmp_path / "iter_0000005" / "mp_rank_00"
    foreign.mkdir(parents=True)
    (foreign / "model_optim_rng.pt").write_bytes(b"legacy")
    with pytest.raises(FileExistsError, match="iter_0000005"):
        files.begin(tmp_path, 5)
    files.discard(tmp_path, 5)
    make(tmp_path, 10)
    assert files.retire(tmp_path, newest=10, retain_interval=3) == []
    assert (foreign / "model_optim_rng.pt").read_bytes() == b"legacy"


def test_retiring_keeps_newest_the_one_before_and_multiples(tmp_path: Path) -> None:
    for iteration in (10, 20, 25, 30, 35):
        make(tmp_path, iteration)
    assert files.retire(tmp_path, newest=35, retain_interval=None) == []
    begun(tmp_path, 33)
    gone = files.retire(tmp_path, newest=35, retain_interval=20)
    assert sorted(gone) == [10, 25, 33]
    assert files.complete_iterations(tmp_path) == [20, 30, 35]


def test_a_disk_that_takes_few_more_is_told(tmp_path: Path) -> None:
    free = files.free_bytes(tmp_path)
    assert free is not None and free > 0 and files.free_bytes(tmp_path / "none") is None
    assert files.little_room(tmp_path, stored=10, free=30) is None
    assert files.little_room(tmp_path, stored=10, free=None) is None
    line = files.little_room(tmp_path, stored=10**9, free=2 * 10**9)
    assert line is not None and f"--save {tmp_path}" in line and "2000 MB" in line


def test_nothing_is_removed_through_a_link_or_outside_the_folder(tmp_path: Path) -> None:
    root, outside = tmp_path / "save", tmp_path / "elsewhere"
    for name in ("a", "b"):
        make(outside / name, 4)
    before = {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    make(root, 2)
    files.folder_of(root, 4).symlink_to(files.folder_of(outside / "a", 4))
    (files.folder_of(root, 2) / "link").symlink_to(files.folder_of(outside / "b", 4))
    (files.folder_of(root, 2) / "common.link").symlink_to(outside / "b" / "iter_0000004/common.pt")
    mark = root / "iter_0000004.unfinished"
    mark.touch()
    with pytest.raises(FileExistsError, match="is a link"):
        files.begin(root, 4)
    files.discard(root, 4)
    files.remove(root, 4)
    files.retire(root, newest=10, retain_interval=3)
    assert files.folder_of(root, 4).is_symlink()
    mark.unlink()
    make(root, 6)
    make(root, 8)
    files.retire(root, newest=10, retain_interval=3)
    assert files.folder_of(root, 4).is_symlink()
    files.remove(root, 2)
    assert not files.folder_of(root, 2).exists()
    assert {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()} == before


def test_a_small_file_is_never_written_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("theirs")
    (tmp_path / f"{files.TRACKER}.tmp{os.getpid()}").symlink_to(target)
    (tmp_path / files.TRACKER).symlink_to(target)
    files.write_atomically(tmp_path / files.TRACKER, "7\n")
    assert target.read_text() == "theirs" and files.read_latest(tmp_path) == 7


@pytest.mark.parametrize(
    "text",
    [
        '{"files": 3}',
        "[" * 100_000,
        '{"files": {"../../secret": {"bytes": 1, "crc32": 1}}}',
        '{"files": {"a": {"bytes": Infinity, "crc32": 1}}}',
        "\udcff",
    ],
)
def test_a_damaged_or_hostile_manifest_is_damage(tmp_path: Path, text: str) -> None:
    folder = make(tmp_path, 3)
    (folder / files.MANIFEST).write_bytes(text.encode(errors="surrogateescape"))
    assert files.MANIFEST in files.damage(folder)[0]
