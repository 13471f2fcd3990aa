"""The clock of a run without what else the machine did, and on another link than its own.

Runs follow each other for hours, on a machine that is now and then a fifth slower for as long as a
run. So the seconds of a step are not taken from the run that made it: everything that any run had
on a link is timed in rounds, forwards and backwards, and a step counts with the median over the
rounds, whosever it is, after what a round was slower in for all is taken off. Pauses and decisions
count as they were.

A policy whose batches no speed decides trains the same on every link but for rounding: the losses
by samples are those of the run, only the seconds of its steps are others. A static batch counts in
the fastest configuration that was timed at it, wherever it was trained.

Also the program that times on the ranks: `-m bench.time_to_loss.clock REQUEST -- FLAGS OF THE RUN`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.time_to_loss.policies import (
    MARK,
    PLAIN,
    PLAIN_WHOLE,
    STATIC,
    Profile,
    Recipe,
    is_blind_to_speed,
    is_plain,
    is_static,
    start_of,
)
from copus_ext.commands.profile_layouts import measure
from copus_ext.planner.configuration import Configuration
from megatron.training.config.layout import Layout

_ROUNDS, _STEPS, _WARM_UP = 8, 4, 2
MEASURING = 0.011
"""Part that measuring the noise scale adds to a step; what is timed does not measure it."""
Way = tuple[str, int, int]
"""Layout, micro-batch, batch."""
_NAMES = ("layout", "micro_batch", "batch")


def _way(record: Mapping[str, Any]) -> Way:
    return record["layout"], record["micro_batch"], record["batch"]


class _Timed:
    """Takes what `tools/profile_layouts.py` measures."""

    def __init__(self) -> None:
        self.seconds: dict[Way, list[float]] = {}

    def add(self, timing: Any) -> None:
        c = timing.configuration
        way = str(c.layout), c.micro_batch_size, c.global_batch_size
        self.seconds.setdefault(way, []).append(round(timing.step_s, 5))


def _take_rounds(ways: list[Way], flags: list[str], device: Any) -> dict[Way, list[float]]:
    """Times everything in turn, every second round backwards."""
    timed, lines = _Timed(), {}
    for layout, micro, batch in sorted(ways):
        lines.setdefault((layout, micro), []).append(batch)
    for number in range(_ROUNDS):
        for (layout, micro), batches in list(lines.items())[:: 1 if number % 2 == 0 else -1]:
            at = Layout.from_text(layout)
            c = Configuration(
                layout=at,
                micro_batch_size=micro,
                global_batch_size=micro * at.dp,
                sequence_parallel=at.tp > 1,
            )
            counts = ",".join(map(str, batches))
            how = argparse.Namespace(batches=counts, steps=_STEPS, warm_up=_WARM_UP)
            measure(c, flags, how, device, timed)
        print(f"round {number + 1} of {_ROUNDS}", flush=True)
    return timed.seconds


def main() -> None:
    """On every rank; rank 0 writes what was asked for."""
    from megatron.training.resilience.env_checks import set_process_defaults

    set_process_defaults()
    import torch.distributed as dist

    from megatron.training.common.device import use_device
    from megatron.training.distributed.process_groups import init_distributed

    request = json.loads(Path(sys.argv[1]).read_text())
    with use_device("cpu", local_rank=0) as device:
        init_distributed(device, timeout_minutes=10)
        found = _take_rounds(request["ways"], sys.argv[sys.argv.index("--") + 1 :], device)
        if os.environ["RANK"] == "0":
            rows = [[*way, some] for way, some in found.items()]
            Path(request["output"]).write_text(json.dumps(rows))
        dist.destroy_process_group()


def clock_of(known: dict[str, Any]) -> dict[Way, float]:
    """Seconds of a step by configuration, median of the rounds, out of a link in a results file."""
    rows = _rows(known)
    seconds = np.exp(np.median(_evened(rows), axis=1)) if rows else []
    return {(a, b, c): float(s) for (a, b, c, _), s in zip(rows, seconds)}


def scatter_of(known: dict[str, Any]) -> float | None:
    """Part by which a round is off a configuration's mean; None if not timed twice."""
    rows = _rows(known)
    if len(rows[0][3] if rows else []) < 2:
        return None
    return float(np.sqrt(_evened(rows).var(axis=1, ddof=1).mean()))


