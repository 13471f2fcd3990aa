"""The data sets a run is trained on, told by their files and their use: a resumed run must meet the
same, wherever they lie.

Another tokenizer, another cut, another order or a file still being written would give the samples
of the run other contents without a word. Sizes, the beginning and end of each index, and 128 blocks
spread over each file show it. The rest is not read: a few changed tokens between two blocks of a
large file stay unseen.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from megatron.trainer.common.errors import counted

_HEAD_BYTES = 1 << 22
_TAIL_BYTES = 1 << 16
_BLOCKS, _BLOCK_BYTES = 128, 4096
"""Read of a larger file: half a megabyte. A smaller one is read as a whole."""
_READERS = 16
"""Data sets that are read at once, since each read of a network file system waits."""
_ORDERS = (
    *("document_index", "sample_index", "shuffle_index"),
    *("dataset_index", "dataset_sample_index"),
)
_WORDS = {
    "bin_bytes": "has {now} bytes instead of {before}",
    "idx_bytes": "has {now} bytes instead of {before}",
    "idx_crc32": "has other documents",
    "bin_blocks_crc32": "has other contents of the same size",
    "idx_blocks_crc32": "has other documents",
}


def identity_of(prefixes: Iterable[str]) -> list[dict[str, Any]]:
    """Describes data sets in plain JSON types, in the order given. Reads at most 5.3 MB of each.

    Args:
        prefixes: paths without `.bin` and `.idx`.

    Raises:
        OSError: a file cannot be read.
    """
    with ThreadPoolExecutor(_READERS) as readers:
        return list(readers.map(_identity, prefixes))


def _identity(prefix: str) -> dict[str, Any]:
    tokens, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    return {
        "prefix": prefix,
        "bin_bytes": os.path.getsize(tokens),
        "idx_bytes": os.path.getsize(index),
        "idx_crc32": _bounded_crc(index),
        "bin_blocks_crc32": _blocks_crc(tokens),
        "idx_blocks_crc32": _blocks_crc(index),
    }


def _bounded_crc(path: Path) -> int:
    """CRC-32 of the header with the lengths of the first million documents, and of the end."""
    with path.open("rb") as file:
        crc = zlib.crc32(file.read(_HEAD_BYTES))
        file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
        return zlib.crc32(file.read(_TAIL_BYTES), crc)


def _blocks_crc(path: Path) -> int:
    """CRC-32 of blocks at equal distances, the first at the beginning and the last at the end; of
    all bytes where the blocks would cover them."""
    with path.open("rb", buffering=_BLOCK_BYTES) as file:
        last = os.fstat(file.fileno()).st_size - _BLOCK_BYTES
        if last < (_BLOCKS - 1) * _BLOCK_BYTES:
            return zlib.crc32(file.read())
        crc = 0
        for number in range(_BLOCKS):
            file.seek(last * number // (_BLOCKS - 1))
            crc = zlib.crc32(file.read(_BLOCK_BYTES), crc)
        return crc


def order_of(source: Any) -> dict[str, int]:
    """CRC-32 of blocks of the arrays that say which tokens are sample number so and so, by name.

    megatron-core keeps them in files that are read as they lie there. A name holds what they were
    made for, so that arrays of one name are equal unless a file was changed.

    Args:
        source: a data set of megatron-core, or parts of some.
    """
    found: dict[str, int] = {}
    name = getattr(source, "unique_description_hash", type(source).__name__)
    for attribute in _ORDERS:
        array = getattr(source, attribute, None)
        if isinstance(array, numpy.ndarray):
            split = getattr(source, "index_split", None) or getattr(source, "split", None)
            key = f"{name}-{getattr(split, 'name', '')}-{attribute}"
            found[key] = _array_crc(array)
    parts = getattr(source, "datasets", None) or getattr(source, "parts", ())
    for part in parts:
        found |= order_of(part)
    return found


def _array_crc(array: numpy.ndarray) -> int:
    """CRC-32 of blocks at equal distances, as `_blocks_crc`."""
    flat, block = array.reshape(-1), _BLOCK_BYTES // array.itemsize
    last = len(flat) - block
    if last < (_BLOCKS - 1) * block:
        return zlib.crc32(flat.tobytes())
    starts = (last * number // (_BLOCKS - 1) for number in range(_BLOCKS))
    crc = 0
    for start in starts:
        crc = zlib.crc32(flat[start : start + block].tobytes(), crc)
    return crc


@dataclass(frozen=True, kw_only=True)
class DataUse:
    """What a run makes of its data sets, wherever they lie."""

    blends: Mapping[str, Sequence[float] | int]
    """By flag, the weights of its data sets, or their number where none are given."""
    split: Sequence[float] | None
    """Shares of `--data-path` to train, validate and test on, of 1; None without that flag."""

    def changes(self, stored: Mapping[str, Any]) -> list[str]:
        """What has become of the use that a checkpoint tells."""
        found = []
        before = stored["blends"]
        for flag in dict.fromkeys([*before, *self.blends]):
            then, now = before.get(flag), self.blends.get(flag)
            if not _same_weights(then, now):
                found.append(f"{flag} names {_told(now)} instead of {_told(then)}")
        then = stored["split"]
        if not found and not _are_close(then or [], self.split or []):
            told = [",".join(f"{100 * share:g}" for share in x or []) for x in (self.split, then)]
            found.append(f"--split is {told[0]} % instead of {told[1]} %")
        return found


def _same_weights(then: Sequence[float] | int | None, now: Sequence[float] | int | None) -> bool:
    """Whether two blends draw alike: weights count by their ratios."""
    if isinstance(then, Sequence) and isinstance(now, Sequence):
        return _are_close([w / sum(then) for w in then], [w / sum(now) for w in now])
    return then == now


def _are_close(then: Sequence[float], now: Sequence[float]) -> bool:
    return len(then) == len(now) and all(map(math.isclose, then, now))


def _told(blend: Sequence[float] | int | None) -> str:
    if blend is None:
        return "nothing"
    if isinstance(blend, int):
        return f"{counted(blend, 'data set')} without weights"
    return f"{counted(len(blend), 'data set')} of weights {', '.join(f'{w:g}' for w in blend)}"


def changes(stored: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
    """Names the data sets that differ from those of a checkpoint, with the difference. Where they
    lie does not matter. Both may end with an entry `order`, see `order_of`, and with one `use`, the
    fields of a `DataUse`.

    Args:
        now: as they are.
    """
    stored, old_order, old_use = _parts(stored)
    now, order, use = _parts(now)
    if len(stored) != len(now):
        names = ", ".join(str(entry.get("prefix")) for entry in stored) or "none"
        return [f"{len(now)} data sets instead of {len(stored)} ({names})"]
    found = []
    for before, after in zip(stored, now, strict=True):
        kind = next((kind for kind in _WORDS if before.get(kind) != after[kind]), None)
        if kind is not None:
            words = _WORDS[kind].format(now=after[kind], before=before.get(kind))
            found.append(f"{after['prefix']}.{kind.partition('_')[0]} {words}")
    if not found and use and old_use:
        found += DataUse(**use).changes(old_use)
    if not found and any(
        order[name] != old_order[name] for name in order.keys() & old_order.keys()
    ):
        found.append(
            "the samples come in another order: an index file in the cache was changed since "
            "(remove the cache to have it made again)"
        )
    return found


def _parts(
    entries: list[dict[str, Any]],
) -> tuple[list[dict[str, Any]], dict[str, int], dict[str, Any]]:
    """The data sets, the order of their samples, and their use."""
    data_sets = [entry for entry in entries if not {"order", "use"} & entry.keys()]
    order, use = (
        next((entry[name] for entry in entries if name in entry), {}) for name in ("order", "use")
    )
    return data_sets, order, use
