"""Tables and figures of B8, from its results file alone."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from time_to_loss import (
    Times,
    curve_of,
    path_of,
    percent,
    saved_over_fastest,
    savings_line,
    table,
    targets,
    times,
)
from time_to_loss_clock import scatter_of
from time_to_loss_doubt import intervals, savings_of
from time_to_loss_figures import draw
from time_to_loss_policies import (
    ABLATIONS,
    MARK,
    MORE,
    OURS,
    STATIC,
    Recipe,
    is_baseline,
    is_plain,
    is_static,
)
from time_to_loss_timed import with_timed

Runs = list[dict[str, Any]]
Sure = dict[str, tuple[float, float]]


def report(result: dict[str, Any], number: int, path: Path) -> str:
    """Draws the figures; returns the tables.

    Args:
        result: of the results file.
        number: of targets.
        path: of the results file, which the figures go beside.
    """
    settings = result["settings"]["recipe"]
    recipe = Recipe(**{**settings, "batches": tuple(settings["batches"])})
    runs = with_timed(result, recipe)
    if not any(is_static(run["policy"]) for run in runs):
        return "no static run is there yet, and so no targets"
    goals = goals_of(runs, number)
    links = {link: _ordered([r for r in runs if r["link"] == link]) for link in result["links"]}
    links = {link: some for link, some in links.items() if some}
    found = {link: times(some, goals) for link, some in links.items()}
    known, sure = result["links"], intervals(result, recipe, goals)
    titles = {link: _title(link, known[link]) for link in links}
    parts = [
        _of_link(titles[link], known[link], some, goals, recipe, sure.get(link, {}))
        for link, some in links.items()
    ]
    draw(
        {titles[link]: some for link, some in links.items()},
        {titles[link]: some for link, some in found.items()},
        goals,
        path,
    )
    commits = sorted({run["commit"][:10] for run in runs})
    if len(commits) > 1:
        parts.append(f"NOTE: runs of several commits: {', '.join(commits)}")
    return "\n\n".join(parts)


def goals_of(runs: Runs, number: int) -> list[float]:
    """Losses to reach, by the static batches among some runs; see `targets`."""
    statics: dict[str, list[Any]] = {}
    for run in runs:
        if is_static(run["policy"]):
            statics.setdefault(run["policy"].rstrip(MARK), []).append(curve_of(run))
    return targets(statics, number)


def _ordered(runs: Runs) -> Runs:
    """By policy as they are listed, then by seed: the order of a table, whatever ran first."""
    statics = {r["policy"] for r in runs if is_static(r["policy"])}
    size = {name: int(name.removeprefix(f"{STATIC}_").rstrip(MARK)) for name in statics}
    last = [*ABLATIONS, *MORE]

    def key(run: dict[str, Any]) -> tuple[Any, ...]:
        name = run["policy"]
        group = 0 if name in size else 1 if is_baseline(name) else 2 if name in OURS else 3
        at = last.index(name) if name in last else size.get(name, 0)
        return group, at, name, run["seed"]

    return sorted(runs, key=key)


def _title(link: str, known: dict[str, Any]) -> str:
    """Nominal and measured speed: the least and the most of all measurements, both ways."""
    speeds = [s / 1000 for ways in known["measured_mbit_per_s"] for s in ways.values()]
    name = f"{float(link) / 1000:g} Gb/s" if float(link) else "no limit"
    return f"{name} ({min(speeds):.2f} to {max(speeds):.2f} Gb/s measured)"


def _of_link(
    title: str, known: dict[str, Any], runs: Runs, goals: list[float], recipe: Recipe, sure: Sure
) -> str:
    """Table and savings of one link."""
    found = times(runs, goals)
    seeds = sorted({run["seed"] for run in runs})
    profile_s = known["profile"]["seconds"]
    lines = [
        f"== {title}, seeds {', '.join(map(str, seeds))}; seconds to a validation "
        f"loss, evaluations not counted; profile {profile_s:.0f} s, not counted",
        table(found, goals, {run["policy"]: _note(run) for run in reversed(runs)}),
        _unsteady(runs),
    ]
    scatter = scatter_of(known)
    if scatter is not None:
        lines.append(f"a round scatters by {percent(scatter)} about the mean of its configuration")
    if any(name.endswith(MARK) for name in found):
        lines.append(f"{MARK} trained on another link, steps timed on this one")
    baselines = [name for name in found if is_baseline(name)]
    own = [name for name in found if not is_baseline(name) and not is_plain(name)]
    for name in own:
        what = "saves over the fastest baseline at each target"
        lines.append(savings_line(name, saved_over_fastest(found, name, baselines), what))
        if name in OURS and name != "adaptive_unprofiled":
            rows = saved_over_fastest(found, name, baselines, profile_s)
            lines.append(savings_line(name, rows, "the same, if it alone pays for the profile"))
    for words, rows in savings_of(found, recipe).items():
        name, what = words.split(" ", 1)
        low, high = sure.get(words, (None, None))
        doubt = f"; timing alone {percent(low)} to {percent(high)}" if low is not None else ""
        lines.append(savings_line(name, rows, what) + doubt)
    return "\n".join([*lines, *_left_out(found, baselines)])


def _left_out(found: Times, baselines: list[str]) -> list[str]:
    """Baselines that no other is compared with."""
    most = max((len(found[name]) for name in baselines), default=0)
    fewer = [name for name in baselines if len(found[name]) < most]
    return [f"not among the fastest, for want of seeds: {', '.join(fewer)}"] if fewer else []


def _unsteady(runs: Runs) -> str:
    """How much longer the clocks ran than is counted."""
    more = [r["as_it_ran_s"] / r["seconds"] - 1 for r in runs if "as_it_ran_s" in r]
    if not more:
        return "no run was trained on this link"
    return (
        "every step counts with the median of its configuration; the clocks as they ran "
        f"were {percent(statistics.fmean(more))} longer on average, at most {percent(max(more))}"
    )


def _note(run: dict[str, Any]) -> str:
    """Where a run went: batches, layouts, pauses."""
    batches = path_of(way["batch"] for way in run["ways"])
    layouts = path_of(way["layout"] for way in run["ways"])
    pause = f", paused {run['paused_s']:.1f} s" if run["paused_s"] else ""
    return f"{batches} on {layouts}{pause}"
