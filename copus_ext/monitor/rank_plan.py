"""`copus plan elastic`: how many ranks a run should have when, for a price.

    copus plan elastic --model llama-2-13b --cluster h100-80g:32 --global-batch-size 64:1024:x2 \
        --copus-ranks 16-64 --copus-cost-of-time 32
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from copus_ext.goodput import ranks
from copus_ext.goodput.headroom import Course, Prior
from copus_ext.planner.request import LARGEST, InputProblem, UsageProblem
from megatron.training.common.errors import counted

SCHEMA = "copus.ranks/1"
LITTLE = 0.02
"""A saving below this is not worth changes of the ranks."""
_HOUR_S = 3600.0
_POINTS = 300
_AS_SLOW = 1.005
"""A fixed number counts as fast enough up to this multiple of the plan's time."""
_COLUMNS = ("from", "B_crit", "ranks", "B", "layout", "b", "hours", "rank-hours", "pause,s")


def add_flags(p: argparse.ArgumentParser) -> None:
    """Adds the flags that `elastic` has beside those of a search."""
    run = p.add_argument_group("run")
    words = "ranks to choose from, whole nodes, such as 16-64"
    run.add_argument("--copus-ranks", metavar="MIN-MAX", help=words)
    words = "what an hour of waiting is worth in rank-hours; 0: as few rank-hours as can be "
    words += "(default: takes as long as the GPUs of --cluster)"
    run.add_argument("--copus-cost-of-time", type=float, metavar="RANKS", help=words)
    words = "journal.jsonl of a run like this one, for the critical batch size "
    words += "(default: published laws)"
    run.add_argument("--journal", type=Path, metavar="FILE", help=words)
    words = "length of the run (default: 20 a parameter)"
    run.add_argument("--train-tokens", type=float, metavar="TOKENS", help=words)


def rank_range(text: str | None) -> tuple[int, int]:
    """Reads `16-64`.

    Raises:
        UsageProblem: another text.
    """
    if text is None:
        raise UsageProblem("`elastic` needs --copus-ranks MIN-MAX; give it, such as 16-64")
    try:
        least, most = ranks.read_range(text)
    except ValueError as error:
        raise UsageProblem(f"--copus-ranks {text}: {error}") from None
    if most > LARGEST:
        raise UsageProblem(f"--copus-ranks {text}: at most {LARGEST}")
    return least, most


