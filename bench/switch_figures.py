"""The pictures of bench/switch_cost.py: what the pauses are made of, and the soak."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws what is there: `<path>.svg` the phases of every pair in the same processes and by a
    restart, `<path>_soak.svg` what the processes hold after each change."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "copus"
    _phases(result, path.with_suffix(".svg"))
    _soak(result, path.with_name(f"{path.stem}_soak.svg"))


def _phases(result: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot

    panels = [
        (f"in the same processes, {place}", part["pairs"])
        for place, part in result.get("changes", {}).items()
    ]
    panels += [
        (f"{name}, {place}", part["pairs"][kind])
        for place, part in result.get("restarts", {}).items()
        for kind, name in (("restart", "restart"), ("reload", "save and load without restart"))
    ]
    if not panels:
        return
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(8, 2.6 * len(panels)), layout="constrained", squeeze=False
    )
    for axis, (title, pairs) in zip(axes[:, 0], panels):
        names = list(dict.fromkeys(name for pair in pairs.values() for name in pair["phases"]))
        left = [0.0] * len(pairs)
        for i, name in enumerate(names):
            seconds = [pair["phases"].get(name, 0.0) for pair in pairs.values()]
            color = pyplot.get_cmap("tab20")(i)
            axis.barh(list(pairs), seconds, left=left, label=name, color=color)
            left = [a + b for a, b in zip(left, seconds)]
        axis.invert_yaxis()
        axis.set_title(title, fontsize="medium")
        axis.set_xlabel("s")
        axis.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _soak(result: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot

    runs = result.get("soak", {})
    if not runs:
        return
    figure, axes = pyplot.subplots(3, 1, sharex=True, figsize=(7, 6), layout="constrained")
    for number, (place, run) in enumerate(runs.items()):
        rows, color = run["rows"], f"C{number}"
        x = [row["number"] for row in rows]
        for rank in range(len(rows[0]["rss"])):
            label = place if rank == 0 else None
            rss = [row["rss"][rank] / 1e6 for row in rows]
            axes[0].plot(x, rss, color=color, linewidth=0.8, label=label)
        axes[1].plot(x, [row["pause_s"] for row in rows], ".", color=color, label=place)
        for name, line in (("fds", "-"), ("threads", "--"), ("groups", ":")):
            most = [max(row[name]) for row in rows]
            axes[2].plot(x, most, line, color=color, label=f"{name}, {place}")
    for axis, label in zip(axes, ("resident MB per rank", "pause, s", "per rank")):
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize="x-small")
    axes[2].set_xlabel("change of layout")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
