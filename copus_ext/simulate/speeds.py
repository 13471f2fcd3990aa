"""The speed of every configuration of a scenario, and what a run knows of it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Sequence

import numpy as np

from copus_ext.goodput.inputs import ConfigThroughput
from copus_ext.planner.search import Planner
from megatron.training.config.layout import Layout

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
    """What layouts are sorted by."""
    return *layout.sizes, layout.ep, layout.expert_tensor_parallel_size, layout.cp


class NoSpeed(ValueError):
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
        """A configuration as it is."""
        return self.actual[row.layout, row.global_batch_size]

    def at(self, layout: Layout, batch: int) -> ConfigThroughput | None:
        """A configuration as it is, None where there is none."""
        return self.actual.get((layout, batch))

    def fastest(self, batch: int, layout: Layout | None = None) -> ConfigThroughput:
        """The fastest of a batch, of a layout if given.

        Raises:
            NoSpeed: there is none.
        """
        rows = [r for (where, b), r in self.actual.items() if b == batch]
        rows = [r for r in rows if layout in (None, r.layout)]
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
        """Rows of some batches and layouts as a run knows them, and where each is.

        Args:
            batches: samples.
            used: configurations that it has timed itself.
            layouts: to choose from.
            now: present one, over whose speed the others are uncertain.
        """
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


def planned(
    planner: Planner,
    batches: Sequence[int],
    *,
    error_sd: float = 0.0,
    seed: int = 0,
    known_sd: float | None = PROFILED_SD,
    others: Sequence[Planner] = (),
) -> Speeds:
    """What the planner predicts.

    Args:
        planner: of model and cluster; it may hold measured times.
        batches: samples.
        error_sd: true speeds are off the known ones by so much, alike for all batches of a layout.
        seed: of these errors.
        known_sd: relative uncertainty that the run takes its rows to have; None: the planner's.
        others: planners under other conditions, whose best layouts are kept too.

    Raises:
        NoSpeed: nothing fits.
    """
    best = best_rows(planner, batches, known_sd=known_sd)
    if not best:
        raise NoSpeed("no configuration of these batches fits on this cluster")
    kept = _nearest(best)
    for other in others:
        also = _nearest(best_rows(other, batches, known_sd=known_sd))
        kept += [layout for layout in also if layout not in kept]
    known = [row for (layout, _), row in best.items() if layout in kept]
    if not error_sd:
        return Speeds(known)
    draws = np.random.default_rng([seed, 0x5BEED]).standard_normal(len(kept))
    factor = {layout: float(np.exp(error_sd * draw)) for layout, draw in zip(kept, draws)}
    true = [
        dataclasses.replace(row, samples_per_s=row.samples_per_s * factor[row.layout])
        for row in known
    ]
    return Speeds(true, known)


def best_rows(
    planner: Planner, batches: Sequence[int], *, known_sd: float | None
) -> dict[Key, ConfigThroughput]:
    """The fastest micro-batch of every layout and batch, as the planner predicts it."""
    best: dict[Key, ConfigThroughput] = {}
    for plan in planner.rank(list(batches), top=_ASKED):
        for r in plan.ranked:
            sd = r.prediction.step_rel_sd if known_sd is None else known_sd
            row = ConfigThroughput(
                configuration=r.configuration,
                samples_per_s=r.prediction.samples_per_s,
                relative_sd=sd,
                source=r.prediction.source,
            )
            best.setdefault((row.layout, row.global_batch_size), row)
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
