"""A comparison as a table for a screen and as a figure."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from copus_ext.simulate.compare import Comparison, Score
from copus_ext.simulate.contenders import ORACLE


def percent(value: float | None) -> str:
    """A share with its sign."""
    return "-" if value is None else f"{100 * value:+.1f}"


def minutes(seconds: float | None) -> str:
    """Minutes."""
    return "-" if seconds is None else f"{seconds / 60:.1f}"


def heads(result: Comparison) -> list[str]:
    """Names of the columns of `rows`."""
    losses = [f"{target}, min" for target in result.scenario.targets]
    return [
        "policy",
        *losses,
        "saved %",
        "by seed",
        "over static, cbs",
        "of oracle %",
        "layouts",
        "batches",
    ]


def rows(result: Comparison) -> list[list[str]]:
    """Cells of the table: a policy a line, the fastest first, the oracle on top."""
    targets = result.scenario.targets
    first = result.best[0]
    saved = [result.oracle_saved(i) for i in range(len(result.seeds))]
    mean = sum(saved) / len(saved)
    oracle = [ORACLE, *(minutes(first[t].seconds) for t in targets), percent(mean), "", "", "100"]
    moves = max((first[t].relayouts for t in targets), default=0)
    lines = [[*oracle, str(moves), "any"]]
    for score in sorted(result.scores(), key=_order):
        share = "-" if score.oracle_share is None else f"{100 * score.oracle_share:.0f}"
        lines.append(
            [
                score.name + (" *" if score.is_baseline else ""),
                *(minutes(score.times_s[t]) for t in targets),
                percent(score.mean_saved),
                " ".join(percent(s) for s in score.saved),
                " ".join(percent(s) for s in score.saved_paper),
                share,
                f"{score.relayouts:g}",
                f"{score.resizes:g}",
            ]
        )
    return lines


def _order(score: Score) -> tuple[bool, float]:
    mean = score.mean_saved
    return mean is None, 0.0 if mean is None else -mean


def show(result: Comparison, console: Any) -> None:
    """Prints the table."""
    from rich.table import Table

    s = result.scenario
    least, most = (f"{seconds:.3g}" for seconds in s.pause_range_s())
    pause = least if least == most else f"{least} to {most}"
    title = (
        f"{s.name}: {s.model}, {s.cluster.world_size} x {s.cluster.gpu.name}; a change of layout "
        f"takes {pause} s; truth {s.truth_name}, "
        f"noise scale multiplier {s.truth.noise_scale_multiplier:g}"
    )
    table = Table(title=title, title_justify="left")
    for i, head in enumerate(heads(result)):
        table.add_column(head, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for line in rows(result):
        table.add_row(*line)
    console.print(table)
    console.print(
        "minutes to each loss, median of the seeds; saved: over the fastest baseline (*) at each "
        "loss, mean of the losses (-: a loss was not reached)"
    )


def draw(result: Comparison, path: Path) -> None:
    """Writes an SVG: batch and layout over time of some, and time saved at each loss.

    Raises:
        ImportError: matplotlib is missing.
        OSError: it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "copus"
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 7), layout="constrained")
    moving = [s for s in sorted(result.scores(), key=_order) if s.resizes or s.relayouts][:6]
    end = max((t for s in moving for t in s.times_s.values() if t is not None), default=60.0)
    for i, score in enumerate(moving):
        changes = result.runs[score.name][0].changes
        times = [c.clock_s / 60 for c in changes]
        sizes = [c.batch for c in changes]
        above.step([*times, end / 60], [*sizes, sizes[-1]], where="post", label=score.name, lw=1)
        moved = [c for a, c in itertools.pairwise(changes) if a.layout != c.layout]
        above.plot([c.clock_s / 60 for c in moved], [c.batch for c in moved], "o", color=f"C{i}")
    above.set(yscale="log", xlabel="minutes", ylabel="batch (dots: another layout)")
    above.set_yticks(result.scenario.batches, [str(b) for b in result.scenario.batches])
    above.legend(fontsize="x-small")
    targets = list(result.scenario.targets)
    base = [result.fastest(t, 0) for t in targets]
    for score in sorted(result.scores(), key=_order)[:10]:
        values = [
            None if b is None or (t := score.times_s[target]) is None else 100 * (1 - t / b)
            for target, b in zip(targets, base)
        ]
        below.plot(targets, values, "o-", lw=1, ms=3, label=score.name)  # pyright: ignore[reportArgumentType]
    best = [
        None if b is None else 100 * (1 - result.best[0][t].seconds / b)
        for t, b in zip(targets, base)
    ]
    below.plot(targets, best, "k--", lw=1, label=ORACLE)  # pyright: ignore[reportArgumentType]
    below.axhline(0, color="grey", lw=0.8)
    below.set(xlabel="loss", ylabel="% of time saved over the fastest baseline")
    below.legend(fontsize="x-small")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
