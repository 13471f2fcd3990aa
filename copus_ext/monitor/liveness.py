"""What a run is doing, from its last records and the times of its files. No process is asked: the
run may be on another machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from copus_ext.monitor.run_files import RunHistory
from copus_ext.monitor.values import LINE, text
from copus_ext.reshard.checked import read_value
from megatron.trainer.common.control import HEARTBEATS, LOCK_FILE, PAUSE_FILE, STOP_FILE
from megatron.trainer.resilience.lock import STALE_S

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
OVER: tuple[State, ...] = ("done", "stopped", "failed", "lost")
_PHASES: dict[str, State] = {
    "start": "starting",
    "training": "training",
    "evaluating": "evaluating",
    "saving": "saving",
    "writing a trace": "saving",
    "changing the layout": "changing layout",
}
_HEARTBEAT_BYTES = 4096
_HARMLESS_FAULT = "checkpoint passed over"


@dataclass(frozen=True, kw_only=True)
class RunLiveness:
    state: State
    why: str
    """Why it is over, or what else to know; empty if nothing."""
    silent_s: float | None
    """Seconds since the last sign of life; None if there never was one."""

    @property
    def is_alive(self) -> bool:
        """Whether the run goes on, as far as can be seen."""
        return self.state not in ("empty", *OVER)


def liveness(run: RunHistory, *, t: float) -> RunLiveness:
    """What a run is doing.

    Args:
        run: what was read of it.
        t: now, seconds since the epoch.
    """
    locked, beat = _touched(run.path / LOCK_FILE), _touched(run.path / HEARTBEATS / "0")
    seen = max(locked or 0.0, beat or 0.0, run.last or 0.0)
    silent_s = max(t - seen, 0.0) if seen else None

    def told(state: State, why: str = "") -> RunLiveness:
        return RunLiveness(state=state, why=why, silent_s=silent_s)

    since = run.since_start
    if ends := [event for event in since if event.kind == "run.end"]:
        why = text(ends[-1].about.get("why"), LINE)
        return told("done") if why == "done" else told("stopped", why)
    if not (run.events or run.steps or run.evaluations) and locked is None:
        is_kept = bool(run.decisions.decided)
        return told("empty", "only its journal is left" if is_kept else "nothing is recorded yet")
    faults = [
        text(event.about.get("line"), LINE)
        for event in since
        if event.kind == "fault" and event.about.get("fault") != _HARMLESS_FAULT
    ]
    starts = [event for event in since if event.kind == "run.start"]
    has_lock = not starts or starts[-1].about.get("has_lock", True) is not False
    if not has_lock and faults:
        return told("failed", faults[-1])
    # Our own trainer holds it, and removes it on every way out but a kill.
    if locked is None and has_lock:
        unknown = "it ended without a last record; its output says why"
        return told("failed", faults[-1] if faults else unknown)
    if silent_s is None or silent_s > STALE_S:
        if faults:
            return told("failed", faults[-1])
        return told("lost", "no sign of life: it was killed, or its machine is gone")
    return told(_phase(run), "asked to stop" if (run.path / STOP_FILE).exists() else "")


def is_paused(run: Path) -> bool:
    """Whether an operator has paused the controller."""
    return (run / PAUSE_FILE).exists()


def _phase(run: RunHistory) -> State:
    """What a living run does, as its rank 0 says; without that it trains, or starts."""
    # A launch that has made no step yet is starting, whatever the one before did.
    has_steps = bool(run.steps) and run.steps[-1].launch == run.launch
    known = _PHASES.get(_heartbeat(run))
    # The heartbeat is some seconds old, and the record of a step may be newer.
    if known is None or (known == "starting" and has_steps):
        return "training" if has_steps else "starting"
    return known


def _heartbeat(run: RunHistory) -> str:
    """What rank 0 of the last launch says it does; empty if it does not say."""
    try:
        beat = read_value(run.path / HEARTBEATS / "0", dict, max_bytes=_HEARTBEAT_BYTES)
    except (ValueError, TypeError):
        return ""
    is_of_launch = bool(beat) and beat.get("launch") == run.launch
    return str(beat.get("doing")) if beat and is_of_launch else ""


def _touched(path: Path) -> float | None:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None
