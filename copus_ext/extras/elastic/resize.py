"""Who leaves where a run asks for fewer ranks, and who is asked where it wants more.

Whoever runs the job writes the number into `control/ranks` in the run's directory. The launcher
that leads looks there. Nodes leave as a whole, the last ones first. Nobody but the cluster can
bring more: the launcher says so, and runs the command that it was given.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from copus_ext.extras.elastic.environment import RESIZE_VARIABLE
from copus_ext.extras.elastic.messages import Generation, Member
from megatron.trainer.common.control import LAUNCH_VARIABLE, SUPERVISOR_VARIABLE, text_of
from megatron.trainer.common.program import tell

RANKS_FILE = Path("control") / "ranks"
"""The number of ranks that the run should have. Whoever runs the job writes it."""
WANTED_VARIABLE, PRESENT_VARIABLE = "COPUS_WANTED_RANKS", "COPUS_PRESENT_RANKS"
"""Environment variables of the command: ranks that the run asks for, and has."""
NODES_VARIABLE = "COPUS_NODES"
"""The same: numbers of the nodes that it has, with commas."""
_OF_LAUNCH = (LAUNCH_VARIABLE, SUPERVISOR_VARIABLE)
"""By these a supervisor finds what it ends with its launch. The command may live longer."""


class RanksAsked(NamedTuple):
    """A number of ranks that the run should have."""

    ranks: int
    """At least 1; 0 where the text is no such number."""
    written_ns: int
    """When, by the clock of the file system."""


def ranks_asked(run_dir: Path) -> RanksAsked | None:
    """What is asked for; None if nobody asks, or has not yet written what."""
    text = text_of(run_dir / RANKS_FILE)
    with contextlib.suppress(OSError):
        if text:
            ranks = int(text) if text.isascii() and text.isdecimal() else 0
            return RanksAsked(ranks, (run_dir / RANKS_FILE).stat().st_mtime_ns)
    return None


def staying(members: Sequence[Member], ranks: int) -> tuple[Member, ...]:
    """Who stays of some members: those of the first nodes that have at most so many ranks in all,
    and those of one node at least."""
    kept: list[Member] = []
    for node in sorted({member.node for member in members}):
        theirs = [member for member in members if member.node == node]
        if kept and len(kept) + len(theirs) > ranks:
            break
        kept += theirs
    return tuple(kept)


def ask_cluster(wanted: int, generation: Generation) -> None:
    """Says where the run wants more ranks than it has, and runs the command for another number."""
    present = len(generation.members)
    if wanted > present:
        tell("launcher", f"the run asks for {wanted} ranks and has {present}: start more nodes")
    command = os.environ.get(RESIZE_VARIABLE)
    if not command:
        return
    env = {name: value for name, value in os.environ.items() if name not in _OF_LAUNCH}
    env |= {WANTED_VARIABLE: str(wanted), PRESENT_VARIABLE: str(present)}
    env[NODES_VARIABLE] = ",".join(map(str, generation.nodes))
    threading.Thread(target=_run, args=(command, env), daemon=True).start()


def _run(command: str, env: dict[str, str]) -> None:
    code = subprocess.run(command, shell=True, env=env, stdin=subprocess.DEVNULL).returncode
    if code != 0:
        tell("launcher", f"--resize-command left with {code}: {command}")
