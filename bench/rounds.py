"""Times of layouts from several rounds, minutes apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from copus_ext.planner.profile import Timing

Times = dict[str, dict[str, Any]]
"""Of every group a `model` and `times`, as `Timing.to_json` writes them."""


def of_rounds(rounds: Sequence[Times], seconds: Callable[[Sequence[float]], float]) -> Times:
    """One time of every layout.

    Args:
        rounds: of one machine. A layout or group that a round lacks counts with the others.
        seconds: what counts of the times of a layout. `min` where what disturbs a step only makes
            it longer; the median where the machine has fast stretches, too.
    """
    found: dict[str, dict[Any, list[Timing]]] = {}
    models: dict[str, Any] = {}
    for one in rounds:
        for group, measured in one.items():
            assert models.setdefault(group, measured["model"]) == measured["model"], group
            for t in map(Timing.from_json, measured["times"]):
                found.setdefault(group, {}).setdefault(t.key, []).append(t)
    return {
        group: {
            "model": models[group],
            "times": [
                dataclasses.replace(some[0], step_s=seconds([t.step_s for t in some])).to_json()
                for some in mine.values()
            ],
        }
        for group, mine in found.items()
    }
