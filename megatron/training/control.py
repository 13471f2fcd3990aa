"""The control directory of a run: how an operator or a supervisor talks to it, and it to them.

Paths are relative to the run directory.
"""

from __future__ import annotations

from pathlib import Path

STOP_FILE = Path("control") / "stop"
"""Save and leave at the next step boundary. Its text may say why, such as `TIME_LIMIT`."""
SAVE_FILE = Path("control") / "save"
"""Save at the next step boundary, and go on."""
PAUSE_FILE = Path("control") / "pause"
"""While it is there a controller decides nothing."""
LOCK_FILE = Path("control") / "lock"
"""Who is writing this directory."""
HEARTBEATS = Path("control") / "heartbeat"
"""A file for each rank, written while it makes progress."""
STACKS = Path("stacks")
"""Where a rank that makes no progress writes its stacks: `<launch>.<rank>.txt`."""
TIME_LIMIT = "time limit"
"""Text of a stop file that was written because the allocation is about to end."""
