"""The clock of a run of B8 without what else the machine did, and on another link than its own.

Steadied: every step counts with the seconds that its configuration was timed with on the link, in
turn with all the others (`time_to_loss_clock.py`), pauses and decisions as they were; the clock as
it ran is kept beside it. Where nothing was timed yet, a step counts with the median of its
configuration in that run.

A policy whose batches no speed decides trains the same on every link but for rounding: the losses
by samples are those of the run, only the seconds of its steps are others.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from time_to_loss_clock import Way, clock_of
from time_to_loss_policies import (
    PLAIN,
    STATIC,
    Profile,
    Recipe,
    is_blind_to_speed,
    is_static,
    layout_of,
    start_of,
)

MARK = "*"
"""Behind the name of a policy that was trained on another link."""
MEASURING = 0.011
"""Part that measuring the noise scale adds to a step (B2); what is timed does not measure it."""


def profile_of(records: list[dict[str, Any]]) -> Profile:
    """Out of the lines of a profile's file."""
    from copus_ext.perf.profile import read_profile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return Profile(read_profile(path)[1])


def way_of(policy: str, batch: int, recipe: Recipe, profile: Profile) -> Way:
    """The configuration that a policy which is blind to speed has at a batch on a link.

    Args:
        policy: its name.
        batch: samples of a step.
        recipe: of the measurement.
        profile: of the link.
    """
    c = start = start_of(policy, recipe, profile)
    if not (is_static(policy) or policy == PLAIN):
        sees_noise = batch == start.global_batch_size
        c = profile.best(batch, layout_of(start), sees_noise=sees_noise)
    return layout_of(c), c.micro_batch_size, batch


def needed(result: dict[str, Any], recipe: Recipe, link: str) -> list[Way]:
    """What has to be timed on a link: all that runs had there, or would have had."""
    runs = result["runs"]
    had = [s for run in runs if run["link"] == link for s in run["speeds"]]
    # A single step is what was left at the end of a run.
    had = [s for s in had if s["steps"] > 1 and s["batch"] in recipe.batches]
    wanted = {(s["layout"], s["micro_batch"], s["batch"]) for s in had}
    there = {run["policy"] for run in runs if run["link"] == link}
    elsewhere = {run["policy"] for run in runs if is_blind_to_speed(run["policy"])} - there
    profile = profile_of(result["links"][link]["profile"]["records"])
    for policy in (*elsewhere, PLAIN):
        own = start_of(policy, recipe, profile).global_batch_size
        stays = is_static(policy) or policy == PLAIN
        wanted |= {way_of(policy, b, recipe, profile) for b in ([own] if stays else recipe.rising)}
    return sorted(wanted)


def is_measuring(run: dict[str, Any]) -> bool:
    """Whether a run measured the noise scale."""
    return "--copus" in run["flags"]


