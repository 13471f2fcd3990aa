"""The clock of a run of B8 without what else the machine did, and on another link than its own.

Steadied: every step counts with the seconds that its configuration was timed with on the link, in
turn with all the others (`time_to_loss_clock.py`), pauses and decisions as they were; the clock as
it ran is kept beside it. Where nothing was timed yet, a step counts with the median of its
configuration in that run.

A policy whose batches no speed decides trains the same on every link but for rounding: the losses
by samples are those of the run, only the seconds of its steps are others. A static batch counts in
the fastest configuration that was timed at it, wherever it was trained.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from time_to_loss_clock import Way, clock_of
from time_to_loss_policies import (
    MARK,
    PLAIN,
    PLAIN_WHOLE,
    STATIC,
    Profile,
    Recipe,
    is_blind_to_speed,
    is_plain,
    is_static,
    layout_of,
    start_of,
)

_NAMES = ("layout", "micro_batch", "batch")
MEASURING = 0.011
"""Part that measuring the noise scale adds to a step (B2); what is timed does not measure it."""


def profile_of(records: list[dict[str, Any]]) -> Profile:
    """Out of the lines of a profile's file."""
    from copus_ext.cost_model.profile import read_profile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return Profile(read_profile(path)[1])


@functools.cache
def way_of(policy: str, batch: int, recipe: Recipe, profile: Profile) -> Way:
    """The configuration that a policy which is blind to speed has at a batch on a link.

    Args:
        policy: its name.
        batch: samples of a step.
        recipe: of the measurement.
        profile: of the link.
    """
    c = start = start_of(policy, recipe, profile)
    if not (is_static(policy) or is_plain(policy)):
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
    for policy in (*elsewhere, PLAIN, PLAIN_WHOLE):
        own = start_of(policy, recipe, profile).global_batch_size
        stays = is_static(policy) or is_plain(policy)
        wanted |= {way_of(policy, b, recipe, profile) for b in ([own] if stays else recipe.rising)}
    return sorted(wanted)


def is_measuring(run: dict[str, Any]) -> bool:
    """Whether a run measured the noise scale."""
    return "--copus" in run["flags"]


