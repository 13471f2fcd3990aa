"""Where the texts of a data set come from: files, folders, JSON lines, Python's own sources."""

from __future__ import annotations

import codecs
import glob
import gzip
import json
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.outside import parse_json

MEND = "mend it or give --skip-bad-lines"
"""Ends the line about a document that cannot be read."""
_JSON_SUFFIXES = (".jsonl", ".json")


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document as it was found: its texts are decoded and tokenized by a worker."""

    where: str
    """File, or file and line, for messages."""
    raw: bytes
    """The bytes of a text file, or one line of JSON."""
    is_json: bool
    """Whether `raw` is a line of JSON."""

    def is_broken(self) -> bool:
        """Whether some of its bytes are no UTF-8."""
        try:
            self.raw.decode("utf-8")
        except UnicodeDecodeError:
            return True
        return False

    def texts(self, keys: Sequence[str]) -> list[str]:
        """One text per key; a text file gives the same text for all. Broken UTF-8 becomes U+FFFD.

        Raises:
            UsageError: A line is not a JSON object with a string of characters under each key.
        """
        text = self.raw.decode("utf-8", errors="replace")
        if not self.is_json:
            return [text] * len(keys)
        try:
            record = parse_json(text)
        except ValueError as error:
            raise UsageError(f"{self.where} is not JSON ({_reason(error)}); {MEND}") from error
        found = [record.get(key) if isinstance(record, dict) else None for key in keys]
        for key, value in zip(keys, found, strict=True):
            if not isinstance(value, str):
                raise UsageError(
                    f"{self.where} has no text under {key}; "
                    "name the right --json-keys or give --skip-bad-lines"
                )
            try:
                value.encode("utf-8")
            except UnicodeEncodeError as error:
                half = ascii(value[error.start])[1:-1]
                raise UsageError(
                    f"{self.where} has {half} under {key}, half of a pair and no character; {MEND}"
                ) from error
        return [value for value in found if isinstance(value, str)]


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    return str(error)


def find_inputs(patterns: Sequence[str]) -> list[Path]:
    """Files that `--input` names: files and pipes as given; folders and patterns sorted by path.

    Raises:
        UsageError: A name matches no file, or a pipe is named twice.
    """
    files: list[Path] = []
    pipes: set[tuple[int, int]] = set()
    for pattern in patterns:
        path = Path(pattern)
        if path.is_file():
            found = [path]
        elif path.is_fifo():
            found = [path]
            status = path.stat()
            pipe = (status.st_dev, status.st_ino)
            if pipe in pipes:
                raise UsageError(f"--input {pattern} is a pipe, which is read once; name it once")
            pipes.add(pipe)
        elif path.is_dir():
            found = sorted(entry for entry in path.rglob("*") if entry.is_file())
        else:
            found = sorted(map(Path, glob.glob(pattern, recursive=True)))
            found = [entry for entry in found if entry.is_file()]
        if not found:
            raise UsageError(f"--input {pattern} matches no file; give files, folders or patterns")
        files += found
    return files


def stdlib_sources(root: Path | None = None) -> list[Path]:
    """The .py files of the standard library, sorted by path below its folder.

    Installed packages are not a part of it; the order is the same on every machine with the same
    Python.

    Raises:
        UsageError: This Python comes without sources.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    outside = {"site-packages", "dist-packages", "__pycache__"}
    files = [
        path for path in root.rglob("*.py") if not outside & set(path.relative_to(root).parts[:-1])
    ]
    if not files:
        raise UsageError(f"--python-stdlib: there are no sources in {root}; use --input")
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def read_documents(files: list[Path], inputs: Sequence[str] = ()) -> Iterator[Document]:
    """Documents of the files, in order: a JSON line each, or a whole file.

    Args:
        files: as `find_inputs` returns them.
        inputs: what names them. A `.json` that only its folder names is one text, unless its first
            line is a JSON object.

    Raises:
        UsageError: A file cannot be read.
    """
    folders = [Path(name) for name in inputs if Path(name).is_dir()]
    for path in files:
        try:
            yield from _read_file(path, any(folder in path.parents for folder in folders))
        # A truncated .gz ends in EOFError, a changed one in zlib's own.
        except (OSError, EOFError, zlib.error) as error:
            raise UsageError(f"cannot read {path}: {error}; check --input") from error


def _is_stream(path: Path) -> bool:
    """Whether the name of an input says nothing of what it holds: `<(...)`, `/dev/stdin`."""
    return path.is_fifo() or path.is_relative_to("/dev") or path.is_relative_to("/proc")


def _begins_with_object(path: Path) -> bool:
    """Whether the first line of a file that is not empty is a whole JSON object."""
    with _open(path) as stream:
        line = next((line for line in stream if line.strip()), b"")
    try:
        return isinstance(parse_json(line.removeprefix(codecs.BOM_UTF8)), dict)
    except ValueError:
        return False


def _open(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _read_file(path: Path, is_in_folder: bool) -> Iterator[Document]:
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    is_json = suffix in _JSON_SUFFIXES or (not suffix and _is_stream(path))
    if is_in_folder and suffix == ".json":
        is_json = _begins_with_object(path)
    with _open(path) as stream:
        if not is_json:
            yield Document(where=str(path), raw=stream.read(), is_json=False)
            return
        for number, line in enumerate(stream, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield Document(where=f"{path}:{number}", raw=line, is_json=True)
