"""Decisions, changes of layout and other events of a run as a Chrome trace, on the clock of torch's
profiler, so that they line up with the steps that it traced."""

from __future__ import annotations

import errno
import gzip
import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from copus_ext.monitor.explain import percent, relayout_result
from copus_ext.monitor.facts import journal
from copus_ext.monitor.journal import MOVED, RelayoutRecord
from copus_ext.monitor.run_files import RunReader
from copus_ext.monitor.values import FOREIGN, number, rows, table, text, whole
from megatron.trainer.common.control import TRACES
from megatron.trainer.common.output_file import replace_file
from megatron.trainer.common.outside import parse_json
from megatron.trainer.common.plain_file import open_plain

FILE = "decisions.json"
"""Name of the trace, beside those of steps."""
Event = dict[str, Any]

_PROCESSES = 5_000_000
"""Process numbers of each file: more than Linux gives."""
_PROCESS = 4_000_000_000
"""Ours: above those of all files."""
_TRACKS = ("decisions", "changes of layout", "events")
_END_OF_TIME_S = 1e11
_MAX_HEAD, _MAX_BYTES = 1 << 24, 1 << 30
_BASE = re.compile(rb'"baseTimeNanoseconds":\s*(\d{1,20})\b')
_DAMAGED = (*FOREIGN, OSError, EOFError, zlib.error)
"""Errors of reading a trace."""


def timeline(run: Path) -> dict[str, Any] | None:
    """The trace of a run, without the steps of a profiler; None if nothing is recorded.

    Args:
        run: its directory; it may go on, or have been killed.

    Raises:
        OSError: a file of the run cannot be read.
    """
    reader = RunReader(run)
    reader.refresh()
    if reader.is_empty:
        return None
    bases = (base_of(path) for path in reversed(traces_of(run)))
    base_ns = next((base for base in bases if base is not None), 0)
    history = reader.history()
    about = {"ph": "M", "pid": _PROCESS}
    events: list[Event] = [{**about, "name": "process_name", "args": {"name": "copus"}}]
    for tid, name in enumerate(_TRACKS):
        events.append({**about, "tid": tid, "name": "thread_name", "args": {"name": name}})
    for line in journal(history):
        needed = None if line.needed is None else percent(line.needed)
        args = {"step": line.iteration, "reason": line.why, "gain": line.gain}
        args |= {"gain needed": needed, "outcome": line.outcome}
        track = "decisions" if line.group in ("change", "stay") else "events"
        events += _event(track, line.what, line.t, base_ns, args, ph="i", s="t")
    for relayout in history.relayouts:
        events += _phases(relayout, base_ns)
    return {"displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns, "traceEvents": events}


def _event(
    track: str, name: str, t: float | None, base_ns: int, args: dict[str, Any], **fields: Any
) -> list[Event]:
    """An event at a time in seconds since the epoch; none without a time."""
    if t is None or not 0 <= t < _END_OF_TIME_S:
        return []
    # Whole nanoseconds: a float has no room for them since 1970.
    ns = round(1e6 * t) * 1000 - base_ns
    about = {"cat": "copus", "pid": _PROCESS, "tid": _TRACKS.index(track), "ts": ns / 1000}
    known = {name: value for name, value in args.items() if value is not None and value != ""}
    return [{"name": name, **about, **fields, "args": known}]


def _phases(s: RelayoutRecord, base_ns: int) -> list[Event]:
    """A change of layout over its phases, which follow each other."""
    if s.t is None or s.pause_s is None:
        return []
    begin, found = s.t - s.pause_s, []
    whole = {f"{s.start} to {s.to}" + ("" if s.kind == MOVED else f", {s.kind}"): s.pause_s}
    for parts in (whole, s.phases):
        t = begin
        for name, took_s in parts.items():
            end = min(t + max(took_s, 0.0), s.t)
            args = {"step": s.iteration, "result": relayout_result(s)} if parts is whole else {}
            dur = max(round(1e6 * (end - t), 3), 0.0)
            found += _event("changes of layout", name, t, base_ns, args, ph="X", dur=dur)
            t = end
    return found


def traces_of(run: Path) -> list[Path]:
    """The finished traces of steps of a run, in the order of their names. They need not be plain
    files.

    Raises:
        OSError: their folder is a link.
    """
    return sorted(folder_of(run).glob("*.steps*.json.gz"))


def folder_of(run: Path) -> Path:
    """The folder of a run's traces; it need not be there yet.

    Raises:
        OSError: it is a link, which may lead out of the run.
    """
    folder = run / TRACES
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "it is a link", str(folder))
    return folder


def base_of(path: Path) -> int | None:
    """Zero of the clock of a trace of steps, nanoseconds since the epoch; None if unknown."""
    try:
        with open_plain(path) as zipped, gzip.open(zipped) as file:
            found = _BASE.search(file.read(_MAX_HEAD))
    except _DAMAGED:
        return None
    return int(found[1]) if found else None


def with_steps(trace: dict[str, Any], paths: list[Path]) -> tuple[dict[str, Any], list[str]]:
    """One trace of a run's events and its traces of steps.

    Args:
        trace: from `timeline`.

    Returns:
        The trace, and a line for each file that is left out because it cannot be read.
    """
    events, problems = list(trace["traceEvents"]), []
    for place, path in enumerate(paths):
        try:
            steps = _steps(path)
            base_ns = whole(steps.get("baseTimeNanoseconds")) or 0
            shift_us = (base_ns - trace["baseTimeNanoseconds"]) / 1000
            name = path.name.removesuffix(".json.gz")
            own = (_moved(e, name, place, len(paths), shift_us) for e in rows(steps["traceEvents"]))
            events += [event for event in own if event is not None]
        except _DAMAGED as error:
            problems.append(text(f"{path} is left out: {error}"))
    return {**trace, "traceEvents": events}, problems


def _steps(path: Path) -> dict[str, Any]:
    """The content of a trace of steps; all its numbers are finite."""
    with open_plain(path) as zipped, gzip.open(zipped) as file:
        text = file.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES} bytes")
    steps = parse_json(text, finite=True)
    if not isinstance(steps, dict) or not isinstance(steps.get("traceEvents"), list):
        raise ValueError("it is not a trace")
    return steps


def _moved(event: Event, name: str, place: int, num: int, shift_us: float) -> Event | None:
    """An event of a file on the common clock, with numbers of processes and arrows that no other
    file has; None if its time is invalid."""
    moved = dict(event)
    if "ts" in moved:
        ts = number(moved["ts"])
        if ts is None:
            return None
        moved["ts"] = ts + shift_us
    if (pid := whole(moved.get("pid"))) is not None:
        moved["pid"] = pid + (place + 1) * _PROCESSES
    if (arrow := whole(moved.get("id"))) is not None:
        moved["id"] = arrow * num + place
    if moved.get("ph") == "M" and moved.get("name") == "process_name":
        moved["args"] = {"name": f"{name} {text(table(moved.get('args')).get('name'))}"}
    return moved


def write_trace(
    path: Path, trace: dict[str, Any], write: Callable[[Path, bytes], object] = replace_file
) -> None:
    """Writes a trace, zipped if the name ends with `.gz`.

    Args:
        write: `write_output` for a file that the user named, which may be a pipe. What lies in the
            folder of a run is replaced, and nothing is written through it.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps(trace, allow_nan=False).encode()
    write(path, gzip.compress(data, 6) if path.suffix == ".gz" else data)