def node_counts(text: str | None, gpus_per_node: int) -> list[int]:
    """The numbers of whole nodes in a range of ranks. Where they are many, they are the ends and
    those of the form 2^k and 3 x 2^k, which batches can be divided by.

    Raises:
        UsageProblem: there is none.
    """
    found = ranks.whole_nodes(*rank_range(text), gpus_per_node)
    if not found:
        raise UsageProblem(
            f"--copus-ranks {text}: no whole number of nodes; use multiples of {gpus_per_node}, "
            "the GPUs of a node, or change --gpus-per-node"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """A plan, and what it is compared with."""

    cost_of_time: float
    """In ranks."""
    schedule: ranks.Schedule
    """The plan."""
    fixed: dict[int, ranks.Schedule]
    """By number of ranks, the fastest run that keeps it."""
    as_fast: int | None
    """Fixed number of ranks that is as fast with the fewest rank-hours; None: none is so fast."""
    best: int
    """Fixed number of ranks of the least price."""
    saved: float | None
    """Rank-hours over those of `as_fast`, as a share."""
    price_saved: tuple[float, ...]
    """Price over that of the best fixed number, as a share, for every course; the likely one
    first."""
    course: Course
    """The likely one."""
    source: str
    """What the critical batch size is from."""
    left_out: tuple[int, ...]
    """Numbers of ranks that nothing fits on."""


def planners_for(args: argparse.Namespace, planner: Any) -> dict[int, Any]:
    """A planner for every number of ranks; that of `--cluster` among them.

    Raises:
        UsageProblem: the range is none, or the cluster's nodes are not alike.
    """
    from copus_ext.planner.search import Planner

    cluster = planner.cluster
    if cluster.links is not None or cluster.nodes:
        raise UsageProblem(
            '`elastic` needs nodes that are alike; leave "links" and "nodes" out of --cluster'
        )
    counts = node_counts(args.copus_ranks, cluster.gpus_per_node)
    found = {}
    for count in sorted({*counts, cluster.num_nodes}):
        own = Planner(
            planner.model,
            dataclasses.replace(cluster, num_nodes=count),
            constants=planner.constants,
            limits=planner.limits,
            memory_margin=planner.memory_margin,
        )
        own.set_peaks(planner.peaks)
        found[own.cluster.world_size] = own
    return found


def pauses_between(planners: dict[int, Any]) -> ranks.Pause:
    """Seconds of a change between two layouts; all of the state counts as moving."""
    from copus_ext.goodput.costs import Machine, MovedBytes, pause_s
    from copus_ext.monitor.phase_plan import held_by
    from copus_ext.simulate.ranks import ELASTIC_S

    held = {n: held_by(planner) for n, planner in planners.items()}
    machines = {n: Machine.of(planner.cluster) for n, planner in planners.items()}

    @functools.cache
    def most(layout: Any) -> float:
        n = layout.world_size
        own, node = held[n](layout), machines[n].ranks_per_node
        near = own if n <= node else 0
        moved = MovedBytes(held=own, within=near, across=0 if near else node * own)
        return pause_s(moved, machines[n])

    def pause(before: Any, after: Any) -> float:
        if before == after:
            return 0.0
        changes = before.world_size != after.world_size
        return max(most(before), most(after)) + ELASTIC_S * changes

    return pause


def courses_of(
    args: argparse.Namespace, planner: Any, rows: Sequence[Any], own: int
) -> tuple[list[Course], str]:
    """The courses of the critical batch size, the likely one first, and what they are from.

    Args:
        args: flags.
        planner: of the model.
        rows: configurations of every number of ranks.
        own: number of ranks whose batches count the samples.

    Raises:
        InputProblem: a journal that cannot be used.
    """
    if args.journal is not None:
        return [_course_of_journal(args.journal)], f"from {args.journal}"
    from copus_ext.monitor.phase_plan import TOKENS_A_PARAMETER

    model = planner.model
    tokens = args.train_tokens or TOKENS_A_PARAMETER * float(model.num_active_parameters)
    prior = Prior.published(
        start=0, end=tokens / model.seq_length, tokens_per_sample=model.seq_length
    )
    if prior is None:
        raise UsageProblem(f"--train-tokens {tokens:g} is less than a sample; give more")
    # The batch that counts the samples is not known before the best one is.
    batch = float(np.median([row.global_batch_size for row in rows]))
    for _ in range(3):
        found = ranks.fixed(rows, prior.courses(batch)[0], own)
        samples = [one.seconds * one.row.samples_per_s for one in found.stretches]
        sizes = [one.row.global_batch_size for one in found.stretches]
        batch = sum(samples) / sum(n / size for n, size in zip(samples, sizes))
    return prior.courses(batch), "from published laws, up to a factor of 8"


def _course_of_journal(path: Path) -> Course:
    from copus_ext.controller.flags import NOISE_SCALE_MULTIPLIER
    from copus_ext.simulate.noise_trajectory import TrajectoryError, from_journal
    from copus_ext.simulate.training_dynamics import GroundTruth

    truth = GroundTruth(noise_scale_multiplier=NOISE_SCALE_MULTIPLIER)
    try:
        seen = from_journal(path, truth)
    except (OSError, ValueError, TrajectoryError) as error:
        raise InputProblem(f"--journal {path}: {error}; give a run's journal.jsonl") from error
    edges = np.concatenate([[0.0], np.geomspace(seen.progress[0], seen.end, _POINTS)])
    middle = np.maximum((edges[1:] + edges[:-1]) / 2, seen.progress[0])
    return Course(
        progress=np.diff(edges),
        critical_batch_size=NOISE_SCALE_MULTIPLIER * np.asarray(seen.phi_at(middle), dtype=float),
    )


def planned(args: argparse.Namespace, planner: Any) -> RankPlan | None:
    """The plan; None where nothing fits on the GPUs of `--cluster`, which it is compared with.

    Raises:
        UsageProblem: flags that make no sense.
        InputProblem: a journal that cannot be used.
    """
    from copus_ext.cost_model.spec_file import SpecError
    from copus_ext.planner.request import batches
    from copus_ext.simulate.speeds import NoSpeed
    from copus_ext.simulate.speeds import planned as speeds_of

    cost = args.copus_cost_of_time
    if cost is not None and not cost >= 0:
        raise UsageProblem(f"--copus-cost-of-time {cost:g} must be at least 0; see --help")
    planners, wanted = planners_for(args, planner), batches(args.global_batch_size)
    rows, left_out = [], []
    for n, one in planners.items():
        try:
            rows += speeds_of(one, wanted, known_sd=None).known.values()
        except (NoSpeed, SpecError):  # Fixed sizes may not go with so many.
            left_out.append(n)
    own = planner.cluster.world_size
    if own in left_out:
        return None
    courses, source = courses_of(args, planner, rows, own)
    pause_s, least = pauses_between(planners), rank_range(args.copus_ranks)
    allowed = [row for row in rows if least[0] <= ranks.ranks_of(row) <= least[1]]
    if not allowed:
        raise UsageProblem(f"--copus-ranks {args.copus_ranks}: nothing fits there; give more ranks")
    course = courses[0]
    fixed = {
        n: ranks.fixed(rows, course, n, pause_s=pause_s)
        for n in sorted({ranks.ranks_of(row) for row in rows})
    }
    if cost is None:
        cost = _cost_of(allowed, course, fixed[own], own, pause_s)
    plan = ranks.schedule(allowed, course, cost, pause_s=pause_s)
    able = [n for n, one in fixed.items() if one.seconds <= _AS_SLOW * plan.seconds]
    as_fast = min(able, key=lambda n: fixed[n].rank_seconds, default=None)
    numbers = sorted({ranks.ranks_of(row) for row in allowed})
    return RankPlan(
        cost_of_time=cost,
        schedule=plan,
        fixed=fixed,
        as_fast=as_fast,
        best=min(numbers, key=lambda n: price_of(fixed[n], cost)),
        saved=None if as_fast is None else 1 - plan.rank_seconds / fixed[as_fast].rank_seconds,
        price_saved=tuple(_price_saved(allowed, one, cost, pause_s) for one in courses),
        course=course,
        source=source,
        left_out=tuple(left_out),
    )


def _cost_of(
    rows: Sequence[Any], course: Course, like: ranks.Schedule, own: int, pause_s: ranks.Pause
) -> float:
    """The cost of time of a run that takes as long as the cluster's own ranks."""
    try:
        return ranks.at_equal_time(rows, course, like.seconds, pause_s=pause_s).cost_of_time
    except ValueError:
        raise UsageProblem(
            f"--copus-ranks: none takes as little time as the {own} of --cluster; give more, or "
            "--copus-cost-of-time"
        ) from None


def price_of(one: ranks.Schedule, cost_of_time: float) -> float:
    """Of a run, in rank-seconds; its time alone where that has no bound."""
    if math.isinf(cost_of_time):
        return one.seconds
    return one.rank_seconds + cost_of_time * one.seconds


def _price_saved(
    rows: Sequence[Any], course: Course, cost_of_time: float, pause_s: ranks.Pause
) -> float:
    plan = ranks.schedule(rows, course, cost_of_time, pause_s=pause_s)
    numbers = sorted({ranks.ranks_of(row) for row in rows})
    prices = [
        price_of(
            ranks.schedule(
                [row for row in rows if ranks.ranks_of(row) == n],
                course,
                cost_of_time,
                pause_s=pause_s,
            ),
            cost_of_time,
        )
        for n in numbers
    ]
    return max(1 - price_of(plan, cost_of_time) / min(prices), 0.0)


# The answer.


def answer(args: argparse.Namespace, planner: Any, put: Callable[[str, Path | None], None]) -> int:
    """Plans, prints and writes; returns the exit code.

    Args:
        args: flags of `copus plan elastic`.
        planner: of the model on the cluster.
        put: prints a text, or writes it to a file.
    """
    from copus_ext.planner import report
    from megatron.training.common.program import tell

    found = planned(args, planner)
    if found is None:
        own = planner.cluster.world_size
        tell(
            "plan.py",
            f"error: no configuration of these batches fits on {own} ranks; use another "
            "--global-batch-size or more GPUs in --cluster",
        )
        return 4
    if args.format == "json":
        put(report.dump(to_json(planner, found)), args.output)
    elif args.output is None:
        table(planner, found, report.console_for(sys.stdout))
    else:
        buffer = io.StringIO()
        table(planner, found, report.console_for(buffer))
        put(buffer.getvalue().rstrip("\n"), args.output)
    return 0


def rows_of(planner: Any, found: RankPlan) -> list[dict[str, Any]]:
    """A row for every stretch of the plan, with where it begins in tokens."""
    edges = np.concatenate([[0.0], np.cumsum(found.course.progress)])
    phi, rows, samples = found.course.critical_batch_size, [], 0.0
    for one in found.schedule.stretches:
        at = min(int(np.searchsorted(edges, one.progress, side="right")) - 1, len(phi) - 1)
        c = one.row.configuration
        rows.append(
            {
                "start_tokens": samples * planner.model.seq_length,
                "critical_batch_size": float(phi[at]),
                "ranks": one.ranks,
                "global_batch_size": c.global_batch_size,
                "micro_batch_size": c.micro_batch_size,
                "layout": str(c.layout),
                "recompute": c.recomputation,
                "hours": one.seconds / _HOUR_S,
                "rank_hours": one.seconds * one.ranks / _HOUR_S,
                "pause_s": one.pause_s,
            }
        )
        samples += one.seconds * one.row.samples_per_s
    return rows


def lines_of(found: RankPlan) -> list[str]:
    """What the plan comes to, and what a fixed number of ranks does."""
    plan = found.schedule
    changes = counted(len(plan.ranks) - 1, "change")
    lines = [
        f"the run takes {_sums(plan)}, with {changes} of ranks, at a cost of time of "
        f"{found.cost_of_time:.3g} ranks",
        "no fixed number of ranks is as fast",
        f"the fixed number of the least price, {found.best}, takes "
        f"{_sums(found.fixed[found.best])}; the plan saves {_percent(found.price_saved[0])} of its "
        "price",
        f"critical batch size {found.source}",
    ]
    if found.as_fast is not None and found.saved is not None:
        lines[1] = (
            f"a fixed number as fast, {found.as_fast}, takes {_sums(found.fixed[found.as_fast])}: "
            f"the plan saves {_percent(found.saved)} of its rank-hours"
        )
    if len(found.price_saved) > 1:
        low, high = min(found.price_saved), max(found.price_saved)
        lines[2] += f" ({_percent(low)} to {_percent(high)} over all courses)"
    if max(found.price_saved) < LITTLE:
        lines.append(f"keep {found.best} ranks: changing them is not worth it")
    if found.left_out:
        lines.append(f"nothing fits on {', '.join(map(str, found.left_out))} ranks")
    return lines


def _sums(one: ranks.Schedule) -> str:
    return f"{_hours(one.seconds)} hours and {_hours(one.rank_seconds)} rank-hours"


def _hours(seconds: float) -> str:
    hours = seconds / _HOUR_S
    return f"{hours:,.0f}" if hours >= 1000 else f"{hours:.4g}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def to_json(planner: Any, found: RankPlan) -> dict[str, Any]:
    """Returns the answer as plain JSON types."""
    from copus_ext import __version__

    def sums(one: ranks.Schedule) -> dict[str, float]:
        return {"hours": one.seconds / _HOUR_S, "rank_hours": one.rank_seconds / _HOUR_S}

    return {
        "schema": SCHEMA,
        "version": __version__,
        "inputs": {"model": planner.model.to_json(), "cluster": planner.cluster.to_json()},
        "cost_of_time": found.cost_of_time,
        "stretches": rows_of(planner, found),
        **sums(found.schedule),
        "fixed": {str(n): sums(one) for n, one in found.fixed.items()},
        "as_fast": found.as_fast,
        "saved": found.saved,
        "best_fixed": found.best,
        "price_saved": list(found.price_saved),
        "critical_batch_size": found.source,
        "left_out": list(found.left_out),
    }


def table(planner: Any, found: RankPlan, console: Any) -> None:
    """Prints a line for each stretch, and the lines of `lines_of`."""
    from rich.table import Table

    from copus_ext.monitor.summary import amount

    shown = Table(box=None, header_style="bold", pad_edge=False)
    for name in _COLUMNS:
        shown.add_column(name, justify="right", no_wrap=True)
    for row in rows_of(planner, found):
        shown.add_row(
            amount(row["start_tokens"]),
            f"{row['critical_batch_size']:.0f}",
            str(row["ranks"]),
            str(row["global_batch_size"]),
            row["layout"],
            str(row["micro_batch_size"]),
            _hours(_HOUR_S * row["hours"]),
            _hours(_HOUR_S * row["rank_hours"]),
            f"{row['pause_s']:.3g}",
        )
    console.print(shown)
    for line in lines_of(found):
        console.print(line, highlight=False, markup=False)
