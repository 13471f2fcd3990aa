"""Does a run with the controller finish sooner than without it, whatever the truth is?

    python -m bench.time_to_loss.truths [--seeds 801,802] [--processes 2]

Runs every cell of `cells.py` on a virtual clock with `--copus --copus-layouts all`, knowing no
speeds but predictions (`unprofiled.py`). A run that has used up its samples before the target goes
on as it is. Everything that a user waits for counts: pauses, measuring and deciding. The rule was
chosen on tuning seeds below 800. Writes docs/results/time_to_loss.json: times over those of the
yardsticks, means, worst cells and 95 % intervals over clusters and seeds.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import statistics
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.support import arguments, interval, origin
from bench.time_to_loss.cells import Cell, cells, first_batch, scenario
from bench.time_to_loss.results import DECIDING_S, FILE, MEASURING, save
from bench.time_to_loss.unprofiled import Machine
from bench.time_to_loss.yardsticks import Yardsticks, seconds_beyond, yardsticks
from copus_ext.controller.flags import CopusConfig
from copus_ext.extras.simulate.contenders import Contender
from copus_ext.extras.simulate.run import Run, Runner
from copus_ext.extras.simulate.scenario import Scenario
from copus_ext.gns.smoothing import LARGEST_INTERVAL

NOTHING_TO_GAIN = 0.005
"""Share that the oracle saves over common sense, below which nothing is to be gained."""
Row = dict[str, Any]


def controller(first: int, s: Scenario, **flags: Any) -> Contender:
    """`--copus --copus-layouts all` from a first batch. The learning rate was chosen for the
    smallest batch of the grid."""
    own = CopusConfig(
        copus=True,
        copus_layouts="all",
        copus_min_global_batch_size=s.batches[0],
        copus_max_global_batch_size=s.batches[-1],
        copus_reference_batch_size=s.batches[0],
        **flags,
    )
    return Contender(name="copus", flags=own, first_batch=first)


@functools.lru_cache(maxsize=4)
def _true_speeds(cluster: str, seed: int, error: float) -> dict:
    """Kept for all runs on one machine, as they take long to compute."""
    return {}


def machine_of(cell: Cell, s: Scenario) -> Machine:
    seed = zlib.crc32(cell.cluster.encode()) % 1000 + 1000 * cell.seed
    machine = Machine(s, seed, cell.error)
    machine.__dict__["_true"] = _true_speeds(cell.cluster, cell.seed, cell.error)
    return machine


def run_cell(cell: Cell) -> Row | None:
    """One run, and what it is held against; None for a start that nobody would take."""
    s = scenario(cell)
    machine = machine_of(cell, s)
    marks = yardsticks(s, machine)
    first = first_batch(cell, s, marks.law_batch)
    if first is None:
        return None
    own = machine.unprofiled()
    is_quadratic = s.quadratic is not None
    if is_quadratic:
        own = own.change(targets={"none": 0.0})
    runner = Runner(own, controller(first, s), cell.seed, None)
    run = runner.run()
    if is_quadratic:
        # The learning rate decays to the end of the samples, so that the run trains all of them.
        marks_there = yardsticks(s, machine, run.last_loss)
        seconds = run.seconds
    else:
        marks_there, time_s = marks, run.times_s[max(s.targets, key=s.targets.__getitem__)]
        if time_s is None:
            row = runner.row
            speed = machine.true(row.configuration)
            time_s = run.seconds + seconds_beyond(
                s, row.global_batch_size, runner.training.progress, speed
            )
        seconds = time_s
    seconds += _besides(run, seconds, _scale(s, marks, cell))
    return {
        **vars(cell),
        "first_batch": first,
        **_ratios(seconds, marks_there, marks),
        "same_start": seconds / marks_there.planned_s[first],
        "missed": not is_quadratic and None in run.times_s.values(),
        "relayouts": run.relayouts,
        "resizes": run.resizes,
        "decisions": run.decisions,
        "paused": run.paused_s / seconds,
        "way": [
            f"{c.consumed_samples / s.total_samples:.3f} {c.batch} {c.layout}" for c in run.changes
        ],
    }


def _besides(run: Run, seconds: float, scale: float) -> float:
    """What measuring and deciding take. A longer run measures no more steps, but one of
    `LARGEST_INTERVAL` at least, and decides as often."""
    share = run.measured_s / seconds
    share = max(share * scale, min(share, 1 / LARGEST_INTERVAL))
    return seconds * share * MEASURING + run.decisions * DECIDING_S * scale


def _scale(s: Scenario, marks: Yardsticks, cell: Cell) -> float:
    """Simulated seconds for one of the run that it stands for."""
    return min(marks.best_static_s / (cell.hours * 3600.0), 1.0)


def _ratios(seconds: float, there: Yardsticks, marks: Yardsticks) -> Row:
    best = seconds / there.best_static_s
    oracle_s = there.oracle_s
    return {
        "best_static": best,
        "common_sense": seconds / there.planned_s[marks.law_batch],
        "law_schedule": best / marks.law_schedule,
        "oracle_over_common_sense": None
        if oracle_s is None
        else oracle_s / there.planned_s[marks.law_batch],
        "oracle": None if oracle_s is None else seconds / oracle_s,
        "yardstick_common_sense": marks.common_sense_s / marks.best_static_s,
        "yardstick_law_schedule": marks.law_schedule,
    }


def run_all(todo: Sequence[Cell], processes: int, done: Callable[[Row], None]) -> list[Row]:
    """All cells, in their order; those that share a machine come after each other."""
    rows = []
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for row in pool.imap(run_cell, todo, chunksize=1):
            if row is not None:
                rows.append(row)
                done(row)
    return rows


# The table.


def mean_and_worst(rows: Sequence[Row], name: str) -> Row:
    values = [row[name] for row in rows]

    def mean(some: Sequence[Row]) -> float:
        return statistics.fmean(row[name] for row in some)

    by = [lambda row: row["cluster"], lambda row: row["seed"]]
    return {
        "mean": statistics.fmean(values),
        "worst": max(values),
        "mean_interval": interval(rows, mean, by),
        "runs": len(values),
    }


def by(rows: Sequence[Row], key: str, name: str) -> Row:
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(str(row[key]), []).append(row[name])
    return {k: {"mean": statistics.fmean(v), "worst": max(v)} for k, v in groups.items()}


FACTORS = ("truth", "cluster", "start", "level", "multiplier", "error", "hours")


def table(rows: Sequence[Row]) -> Row:
    """The figures of the virtual clock."""
    schedule = sorted(one["mean"] for one in by(rows, "truth", "law_schedule").values())
    of_one = [row for row in rows if row["truth"] == "P^1"]
    nothing = [
        row
        for row in rows
        if row["start"] == "law"
        and row["oracle_over_common_sense"] is not None
        and row["oracle_over_common_sense"] >= 1 - NOTHING_TO_GAIN
    ]
    return {
        "common_sense": {
            **mean_and_worst(rows, "common_sense"),
            "by": {factor: by(rows, factor, "common_sense") for factor in FACTORS},
        },
        "best_static": {
            **mean_and_worst(rows, "best_static"),
            "at_exponent_1": statistics.fmean(row["best_static"] for row in of_one)
            if of_one
            else None,
            "by": {factor: by(rows, factor, "best_static") for factor in FACTORS},
        },
        "law_schedule": {
            "worst_truth": schedule[-1],
            "second_best_truth": schedule[min(1, len(schedule) - 1)],
            "by": {"truth": by(rows, "truth", "law_schedule")},
        },
        "nothing_to_gain": mean_and_worst(nothing, "common_sense") if nothing else None,
    }


def text(rows: Sequence[Row]) -> str:
    """The same in lines: mean and worst, in all and by what was dealt."""
    lines = []
    for name in ("common_sense", "best_static", "law_schedule"):
        lines.append(f"{name}: {_both(row[name] for row in rows)}  ({len(rows)} runs)")
        for factor in FACTORS:
            groups: dict[str, list[float]] = {}
            for row in rows:
                value = row[factor]
                key = f"{value:.3g}" if isinstance(value, float) else str(value)
                groups.setdefault(key, []).append(row[name])
            lines.append("   " + " | ".join(f"{k} {_both(v)}" for k, v in groups.items()))
    for name in ("yardstick_common_sense", "yardstick_law_schedule", "relayouts", "resizes"):
        lines.append(f"{name}: {statistics.fmean(row[name] for row in rows):.3f}")
    nothing = table(rows)["nothing_to_gain"]
    if nothing:
        lines.append(f"nothing to gain: {nothing['mean']:.4f} {nothing['worst']:.4f}")
    return "\n".join(lines)


def _both(values: Iterable[float]) -> str:
    values = list(values)
    return f"{statistics.fmean(values):.3f} {max(values):.3f}"


def main() -> None:
    parser = arguments(__doc__, FILE)
    parser.add_argument("--seeds", default="801,802", help="comma between them")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="a part of a cluster, truth or start")
    parser.add_argument("--share", type=int, default=1, help="one of so many cells")
    parser.add_argument("--rows", type=Path, help="write the runs there, and no results")
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    words = [word for word in args.only.split(",") if word]
    places = [(c, f"{c.cluster}, {c.truth}, {c.start}") for c in cells(seeds)]
    todo = [c for c, place in places if all(word in place for word in words)][:: args.share]

    def done(row: Row) -> None:
        where = f"{row['cluster']}, {row['truth']}, {row['start']} {row['first_batch']}"
        over = f"{row['common_sense']:.3f} of common sense"
        print(f"{where}: {over}, {row['best_static']:.3f} of the best static", flush=True)
        if args.rows:
            with args.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")

    rows = run_all(todo, args.processes, done)
    print(text(rows))
    if not args.rows:
        write(args.output, rows)


def write(path: Path, rows: Sequence[Row]) -> None:
    """Puts the figures of the virtual clock into the results, with every run."""
    seeds = sorted({row["seed"] for row in rows})
    command = f"python -m bench.time_to_loss.truths --seeds {','.join(map(str, seeds))}"
    made = {"seeds": seeds, "runs": len(rows), "command": command, **origin()}
    save(path, {**table(rows), "virtual_clock": {**made, "rows": rows}})


if __name__ == "__main__":
    main()
