"""`metrics.jsonl`, the truth about a run: writing it, reading it back, naming launches."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from megatron.trainer.common.control import GENERATION_VARIABLE, supervised_launch
from megatron.trainer.common.file_limits import FileSystemStuck, answer_of, stall_s
from megatron.trainer.common.outside import parse_json
from megatron.trainer.common.plain_file import open_plain

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
GENERATION_MARK = "-g"
"""Before the number of a generation, in the name of a launch that goes on with other ranks."""

_MAX_DIGITS = 9
_MAX_HELD = 10_000
"""Records kept in memory while the disk takes none; a step's is less than a kilobyte."""

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_REPEATED_KINDS = ("step", "eval")


class RecordFile:
    """Appends records, one line each, in one write. What a disk does not take, because it is full
    or does not answer, is held back and written when it does."""

    def __init__(self, run_dir: Path) -> None:
        """Opens `<run_dir>/metrics.jsonl` for appending, making both if missing.

        Raises:
            OSError: it cannot be opened, so that a run fails at its start and not later.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / METRICS_FILE
        self._file: int | None = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._is_cut = not _ends_with_newline(self._file)
        self._held: collections.deque[bytes] = collections.deque()
        self._num_lost, self._complained = 0, False
        self._stuck: threading.Thread | None = None
        """Writes what is held back, if the file system ever answers."""

    def append(self, record: Mapping[str, Any], *, durable: bool) -> None:
        """Writes one record after those held back, and waits for the disk if it must be durable."""
        assert self._file is not None, f"{self._path} is closed"
        had = len(self._held)
        self._held.append(encode(record).encode() + b"\n")
        if self._stuck is not None and self._stuck.is_alive():
            self._forget_some()
            return
        self._stuck = None
        try:
            self._write(self._file, durable=durable or bool(had))
        except OSError as error:
            if not self._complained:
                logger.warning(
                    "cannot write %s (%s); training goes on, up to %d records are held back",
                    self._path,
                    error,
                    _MAX_HELD,
                )
            self._complained = True
            self._forget_some()
            return
        if self._complained:
            logger.warning(
                "%s can be written again: %d records held back are in it, %d are lost",
                self._path,
                had,
                self._num_lost,
            )
            self._num_lost, self._complained = 0, False

    def _write(self, file: int, *, durable: bool) -> None:
        """Writes what is held back, within a limit.

        Raises:
            OSError: not all of it could be written; the rest is still held back.
        """

        def act(_: object) -> None:
            self._write_held(file)
            if durable:
                os.fsync(file)

        try:
            answer_of(act, holds_saves=False)
        except FileSystemStuck as error:
            self._stuck = error.thread
            raise

    def _forget_some(self) -> None:
        while len(self._held) > _MAX_HELD:
            del self._held[1]  # of the first a part may be written
            self._num_lost += 1

    def _write_held(self, file: int) -> None:
        """Writes what is held back, oldest first.

        Raises:
            OSError: not all of it could be written; the rest is still held back.
        """
        while self._held:
            if self._is_cut:  # a line of an earlier launch ends here, so that it spoils no other
                self._held[0] = b"\n" + self._held[0]
                self._is_cut = False
            size = len(self._held[0])
            num_written = os.write(file, self._held[0])
            self._held[0] = self._held[0][num_written:]
            if self._held[0]:
                raise OSError(f"{num_written} of {size} bytes written")
            self._held.popleft()

    def close(self) -> None:
        """Closes the file, after one more try to write what is held back; more than once is
        harmless."""
        file, self._file = self._file, None
        if file is None:
            return
        if self._stuck is not None:
            self._stuck.join(stall_s())
            if self._stuck.is_alive():
                logger.warning(
                    "%s: the file system does not answer; the last %d records are lost",
                    self._path,
                    self._num_lost + len(self._held),
                )
                return

        def act(_: object) -> None:
            with contextlib.suppress(OSError):
                self._write_held(file)
            os.close(file)

        with contextlib.suppress(OSError):
            answer_of(act, holds_saves=False)


def launch_id(env: Mapping[str, str], now: datetime, previous: Iterable[str] = ()) -> str:
    """Returns `<job>.<restart count>.<n>`, which differs from every previous launch.

    A bare counter repeats after a requeue; a job number with its restart count does not. A
    supervisor has named the launch itself.

    Args:
        env: environment; COPUS_LAUNCH, SLURM_JOB_ID and SLURM_RESTART_COUNT are read.
        now: start time, stands for the job outside SLURM.
        previous: launches already recorded in this run directory.
    """
    previous = list(previous)
    named = supervised_launch(env)
    generation = env.get(GENERATION_VARIABLE, "").rpartition("/")[2]
    if named is not None and generation.isdecimal() and int(generation) > 1:
        named += f"{GENERATION_MARK}{generation}"
    if named is not None and named not in previous:
        return named
    job = env.get("SLURM_JOB_ID") or now.astimezone(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    prefix = f"{job}.{env.get('SLURM_RESTART_COUNT') or '0'}."
    return f"{prefix}{next_number(prefix, previous)}"


def next_number(prefix: str, previous: Iterable[str]) -> int:
    """The first number behind a prefix that is above those of all previous names. What follows the
    prefix in a damaged record need not be a number."""
    counts = [name[len(prefix) :] for name in previous if name.startswith(prefix)]
    known = [int(n) for n in counts if n.isascii() and n.isdecimal() and len(n) <= _MAX_DIGITS]
    return max(known, default=-1) + 1


def previous_launches(run_dir: Path) -> list[str]:
    """Returns the launches recorded in a run directory, oldest first."""
    path = run_dir / METRICS_FILE
    try:
        file = open_plain(path, follow=True)
    except FileNotFoundError:
        return []
    with file:
        starts = [line for line in file if b'"run.start"' in line]
    records = (decode(line.decode(errors="replace")) for line in starts)
    names = (record.get("launch") for record in records if record is not None)
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))


def encode(record: Mapping[str, Any]) -> str:
    """Returns one line of strict JSON; NaN, Infinity and -Infinity are strings in it.

    `decode` makes floats of them again, also of texts that read exactly so.
    """
    try:
        return json.dumps(record, allow_nan=False, separators=(",", ":"), default=_plain)
    except (ValueError, TypeError):
        return json.dumps(_plain_tree(record), allow_nan=False, separators=(",", ":"))


def decode(line: str) -> dict[str, Any] | None:
    """Returns the record of a line, or None if it is torn."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return _with_floats(record) if isinstance(record, dict) else None


