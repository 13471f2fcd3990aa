"""The ends of a run's record and journal, read without the rest; what is torn or foreign is passed
over."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from copus_ext.controller.decision_log import NAME as JOURNAL
from copus_ext.monitor.decisions import Decisions
from copus_ext.monitor.lines import Lines, record_of, small_json
from copus_ext.monitor.pairing import add, slim
from copus_ext.monitor.values import text, whole, written
from megatron.training.logging.metrics import METRICS_FILE, committed_history, decode
from megatron.training.logging.tail_reader import Tail, last_lines, placed_lines

CONFIG_FILE = "config.json"
_MOST_BYTES = 1 << 26
"""Looked through for what is rare: tens of thousands of steps."""
_STEP_BYTES = 1 << 20
"""Of the last steps."""
_KIND_BYTES = 100
"""The kind is among the first fields of a line."""
_STEPS = 100
# As the journal is written; quotes inside a text are not bare. What is written otherwise is decoded
# whole.
_DECISION_KIND = b'"kind": "decision"'
_SITUATION, _DECISION = b', "situation": {', b', "decision": {'


def seconds(record: Mapping[str, Any]) -> float:
    """When a record was written, in seconds since the epoch; 0 if it does not say."""
    return written(record) or 0.0


@dataclass(frozen=True, kw_only=True)
class Record:
    """The end of `metrics.jsonl`."""

    steps: tuple[dict[str, Any], ...]
    """The last ones that count, at most a hundred."""
    events: tuple[dict[str, Any], ...]
    """All that are no steps."""
    is_whole: bool
    """Whether none are missing at the beginning."""
    config: dict[str, Any]
    """Resolved flags of the last launch; empty if unknown."""

    @property
    def last(self) -> dict[str, Any]:
        """The last step; empty before the first."""
        return self.steps[-1] if self.steps else {}

    @property
    def starts(self) -> list[dict[str, Any]]:
        """Beginnings of launches."""
        return self.of("run.start")

    @property
    def launch(self) -> str:
        """Name of the last launch; empty if unknown."""
        source = self.starts[-1] if self.starts else self.last
        return text(source.get("launch"))

    @property
    def since_start(self) -> list[dict[str, Any]]:
        """Events of the last launch."""
        kinds = [event.get("kind") for event in self.events]
        at = len(kinds) - kinds[::-1].index("run.start") - 1 if "run.start" in kinds else 0
        return list(self.events[at:])

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        """Events of some kinds."""
        return [event for event in self.events if event.get("kind") in kinds]


def read_record(run: Path) -> Record:
    """The end of a run's record; an empty one, if there is none."""
    path = run / METRICS_FILE
    events = []
    for line in last_lines(path, _MOST_BYTES):
        if b'"kind":"step"' in line[:_KIND_BYTES] or not line.endswith(b"\n"):
            continue
        record = decode(line.decode(errors="replace"))
        if record is not None and isinstance(record.get("kind"), str) and record["kind"] != "step":
            events.append(record)
    tail = committed_history(list(Tail(path, most_bytes=_STEP_BYTES).records()))
    steps = [r for r in tail if r.get("kind") == "step" and whole(r.get("iteration")) is not None]
    start = next((e for e in reversed(events) if e.get("kind") == "run.start"), None)
    launch = None if start is None else start.get("launch")
    # A launch that has not made a step yet shows what the one before it did.
    steps = [s for s in steps if s.get("launch") == launch] or steps
    return Record(
        steps=tuple(steps[-_STEPS:]),
        events=tuple(events),
        is_whole=_size(path) <= _MOST_BYTES,
        config=_config(run, start),
    )


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _config(run: Path, start: Mapping[str, Any] | None) -> dict[str, Any]:
    known = None if start is None else start.get("config")
    return known if isinstance(known, dict) else small_json(run / CONFIG_FILE)


def read_journal_end(run: Path) -> Decisions:
    """The end of a run's journal; nothing, if there is none. Of what a decision depended on it
    tells nothing: `whole_record` reads that."""
    found = Decisions()
    for place, line in placed_lines(run / JOURNAL, _MOST_BYTES):
        if line.endswith(b"\n") and (record := _without_situation(line)) is not None:
            add(found, place, record)
    return found


def whole_record(run: Path, place: int) -> dict[str, Any]:
    """The record at a place of the journal; empty if it is no longer there."""
    return Lines(run / JOURNAL).at(place)


def _without_situation(line: bytes) -> dict[str, Any] | None:
    """A record of the journal. Most of a decision's line is the situation that it depended on, and
    most lines are decisions: that part is cut out before it is decoded."""
    begin, end = line.find(_SITUATION), line.rfind(_DECISION)
    if _DECISION_KIND in line[:_KIND_BYTES] and 0 < begin < end:
        record = record_of(line[:begin] + line[end:])
        if record is not None:
            return record
    record = record_of(line)
    return None if record is None else slim(record)
