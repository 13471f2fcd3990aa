"""The clock of a run of B8 without what else the machine did, and on another link than its own.

Steadied: every step counts with the median of its configuration in that run, pauses and decisions
as they were; a core that somebody else takes for a while then costs nobody time. The clock as it
ran is kept beside it.

A policy whose batches no speed decides trains the same on every link but for rounding: the losses
by samples are those of the run, only the seconds of its steps are others. They are measured on the
link, in the same hour as the runs that they are compared with.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
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


def profile_of(records: list[dict[str, Any]]) -> Profile:
    """Out of the lines of a profile's file."""
    from copus_ext.perf.profile import read_profile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return Profile(read_profile(path)[1])


def way_of(policy: str, batch: int, recipe: Recipe, profile: Profile) -> Any:
    """The configuration that a policy which is blind to speed has at a batch on a link.

    Args:
        policy: its name.
        batch: samples of a step.
        recipe: of the measurement.
        profile: of the link.
    """
    start = start_of(policy, recipe, profile)
    if is_static(policy) or policy == PLAIN:
        return start
    sees_noise = batch == start.global_batch_size
    return profile.best(batch, layout_of(start), sees_noise=sees_noise)


def needed(
    policies: list[str], recipe: Recipe, profile: Profile
) -> dict[Any, tuple[Any, list[int]]]:
    """What has to be timed on a link: by line of its profile, a configuration and batches."""
    wanted: dict[Any, tuple[Any, list[int]]] = {}
    for policy in policies:
        own = start_of(policy, recipe, profile).global_batch_size
        for batch in [own] if is_static(policy) or policy == PLAIN else recipe.rising:
            c = way_of(policy, batch, recipe, profile)
            batches = wanted.setdefault(c.timed(1.0).line, (c, []))[1]
            if batch not in batches:
                batches.append(batch)
    return wanted


def timed(run: dict[str, Any], recipe: Recipe, profile: Profile, times: Profile) -> dict[str, Any]:
    """A run with the clock that it would have on another link.

    Args:
        run: of a policy that is blind to speed.
        recipe: of the measurement.
        profile: of the other link; decides the configurations, as it would have.
        times: measured there for this comparison.
    """
    ways, policy = run["ways"], run["policy"]
    ends = [*(way["samples"] for way in ways[1:]), run["evaluations"][-1][0]]
    clock: float = run["set_up_s"]
    marks: list[tuple[float, float]] = [(0, clock)]
    there, speeds = [], []
    for way, end in zip(ways, ends):
        batch = way["batch"]
        c = way_of(policy, batch, recipe, profile) if batch in recipe.batches else None
        if c is None:  # the last few samples of a run
            there.append({**there[-1], "batch": batch, "samples": way["samples"]})
            continue
        count = batch // (c.dp * c.micro_batch_size)
        step_s = times.seconds(c.timed(1.0).line, count)
        steps = -(-(end - way["samples"]) // batch)
        began, clock = clock, clock + steps * step_s
        marks.append((end, clock))
        kept = {"layout": layout_of(c), "micro_batch": c.micro_batch_size, "batch": batch}
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


def steadied(run: dict[str, Any]) -> dict[str, Any]:
    """A run with the clock that it would have had, had every step taken its usual time."""
    names = ("layout", "micro_batch", "batch")
    usual = {tuple(s[k] for k in names): s["median_s"] for s in run["speeds"]}
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
    clocks = {"as_it_ran_s": run["seconds"], "seconds": round(clock, 4)}
    return {**run, **clocks, "evaluations": evaluations}


def with_timed(result: dict[str, Any], recipe: Recipe) -> list[dict[str, Any]]:
    """The runs of a results file, steadied, and those that are only timed on a link, marked."""
    runs = [steadied(run) for run in result["runs"]]
    trained = {(r["seed"], r["link"], r["policy"]) for r in runs}
    for link, known in result["links"].items():
        times = {int(k): profile_of(v) for k, v in known.get("timed", {}).items()}
        profile = profile_of(known["profile"]["records"]) if times else None
        for run in result["runs"]:
            seed, policy = run["seed"], run["policy"]
            elsewhere = run["link"] != link and (seed, link, policy) not in trained
            if profile and seed in times and elsewhere and is_blind_to_speed(policy):
                other = timed(run, recipe, profile, times[seed])
                runs.append({**other, "link": link, "policy": policy + MARK})
        all_known = profile_of(known["profile"]["records"])
        for run in result["runs"]:
            if run["policy"] == f"{STATIC}_{recipe.first_batch}":
                own = times.get(run["seed"], all_known)
                other = timed({**run, "policy": PLAIN}, recipe, all_known, own)
                runs.append({**other, "link": link, "policy": PLAIN + MARK})
    return runs
