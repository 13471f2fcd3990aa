"""What a drawn fault is, and what those of every kind share."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.fault_runs import MOST_S, Run, num_launches, wait_until


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault of one run."""

    kind: str
    """Of `KINDS`."""
    number: int
    """Among those of its kind: with the seed it gives all that is drawn."""
    moment: str
    """See `fault_runs.come`."""
    after_s: float
    """From the moment."""
    is_async: bool
    """Whether the run saves beside its steps."""
    drawn: dict[str, Any]
    """What else belongs to a fault of this kind."""


@dataclass(kw_only=True)
class Seen:
    """What came of a fault."""

    what: str
    """That was done, and when; empty if the run was over before."""
    seconds: float | None = None
    """See `Kind.seconds_are`."""
    problems: list[str] = field(default_factory=list)
    """Beside those that the end of the run shows."""
    winner: Run | None = None
    """The run that goes on to the end, if it is not the one that was hurt."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A class of faults."""

    draw: Callable[[random.Random, bool], tuple[str, float, dict[str, Any]]]
    """Gives moment, seconds after it, and what else there is to draw, of one variety for even
    numbers and of another for odd ones."""
    hurt: Callable[[Run, Case], Seen]
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


def goes_on(run: Run, launches: int = 0) -> tuple[float | None, list[str]]:
    """Waits for a further step, of a further launch if `launches` are known; seconds to it."""
    began_s, known = time.monotonic(), len(run.records())

    def is_on() -> bool:
        new = run.records()[known:]
        return num_launches(run) > launches and any(r.get("kind") == "step" for r in new)

    came = wait_until(lambda: run.code is not None or is_on(), MOST_S)
    problems = [] if came else ["it does not go on"]
    return after(began_s, came and run.code is None), problems


def only_launch(run: Run) -> list[str]:
    """That it had no need to start again is known only at its end."""
    run.finish()
    again = [line for line in run.log.splitlines() if line.startswith("supervisor: ")]
    return [f"started again: {again}"] if num_launches(run) != 1 else []


@contextlib.contextmanager
def plain(case: Case, folder: Path, flags: list[str]) -> Iterator[Run]:
    """A run as it is."""
    yield Run(folder, flags)
