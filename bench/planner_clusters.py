"""How right is the planner on clusters whose measurements it has never seen?

    python -m bench.planner_clusters

The public tables of bench/data come from three clusters. Each in turn is left out: the constants
are fitted on the other one with such GPUs (H100: on vTrain's, with what newer software is expected
to change), and links are the usual ones (`bench.planner_accuracy.USUAL_LINKS`). Then all its runs
are predicted: without any measured time, and, where groups have more than two runs, with two of
each group, which the planner has proposed. A group is of one model on one number of GPUs, with one
batch: runs of other models have an order that says nothing of layouts. The worst group is told,
too, what the choice loses among runs that were not timed (`of_others`), and how often a prediction
is within its stated doubt. Writes
docs/results/planner_clusters.json in a minute.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np

from bench import planner_tables
from bench.planner_accuracy import (
    NEWER_NETWORK,
    SINGLE_WEIGHT,
    USUAL_LINKS,
    fit,
    newer,
)
from bench.planner_tables import timed_table
from bench.support import arguments, origin, write
from copus_ext.cost_model.constants import Constants
from copus_ext.extras.planner_validation import validation

CLUSTERS = {
    "vTrain's, A100": ("vtrain_multi", "vtrain_single"),
    "Selene, A100": ("korthikanti", "narayanan"),
    "Megatron-LM's, H100": ("h100_weak_scaling",),
}
"""Tables of each."""
_FEW = ("korthikanti", "narayanan", "h100_weak_scaling")
"""Tables whose groups have one or two runs."""
_LEVELS = np.linspace(0.02, 0.98, 49)


def constants_without() -> dict[str, Constants]:
    """Constants for each cluster, from what was measured on others."""
    on_vtrain = fit(
        [(timed_table("vtrain_multi"), 1.0), (timed_table("vtrain_single"), SINGLE_WEIGHT)]
    ).constants
    on_selene = fit([(timed_table("korthikanti"), 1.0), (timed_table("narayanan"), 1.0)]).constants
    usual_vtrain, usual_selene = (
        dataclasses.replace(one, **USUAL_LINKS) for one in (on_vtrain, on_selene)
    )
    h100 = dataclasses.replace(newer(on_vtrain), nic_efficiency=NEWER_NETWORK)
    return dict(zip(CLUSTERS, (usual_selene, usual_vtrain, h100)))


def scores(runs: list[Any], found: validation.Predictions) -> Any:
    """[n] errors over their stated doubt, of runs whose times were not used."""
    at = [i for i, run in enumerate(runs) if run.step_s is not None and not found.known[i]]
    logs = np.log([float(runs[i].step_s or 1.0) for i in at] / found.step_s[at])
    return logs / found.relative_sd[at]


def normal_share(scores_: Any, level: float) -> float:
    """Share of scores within the middle `level` of a normal distribution."""
    from statistics import NormalDist

    return float(np.mean(np.abs(scores_) <= NormalDist().inv_cdf(0.5 + level / 2)))


def pairs_in_order(runs: list[Any], found: validation.Predictions) -> tuple[int, int]:
    """Pairs of runs of a group, whose times were not used, in the measured order; and all pairs."""
    right = total = 0
    for at in validation.groups(runs).values():
        for i, j in itertools.combinations([i for i in at if not found.known[i]], 2):
            measured = float(runs[i].step_s or 0.0) - float(runs[j].step_s or 0.0)
            total += measured != 0
            right += measured * (found.step_s[i] - found.step_s[j]) > 0
    return int(right), total


def choice_of_others(runs: list[Any], found: validation.Predictions) -> list[float]:
    """Of every group: what the best predicted run costs over the fastest, among those whose times
    were not used."""
    lost = []
    for at in validation.groups(runs).values():
        others = [i for i in at if not found.known[i]]
        if len(others) > 1 and found.fits[others].any():
            seconds = np.array([float(runs[i].step_s or 0.0) for i in others])
            choice = np.argmin(np.where(found.fits[others], found.step_s[others], np.inf))
            lost.append(float(seconds[choice] / seconds.min() - 1))
    return lost


def judged(name: str, constants: Constants, known: int) -> tuple[dict[str, Any], Any]:
    """Figures of a table, and its scores."""
    runs = planner_tables.read(name)
    found = validation.predict(runs, num_known=known, constants=constants)
    result = validation.judge(runs, found)
    worst = max(
        (g["mean"], group) for group, g in result["groups"].items() if g["mean"] is not None
    )
    z, pairs = scores(runs, found), pairs_in_order(runs, found)
    others = choice_of_others(runs, found)
    return {
        **result["in_all"],
        "mean_regret_of_others": float(np.mean(others)) if others else None,
        "worst_regret_of_others": max(others, default=None),
        "worst_group": worst[1],
        "worst_mean": worst[0],
        "within_99_percent": normal_share(z, 0.99),
        "pairs": pairs[1],
        "pairs_in_order": pairs[0],
    }, z


def main() -> None:
    """Fits, predicts, prints and writes."""
    args = arguments(__doc__, "planner_clusters.json").parse_args()
    result: dict[str, Any] = {}
    curves: dict[str, Any] = {}
    for cluster, constants in constants_without().items():
        for known in (0, 2):
            here = [
                (name, *judged(name, constants, known))
                for name in CLUSTERS[cluster]
                if not (known and name in _FEW)
            ]
            if not here:
                continue
            for name, figures, _ in here:
                result.setdefault(cluster, {}).setdefault(name, {})[f"known_{known}"] = figures
            # Every table counts the same: most rows are of one with a single node.
            shares = [[normal_share(z, x) for x in _LEVELS] for *_, z in here if len(z)]
            words = ", two known" if known else ""
            curves[f"{cluster}{words}"] = np.mean(shares, axis=0).tolist()
    middle = int(np.argmin(np.abs(_LEVELS - math.erf(1 / math.sqrt(2)))))
    answer = {
        "what": "step times on clusters left out of the fit",
        "clusters": result,
        "within_one_sd": {name: one[middle] for name, one in curves.items()},
        "calibration": {"levels": _LEVELS.tolist(), **curves},
        "origin": origin(),
    }
    write(args.output, answer, hide=["calibration"])


if __name__ == "__main__":
    main()
