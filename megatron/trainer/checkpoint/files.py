"""The files of a checkpoint directory: complete checkpoints, the latest one, and their checksums.

    <save>/latest_checkpointed_iteration.txt      replaced last, atomically
    <save>/iter_0000100/                          metadata.json marks a finished write,
                                                  manifest.json has size and CRC-32 of every file
    <save>/iter_0000100.unfinished                while we write or remove that folder; only folders
                                                  with this mark and without a manifest, which is
                                                  written last, are ever tidied up

Nothing here needs torch or a process group.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from megatron.trainer.common.outside import parse_json
from megatron.trainer.common.plain_file import open_plain

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
CORE_MARK = "metadata.json"
COMMON = "common.pt"
"""The common state, up to megatron-core 0.18."""
METADATA = ".metadata"
"""The index, which says where everything else lies."""
COMMON_STATE = "common_state"
"""The object that holds it from 0.19 on, in a file with tensors."""
COMMON_FILE = "common.distcp"
"""Where a conversion puts that object."""
OF_RANKS = ("rng_state", "rerun_state_machine_state")
"""Objects that Megatron-LM saves for each rank, and that fit no other layout."""
OUR_KEY = "copus"
"""Entry of the common state in every checkpoint that COPUS trained, and in no other."""
MIN_ROOM = 3
"""Checkpoints that the disk should still take."""
_UNFINISHED = ".unfinished"
_SMALL = (METADATA, COMMON, COMMON_FILE)
_CHUNK_BYTES = 1 << 22
_TRACKER_BYTES = 1 << 10
_MANIFEST_BYTES = 1 << 28
_NO_MANIFEST = (KeyError, TypeError, AttributeError, ValueError, OverflowError)


def folder_of(root: Path, iteration: int) -> Path:
    """The folder of one iteration's checkpoint."""
    return root / f"iter_{iteration:07d}"


def write_atomically(path: Path, text: str, *, mode: int | None = None) -> None:
    """Replaces a small file so that a reader sees the old or the new text, never a part.

    Args:
        mode: of the new file, whatever the umask and the mode of the old one; None leaves it to
            the umask. It holds from the first byte on.
    """
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    temporary.unlink(missing_ok=True)
    # O_EXCL: never through a link that lies there.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        with os.fdopen(os.open(temporary, flags, 0o666 if mode is None else mode), "w") as file:
            if mode is not None:
                with contextlib.suppress(OSError):  # a file system may keep no modes
                    os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_text(path: Path, *, max_bytes: int) -> str:
    """The text of a small file; bytes that are no UTF-8 become U+FFFD.

    Raises:
        ValueError: it is larger than it can be.
        OSError: it cannot be read, or is a pipe or something else that is no file.
    """
    with open_plain(path, follow=True) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{path} is larger than {max_bytes} bytes")
    return data.decode(errors="replace")


def read_latest(root: Path) -> int | None:
    """The iteration the tracker names, or None without a tracker.

    Raises:
        ValueError: the tracker holds something else than a number, or is no file.
    """
    try:
        text = read_text(root / TRACKER, max_bytes=_TRACKER_BYTES).strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise ValueError(f"{root / TRACKER} is not a plain file") from error
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{root / TRACKER} should hold an iteration number, not {text[:40]!r}")
    return int(text)


def is_of_checkpoints(folder: Path) -> bool:
    """Whether a folder is a checkpoint, or a directory with a tracker or folders of iterations,
    complete or not."""
    marks = (folder / CORE_MARK, folder / TRACKER)
    return any(mark.exists() for mark in marks) or any(_iterations(folder))


def complete_iterations(root: Path) -> list[int]:
    """Iterations whose checkpoint was written to the end, oldest first."""
    return sorted(i for i in _iterations(root) if is_complete(root, i))


def is_legacy(folder: Path) -> bool:
    """Whether Megatron-LM wrote this checkpoint with `--ckpt-format torch`: one file a rank."""
    return any(folder.glob("mp_rank_*/*.pt"))


def is_complete(root: Path, iteration: int) -> bool:
    """Whether the checkpoint of an iteration was written to the end."""
    return unfinished(folder_of(root, iteration)) is None


def unfinished(folder: Path) -> str | None:
    """Why the folder of an iteration was not written to the end, or None.

    The manifest is written last of all and its folder loses `CORE_MARK` before any other file, so
    that a mark beside both is a stray one: a kill left it there, or a person made it.
    """
    if not folder.exists():
        return "missing"
    if not (folder / CORE_MARK).is_file():
        return f"half-written: it has no {CORE_MARK}"
    mark = folder.with_name(folder.name + _UNFINISHED)
    if mark.exists() and not (folder / MANIFEST).is_file():
        return (
            f"half-written: {mark.name} lies beside it and it has no {MANIFEST}; if no save is "
            "under way and you know it to be whole, remove that file"
        )
    return None