def timed(
    run: dict[str, Any], recipe: Recipe, profile: Profile, seconds: dict[Way, float]
) -> dict[str, Any]:
    """A run with the clock that it would have on another link.

    Args:
        run: of a policy that is blind to speed.
        recipe: of the measurement.
        profile: of the other link; decides the configurations, as it would have.
        seconds: of a step there, by configuration.
    """
    ways, policy = run["ways"], run["policy"]
    ends = [*(way["samples"] for way in ways[1:]), run["evaluations"][-1][0]]
    factor = 1 + MEASURING * is_measuring(run)
    clock: float = run["set_up_s"]
    marks: list[tuple[float, float]] = [(0, clock)]
    there, speeds = [], []
    for way, end in zip(ways, ends):
        batch = way["batch"]
        if batch not in recipe.batches:  # the last few samples of a run
            there.append({**there[-1], "batch": batch, "samples": way["samples"]})
            continue
        own = way_of(policy, batch, recipe, profile)
        step_s = factor * seconds[own]
        steps = -(-(end - way["samples"]) // batch)
        began, clock = clock, clock + steps * step_s
        marks.append((end, clock))
        kept = dict(zip(("layout", "micro_batch", "batch"), own))
        there.append({"samples": way["samples"], "seconds": round(began, 3), **kept})
        speeds.append({**kept, "steps": steps, "median_s": round(step_s, 5)})
    evaluations = _clocked(run, marks)
    kept = {k: run[k] for k in ("policy", "seed", "set_up_s", "commit", "steps", "decisions")}
    return {
        **kept,
        "trained_on": run["link"],
        "evaluations": evaluations,
        "seconds": round(clock, 4),
        "paused_s": 0.0,
        "ways": there,
        "speeds": speeds,
        "moves": [],
    }


def _clocked(
    run: dict[str, Any], marks: list[tuple[float, float]]
) -> list[tuple[int, float, float]]:
    """Evaluations of a run on another clock, given at some samples."""
    samples, seconds = (np.array(column) for column in zip(*marks))
    at = np.interp([n for n, _, _ in run["evaluations"]], samples, seconds)
    return [(n, round(float(s), 4), loss) for s, (n, _, loss) in zip(at, run["evaluations"])]


def steadied(run: dict[str, Any], seconds: dict[Way, float]) -> dict[str, Any]:
    """A run with the clock that it would have had, had every step taken its usual time.

    Args:
        run: of the results file.
        seconds: of a step on its link, by configuration; the run's own medians for what is not
            there.
    """
    names = ("layout", "micro_batch", "batch")
    factor = 1 + MEASURING * is_measuring(run)
    usual = {tuple(s[k] for k in names): s["median_s"] for s in run["speeds"]}
    usual |= {way: factor * step_s for way, step_s in seconds.items()}
    ends = [*(way["samples"] for way in run["ways"][1:]), run["evaluations"][-1][0]]
    paused: dict[int, float] = {}
    for move in run["moves"]:
        paused[move["consumed_samples"]] = paused.get(move["consumed_samples"], 0) + move["pause_s"]
    each_s = run["deciding_s"] / max(len(run["decisions"]), 1)
    for decision in run["decisions"]:
        paused[decision["samples"]] = paused.get(decision["samples"], 0.0) + each_s
    clock, marks = run["set_up_s"], [(0.0, run["set_up_s"])]
    for way, end in zip(run["ways"], ends):
        begin, step_s = way["samples"], usual[tuple(way[k] for k in names)]
        inside = sorted(n for n in paused if begin < n <= end)
        for stop in [*inside, end]:
            clock += -(-(stop - begin) // way["batch"]) * step_s
            marks.append((stop, clock))
            clock += paused.pop(stop, 0.0)
            # Just behind: what was reached at a boundary was reached before its pause.
            marks.append((stop + 1e-6, clock))
            begin = stop
    evaluations = _clocked(run, marks)
    speeds = [{**s, "median_s": round(usual[tuple(s[k] for k in names)], 5)} for s in run["speeds"]]
    clocks = {"as_it_ran_s": run["seconds"], "seconds": round(clock, 4)}
    return {**run, **clocks, "evaluations": evaluations, "speeds": speeds}


def with_timed(result: dict[str, Any], recipe: Recipe) -> list[dict[str, Any]]:
    """The runs of a results file, steadied, and those that are only timed on a link, marked; not
    those of which something is still to be timed there."""
    clocks = {link: clock_of(known) for link, known in result["links"].items()}
    runs = [steadied(run, clocks[run["link"]]) for run in result["runs"]]
    trained = {(r["link"], r["policy"]) for r in runs}
    for link, seconds in clocks.items():
        if not seconds:
            continue
        profile = profile_of(result["links"][link]["profile"]["records"])
        for run in result["runs"]:
            policy = run["policy"]
            there = [policy] if is_blind_to_speed(policy) and (link, policy) not in trained else []
            there += [PLAIN] if policy == f"{STATIC}_{recipe.first_batch}" else []
            for name in there:
                batches = {way["batch"] for way in run["ways"]} & set(recipe.batches)
                if {way_of(name, b, recipe, profile) for b in batches} <= seconds.keys():
                    other = timed({**run, "policy": name}, recipe, profile, seconds)
                    runs.append({**other, "link": link, "policy": name + MARK})
    return runs
