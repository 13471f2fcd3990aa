"""Tables and the figure of `real`, from its results file alone, with intervals of the savings.

The seeds of a link share one timing of its configurations, which has errors of its own. So the
rounds of the timing are drawn again and again with replacement, all configurations alike, and the
savings computed from each draw.
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from bench.support import figure
from bench.time_to_loss.clock import drawn_again, profiles_of, scatter_of, with_timed
from bench.time_to_loss.curves import (
    Times,
    curve_of,
    fastest,
    mean_times,
    percent,
    saved,
    saved_over_fastest,
    savings_line,
    summary,
    targets,
    times,
)
from bench.time_to_loss.policies import (
    ABLATIONS,
    MARK,
    OURS,
    PAPER,
    PLAIN,
    PLAIN_WHOLE,
    STATIC,
    Recipe,
    batch_of,
    is_baseline,
    is_plain,
    is_static,
)

_DRAWS, _INNER = 200, (5, 95)
"""Of the rounds; percentiles that an interval lies between."""
Runs = list[dict[str, Any]]
Savings = dict[str, list[list[float]]]
"""What is saved, [target][seed], by the words for it."""


def report(result: dict[str, Any], number: int, path: Path) -> str:
    """Prints nothing; draws `<path>.saved.svg` and returns the tables.

    Args:
        result: of the results file.
        number: of targets.
        path: of the results file.
    """
    recipe = Recipe.of(result)
    runs = sorted(with_timed(result, recipe, profiles_of(result)), key=_place)
    goals = goals_of(runs, number)
    sure = intervals(result, recipe, goals)
    found, parts = {}, []
    for link, known in result["links"].items():
        own = [run for run in runs if run["link"] == link]
        found[_title(link, known)] = times(own, goals)
        parts.append(_of_link(_title(link, known), known, own, goals, recipe, sure.get(link, {})))
    draw(found, path.with_suffix(".saved.svg"))
    return "\n\n".join(parts)


def goals_of(runs: Runs, number: int) -> list[float]:
    """Losses to reach, by the static batches among some runs; see `targets`."""
    statics: dict[str, list[Any]] = {}
    for run in runs:
        if is_static(run["policy"]):
            statics.setdefault(run["policy"].rstrip(MARK), []).append(curve_of(run))
    return targets(statics, number)


def _place(run: dict[str, Any]) -> tuple[Any, ...]:
    """Of a run in a table, whatever ran first: by policy, then by seed."""
    name = run["policy"]
    if is_static(name):
        return 0, batch_of(name), name, run["seed"]
    group = 1 if is_baseline(name) else 2 if name in OURS else 3
    last = [*ABLATIONS, PAPER]
    return group, last.index(name) if name in last else 0, name, run["seed"]


def savings_of(found: Times, recipe: Recipe) -> Savings:
    """What ours save over where they start, and over the fastest static batch of each loss."""
    static = f"{STATIC}_{recipe.first_batch}"
    named = {name.rstrip(MARK): name for name in found}
    statics = [name for name in found if is_static(name)]
    starts = {"adaptive": (static,), "adaptive_unprofiled": (PLAIN, PLAIN_WHOLE, static)}
    rows: Savings = {}
    for name in (n for n in (*OURS, PAPER) if n in found):
        for start in (s for s in starts.get(name, ()) if s in named):
            rows[f"{name} saves over {start}"] = saved(found, name, named[start])
        words = f"{name} saves over the fastest static batch at each target"
        rows[words] = saved_over_fastest(found, name, statics)
    return rows


def intervals(
    result: dict[str, Any], recipe: Recipe, goals: list[float]
) -> dict[str, dict[str, tuple[float, float]]]:
    """[link][words] low and high mean saving over the draws, of links timed twice or more."""
    timed = {link: x for link, x in result["links"].items() if scatter_of(x) is not None}
    if not timed:
        return {}
    draw, profiles = np.random.default_rng(0), profiles_of(result)
    means: dict[str, dict[str, list[float]]] = {link: {} for link in timed}
    for _ in range(_DRAWS):
        links = {link: drawn_again(known, draw) for link, known in timed.items()}
        runs = with_timed({**result, "links": links}, recipe, profiles)
        for link, of_link in means.items():
            found = times([run for run in runs if run["link"] == link], goals)
            for words, rows in savings_of(found, recipe).items():
                if known := [part for row in rows for part in row]:
                    of_link.setdefault(words, []).append(statistics.fmean(known))
    return {
        link: {words: tuple(np.percentile(some, _INNER).tolist()) for words, some in own.items()}
        for link, own in means.items()
    }


def _title(link: str, known: dict[str, Any]) -> str:
    """Nominal and measured speed: the least and the most of all measurements, both ways."""
    speeds = [s / 1000 for ways in known["measured_mbit_per_s"] for s in ways.values()]
    name = f"{float(link) / 1000:g} Gb/s" if float(link) else "no limit"
    return f"{name} ({min(speeds):.2f} to {max(speeds):.2f} Gb/s measured)"


def _of_link(
    title: str,
    known: dict[str, Any],
    runs: Runs,
    goals: list[float],
    recipe: Recipe,
    sure: dict[str, tuple[float, float]],
) -> str:
    """Table and savings of one link."""
    found = times(runs, goals)
    seeds = ", ".join(map(str, sorted({run["seed"] for run in runs})))
    longer = [r["as_it_ran_s"] / r["seconds"] - 1 for r in runs if "as_it_ran_s" in r]
    lines = [
        f"== {title}, seeds {seeds}; seconds to a validation loss, evaluations not counted; "
        f"profile {known['profile']['seconds']:.0f} s, not counted",
        _table(found, goals, {run["policy"]: _note(run) for run in reversed(runs)}),
        f"{MARK} trained on another link, steps timed on this one. A round scatters by "
        f"{percent(scatter_of(known))} about the mean of its configuration",
    ]
    if longer:
        mean, most = percent(statistics.fmean(longer)), percent(max(longer))
        lines.append(f"the clocks as they ran were {mean} longer on average, at most {most}")
    baselines = [name for name in found if is_baseline(name)]
    for name in (name for name in found if not is_baseline(name) and not is_plain(name)):
        rows = saved_over_fastest(found, name, baselines)
        lines.append(savings_line(rows, f"{name} saves over the fastest baseline at each target"))
    for words, rows in savings_of(found, recipe).items():
        low, high = sure.get(words, (None, None))
        timing = f"; timing alone {percent(low)} to {percent(high)}" if words in sure else ""
        lines.append(savings_line(rows, words) + timing)
    return "\n".join(lines)


def _table(found: Times, goals: list[float], notes: dict[str, str]) -> str:
    """Mean seconds to each target, with half of the range over the seeds; one line a policy."""
    width = max([len(name) for name in found] + [6])
    head = "".join(f"{f'{g:.3f}':>14}" for g in goals)
    lines = [f"{'policy':<{width}}{head}  batch and layout"]
    for name, of_seeds in found.items():
        cells = []
        for mean, column in zip(mean_times(of_seeds), zip(*of_seeds.values())):
            known = [v for v in column if v is not None]
            text = "-" if mean is None else f"{mean:.1f}"
            if mean is not None and len(known) > 1:
                text += f" +-{(max(known) - min(known)) / 2:.1f}"
            cells.append(f"{text:>14}")
        lines.append(f"{name:<{width}}{''.join(cells)}  {notes[name]}")
    return "\n".join(lines)


def _note(run: dict[str, Any]) -> str:
    """Where a run went: batches, layouts, pauses."""
    batches, layouts = (
        " > ".join(str(value) for value, _ in itertools.groupby(way[name] for way in run["ways"]))
        for name in ("batch", "layout")
    )
    pause = f", paused {run['paused_s']:.1f} s" if run["paused_s"] else ""
    return f"{batches} on {layouts}{pause}"


def draw(found: dict[str, Times], path: Path) -> None:
    """Mean time saved by ours over each baseline, a dot for every seed.

    Args:
        found: times to the targets by title of the link.
        path: of the figure.
    """
    # A policy is one row, wherever it was trained.
    found = {title: {n.rstrip(MARK): t for n, t in x.items()} for title, x in found.items()}
    names = [n for n in dict.fromkeys(itertools.chain(*found.values())) if is_baseline(n)]
    size = (2 + 4.5 * len(found), 5.0)
    with figure(path, 1, len(found), squeeze=False, sharey="row", figsize=size) as axes:
        for at, (title, of_link) in zip(axes[0], found.items()):
            best = {name for name in fastest(of_link, names) if name}
            ours = [name for name in OURS if name in of_link]
            for i, own in enumerate(ours):
                at.barh(0, 0, color=f"C{i}", label=own)
                for k, name in enumerate(names):
                    result = summary(saved(of_link, own, name)) if name in of_link else None
                    if result is None:
                        continue
                    y = k + 0.35 * i - 0.175 * (len(ours) - 1)
                    at.barh(y, 100 * result["mean"], 0.33, color=f"C{i}")
                    dots = [100 * s for s in result["by_seed"]]
                    at.plot(dots, [y] * len(dots), "k.")
            marked = [f"{name} *" if name in best else name for name in names]
            at.set(title=title, xlabel="time saved, %", yticks=range(len(names)))
            at.set_yticklabels(marked)
            at.axvline(0, color="k", linewidth=0.5)
        axes[0][-1].legend(fontsize=7, title="* fastest at a target", title_fontsize=7)
