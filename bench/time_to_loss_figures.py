"""Figures of B8, from its results file alone."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from time_to_loss import Times, curve_of, fastest, saved, summary
from time_to_loss_policies import MARK, OURS, is_baseline, is_static

Runs = list[dict[str, Any]]


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "copus"
    return pyplot


def draw(links: dict[str, Runs], found: dict[str, Times], goals: list[float], path: Path) -> None:
    """Three figures beside `path`: losses, batches and layouts, savings.

    Args:
        links: runs by title of the link.
        found: times to the targets by the same.
        goals: the targets.
        path: of the results; `.loss.svg`, `.ways.svg` and `.saved.svg` replace its ending.
    """
    # A policy is one row and one colour, wherever it was trained.
    links = {title: [_unmarked(run) for run in runs] for title, runs in links.items() if runs}
    found = {title: {n.rstrip(MARK): t for n, t in found[title].items()} for title in links}
    if not links:
        return
    _losses(links, goals, path.with_suffix(".loss.svg"))
    _ways(links, path.with_suffix(".ways.svg"))
    _savings(found, path.with_suffix(".saved.svg"))


def _unmarked(run: dict[str, Any]) -> dict[str, Any]:
    return {**run, "policy": run["policy"].rstrip(MARK)}


def _style(name: str, names: list[str]) -> dict[str, Any]:
    """Static batches in shades of grey, dashed baselines, ours solid and wide."""
    if is_static(name):
        statics = [n for n in names if is_static(n)]
        shade = 0.8 * (statics.index(name) + 1) / len(statics)
        return {"color": str(0.85 - shade), "linewidth": 1.0}
    color = f"C{[n for n in names if not is_static(n)].index(name) % 10}"
    if is_baseline(name):
        return {"color": color, "linewidth": 1.0, "linestyle": "--"}
    return {"color": color, "linewidth": 2.0 if name in OURS else 1.0}


def _names(links: dict[str, Runs]) -> list[str]:
    return list(dict.fromkeys(run["policy"] for runs in links.values() for run in runs))


def _first_seed(runs: Runs) -> Runs:
    """One run of every policy."""
    least = min(run["seed"] for run in runs)
    return [run for run in runs if run["seed"] == least]


def _grid(pyplot: Any, rows: int, columns: int, height: float) -> tuple[Any, Any]:
    return pyplot.subplots(
        rows,
        columns,
        squeeze=False,
        sharey="row",
        figsize=(2 + 4.5 * columns, height * rows + 1),
        layout="constrained",
    )


def _losses(links: dict[str, Runs], goals: list[float], path: Path) -> None:
    """Smoothed validation loss against the clock, one seed."""
    pyplot = _pyplot()
    figure, axes = _grid(pyplot, 1, len(links), 4.0)
    names = _names(links)
    for at, (title, runs) in zip(axes[0], links.items()):
        for run in _first_seed(runs):
            curve = curve_of(run)
            style = _style(run["policy"], names)
            at.plot(curve.seconds, curve.losses, label=run["policy"], **style)
        for goal in goals:
            at.axhline(goal, color="0.8", linewidth=0.5, zorder=0)
        if goals:
            room = max(goals) - min(goals) or 0.5
            at.set_ylim(min(goals) - 0.4 * room, max(goals) + 0.6 * room)
        at.set(title=title, xlabel="seconds")
    axes[0][0].set_ylabel("validation loss, smoothed")
    axes[0][-1].legend(fontsize=6, ncols=2)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _ways(links: dict[str, Runs], path: Path) -> None:
    """Batch and layout of the policies that change them, one seed."""
    pyplot = _pyplot()
    figure, axes = _grid(pyplot, 2, len(links), 2.6)
    names = _names(links)
    texts = sorted({w["layout"] for runs in links.values() for r in runs for w in r["ways"]})
    for column, (title, runs) in enumerate(links.items()):
        batch, layout = axes[0][column], axes[1][column]
        for run in _first_seed(runs):
            if is_static(run["policy"]):
                continue
            x = [w["seconds"] for w in run["ways"]] + [run["seconds"]]
            style = {**_style(run["policy"], names), "where": "post"}
            sizes = [w["batch"] for w in run["ways"]]
            batch.step(x, [*sizes, sizes[-1]], label=run["policy"], **style)
            where = [texts.index(w["layout"]) for w in run["ways"]]
            layout.step(x, [*where, where[-1]], **style)
        batch.set(title=title)
        batch.set_yscale("log", base=2)
        layout.set(xlabel="seconds", yticks=range(len(texts)), yticklabels=texts)
    axes[0][0].set_ylabel("global batch")
    if axes[0][-1].get_legend_handles_labels()[0]:
        axes[0][-1].legend(fontsize=6)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _savings(found: dict[str, Times], path: Path) -> None:
    """Mean time saved by ours over each baseline, a dot for every seed."""
    pyplot = _pyplot()
    ours = [name for name in OURS if any(name in times for times in found.values())]
    if not ours:
        return
    figure, axes = _grid(pyplot, 1, len(found), 4.0)
    every = dict.fromkeys(name for times in found.values() for name in times)
    names = [name for name in every if is_baseline(name)]
    for at, (title, times) in zip(axes[0], found.items()):
        best = {name for name in fastest(times, names) if name}
        for i, own in enumerate(n for n in ours if n in times):
            at.barh(0, 0, color=f"C{i}", label=own)
            for k, name in enumerate(names):
                result = summary(saved(times, own, name)) if name in times else None
                if result is None:
                    continue
                y = k + 0.35 * i - 0.175 * (len(ours) - 1)
                at.barh(y, 100 * statistics.fmean(result["by_seed"]), 0.33, color=f"C{i}")
                at.plot([100 * s for s in result["by_seed"]], [y] * len(result["by_seed"]), "k.")
        marked = [f"{name} *" if name in best else name for name in names]
        at.set(title=title, xlabel="time saved, %", yticks=range(len(names)), yticklabels=marked)
        at.axvline(0, color="k", linewidth=0.5)
    axes[0][-1].legend(fontsize=7, title="* fastest at a target", title_fontsize=7)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
