"""SIGKILL of processes of a supervised run, again and again."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.faults.supervised_run import (
    MOMENTS,
    MOST_S,
    Run,
    num_launches,
    problems_at_end,
    process_names,
    send,
    step_of,
    wait_for_moment,
    wait_until,
)

VICTIMS = ("rank 0", "rank 1", "writer", "launcher", "supervisor", "all")
_LAUNCH_S = 14.0
"""Seconds of a launch out of which "any" is drawn."""
_START_S = 8.0


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One SIGKILL."""

    victim: str
    """Of `VICTIMS`."""
    moment: str
    """Of `MOMENTS`."""
    after_s: float
    """From the start of the launch (`any`, `start`), else from the moment."""
    is_async: bool
    """Whether the run saves beside its steps."""

    def __str__(self) -> str:
        return f"{self.victim}, {self.moment} + {self.after_s:.2f} s"


def drawn(seed: int, number: int, *, chain: int) -> list[list[Kill]]:
    """Kills in chains, each of one run."""
    rng = random.Random(seed)
    kills = []
    for i in range(number):
        moment = MOMENTS[i % len(MOMENTS)]
        longest = {"any": _LAUNCH_S, "start": _START_S}.get(moment, 0.05)
        kills.append(
            Kill(
                victim=rng.choice(VICTIMS),
                moment=moment,
                after_s=rng.uniform(0, longest),
                is_async=i // chain % 2 == 1,
            )
        )
    return [kills[i : i + chain] for i in range(0, number, chain)]


def kill_at_moment(run: Run, kill: Kill) -> str:
    """Waits for the moment and kills.

    Returns:
        What was killed where, or nothing if nothing was: the run was done before.
    """
    is_there = wait_for_moment(run, kill.moment, kill.after_s)
    if is_there and kill.victim == "writer":  # lives only while a checkpoint is written
        wait_until(lambda: bool(run.find("writer")) or run.code is not None, MOST_S)
    victims = run.find(kill.victim) if is_there else []
    for pid in victims:
        send(pid, signal.SIGKILL)
    return f"{kill.victim} at step {step_of(run)}" if victims else ""


def run_chain(kills: Sequence[Kill], folder: Path, reference: list[Any]) -> list[dict[str, Any]]:
    """Kills a run again and again, starts it again where nobody else does, and looks at the end.

    Args:
        kills: in turn; those that come after the run is done are of another run.
        folder: new.
        reference: `history` of the run that nobody hurt.

    Returns:
        A row for each kill. `problems` are of the run it is of: empty if all is well.
    """
    rows: list[dict[str, Any]] = []
    left = list(kills)
    while left:
        run = Run(folder / str(len(rows)), ["--async-save"] * left[0].is_async)
        struck: list[dict[str, Any]] = []
        problems: list[str] = []
        try:
            run.start()
            while left and run.code is None:
                what = kill_at_moment(run, left[0])
                if not what:
                    break
                struck.append({**asdict(left.pop(0)), "what": what})
                problems += _recover(run, struck[-1])
            problems += problems_at_end(run, reference)
        finally:
            run.end()
        if not struck:  # the run was done before its first kill: that kill found nobody
            struck.append({**asdict(left.pop(0)), "what": "nobody was there"})
        rows += [{**row, "problems": problems, "starts": run.starts} for row in struck]
    return rows


def _recover(run: Run, row: dict[str, Any]) -> list[str]:
    """The run goes on by itself, or is started again once all of it is gone."""
    began = time.monotonic()
    before = num_launches(run)
    problems = []
    if row["victim"] in ("supervisor", "all"):
        if not run.gone():
            problems.append(f"after {row['what']} processes are left: {process_names(run)}")
        run.end()
        run.start()
    came = wait_until(lambda: run.code is not None or num_launches(run) > before, MOST_S)
    if not came:
        problems.append(f"after {row['what']} the run does not come back")
    row["seconds_to_run"] = time.monotonic() - began if run.code is None else None
    return problems
