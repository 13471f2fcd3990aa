"""Times of layouts from several rounds, minutes apart.

Other programs only ever slow a step down, so that a configuration counts with its least time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from copus_ext.planner.profile import Timing

Times = dict[str, dict[str, Any]]
"""Of every group a `model` and `times`, as `Timing.to_json` writes them."""


def least(rounds: Sequence[Times]) -> Times:
    """The least time of every configuration.

    Args:
        rounds: a group that a round does not have counts with its other rounds.
    """
    best: dict[str, dict[Any, Timing]] = {}
    models: dict[str, Any] = {}
    for one in rounds:
        for group, measured in one.items():
            models[group] = measured["model"]
            mine = best.setdefault(group, {})
            for t in map(Timing.from_json, measured["times"]):
                if t.key not in mine or t.step_s < mine[t.key].step_s:
                    mine[t.key] = t
    return {
        group: {"model": models[group], "times": [t.to_json() for t in mine.values()]}
        for group, mine in best.items()
    }
