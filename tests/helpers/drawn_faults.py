"""Drawn faults of a run under the supervisor: a wall clock that jumps, a rank that is stopped.

`bench.faults` has the kills.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.processes import wait_until
from tests.helpers.supervised_run import (
    MAX_S,
    POLL_S,
    Run,
    num_launches,
    problems_at_end,
    send,
    step_of,
    wait_for_moment,
)

_WATCHDOG = {"COPUS_WATCHDOG_S": "2:6"}
Drawn = tuple[str, float, dict[str, Any]]
"""Moment, seconds after it, and what else a kind draws."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault of one run."""

    kind: str
    """Of `KINDS`."""
    number: int
    """Among those of its kind: with the seed it gives all that is drawn."""
    moment: str
    """See `wait_for_moment`."""
    after_s: float
    """From the moment."""
    is_async: bool
    """Whether the run saves beside its steps."""
    drawn: dict[str, Any]
    """What else belongs to a fault of this kind."""


@dataclass(kw_only=True)
class FaultOutcome:
    """What came of a fault."""

    what: str
    """That was done, and when; empty if the run was over before."""
    seconds: float | None = None
    """See `Kind.seconds_are`."""
    problems: list[str] = field(default_factory=list)
    """Beside those that the end of the run shows."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A class of faults."""

    draw: Callable[[random.Random, bool], Drawn]
    """Gives moment, seconds after it, and what else there is to draw, of one variety for even
    numbers and of another for odd ones."""
    inject: Callable[[Run, Case], FaultOutcome]
    """Does it to a run that has just been started, and waits until it has got over it."""
    seconds_are: str
    """From where to where they go."""
    make: Callable[[Case, Path, list[str]], contextlib.AbstractContextManager[Run]]
    """Gives the run, not yet started."""
    why_not: Callable[[], str] = lambda: ""
    """Why it cannot be done here; empty if it can."""


def moment(rng: random.Random, *, start_s: float = 0.0) -> tuple[str, float]:
    """One of those that every run comes to early enough to see what follows."""
    names = ["steps", "save", "commit", "evaluation", *["start"] * (start_s > 0)]
    moment = rng.choice(names)
    return moment, rng.uniform(0, {"steps": 2.0, "start": start_s}.get(moment, 0.05))


def after(began_s: float, came: bool) -> float | None:
    """Seconds since then, if what was waited for came."""
    return time.monotonic() - began_s if came else None


def wait_for_progress(run: Run, launches: int = 0) -> tuple[float | None, list[str]]:
    """Waits for a further step, of a further launch if `launches` are known; seconds to it."""
    began_s, known = time.monotonic(), len(run.records())

    def is_on() -> bool:
        new = run.records()[known:]
        return num_launches(run) > launches and any(r.get("kind") == "step" for r in new)

    came = wait_until(lambda: run.code is not None or is_on(), MAX_S, poll_s=POLL_S)
    problems = [] if came else ["it does not go on"]
    return after(began_s, came and run.code is None), problems


def only_launch(run: Run) -> list[str]:
    """That it had no need to start again is known only at its end."""
    run.finish()
    again = [line for line in run.log.splitlines() if line.startswith("supervisor: ")]
    return [f"started again: {again}"] if num_launches(run) != 1 else []


def _draw_clock(rng: random.Random, is_odd: bool) -> Drawn:
    hours = rng.choice([-1, 1]) * rng.choice([0.5, 3.0, 48.0]) * rng.uniform(0.5, 1.0)
    return *moment(rng, start_s=6.0), {"hours": hours, "kills": is_odd}


def _clock_missing() -> str:
    if shutil.which("cc") is None or sys.platform != "linux":
        return "this needs Linux and a C compiler, cc, for tests/helpers/own_clock.c"
    return ""


@contextlib.contextmanager
def _with_own_clock(case: Case, folder: Path, flags: list[str]) -> Iterator[Run]:
    """A run whose wall clock is the machine's and what a file says; monotonic clocks and the stamps
    of files, which are a file server's, stay."""
    library, clock = folder / "own_clock.so", folder / "clock"
    run = Run(folder, flags, env={"LD_PRELOAD": str(library), "COPUS_TEST_CLOCK": str(clock)})
    source = Path(__file__).with_name("own_clock.c")
    compiler = ["cc", "-O1", "-shared", "-fPIC", "-o", library, source]
    subprocess.run(compiler, check=True, capture_output=True)
    clock.write_bytes(bytes(8))
    yield run


