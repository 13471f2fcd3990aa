"""Measured times, and what they say about configurations that were not measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from copus_ext.cost_model.cluster_spec import ClusterSpec
from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.correct import Correction, correct
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.cost_model.step import step_time
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.profile import Timing
from copus_ext.planner.space import Points, joined, points_of, to_rows


class Measured:
    """Timings against their predictions.

    Args:
        model: that was timed.
        cluster: where.
        constants: of the predictions.
        timings: any number.
        earlier: more of them, of a time when the machine may have been faster or slower.
    """

    def __init__(
        self,
        model: ModelSpec,
        cluster: ClusterSpec,
        constants: Constants,
        timings: Sequence[Timing],
        earlier: Sequence[Timing] = (),
    ) -> None:
        self.timings = [*timings, *earlier]
        self._earlier = [False] * len(timings) + [True] * len(earlier)
        self.points = points_of([x.configuration for x in self.timings])
        """What was timed."""
        self._log_ratios = np.zeros(0)
        if self.timings:
            predicted = step_time(to_rows(model, cluster, self.points), constants).step_s
            self._log_ratios = np.log([x.step_s for x in self.timings] / predicted)
        self._lines = {tuple(key) for key in _keys(self.points).tolist()}

    def corrected(self, points: Points, predicted: Any) -> tuple[Any, Any, list[str]]:
        """Seconds, relative uncertainty and source of each point.

        Args:
            points: n of them.
            predicted: [n] seconds, raw.
        """
        found = self._correction(points)
        if not self.timings:
            source = ["predicted"] * len(points)
        else:
            keys = _keys(points).tolist()
            source = ["profiled" if tuple(k) in self._lines else "corrected" for k in keys]
        return predicted * found.factor, found.relative_sd, source

    def against(self, points: Points, one: Configuration) -> Any:
        """[n] relative uncertainty of the seconds of each point over those of one configuration: 0
        for itself."""
        both = joined([points, points_of([one])])
        sd = self._correction(both, against=len(points)).against_sd[:-1]
        keys = _keys(both)
        same = (keys[:-1] == keys[-1]).all(axis=1)
        same &= points.num_microbatches == both.num_microbatches[-1]
        return np.where(same, 0.0, sd)

    def _correction(self, points: Points, *, against: int | None = None) -> Correction:
        return correct(
            _keys(points),
            _keys(self.points),
            self._log_ratios,
            counts=points.num_microbatches,
            measured_counts=self.points.num_microbatches,
            noise=[x.relative_sd for x in self.timings],
            earlier=self._earlier,
            against=against,
        )


def _keys(points: Points) -> Any:
    """[n, 8] what a correction goes by: tensor, pipeline, micro-batch, and all that tells
    configurations apart but the number of micro-batches."""
    names = ("tp", "pp", "micro_batch_size", "vpp", "dp", "recompute", "recompute_num_layers")
    names += ("use_distributed_optimizer",)
    return np.stack([getattr(points, n).astype(np.int64) for n in names], axis=1)