def drawn_again(known: dict[str, Any], draw: np.random.Generator) -> dict[str, Any]:
    """A link in a results file as it could have been timed: as many of its rounds, drawn with
    replacement, the same for all configurations."""
    rows = _rows(known)
    number = len(rows[0][3]) if rows else 0
    picked = draw.integers(number, size=number).tolist() if number else []
    ways = [[*way, [some[i] for i in picked]] for *way, some in rows]
    return {**known, "clock": {**known.get("clock", {}), "ways": ways}}


def _rows(known: dict[str, Any]) -> list[Any]:
    rows = known.get("clock", {}).get("ways", [])
    if len({len(some) for *_, some in rows}) > 1:
        raise ValueError("configurations of one link were timed in different rounds; time it anew")
    return rows


def _evened(rows: list[Any]) -> np.ndarray:
    """Logarithms of seconds by configuration and round, each without what the median configuration
    was slower by in that round (one pass of Tukey's median polish)."""
    logs = np.log([some for *_, some in rows])
    return logs - np.median(logs - np.median(logs, axis=1, keepdims=True), axis=0)


@functools.cache
def way_of(policy: str, batch: int, recipe: Recipe, profile: Profile) -> Way:
    """The configuration that a policy which is blind to speed has at a batch on a link."""
    c = start = start_of(policy, recipe, profile)
    if not (is_static(policy) or is_plain(policy)):
        c = profile.best(batch, str(start.layout), sees_noise=batch == start.global_batch_size)
    return str(c.layout), c.micro_batch_size, batch


def needed(result: dict[str, Any], recipe: Recipe, link: str) -> list[Way]:
    """What has to be timed on a link: all that runs had there, or would have had."""
    runs = result["runs"]
    had = [s for run in runs if run["link"] == link for s in run["speeds"]]
    # A single step is what was left at the end of a run.
    wanted = {_way(s) for s in had if s["steps"] > 1 and s["batch"] in recipe.batches}
    there = {run["policy"] for run in runs if run["link"] == link}
    elsewhere = {run["policy"] for run in runs if is_blind_to_speed(run["policy"])} - there
    profile = Profile.of_records(result["links"][link]["profile"]["records"])
    for policy in (*elsewhere, PLAIN, PLAIN_WHOLE):
        own = [start_of(policy, recipe, profile).global_batch_size]
        if not (is_static(policy) or is_plain(policy)):
            own = recipe.rising
        wanted |= {way_of(policy, b, recipe, profile) for b in own}
    return sorted(wanted)


def is_measuring(run: dict[str, Any]) -> bool:
    """Whether a run measured the noise scale."""
    return "--copus" in run["flags"]