def _step_clock(run: Run, case: Case) -> FaultOutcome:
    if not wait_for_moment(run, case.moment, case.after_s):
        return FaultOutcome(what="")
    step, hours = step_of(run), case.drawn["hours"]
    seconds = round(3600 * hours)
    with (run.folder / "clock").open("r+b", buffering=0) as file:
        file.write(struct.pack("=q", seconds))
    kills, launches = case.drawn["kills"], num_launches(run)
    seen = FaultOutcome(what=f"{hours:+.1f} h at step {step}" + ", then rank 0 killed" * kills)
    if kills:
        for pid in run.find("rank 0"):
            send(pid, signal.SIGKILL)
        seen.seconds, seen.problems = wait_for_progress(run, launches)
        run.finish()
    else:
        seen.seconds, seen.problems = wait_for_progress(run)
        seen.problems += only_launch(run)
    last = run.records()[-1]["t"] - time.time()
    if abs(last - seconds) > MAX_S:
        seen.problems.append(f"the clock of the run was {last:.0f} s ahead, not {seconds}")
    return seen


def _draw_stop(rng: random.Random, is_odd: bool) -> Drawn:
    more = {"victim": rng.choice(["rank 0", "rank 1"]), "goes_on_s": None}
    if is_odd:
        more["goes_on_s"] = rng.uniform(1, 6)
    return *moment(rng, start_s=0.0 if more["goes_on_s"] is None else 8.0), more


@contextlib.contextmanager
def _watched(case: Case, folder: Path, flags: list[str]) -> Iterator[Run]:
    is_left = case.drawn["goes_on_s"] is None
    flags = [*flags, "--distributed-timeout-minutes", "1"]
    yield Run(folder, flags, env=_WATCHDOG if is_left else None)


def _stop_rank(run: Run, case: Case) -> FaultOutcome:
    if not wait_for_moment(run, case.moment, case.after_s):
        return FaultOutcome(what="")
    step, launches = step_of(run), num_launches(run)
    victims, wait_s = run.find(case.drawn["victim"]), case.drawn["goes_on_s"]
    for pid in victims:
        send(pid, signal.SIGSTOP)
    if not victims:
        return FaultOutcome(what="")
    seen = FaultOutcome(what=f"{case.drawn['victim']} stopped at step {step}")
    if wait_s is None:
        seen.seconds, seen.problems = wait_for_progress(run, launches)
        said = "exits with 86" if "and exits with 86" in run.log else "a collective's time-out"
        seen.what += f", seen by {said}"
        if "was ended by SIGKILL" in run.log or " hung: it did not answer" not in run.log:
            seen.problems.append("what was told is not that it hung")
    else:
        time.sleep(wait_s)
        for pid in victims:
            send(pid, signal.SIGCONT)
        seen.seconds, seen.problems = wait_for_progress(run)
        seen.what += f" for {wait_s:.1f} s"
        seen.problems += only_launch(run)
    return seen


KINDS = {
    "clock": Kind(
        draw=_draw_clock,
        inject=_step_clock,
        seconds_are="from the jump to the next step, of a new launch where a rank was killed",
        make=_with_own_clock,
        why_not=_clock_missing,
    ),
    "stop": Kind(
        draw=_draw_stop,
        inject=_stop_rank,
        seconds_are="from the stop to a step of the next launch, or from going on to a step",
        make=_watched,
    ),
}


def drawn(kind: str, seed: int, number: int) -> Case:
    """The case of a number, the same whatever else is drawn."""
    rng = random.Random(f"{seed} {kind} {number}")
    moment, after_s, more = KINDS[kind].draw(rng, number % 2 == 1)
    return Case(
        kind=kind,
        number=number,
        moment=moment,
        after_s=after_s,
        is_async=rng.random() < 0.5,
        drawn=more,
    )


def run_case(case: Case, folder: Path, reference: list[Any]) -> dict[str, Any]:
    """Hurts a run once and looks at its end.

    Args:
        case: what to do.
        folder: new.
        reference: `history` of the run that nobody hurt.

    Returns:
        A row: the case, what was done, seconds, problems (empty if all is well).
    """
    began = time.monotonic()
    kind = KINDS[case.kind]
    with kind.make(case, folder, ["--async-save"] * case.is_async) as run:
        try:
            run.start()
            seen = kind.inject(run, case)
            problems = seen.problems + problems_at_end(run, reference)
            if problems:
                problems.append(f"the log ends with: {run.log[-1500:]}")
            launches = num_launches(run)
        finally:
            run.end()
    return {
        **asdict(case),
        "what": seen.what or "nobody was there",
        "seconds": seen.seconds,
        "problems": problems,
        "launches": launches,
        "wall_s": time.monotonic() - began,
    }