def was_ever_complete(root: Path) -> bool:
    """Whether any checkpoint was ever written to the end, even if it is damaged now."""
    return any(
        (folder_of(root, i) / MANIFEST).exists() and not _mark_of(root, i).exists()
        for i in _iterations(root)
    )


def _iterations(root: Path) -> Iterator[int]:
    if not root.is_dir():
        return
    for folder in root.iterdir():
        number = folder.name.removeprefix("iter_")
        is_number = number.isascii() and number.isdecimal()
        if folder.name.startswith("iter_") and is_number and folder.is_dir():
            yield int(number)


def _mark_of(root: Path, iteration: int) -> Path:
    folder = folder_of(root, iteration)
    return folder.with_name(folder.name + _UNFINISHED)


def begin(root: Path, iteration: int) -> Path:
    """Makes an empty folder for the checkpoint of an iteration, marked unfinished.

    Deletes an earlier partial, complete or damaged checkpoint of that iteration. Before that, the
    tracker steps back to the checkpoint before it.

    Raises:
        FileExistsError: there is a folder of that name that is no such checkpoint.
        OSError: the file system refuses.
    """
    folder = folder_of(root, iteration)
    if folder.is_symlink():
        raise FileExistsError(f"{folder} is a link, which is neither followed nor removed: move it")
    root.mkdir(parents=True, exist_ok=True)
    if is_complete(root, iteration) or (folder / MANIFEST).is_file():
        _step_back(root, iteration)
        remove(root, iteration)
    discard(root, iteration)
    if folder.exists():
        raise FileExistsError(f"{folder} is there and is not a checkpoint of this format: move it")
    _mark_of(root, iteration).touch()
    folder.mkdir()
    return folder


def finish(root: Path, iteration: int, sums: dict[str, tuple[int, int]]) -> None:
    """Makes a written checkpoint the latest: manifest, mark, tracker, in this order."""
    write_manifest(folder_of(root, iteration), iteration, sums)
    _mark_of(root, iteration).unlink()
    write_atomically(root / TRACKER, f"{iteration}\n")


def _step_back(root: Path, iteration: int) -> None:
    """Lets the tracker name the checkpoint before `iteration`, if it names that."""
    if read_latest(root) != iteration:
        return
    older = [i for i in complete_iterations(root) if i < iteration]
    if older:
        write_atomically(root / TRACKER, f"{older[-1]}\n")
    else:
        (root / TRACKER).unlink()


def data_files(folder: Path) -> list[str]:
    """Names of the files a manifest covers, sorted."""
    return sorted(p.name for p in folder.iterdir() if p.is_file() and p.name != MANIFEST)


