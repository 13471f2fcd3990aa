"""Killed at any moment, does a run go on with the same losses?

    python -m bench.faults runs [--kills 225]
    python -m bench.faults moves [--kills 50]

* runs: a tiny GPT trains on two ranks under the supervisor. It saves as it goes, every other run
  beside its steps. Ranks, their writers, the launcher, the supervisor or all at once are killed,
  five times in one run. The moments are drawn: while it starts, saves, has just committed or
  evaluates. The run must come back by itself, or by the same command if the supervisor was killed.
  It must leave no process, lock or half-made file. Writes faults.json.
* moves: the same GPT changes its layout and loses a rank at a drawn place of the change, the way
  back among them. The other rank must leave by itself to be launched again; the run that is started
  again loses a rank elsewhere, five times. Writes relayout_faults.json.

Each run must end with the losses of one that nobody hurt, bit for bit, and with every sample once.
Results go to docs/results; what the output already holds is not done again.
`tests/distributed/test_faults.py` has other faults.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.support import RESULTS, arguments, origin
from tests.helpers import relayout_cases, supervised_run
from tests.helpers.processes import wait_until
from tests.helpers.supervised_run import MAX_S, MOMENTS, Run

Rows = list[dict[str, Any]]
CHAIN = 5
"""Kills of a run."""
VICTIMS = ("rank 0", "rank 1", "writer", "launcher", "supervisor", "all")
LONGEST_S = {"any": 14.0, "start": 8.0}
"""Out of which the seconds after a moment are drawn; .05 of the others."""
JOBS = 2
"""Runs that are killed at a time."""


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


def drawn(seed: int, number: int) -> list[Any]:
    rng, kills = random.Random(seed), []
    for i in range(number):
        moment = MOMENTS[i % len(MOMENTS)]
        victim, after_s = rng.choice(VICTIMS), rng.uniform(0, LONGEST_S.get(moment, 0.05))
        is_async = i // CHAIN % 2 == 1
        kills.append(Kill(victim=victim, moment=moment, after_s=after_s, is_async=is_async))
    return kills


def kill_at_moment(run: Run, kill: Kill) -> str:
    """Waits for the moment and kills.

    Returns:
        What was killed where, or nothing if nothing was: the run was done before.
    """
    is_there = supervised_run.wait_for_moment(run, kill.moment, kill.after_s)
    if is_there and kill.victim == "writer":  # lives only while a checkpoint is written
        wait_until(lambda: bool(run.find("writer")) or run.code is not None, MAX_S)
    victims = run.find(kill.victim) if is_there else []
    for pid in victims:
        supervised_run.send(pid, signal.SIGKILL)
    return f"{kill.victim} at step {supervised_run.step_of(run)}" if victims else ""


def run_chain(kills: Sequence[Kill], folder: Path, reference: list[Any]) -> Rows:
    """Kills a run again and again, starts it again where nobody else does, and looks at the end.

    Args:
        kills: in turn; those that come after the run is done are of another run.
        folder: new.
        reference: `history` of the run that nobody hurt.

    Returns:
        A row for each kill. `problems` are of the run it is of: empty if all is well.
    """
    rows: Rows = []
    left = list(kills)
    while left:
        run = Run(folder / str(len(rows)), ["--async-save"] * left[0].is_async)
        struck: Rows = []
        problems: list[str] = []
        try:
            run.start()
            while left and run.code is None:
                what = kill_at_moment(run, left[0])
                if not what:
                    break
                struck.append({**asdict(left.pop(0)), "what": what})
                problems += _recover(run, struck[-1])
            problems += supervised_run.problems_at_end(run, reference)
        finally:
            run.end()
        if not struck:  # the run was done before its first kill: that kill found nobody
            struck.append({**asdict(left.pop(0)), "what": "nobody was there"})
        rows += [{**row, "problems": problems, "starts": run.starts} for row in struck]
    return rows


def _recover(run: Run, row: dict[str, Any]) -> list[str]:
    """The run goes on by itself, or is started again once all of it is gone."""
    began, before, problems = time.monotonic(), supervised_run.num_launches(run), []
    if row["victim"] in ("supervisor", "all"):
        if not run.gone():
            left = supervised_run.process_names(run)
            problems.append(f"after {row['what']} processes are left: {left}")
        run.end()
        run.start()
    back = lambda: run.code is not None or supervised_run.num_launches(run) > before  # noqa: E731
    if not wait_until(back, MAX_S):
        problems.append(f"after {row['what']} the run does not come back")
    row["seconds_to_run"] = time.monotonic() - began if run.code is None else None
    return problems


def summary(part: str, rows: Rows, seed: int) -> dict[str, Any]:
    """What is written of the kills so far."""
    own = [row for row in rows if row.get("what") != "nobody was there"]
    name = "seconds_to_run" if part == "runs" else "seconds_to_leave"
    seconds = [row[name] for row in own if row.get(name) is not None]
    hurt = {"runs": "processes of a supervised run", "moves": "ranks in a change of layout"}
    return {
        "what": f"{hurt[part]} killed, and what became of the run",
        "seed": seed,
        "kills": len(own),
        "recovered_with_equal_losses": sum(not row["problems"] for row in own),
        f"median_{name}": statistics.median(seconds) if seconds else None,
        f"longest_{name}": max(seconds, default=None),
        **{
            key: dict(sorted(Counter(row[key] for row in rows).items()))
            for key in ("victim", "moment", "topic")
            if key in rows[0]
        },
        **origin(),
        "rows": rows,
    }


def rows_so_far(output: Path, cases: Sequence[Any]) -> Rows:
    """The rows of an earlier run of the same kills, in whole chains."""
    rows = json.loads(output.read_text())["rows"] if output.exists() else []
    same = [all(row.get(k) == v for k, v in asdict(c).items()) for row, c in zip(rows, cases)]
    return rows[: len(rows) // CHAIN * CHAIN] if all(same) and len(rows) <= len(cases) else []


def campaign(args: argparse.Namespace, output: Path) -> Rows:
    """Kills, waits, compares, writes; returns the rows."""
    is_runs = args.part == "runs"
    act: Any = run_chain if is_runs else relayout_cases.run_chain
    whole = supervised_run.uninterrupted if is_runs else relayout_cases.uninterrupted
    cases = (drawn if is_runs else relayout_cases.drawn)(args.seed, args.kills)
    rows = rows_so_far(output, cases)
    chains = [cases[i : i + CHAIN] for i in range(len(rows), len(cases), CHAIN)]
    with (
        tempfile.TemporaryDirectory() as name,
        ThreadPoolExecutor(JOBS if is_runs else 1) as pool,
    ):
        folder = Path(name)
        reference = whole(folder / "whole") if chains else []
        places = [folder / str(i) for i in range(len(chains))]
        for new in pool.map(lambda one: act(*one, reference), zip(chains, places)):
            rows += new
            text = json.dumps(summary(args.part, rows, args.seed), indent=1)
            output.write_text(text + "\n")
            for row in new:
                seen = "; ".join(row["problems"]) or "recovered"
                print(f"{row.get('what') or row.get('topic')}: {seen}")
            print(f"{len(rows)}/{args.kills} kills", flush=True)
    return rows


def main() -> int:
    """Does what the flags say; 1 if any run did not get over it."""
    parser = arguments(__doc__)
    parser.add_argument("part", choices=("runs", "moves"))
    parser.add_argument("--output", type=Path, help="instead of the file in docs/results")
    parser.add_argument("--kills", type=int, help="225 of runs, 50 of moves")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    name, kills = {"runs": ("faults", 225), "moves": ("relayout_faults", 50)}[args.part]
    args.kills = args.kills or kills
    rows = campaign(args, args.output or RESULTS / f"{name}.json")
    return 1 if any(row["problems"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
