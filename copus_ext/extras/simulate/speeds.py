"""The speed of every configuration of a scenario, and what a run knows of it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Sequence

from copus_ext.goodput.inputs import ConfigThroughput
from copus_ext.planner.search import Planner
from megatron.trainer.common.errors import Refused
from megatron.trainer.config.layout import Layout

Key = tuple[Layout, int]
PROFILED_SD = 0.03
"""Relative uncertainty of two profiled layouts."""
_MEASURED_SD = 0.01
"""Of two configurations that the run has timed itself."""
_SAME_LAYOUT = 1 / 3
"""Part of it between two batches of one layout."""
_LAYOUTS = 8
_ASKED = 400


def _order(layout: Layout) -> tuple[int, ...]:
    return *layout.sizes, layout.ep, layout.expert_tensor_parallel_size, layout.cp


class NoSpeed(Refused):
    """A batch that no configuration can run."""


class Speeds:
    """The fastest micro-batch of every layout and batch.

    Args:
        rows: as they are.
        known: the same rows as a run knows them before it has used them; None: as they are.
    """

    def __init__(
        self, rows: Sequence[ConfigThroughput], known: Sequence[ConfigThroughput] | None = None
    ) -> None:
        self.actual = {(row.layout, row.global_batch_size): row for row in rows}
        self.known = {(r.layout, r.global_batch_size): r for r in (known or rows)}
        self.batches = sorted({row.global_batch_size for row in rows})
        self.layouts = sorted({row.layout for row in rows}, key=_order)

    def true(self, row: ConfigThroughput) -> ConfigThroughput:
        return self.actual[row.layout, row.global_batch_size]

    def at(self, layout: Layout, batch: int) -> ConfigThroughput | None:
        """A configuration as it is, None where there is none."""
        return self.actual.get((layout, batch))

    def fastest(self, batch: int) -> ConfigThroughput:
        """The fastest of a batch.

        Raises:
            NoSpeed: there is none.
        """
        rows = [r for (_, b), r in self.actual.items() if b == batch]
        if not rows:
            raise NoSpeed(f"no layout can run a batch of {batch}")
        return max(rows, key=lambda r: (r.samples_per_s, [-n for n in _order(r.layout)]))

    def table(
        self,
        batches: Sequence[int],
        used: Collection[tuple[Layout, int]],
        layouts: Sequence,
        now: ConfigThroughput,
    ) -> tuple[list[ConfigThroughput], dict[tuple[Layout, int], int]]:
        """Rows of some batches and layouts as a run knows them, and where each is. It has timed the
        `used` ones itself, and the others are uncertain over the speed of `now`."""
        current = now.layout, now.global_batch_size
        return _table(self, tuple(batches), frozenset(used), tuple(layouts), current)


@functools.lru_cache(maxsize=4096)
def _table(
    speeds: Speeds, batches: tuple, used: frozenset, layouts: tuple, current: Key
) -> tuple[list[ConfigThroughput], dict[Key, int]]:
    rows: list[ConfigThroughput] = []
    for batch, layout in itertools.product(batches, layouts):
        key = (layout, batch)
        if (row := speeds.known.get(key)) is None:
            continue
        source = row.source
        sd = row.relative_sd * (_SAME_LAYOUT if layout == current[0] else 1.0)
        if key in used:
            row, source = speeds.actual[key], "measured"
            sd = _MEASURED_SD if current in used else sd
        sd = 0.0 if key == current else sd
        rows.append(dataclasses.replace(row, relative_sd=sd, source=source))
    return rows, {(row.layout, row.global_batch_size): i for i, row in enumerate(rows)}


def planned(planner: Planner, batches: Sequence[int], *, others: Sequence[Planner] = ()) -> Speeds:
    """What the planner predicts of some batches, for the layouts that come nearest to the fastest
    of some batch; those of planners under other conditions are kept, too.

    Raises:
        NoSpeed: nothing fits.
    """
    best = best_rows(planner, batches)
    if not best:
        raise NoSpeed("no configuration of these batches fits on this cluster")
    kept = {layout for one in (planner, *others) for layout in _nearest(best_rows(one, batches))}
    return Speeds([row for (layout, _), row in best.items() if layout in kept])


def best_rows(planner: Planner, batches: Sequence[int]) -> dict[Key, ConfigThroughput]:
    """The fastest micro-batch of every layout and batch, as the planner predicts it."""
    best: dict[Key, ConfigThroughput] = {}
    for plan in planner.rank(list(batches), top=_ASKED):
        for r in plan.ranked:
            row = ConfigThroughput(
                configuration=r.configuration,
                samples_per_s=r.prediction.samples_per_s,
                relative_sd=PROFILED_SD,
                source=r.prediction.source,
            )
            key = row.layout, row.global_batch_size
            if key not in best or row.samples_per_s > best[key].samples_per_s:
                best[key] = row
    return best


def _nearest(best: dict[Key, ConfigThroughput]) -> list[Layout]:
    """The layouts that come nearest to the fastest of some batch."""
    top = {b: max(r.samples_per_s for (_, own), r in best.items() if own == b) for _, b in best}
    near = {
        layout: max(
            row.samples_per_s / top[b] for (where, b), row in best.items() if where == layout
        )
        for layout, _ in best
    }
    return sorted(near, key=lambda layout: (-near[layout], _order(layout)))[:_LAYOUTS]
