"""The data sets a run is trained on, told by their files: a resumed run must meet the same.

Another tokenizer, another cut or a file still being written would give the samples of the run other
contents without a word. Sizes and a bounded part of each index show it; the texts are not read.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_HEAD_BYTES = 1 << 22
_TAIL_BYTES = 1 << 16


def identity_of(prefixes: Iterable[str]) -> list[dict[str, Any]]:
    """Describes data sets in plain JSON types, in the order given.

    Args:
        prefixes: paths without `.bin` and `.idx`.

    Raises:
        OSError: a file cannot be read.
    """
    return [
        {
            "prefix": prefix,
            "bin_bytes": os.path.getsize(f"{prefix}.bin"),
            "idx_bytes": os.path.getsize(f"{prefix}.idx"),
            "idx_crc32": _bounded_crc(Path(f"{prefix}.idx")),
        }
        for prefix in prefixes
    ]


def _bounded_crc(path: Path) -> int:
    """CRC-32 of the header with the lengths of the first million documents, and of the end."""
    with path.open("rb") as file:
        crc = zlib.crc32(file.read(_HEAD_BYTES))
        file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
        return zlib.crc32(file.read(_TAIL_BYTES), crc)


def changes(stored: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
    """Names the data sets that differ from those of a checkpoint, with the difference. Where they
    lie does not matter.

    Args:
        stored: from a checkpoint.
        now: as they are.
    """
    if len(stored) != len(now):
        names = ", ".join(str(entry.get("prefix")) for entry in stored) or "none"
        return [f"{len(now)} data sets instead of {len(stored)} ({names})"]
    found = []
    for before, after in zip(stored, now, strict=True):
        kinds = ("bin_bytes", "idx_bytes", "idx_crc32")
        different = [kind for kind in kinds if before.get(kind) != after[kind]]
        if different:
            kind = different[0]
            name, unit = f".{kind.partition('_')[0]}", kind.partition("_")[2]
            what = "has other documents" if unit == "crc32" else f"has {after[kind]} bytes"
            told = "" if unit == "crc32" else f" instead of {before.get(kind)}"
            found.append(f"{after['prefix']}{name} {what}{told}")
    return found
