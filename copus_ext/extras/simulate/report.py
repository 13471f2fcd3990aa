"""A comparison as a table for a screen."""

from __future__ import annotations

from typing import Any

from copus_ext.extras.simulate.compare import Comparison, Score


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f}"


def minutes(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds / 60:.1f}"


def rows(result: Comparison) -> list[list[str]]:
    """Cells of the table: a policy a line, the fastest first, the oracle on top."""
    targets, lines = result.scenario.targets, []
    if result.best:
        times = [minutes(result.best.get(t)) for t in targets]
        lines.append(["oracle", *times, percent(result.oracle_saved), "", "", "any"])
    for score in sorted((result.score(name) for name in result.runs), key=_order):
        lines.append(
            [
                score.name + (" *" if score.is_baseline else ""),
                *(minutes(score.times_s[t]) for t in targets),
                percent(score.mean_saved),
                " ".join(percent(s) for s in score.saved),
                f"{score.relayouts:g}",
                f"{score.resizes:g}",
            ]
        )
    return lines


def _order(score: Score) -> tuple[bool, float]:
    mean = score.mean_saved
    return mean is None, 0.0 if mean is None else -mean


def show(result: Comparison, console: Any) -> None:
    from rich.table import Table

    s = result.scenario
    least, most = (f"{seconds:.3g}" for seconds in s.pause_range_s())
    pause = least if least == most else f"{least} to {most}"
    title = (
        f"{s.name}: {s.model}, {s.cluster.world_size} x {s.cluster.gpu.name}; a change of layout "
        f"takes {pause} s; truth {s.truth_name}"
    )
    table = Table(title=title, title_justify="left")
    losses = [f"{target}, min" for target in s.targets]
    for i, head in enumerate(["policy", *losses, "saved %", "by seed", "layouts", "batches"]):
        table.add_column(head, justify="right" if i else "left", no_wrap=not i)
    for line in rows(result):
        table.add_row(*line)
    console.print(table)
    console.print(
        "minutes to each loss, median of the seeds; saved: over the fastest baseline (*) at each "
        "loss, mean of the losses (-: a loss was not reached)"
    )
