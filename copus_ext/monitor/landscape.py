"""The goodput of every layout and batch, as a decision saw it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from copus_ext.monitor.explain import amount
from copus_ext.monitor.journal import DecisionRecord, sizes_of
from copus_ext.monitor.values import number, rows, table, text

BEST, HERE = "★", "○"
_MAX_LAYOUTS = 12


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The best micro-batch of a layout and a batch."""

    share: float
    """Its goodput over the largest of all."""
    mark: str
    """`BEST`, `HERE`, both or none."""
    tip: str


@dataclass(frozen=True, kw_only=True)
class Landscape:
    caption: str
    batches: Sequence[int]
    """Of the columns, ascending."""
    lines: Sequence[tuple[str, Sequence[Cell | None]]]
    """Layouts, the best first, each with a cell for every batch; None where none was considered."""


def landscape(record: Mapping[str, Any], decided: DecisionRecord) -> Landscape | None:
    """The goodput T / (1 + B / B_crit) of what a decision could choose from.

    Args:
        record: whole record of the decision.
        decided: its values.

    Returns:
        None where the decision knew no critical batch size, or the record holds no speeds.
    """
    critical = number(table(record.get("decision")).get("critical_batch_size"))
    if critical is None or critical <= 0:
        return None
    best: dict[tuple[str, int], tuple[float, str]] = {}
    for row in rows(table(record.get("situation")).get("rows")):
        sizes, speed = sizes_of(row), number(row.get("samples_per_s"))
        if not (speed and speed > 0 and sizes.layout and sizes.batch):
            continue
        value = speed / (1.0 + sizes.batch / critical)
        known_by = text(row.get("source"), 20)
        tip = f"{sizes}: {value:.3g} useful of {speed:.3g} samples/s, {known_by}"
        place = sizes.layout, sizes.batch
        best[place] = max(best.get(place, (0.0, "")), (value, tip))
    if not best:
        return None
    most, star = max((value, place) for place, (value, _) in best.items())
    ring = decided.to if decided.was_made else decided.now

    def cell(place: tuple[str, int]) -> Cell | None:
        if place not in best:
            return None
        value, tip = best[place]
        marks = [BEST] * (place == star) + [HERE] * (place == (ring.layout, ring.batch))
        return Cell(share=value / most, mark="".join(marks), tip=tip)

    batches = sorted({batch for _, batch in best})
    order = sorted(best, key=lambda place: -best[place][0])
    layouts = list(dict.fromkeys(layout for layout, _ in order))
    shown = [x for i, x in enumerate(layouts) if i < _MAX_LAYOUTS or x == ring.layout]
    more = f"; {len(layouts) - len(shown)} slower layouts left out" * (len(shown) < len(layouts))
    return Landscape(
        caption="Goodput of each layout and batch in its best micro-batch, in percent of the "
        f"largest ({BEST}); {HERE} is where the run went on{more}. It takes the critical batch "
        f"size to be {amount(round(critical, 1))} samples. The decision also weighed how far that "
        "and each speed may be off, the rest of the run and the pause of a change, so it may have "
        "taken another.",
        batches=batches,
        lines=[(layout, [cell((layout, batch)) for batch in batches]) for layout in shown],
    )