def checksum(path: Path, count: Callable[[int], None] = lambda number: None) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file.

    Args:
        count: told of the bytes as they are read.
    """
    size = crc = 0
    with open_plain(path, follow=True) as file:
        while chunk := file.read(_CHUNK_BYTES):
            count(len(chunk))
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return size, crc


def checksums(
    folder: Path, names: Iterable[str], count: Callable[[int], None] = lambda number: None
) -> dict[str, tuple[int, int]]:
    """Size and CRC-32 of several files of a checkpoint; see `checksum`."""
    return {name: checksum(folder / name, count) for name in names}


def share(names: list[str], rank: int, world_size: int) -> list[str]:
    """The files one rank looks after, so that the ranks together cover each once."""
    return names[rank::world_size]


def write_manifest(folder: Path, iteration: int, sums: dict[str, tuple[int, int]]) -> None:
    files = {name: {"bytes": size, "crc32": crc} for name, (size, crc) in sorted(sums.items())}
    write_atomically(
        folder / MANIFEST, json.dumps({"iteration": iteration, "files": files}, indent=1)
    )


def read_manifest(folder: Path) -> dict[str, tuple[int, int]] | None:
    """Size and CRC-32 by file name, or None if there is no manifest; see `unverified`.

    Raises:
        ValueError: the manifest is not what `write_manifest` writes.
    """
    path = folder / MANIFEST
    try:
        files = parse_json(read_text(path, max_bytes=_MANIFEST_BYTES))["files"]
        sums = {name: (int(f["bytes"]), int(f["crc32"])) for name, f in files.items()}
    except FileNotFoundError:
        return None
    except _NO_MANIFEST as error:
        raise ValueError(f"{path} is damaged ({error})") from error
    outside = [name for name in sums if Path(name).name != name]
    if outside:
        raise ValueError(f"{path} is damaged (it lists {outside[0][:80]!r})")
    return sums


def damage(folder: Path, *, rank: int = 0, world_size: int = 1, contents: bool = True) -> list[str]:
    """What is wrong with the files of a checkpoint, one line each.

    Args:
        rank: which share of the files to read; missing files are everybody's.
        contents: compare all checksums; otherwise sizes, and the checksums of the index and of a
            common state that is a file of its own. As an object it has its own.

    Returns:
        An empty list when nothing is wrong, or when there is no manifest to compare with and the
        common state is whole.
    """
    if problem := unfinished(folder):
        return [f"{folder} is {problem}"]
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return [str(error)]
    if manifest is None:
        return _torn(folder / COMMON)
    problems = []
    for name in share(sorted(manifest), rank, world_size):
        size, crc = manifest[name]
        path = folder / name
        if not path.is_file():
            problems.append(f"{path} is missing")
        elif path.stat().st_size != size:
            problems.append(f"{path} has {path.stat().st_size} bytes instead of {size}")
        elif (contents or name in _SMALL) and checksum(path)[1] != crc:
            problems.append(f"{path} has changed since it was written (checksum)")
    return problems


def _torn(path: Path) -> list[str]:
    """What is wrong with the zip archive of a common state, by its own checksums.

    torch does not compare them, and one changed byte may hide which trainer wrote it.
    """
    try:
        file = open_plain(path, follow=True)
    except FileNotFoundError:
        return []  # as it is where the state lies among tensors
    with file:
        return _torn_archive(path, file)


def _torn_archive(path: Path, file: BinaryIO) -> list[str]:
    if not zipfile.is_zipfile(file):
        return []  # torch says why it cannot read it
    try:
        with zipfile.ZipFile(file) as archive:
            changed = archive.testzip()
    except OSError:
        raise
    except Exception as error:  # zipfile raises many kinds; all mean a damaged file
        return [f"{path} is damaged ({error})"]
    return [f"{path} has changed since it was written ({changed})"] if changed else []


def unverified(folder: Path, common: Mapping[str, Any], names: Collection[str] = ()) -> str | None:
    """Why a checkpoint of COPUS counts as damaged if its manifest is gone or incomplete.

    Returns:
        One line that names the flag to load it all the same. None for a checkpoint of Megatron-LM,
        which writes no manifest.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        problem = f"has lost its {MANIFEST}" if OUR_KEY in common else None
    else:
        unlisted = sorted(set(names) - manifest.keys())
        problem = f"has a {MANIFEST} that does not list {unlisted[0]}" if unlisted else None
    return problem and (
        f"{folder} {problem}, so nothing says whether its bytes have changed "
        "(--ckpt-trust-unverified loads it all the same)"
    )


def stored_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.iterdir() if p.is_file())


def free_bytes(root: Path) -> int | None:
    """Bytes that the file system of `root` has left; None if it does not say."""
    try:
        return shutil.disk_usage(root).free
    except OSError:
        return None


def little_room(root: Path, *, stored: int, free: int | None) -> str | None:
    """A line for the user where few more checkpoints have room, else None.

    Args:
        free: what `free_bytes` said.
    """
    if free is None or free >= MIN_ROOM * stored:
        return None
    return (
        f"{free / 1e6:.0f} MB are free in --save {root}, and a checkpoint takes "
        f"{stored / 1e6:.0f} MB; make room, or keep fewer with --save-retain-interval"
    )


def remove(root: Path, iteration: int) -> None:
    """Deletes one checkpoint folder of `root`, as far as the file system allows.

    A kill on the way leaves it marked unfinished. A link in place of the folder stays.
    """
    folder = folder_of(root, iteration)
    if folder.is_symlink():
        return
    with contextlib.suppress(OSError):  # a full disk may have no room for the mark
        _mark_of(root, iteration).touch()
    with contextlib.suppress(OSError):
        (folder / CORE_MARK).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            _mark_of(root, iteration).unlink(missing_ok=True)


def discard(root: Path, iteration: int) -> None:
    """Removes the folder of an iteration if it is marked unfinished."""
    if _mark_of(root, iteration).exists():
        remove(root, iteration)


def retire(root: Path, *, newest: int, retain_interval: int | None) -> list[int]:
    """Deletes checkpoints that a new one replaces. Call it after the tracker names `newest`.

    Folders marked unfinished always go, but one that is complete all the same loses its mark. With
    a retain interval, complete checkpoints go too, except its multiples, the newest, and the one
    before the newest, to fall back to.

    Returns:
        The iterations removed.
    """
    marked = [i for i in _iterations(root) if _mark_of(root, i).exists()]
    gone = [i for i in marked if not is_complete(root, i)]
    if retain_interval:
        older = [i for i in complete_iterations(root) if i < newest]
        gone += [i for i in older[:-1] if i % retain_interval != 0]
    for iteration in gone:
        remove(root, iteration)
    for iteration in set(marked) - set(gone):
        if not folder_of(root, iteration).is_symlink():
            _mark_of(root, iteration).unlink(missing_ok=True)
    return gone
