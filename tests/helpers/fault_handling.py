"""Faults of handling: ranks that are stopped, signals, damaged files, a second start."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.training.checkpoint import files
from tests.helpers.fault_drawn import Case, Kind, Seen, after, goes_on, moment, only_launch, plain
from tests.helpers.fault_runs import (
    INTERVAL,
    MOST_S,
    STEPS,
    Run,
    come,
    latest_of,
    named,
    num_launches,
    send,
    step_of,
    wait_until,
)

_WATCHDOG = {"COPUS_WATCHDOG_S": "2:6"}
_SECOND_LEAVES_S = 120.0
_HOLDER = re.compile(r"process \d+ on \S+, launch ")


def _draw_stop(rng: random.Random, is_odd: bool) -> tuple[str, float, dict[str, Any]]:
    more = {"victim": rng.choice(["rank 0", "rank 1"]), "goes_on_s": None}
    if is_odd:
        more["goes_on_s"] = rng.uniform(1, 6)
    return *moment(rng, start_s=0.0 if more["goes_on_s"] is None else 8.0), more


@contextlib.contextmanager
def _watched(case: Case, folder: Path, flags: list[str]) -> Iterator[Run]:
    is_left = case.drawn["goes_on_s"] is None
    flags = [*flags, "--distributed-timeout-minutes", "1"]
    yield Run(folder, flags, env=_WATCHDOG if is_left else None)


def _stop_rank(run: Run, case: Case) -> Seen:
    if not come(run, case.moment, case.after_s):
        return Seen(what="")
    step, launches = step_of(run), num_launches(run)
    victims, wait_s = run.find(case.drawn["victim"]), case.drawn["goes_on_s"]
    for pid in victims:
        send(pid, signal.SIGSTOP)
    if not victims:
        return Seen(what="")
    seen = Seen(what=f"{case.drawn['victim']} stopped at step {step}")
    if wait_s is None:
        seen.seconds, seen.problems = goes_on(run, launches)
        said = "leaves with 86" if "and leaves with 86" in run.log else "a collective's time-out"
        seen.what += f", seen by {said}"
        if "was ended by SIGKILL" in run.log or " hung: it did not answer" not in run.log:
            seen.problems.append("what was told is not that it hung")
    else:
        time.sleep(wait_s)
        for pid in victims:
            send(pid, signal.SIGCONT)
        seen.seconds, seen.problems = goes_on(run)
        seen.what += f" for {wait_s:.1f} s"
        seen.problems += only_launch(run)
    return seen


def _draw_signals(rng: random.Random, is_odd: bool) -> tuple[str, float, dict[str, Any]]:
    name = "SIGUSR1" if is_odd else "SIGTERM"
    more = {"signal": name, "again_s": rng.uniform(0, 0.5) if name == "SIGUSR1" else None}
    return *moment(rng, start_s=8.0), more


def _signal_supervisor(run: Run, case: Case) -> Seen:
    """It saves and leaves with 85; the same command goes on."""
    if not come(run, case.moment, case.after_s):
        return Seen(what="")
    name, again_s = case.drawn["signal"], case.drawn["again_s"]
    number, began_s = getattr(signal, name), time.monotonic()
    began_at = step_of(run)
    seen = Seen(what=f"{name}{' twice' if again_s is not None else ''} at step {began_at}")
    for pid in run.find("supervisor"):
        send(pid, number)
        if again_s is not None:
            time.sleep(again_s)
            send(pid, number)
    code, left_at = run.finish(), step_of(run)
    seen.seconds = after(began_s, code is not None)
    # Before the ranks can save there is nothing to save, and the signal is passed on.
    allowed = (85,) if began_at else (85, 128 + number)
    if code == 0 and left_at == STEPS:
        return seen
    if code not in allowed:
        seen.problems.append(f"left with {code}")
    if began_at and latest_of(run) != left_at:
        seen.problems.append(f"left after step {left_at} with checkpoint {latest_of(run)}")
    if not run.gone():
        seen.problems.append(f"left behind: {named(run)}")
    run.end()
    run.start()
    return seen


def _draw_damage(rng: random.Random, is_odd: bool) -> tuple[str, float, dict[str, Any]]:
    more = {
        "way": "cut" if is_odd else "flip",
        "checkpoints": rng.randint(2, STEPS // INTERVAL - 1),
        "killed": rng.choice(["all", "rank 0", "rank 1"]),
        "file": rng.random(),
        "place": rng.random(),
        "mask": rng.randint(1, 255),
    }
    return "commit", 0.0, more


def _spoil(folder: Path, more: dict[str, Any]) -> Path:
    """Flips a byte of a file of a checkpoint, or cuts it."""
    names = sorted(path for path in folder.iterdir() if path.stat().st_size)
    path = names[int(more["file"] * len(names))]
    at = int(more["place"] * path.stat().st_size)
    if more["way"] == "cut":
        os.truncate(path, at)
    else:
        with path.open("r+b") as file:
            file.seek(at)
            old = file.read(1)[0]
            file.seek(at)
            file.write(bytes([old ^ more["mask"]]))
    return path


def _damage(run: Run, case: Case) -> Seen:
    """The newest checkpoint changes as the run is killed: the one before it is taken, or, from a
    manifest that still says the same, the damaged one."""
    more = case.drawn
    enough = lambda: len(files.complete_iterations(run.save)) >= more["checkpoints"]  # noqa: E731
    wait_until(lambda: run.code is not None or (enough() and latest_of(run) is not None), MOST_S)
    victims, all_of_it = run.find(more["killed"]), run.find("all")
    if run.code is not None or not victims:
        return Seen(what="")
    launches = num_launches(run)
    for pid in all_of_it:  # so that the newest stays the newest
        send(pid, signal.SIGSTOP)
    latest = latest_of(run)
    assert latest is not None
    spoilt = _spoil(files.folder_of(run.save, latest), more)
    for pid in victims:
        send(pid, signal.SIGKILL)
    for pid in all_of_it:
        send(pid, signal.SIGCONT)
    seen = Seen(
        what=f"{more['way']} in {spoilt.parent.name}/{spoilt.name}, {more['killed']} killed"
    )
    if more["killed"] == "all":
        if not run.gone():
            seen.problems.append(f"processes are left: {named(run)}")
        run.end()
        run.start()
    seen.seconds, problems = goes_on(run, launches)
    seen.problems += problems
    run.finish()
    told = f"{spoilt.parent.name}" in run.log and "; going on from iteration" in run.log
    if not told and spoilt.name != files.MANIFEST:
        seen.problems.append(f"{seen.what} was not told")
    return seen


def _draw_second(rng: random.Random, is_odd: bool) -> tuple[str, float, dict[str, Any]]:
    return *moment(rng, start_s=8.0), {}


def _start_second(run: Run, case: Case) -> Seen:
    """One of both is refused and names the other. While a run is not yet there it is open which."""
    if not come(run, case.moment, case.after_s):
        return Seen(what="")
    is_early = num_launches(run) == 0
    seen = Seen(what=f"at step {step_of(run)}")
    other = Run(run.folder, ["--async-save"] * case.is_async, log="second")
    began_s = time.monotonic()
    try:
        other.start()
        wait_until(lambda: other.code is not None or run.code is not None, _SECOND_LEAVES_S)
        if run.code == 0 and other.code is None:
            return Seen(what="")  # nobody is there to refuse it, and it finds that all is done
        refused, seen.winner = (other, run) if other.code is not None else (run, other)
        seen.seconds = after(began_s, refused.code is not None)
        if refused is run and not is_early:
            seen.problems.append(f"the second was not refused: {other.log[-600:]}")
        elif refused.code not in (1, 2) or not _HOLDER.search(refused.log):
            seen.problems.append(f"refused with {refused.code}: {refused.log[-600:]}")
        seen.problems += only_launch(seen.winner)
        for one in (run, other):
            if not one.gone():
                seen.problems.append(f"left behind: {named(one)}")
    finally:
        other.end()
    return seen


HANDLING = {
    "stop": Kind(
        draw=_draw_stop,
        hurt=_stop_rank,
        seconds_are="from the stop to a step of the next launch, or from going on to a step",
        make=_watched,
    ),
    "signals": Kind(
        draw=_draw_signals,
        hurt=_signal_supervisor,
        seconds_are="from the signal to the end of the supervisor",
        make=plain,
    ),
    "damage": Kind(
        draw=_draw_damage,
        hurt=_damage,
        seconds_are="from the kill, or the start after it, to a step of the next launch",
        make=plain,
    ),
    "second": Kind(
        draw=_draw_second,
        hurt=_start_second,
        seconds_are="from the second start to its refusal",
        make=plain,
    ),
}
