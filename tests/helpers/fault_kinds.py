"""Faults other than kills, drawn: of each a run under the supervisor is hurt once and must get over
it. `fault_cases.py` has the kills.
"""

from __future__ import annotations

import random
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.helpers.fault_drawn import Case
from tests.helpers.fault_handling import HANDLING
from tests.helpers.fault_machine import MACHINE
from tests.helpers.fault_runs import end_of, num_launches

KINDS = {**MACHINE, **HANDLING}


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


def run_case(case: Case, folder: Path, whole: list[Any]) -> dict[str, Any]:
    """Hurts a run once and looks at its end.

    Args:
        case: what to do.
        folder: new.
        whole: `history` of the run that nobody hurt.

    Returns:
        A row: the case, what was done, seconds, problems (empty if all is well).
    """
    began = time.monotonic()
    kind = KINDS[case.kind]
    with kind.make(case, folder, ["--async-save"] * case.is_async) as run:
        try:
            run.start()
            seen = kind.hurt(run, case)
            last = seen.winner or run
            problems = seen.problems + end_of(last, whole)
            if problems:
                problems.append(f"the log ends with: {last.log[-1500:]}")
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
