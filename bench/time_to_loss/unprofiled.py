"""A machine whose speeds the planner predicts with an error, and a run that has not profiled it.

The true seconds of a step are the predicted ones times a factor. It is drawn for every layout with
its micro-batch, and a part of it grows with the number of micro-batches. The run sees predictions.
It corrects them with the steps that it has timed, by the planner, as a job's table of throughputs
does. So it starts in the configuration that the planner puts first, whose micro-batch may be wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from copus_ext.cost_model.constants import USUAL
from copus_ext.extras.simulate.scenario import Scenario
from copus_ext.extras.simulate.speeds import Speeds
from copus_ext.goodput.inputs import ConfigThroughput
from copus_ext.goodput.state import MIN_TIMED_STEPS, WARM_UP_STEPS
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.profile import Timing
from copus_ext.planner.search import Planner
from megatron.trainer.config.layout import Layout

ERROR_SD, GROWTH_SD = 0.10, 0.03
"""Standard deviations of the logarithm of the factor: of a layout with its micro-batch, and for a
number of micro-batches e times `_USUAL_COUNT`. Both are what the planner's correction has where
runs choose: 4/3 of .03, .03, .04 and .05 together, and of .02."""
_USUAL_COUNT = 4
_PER_BATCH = 20
"""Configurations of a batch that the controller ranks."""
_EVERY = 400
_TIMED = WARM_UP_STEPS + MIN_TIMED_STEPS
Table = tuple[list[ConfigThroughput], dict[tuple[Layout, int], int]]


class Machine:
    """The predicted and the true speeds of one cluster."""

    def __init__(self, s: Scenario, seed: int, error_sd: float = ERROR_SD) -> None:
        self._scenario, self._seed, self._error_sd = s, seed, error_sd
        # One of its own: what a run has timed is told to it.
        self.planner = Planner(s.planner.model, s.cluster, limits=s.limits)
        ranked = [r for plan in self.planner.rank(s.batches, top=_EVERY) for r in plan.ranked]
        self.predicted = [self.row(r.configuration, r.prediction.samples_per_s) for r in ranked]
        """Of every configuration, those of a batch with the fastest first."""

    @staticmethod
    def row(
        c: Configuration, speed: float, sd: float = 0.0, source: str = "predicted"
    ) -> ConfigThroughput:
        return ConfigThroughput(configuration=c, samples_per_s=speed, relative_sd=sd, source=source)

    def true(self, c: Configuration) -> float:
        """Samples per second of a configuration as it is."""
        if c not in self._true:
            seconds = self.planner.raw_step_s(c, USUAL) * math.exp(self._error(c))
            self._true[c] = c.global_batch_size / seconds
        return self._true[c]

    @functools.cached_property
    def _true(self) -> dict[Configuration, float]:
        return {}

    def _error(self, c: Configuration) -> float:
        if not self._error_sd:
            return 0.0
        # As the configuration's text, whatever is ranked beside it.
        name = zlib.crc32(f"{self._scenario.name} {c.line}".encode())
        own, growth = np.random.default_rng([self._seed, name]).standard_normal(2)
        count = math.log(c.num_microbatches / _USUAL_COUNT)
        return float(self._error_sd * own + GROWTH_SD * growth * count)

    def known_afterwards(self) -> Scenario:
        """The scenario with the true speeds, as static runs have it: every batch in the
        configuration that is fastest for it."""
        rows = [self.row(p.configuration, self.true(p.configuration)) for p in self.predicted]
        return self._scenario.change(measured=Speeds(_best(rows)))

    def unprofiled(self) -> Scenario:
        """The scenario for one run that knows predictions alone. Another run needs another one."""
        return self._scenario.change(measured=_Unprofiled(self))


def _best(rows: Sequence[ConfigThroughput]) -> list[ConfigThroughput]:
    """The fastest micro-batch of every layout and batch."""
    found: dict[tuple[Layout, int], ConfigThroughput] = {}
    for row in rows:
        at = row.layout, row.global_batch_size
        if at not in found or row.samples_per_s > found[at].samples_per_s:
            found[at] = row
    return list(found.values())


class _Unprofiled(Speeds):
    """What one run knows. `fastest` and `at`, from which it starts, are predictions."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(_best(machine.predicted))
        self._machine = machine
        self._steps: Counter[Configuration] = Counter()
        self._tables: dict[tuple, Table] = {}

    def true(self, row: ConfigThroughput) -> ConfigThroughput:
        """A configuration as it is. Must be called once a step, of the present one: the run knows
        a speed after as many steps as a job does."""
        self._steps[row.configuration] += 1
        return dataclasses.replace(row, samples_per_s=self._machine.true(row.configuration))

    def table(
        self,
        batches: Sequence[int],
        used: Collection[tuple[Layout, int]],
        layouts: Sequence,
        now: ConfigThroughput,
    ) -> Table:
        """Every micro-batch of some batches and layouts as the planner predicts it from the timed
        steps, and where the present one is. `used` says nothing here."""
        timed = tuple(c for c, steps in self._steps.items() if steps >= _TIMED)
        key = tuple(batches), tuple(layouts), now.configuration, timed
        if key not in self._tables:
            self._tables[key] = self._table(batches, layouts, now, timed)
        return self._tables[key]

    def _table(
        self,
        batches: Sequence[int],
        layouts: Sequence,
        now: ConfigThroughput,
        timed: Sequence[Configuration],
    ) -> Table:
        machine, planner, allowed = self._machine, self._machine.planner, {*layouts}
        planner.retime(
            [Timing(configuration=c, step_s=c.global_batch_size / machine.true(c)) for c in timed]
        )
        some = [b for b in batches if b in self.batches]
        rows = [
            machine.row(
                r.configuration,
                r.prediction.samples_per_s,
                r.against_rel_sd or 0.0,
                "measured" if r.configuration in timed else r.prediction.source,
            )
            for plan in planner.rank(some, top=_PER_BATCH, against=now.configuration)
            for r in plan.ranked
            if r.configuration.layout in allowed
        ]
        at = next((i for i, r in enumerate(rows) if r.configuration == now.configuration), None)
        if at is None:
            # None of the first of its batch; what was timed is known all the same.
            known = now.configuration in timed
            speed = machine.true(now.configuration) if known else now.samples_per_s
            source = "measured" if known else now.source
            rows.append(
                dataclasses.replace(now, samples_per_s=speed, source=source, relative_sd=0.0)
            )
            at = len(rows) - 1
        return rows, {(now.layout, now.global_batch_size): at}