def steadied(run: dict[str, Any], seconds: Mapping[Way, float]) -> dict[str, Any]:
    """A run with the clock that it would have had, had every step taken its usual time.

    Args:
        run: of the results file.
        seconds: of a step on its link, by configuration; the run's own medians for what is not
            there.
    """
    factor = 1 + MEASURING * is_measuring(run)
    usual = {_way(s): s.get("median_s") for s in run["speeds"]}
    usual |= {way: factor * step_s for way, step_s in seconds.items()}
    ends = [*(way["samples"] for way in run["ways"][1:]), run["evaluations"][-1][0]]
    paused: dict[int, float] = {}
    each_s = run["deciding_s"] / max(len(run["decisions"]), 1)
    moves = [(m["consumed_samples"], m["pause_s"]) for m in run["moves"]]
    for samples, pause_s in [*moves, *((d["samples"], each_s) for d in run["decisions"])]:
        paused[samples] = paused.get(samples, 0.0) + pause_s
    clock, marks, ways = run["set_up_s"], [(0.0, run["set_up_s"])], []
    for way, end in zip(run["ways"], ends):
        ways.append({**way, "seconds": round(clock, 3) if ways else 0.0})
        begin = way["samples"]
        for stop in [*sorted(n for n in paused if begin < n <= end), end]:
            clock += -(-(stop - begin) // way["batch"]) * usual[_way(way)]
            marks.append((stop, clock))
            clock += paused.pop(stop, 0.0)
            # Just behind: what was reached at a boundary was reached before its pause.
            marks.append((stop + 1e-6, clock))
            begin = stop
    stops, clocks = map(np.array, zip(*marks))
    at = np.interp([n for n, _, _ in run["evaluations"]], stops, clocks)
    evaluations = [(n, round(float(s), 4), x) for s, (n, _, x) in zip(at, run["evaluations"])]
    speeds = [{**s, "median_s": round(usual[_way(s)], 5)} for s in run["speeds"]]
    both = {"as_it_ran_s": run["seconds"], "seconds": round(clock, 4)}
    return {**run, **both, "evaluations": evaluations, "ways": ways, "speeds": speeds}


def _moved(run: dict[str, Any], at: dict[int, Way], seconds: Mapping[Way, float]) -> dict[str, Any]:
    """A run with the clock that it would have had in the configurations `at` of its batches."""
    # A batch that is not there is of the last few samples: they follow in the way before.
    ways = [
        {**way, **dict(zip(_NAMES, at[way["batch"]]))} for way in run["ways"] if way["batch"] in at
    ]
    ends = [*(way["samples"] for way in ways[1:]), run["evaluations"][-1][0]]
    speeds = [
        {**dict(zip(_NAMES, _way(way))), "steps": -(-(end - way["samples"]) // way["batch"])}
        for way, end in zip(ways, ends)
    ]
    there = steadied({**run, "ways": ways, "speeds": speeds, "moves": []}, seconds)
    del there["as_it_ran_s"]
    return {**there, "trained_on": run["link"], "paused_s": 0.0}


def with_timed(
    result: dict[str, Any], recipe: Recipe, profiles: dict[str, Profile]
) -> list[dict[str, Any]]:
    """The runs of a results file, steadied, and those that are only timed on a link, marked; not
    those of which something is still to be timed there."""
    trained = {(run["link"], run["policy"]) for run in result["runs"]}
    runs = []
    for link, known in result["links"].items():
        seconds = clock_of(known)
        for run in result["runs"]:
            policy = run["policy"]
            names = [policy] if run["link"] == link else []
            if not names and is_blind_to_speed(policy) and (link, policy) not in trained:
                names = [policy + MARK]
            if policy == f"{STATIC}_{recipe.first_batch}":
                names += [PLAIN + MARK, PLAIN_WHOLE + MARK]
            for name in names:
                own = {**run, "policy": name.rstrip(MARK)}
                there = _on(link, own, recipe, profiles[link], seconds)
                runs += [{**there, "link": link, "policy": name}] if there else []
    return runs


def _on(
    link: str, run: dict[str, Any], recipe: Recipe, profile: Profile, seconds: dict[Way, float]
) -> dict[str, Any] | None:
    """A run with its clock on a link; None if that is not known."""
    policy = run["policy"]
    own = steadied(run, seconds) if run["link"] == link and not is_plain(policy) else None
    if own and not is_static(policy):
        return own
    at, batches = {}, {way["batch"] for way in run["ways"]} & set(recipe.batches)
    for batch in batches:
        if is_static(policy):
            able = [way for way in seconds if way[2] == batch]
        else:
            able = [way_of(policy, batch, recipe, profile)]
        if able := [way for way in able if way in seconds]:
            at[batch] = min(able, key=lambda way: seconds[way])
    if batches - at.keys():
        return own
    there = _moved(run, at, seconds)
    if own:
        there["as_it_ran_s"] = own["as_it_ran_s"] * there["seconds"] / own["seconds"]
    return there


def profiles_of(result: dict[str, Any]) -> dict[str, Profile]:
    """Measured times by link."""
    return {
        link: Profile.of_records(known["profile"]["records"])
        for link, known in result["links"].items()
    }


if __name__ == "__main__":
    main()