def timed(run: dict[str, Any], at: dict[int, Way], seconds: dict[Way, float]) -> dict[str, Any]:
    """A run with the clock that it would have had in other configurations or on another link.

    Args:
        run: of a policy that is blind to speed.
        at: configuration of each of its batches.
        seconds: of a step there, by configuration.
    """
    # A batch that is not there is of the last few samples: they follow in the way before.
    ways = [
        {**way, **dict(zip(_NAMES, at[way["batch"]]))} for way in run["ways"] if way["batch"] in at
    ]
    ends = [*(way["samples"] for way in ways[1:]), run["evaluations"][-1][0]]
    speeds = [
        {**dict(zip(_NAMES, at[way["batch"]])), "steps": -(-(end - way["samples"]) // way["batch"])}
        for way, end in zip(ways, ends)
    ]
    there = steadied({**run, "ways": ways, "speeds": speeds, "moves": []}, seconds)
    del there["as_it_ran_s"]
    return {**there, "trained_on": run["link"], "paused_s": 0.0}


def places(
    run: dict[str, Any], recipe: Recipe, profile: Profile, seconds: dict[Way, float]
) -> dict[int, Way]:
    """Configuration on a link of each batch of a policy that is blind to speed; of a static batch
    the fastest that was timed at it. Without what was not timed."""
    found = {}
    for batch in {way["batch"] for way in run["ways"]} & set(recipe.batches):
        if is_static(run["policy"]):
            able = [way for way in seconds if way[2] == batch]
        else:
            able = [way_of(run["policy"], batch, recipe, profile)]
        able = [way for way in able if way in seconds]
        if able:
            found[batch] = min(able, key=lambda way: seconds[way])
    return found


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
    factor = 1 + MEASURING * is_measuring(run)
    usual = {tuple(s[k] for k in _NAMES): s.get("median_s") for s in run["speeds"]}
    usual |= {way: factor * step_s for way, step_s in seconds.items()}
    ends = [*(way["samples"] for way in run["ways"][1:]), run["evaluations"][-1][0]]
    paused = _pauses(run)
    clock, marks, ways = run["set_up_s"], [(0.0, run["set_up_s"])], []
    for way, end in zip(run["ways"], ends):
        ways.append({**way, "seconds": round(clock, 3) if ways else 0.0})
        begin, step_s = way["samples"], usual[tuple(way[k] for k in _NAMES)]
        inside = sorted(n for n in paused if begin < n <= end)
        for stop in [*inside, end]:
            clock += -(-(stop - begin) // way["batch"]) * step_s
            marks.append((stop, clock))
            clock += paused.pop(stop, 0.0)
            # Just behind: what was reached at a boundary was reached before its pause.
            marks.append((stop + 1e-6, clock))
            begin = stop
    clocks = {"as_it_ran_s": run["seconds"], "seconds": round(clock, 4)}
    speeds = [
        {**s, "median_s": round(usual[tuple(s[k] for k in _NAMES)], 5)} for s in run["speeds"]
    ]
    return {**run, **clocks, "evaluations": _clocked(run, marks), "ways": ways, "speeds": speeds}


def _pauses(run: dict[str, Any]) -> dict[int, float]:
    """Seconds of changes and decisions by samples."""
    paused: dict[int, float] = {}
    for move in run["moves"]:
        paused[move["consumed_samples"]] = paused.get(move["consumed_samples"], 0) + move["pause_s"]
    each_s = run["deciding_s"] / max(len(run["decisions"]), 1)
    for decision in run["decisions"]:
        paused[decision["samples"]] = paused.get(decision["samples"], 0.0) + each_s
    return paused


def profiles_of(result: dict[str, Any]) -> dict[str, Profile]:
    """Measured times by link."""
    return {
        link: profile_of(known["profile"]["records"]) for link, known in result["links"].items()
    }


def with_timed(
    result: dict[str, Any], recipe: Recipe, profiles: dict[str, Profile] | None = None
) -> list[dict[str, Any]]:
    """The runs of a results file, steadied, and those that are only timed on a link, marked; not
    those of which something is still to be timed there.

    Args:
        result: of the results file.
        recipe: of the measurement.
        profiles: `profiles_of` it, where they are already there.
    """
    profiles = profiles or profiles_of(result)
    trained = {(run["link"], run["policy"]) for run in result["runs"]}
    runs = []
    for link, known in result["links"].items():
        seconds, profile = clock_of(known), profiles[link]
        for run in result["runs"]:
            policy = run["policy"]
            names = [policy] if run["link"] == link else []
            if not names and is_blind_to_speed(policy) and (link, policy) not in trained:
                names = [policy + MARK]
            if policy == f"{STATIC}_{recipe.first_batch}":
                names += [PLAIN + MARK, PLAIN_WHOLE + MARK]
            for name in names:
                there = _on(link, {**run, "policy": name.rstrip(MARK)}, recipe, profile, seconds)
                runs += [{**there, "link": link, "policy": name}] if there else []
    return runs


def _on(
    link: str, run: dict[str, Any], recipe: Recipe, profile: Profile, seconds: dict[Way, float]
) -> dict[str, Any] | None:
    """A run with its clock on a link; None if that is not known."""
    own = steadied(run, seconds) if run["link"] == link and not is_plain(run["policy"]) else None
    if own and not is_static(run["policy"]):
        return own
    at = places(run, recipe, profile, seconds)
    if {way["batch"] for way in run["ways"]} & set(recipe.batches) - at.keys():
        return own
    there = timed(run, at, seconds)
    if own:
        there["as_it_ran_s"] = own["as_it_ran_s"] * there["seconds"] / own["seconds"]
    return there
