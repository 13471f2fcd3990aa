"""A rank of an elastic launch, as its launcher sees it: a process and a connection with it."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from copus_ext.extras.elastic.environment import PIPE_VARIABLE
from copus_ext.extras.elastic.messages import FROM_RANK, JsonSocket, Member
from copus_ext.launch.failure import Failure, error_line, traceback_end
from copus_ext.launch.workers import Launch
from megatron.trainer.common.outside import parse_json


@dataclass
class RankProcess:
    member: Member
    process: subprocess.Popen[bytes]
    lines: JsonSocket
    """The connection with it; it does not block."""
    error_file: Path
    """Where it leaves its error."""
    has_met: bool = False
    """It has been in a world."""
    has_left: bool = False
    """It said that it ends, before it did."""
    was_released: bool = False
    """It said that the run goes on without it."""

    @classmethod
    def start(cls, member: Member, launch: Launch, command: Sequence[str]) -> RankProcess:
        ours, theirs = socket.socketpair()
        error_file = Path(launch.folder) / f"error-{member.local}-{member.run}.json"
        env = {
            **os.environ,
            PIPE_VARIABLE: f"{theirs.fileno()}:{member.node}:{member.local}:{member.run}",
            "LOCAL_RANK": str(member.local),
            "LOCAL_WORLD_SIZE": str(launch.num_ranks),
            "GROUP_RANK": str(launch.node),
            "TORCHELASTIC_ERROR_FILE": str(error_file),
            # Else torch ends a rank as soon as NCCL tells of a lost peer.
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            # Else its watchdog then sleeps for a minute, and the end of a group waits for it.
            "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "10",
        }
        words = [sys.executable, "-u", *command]
        process = subprocess.Popen(
            words, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        ours.setblocking(False)
        return cls(member, process, JsonSocket(ours, FROM_RANK), error_file)

    def failure(self, code: int, rank: int) -> Failure:
        """How it failed; `rank` is -1 if it had no number in the world."""
        error, text = "", ""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            message = parse_json(self.error_file.read_bytes())["message"]
            error, text = str(message["message"]), str(message["extraInfo"]["py_callstack"])
        return failure_of(rank, code, error, text)


@dataclass
class Place:
    """Where a rank of this node runs, one after another."""

    rank: RankProcess | None = None
    restarts: int = 0
    start_again_at: float | None = None


def failure_of(rank: int, code: int, error: str, text: str) -> Failure:
    """A failure on this machine, now; see `Failure` for the arguments."""
    return Failure(
        rank=rank,
        host=platform.node()[:500],
        code=code,
        time_s=time.time(),
        error=error_line(error),
        traceback=traceback_end(text),
    )