def read_metrics(path: Path, *, superseded: bool = False) -> list[dict[str, Any]]:
    """Returns the records of a run in the order written.

    Lines cut short by a crash are left out. So are steps and evaluations that a later launch did
    again, or that lie beyond the iteration a later launch started from: they are not a part of the
    committed history of the run. All other kinds are kept.

    Args:
        path: `metrics.jsonl` or the directory it lies in.

    Raises:
        FileNotFoundError: no record there.
    """
    file = path / METRICS_FILE if path.is_dir() else path
    with open_plain(file, follow=True) as lines:
        decoded = (decode(line.decode(errors="replace")) for line in lines)
        records = [record for record in decoded if record is not None]
    return records if superseded else committed_history(records)


def committed_history(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the records without superseded steps and evaluations; see `read_metrics`."""
    kept: list[dict[str, Any]] = []
    seen: set[tuple[Any, ...]] = set()
    limits = _last_steps_that_count(records)
    for record in reversed(records):
        kind, launch, iteration = (record.get(k) for k in ("kind", "launch", "iteration"))
        if kind in _REPEATED_KINDS and isinstance(iteration, int):
            key = (kind, iteration, str(record.get("split")))
            if iteration > limits[str(launch)] or key in seen:
                continue
            seen.add(key)
        kept.append(record)
    return kept[::-1]


def _last_steps_that_count(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """By launch, the last iteration of it that later launches have built on.

    A launch goes on from a step of the newest launch before it that had come so far. One in between
    that had not has left nothing: it died before it came to a checkpoint.
    """
    start: dict[str, float] = {}
    reached: dict[str, float] = {}
    for record in records:
        launch, iteration = str(record.get("launch")), record.get("iteration")
        start.setdefault(launch, math.inf)
        reached.setdefault(launch, 0)
        if record.get("kind") in ("run.start", "step"):
            # In the order of their last steps: what was cut off may write other records later.
            start[launch] = start.pop(launch)
        if isinstance(iteration, int):
            if record.get("kind") == "run.start":
                start[launch] = iteration
            reached[launch] = max(reached[launch], iteration)
    limits: dict[str, float] = {}
    needed = math.inf
    launches = list(start)
    for i in range(len(launches) - 1, -1, -1):
        launch = launches[i]
        limits[launch] = needed
        has_come_so_far = reached[launch] >= needed or math.isinf(needed)
        if not has_come_so_far and any(reached[one] >= needed for one in launches[:i]):
            limits[launch] = start[launch]
            continue
        needed = min(needed, start[launch])
    return limits


def _ends_with_newline(file: int) -> bool:
    size = os.fstat(file).st_size
    return size == 0 or os.pread(file, 1, size - 1) == b"\n"


def _plain(value: Any) -> Any:
    """JSON form of what json does not know: numpy and torch values, dataclasses, mappings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else str(value)


def _plain_tree(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain_tree(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_tree(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (str, int, float)):
        return value
    return _plain_tree(_plain(value))


def _with_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_floats(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_with_floats(entry) for entry in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value
