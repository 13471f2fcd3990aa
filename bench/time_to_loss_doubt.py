"""How sure B8's savings are: its seeds share one timing of a link, which has errors of its own.

The rounds of the timing are drawn again and again with replacement, all configurations alike, and
the savings computed from each draw.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
from time_to_loss import Times, saved, saved_over_fastest, times
from time_to_loss_clock import drawn_again, scatter_of
from time_to_loss_policies import MARK, OURS, PLAIN, PLAIN_WHOLE, STATIC, Recipe, is_static
from time_to_loss_timed import profiles_of, with_timed

DRAWS = 200
INNER = 5, 95
"""Percentiles that an interval lies between."""
Savings = dict[str, list[list[float]]]
"""What is saved, [target][seed], by the words for it."""


def savings_of(found: Times, recipe: Recipe) -> Savings:
    """What ours save over where they start, and over the fastest static batch of each loss."""
    static = f"{STATIC}_{recipe.first_batch}"
    named = {name.rstrip(MARK): name for name in found}
    statics = [name for name in found if is_static(name)]
    starts = {"adaptive": (static,), "adaptive_unprofiled": (PLAIN, PLAIN_WHOLE, static)}
    rows: Savings = {}
    for name in (n for n in (*OURS, "paper") if n in found):
        for start in (s for s in starts.get(name, ()) if s in named):
            rows[f"{name} saves over {start}"] = saved(found, name, named[start])
        words = f"{name} saves over the fastest static batch at each target"
        rows[words] = saved_over_fastest(found, name, statics)
    return rows


def intervals(
    result: dict[str, Any], recipe: Recipe, goals: list[float]
) -> dict[str, dict[str, tuple[float, float]]]:
    """[link][words] low and high mean saving over the draws, of links timed twice or more.

    Args:
        result: of the results file.
        recipe: of the measurement.
        goals: the targets.
    """
    timed = {
        link: known for link, known in result["links"].items() if scatter_of(known) is not None
    }
    if not timed:
        return {}
    draw, profiles = np.random.default_rng(0), profiles_of(result)
    means: dict[str, dict[str, list[float]]] = {}
    for _ in range(DRAWS):
        links = {link: drawn_again(known, draw) for link, known in timed.items()}
        runs = with_timed({**result, "links": links}, recipe, profiles)
        for link in timed:
            found = times([run for run in runs if run["link"] == link], goals)
            for words, rows in savings_of(found, recipe).items():
                if known := [part for row in rows for part in row]:
                    of_link = means.setdefault(link, {})
                    of_link.setdefault(words, []).append(statistics.fmean(known))
    return {
        link: {
            words: (low, high) for words, some in of_link.items() for low, high in [_inner(some)]
        }
        for link, of_link in means.items()
    }


def _inner(values: list[float]) -> tuple[float, float]:
    low, high = np.percentile(values, INNER)
    return float(low), float(high)
