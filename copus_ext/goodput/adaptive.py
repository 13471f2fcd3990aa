"""The policy `adaptive`: the configuration that is expected to finish the run soonest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from copus_ext.goodput import constraints, question
from copus_ext.goodput.inputs import ConfigThroughput, DecisionInputs
from copus_ext.goodput.policy import Weighed

INTERVALS = 12
"""Of the rest of the run, over which the critical batch size is followed."""


@dataclass(frozen=True, kw_only=True)
class Adaptive:
    needs_noise: bool = True
    is_schedule: bool = False

    def weigh(self, s: DecisionInputs) -> Weighed:
        """All configurations by what the belief about the critical batch size makes of their
        speeds."""
        costs = _costs(s)
        own = [i for i, row in enumerate(s.rows) if row.layout == s.now.layout]
        best = min(own, key=lambda i: costs.now[i])
        return Weighed(
            candidates=question.candidates(s, costs, _considered(s)),
            target_batch=float(s.rows[best].global_batch_size),
            goes_by=s.critical_batch_size_words,
        )


def _considered(s: DecisionInputs) -> list[int]:
    """Rows to choose from: batches of the grid, within one step of growth unless annealing asks
    for more, and on another layout none that a loss spike holds back."""
    most = max(s.now.global_batch_size * s.rules.growth, s.annealing_batch)
    grid = {size for size in s.rules.grid if size <= most}

    def may_come(row: ConfigThroughput) -> bool:
        is_held = s.consumed_samples < constraints.held_until(s, row)
        is_other = row.layout != s.now.layout
        return row.global_batch_size in grid and _may_be(s, row) and not (is_held and is_other)

    return sorted({*(i for i, row in enumerate(s.rows) if may_come(row)), s.current})


def _may_be(s: DecisionInputs, row: ConfigThroughput) -> bool:
    """Whether the run may be in a configuration from now on. A smaller batch may be out of the
    question, and so is one whose noise scale cannot be measured, but for the present one."""
    may_shrink = s.rules.allow_shrink or row.global_batch_size >= s.now.global_batch_size
    return may_shrink and (row == s.now or not row.noise_unmeasurable)


def _costs(s: DecisionInputs) -> question.Costs:
    """ln((1 + B / B_crit) / T) of all rows, now and along the rest of the run; infinite for those
    that may not be. Below the batch that annealing asks for, a row loses in proportion to what it
    lacks."""
    start, end = s.trained_samples, s.trained_samples + s.samples_left
    edges = np.linspace(start, end, INTERVALS + 1)
    points = np.array([start, *(edges[1:] + edges[:-1]) / 2])
    sizes = sorted({row.global_batch_size for row in s.rows})
    needed = dict(zip(sizes, s.belief.log_samples(sizes, points)))
    cost = np.stack([needed[row.global_batch_size] for row in s.rows])
    cost = cost - np.log([row.samples_per_s for row in s.rows])[:, None]
    batches = np.array([row.global_batch_size for row in s.rows])
    cost[[not _may_be(s, row) for row in s.rows]] = np.inf
    if s.annealing_batch:
        cost = cost - np.log(np.minimum(batches / s.annealing_batch, 1.0))[:, None]
    # Progress along the rest is what its samples are worth at the present batch.
    worth = np.exp(-needed[s.now.global_batch_size][1:])
    return question.Costs(now=cost[:, 0], ahead=cost[:, 1:], weights=worth / worth.sum())
