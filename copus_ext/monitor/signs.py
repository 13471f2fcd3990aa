"""What a run is about, from what it wrote last and when it touched its files. Never asks a process:
the run may be on another machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from copus_ext.monitor.decisions import Decisions
from copus_ext.monitor.ends import Record, seconds
from copus_ext.monitor.lines import small_json
from copus_ext.monitor.values import LINE, text
from copus_ext.reshard.checked import check_number, read_value
from megatron.training.common.control import HEARTBEATS, LOCK_FILE, PAUSE_FILE, STOP_FILE
from megatron.training.resilience.lock import STALE_S

State = Literal[
    "empty",
    "starting",
    "training",
    "evaluating",
    "saving",
    "changing layout",
    "done",
    "stopped",
    "failed",
    "lost",
]
_PHASES: dict[str, State] = {
    "start": "starting",
    "training": "training",
    "evaluating": "evaluating",
    "saving": "saving",
    "writing a trace": "saving",
    "changing the layout": "changing layout",
}
_HEARTBEAT_BYTES = 4096
_TOGETHER_S = 1.0
"""What happens at one boundary is written so soon after the step."""
_HARMLESS_FAULT = "checkpoint passed over"
_LATEST = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True, kw_only=True)
class RunLiveness:
    """What is seen of a run."""

    state: State
    """What it is about."""
    why: str
    """Why it is over, or what else is to be known; empty if nothing."""
    silent_s: float | None
    """Seconds since the last sign of life; None if there never was one."""

    @property
    def is_alive(self) -> bool:
        """Whether it goes on, as far as can be seen."""
        return self.state not in ("empty", "done", "stopped", "failed", "lost")


def read_signs(run: Path, record: Record, decisions: Decisions, *, t: float) -> RunLiveness:
    """What a run is about.

    Args:
        run: its directory.
        record: the end of its record.
        decisions: its journal, or the end of it.
        t: now, seconds since the epoch.
    """
    locked, beat = _touched(run / LOCK_FILE), _touched(run / HEARTBEATS / "0")
    wrote = max(map(seconds, [*record.events[-1:], record.last]), default=0.0)
    seen = max(locked or 0.0, beat or 0.0, wrote)
    silent_s = max(t - seen, 0.0) if seen else None
    since = record.since_start
    if ends := [event for event in since if event.get("kind") == "run.end"]:
        why = text(ends[-1].get("why"), LINE)
        state: State = "done" if why == "done" else "stopped"
        return RunLiveness(state=state, why="" if state == "done" else why, silent_s=silent_s)
    if not record.events and not record.steps and locked is None:
        why = "only its journal is left" if decisions.decided else "nothing is recorded yet"
        return RunLiveness(state="empty", why=why, silent_s=silent_s)
    faults = [text(e.get("line"), LINE) for e in since if _is_fatal(e)]
    if locked is None and (run / LOCK_FILE).parent.is_dir():
        why = faults[-1] if faults else "it ended without a last record; its output says why"
        return RunLiveness(state="failed", why=why, silent_s=silent_s)
    if silent_s is None or silent_s > STALE_S:
        if faults:
            return RunLiveness(state="failed", why=faults[-1], silent_s=silent_s)
        why = "no sign of life: it was killed, or its machine is gone"
        return RunLiveness(state="lost", why=why, silent_s=silent_s)
    why = "asked to stop" if (run / STOP_FILE).exists() else ""
    return RunLiveness(state=_phase(run, record, decisions), why=why, silent_s=silent_s)


def is_paused(run: Path) -> bool:
    """Whether an operator has stopped the controller's decisions."""
    return (run / PAUSE_FILE).exists()


def latest_checkpoint(run: Path) -> tuple[int, float] | None:
    """Iteration of the checkpoint that the directory points to and when that was written; None
    without one."""

    def parse(value: Any) -> int:
        check_number("iteration", value, 0, 1 << 53)
        return value

    try:
        iteration = read_value(run / _LATEST, parse, most_bytes=100)
    except ValueError:
        return None
    touched = _touched(run / _LATEST)
    return None if iteration is None or touched is None else (iteration, touched)


def _is_fatal(event: dict[str, Any]) -> bool:
    return event.get("kind") == "fault" and event.get("fault") != _HARMLESS_FAULT


def _phase(run: Path, record: Record, decisions: Decisions) -> State:
    """What a living run is about: as rank 0 says, else as the record does."""
    beat = small_json(run / HEARTBEATS / "0", _HEARTBEAT_BYTES)
    if beat and beat.get("launch") == record.launch:
        known = _PHASES.get(str(beat.get("doing")))
        # It is written every few seconds, and a record of a step is newer.
        if known is not None and not (known == "starting" and _has_steps(record)):
            return known
    if not _has_steps(record):
        return "starting"
    if (decisions.begun_t or 0.0) >= max(seconds(record.last) - _TOGETHER_S, 0.1):
        return "changing layout"
    saves = ("checkpoint.commit", "checkpoint.failed")
    is_async = bool(record.config.get("async_save"))
    if not is_async and _open(record.since_start, "checkpoint.begin", saves, after=record.last):
        return "saving"
    return "training"


def _has_steps(record: Record) -> bool:
    """Whether the last launch has made one."""
    return bool(record.steps) and text(record.last.get("launch")) == record.launch


def _open(
    events: Sequence[dict[str, Any]], begin: str, ends: tuple[str, ...], *, after: dict[str, Any]
) -> bool:
    """Whether something has begun after a step and not ended."""
    is_open = False
    for event in events:
        if event.get("kind") == begin:
            is_open = seconds(event) >= seconds(after) - _TOGETHER_S
        elif event.get("kind") in ends:
            is_open = False
    return is_open


def _touched(path: Path) -> float | None:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None
