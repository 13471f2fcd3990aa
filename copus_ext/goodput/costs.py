"""What changing the layout has cost and is thought to cost, and which changes are barred.

The record is plain JSON types, part of the controller's, and so of every checkpoint.
"""

from __future__ import annotations

import math
from typing import Any

from megatron.training.config.layout import Layout

_NEWEST = 3
MOST_FAILURES = 3
"""After so many failures the layout stays."""
BUILD_S = {"cpu": 2.0, "cuda": 10.0}
"""Seconds of a change without its messages, before one was measured."""
LINK_BYTES_PER_S = {"cpu": 0.5e9, "cuda": 5e9}
"""Bytes per second that a rank is taken to send before one was measured; low."""
RELAUNCH_S = 60.0
"""Seconds of leaving, starting and loading, before one was measured."""
MIN_TIMEOUT_S = 60.0
"""Least seconds that a change in the running processes may take before it counts as hung."""
_PREDICTED_TIMES = 10.0


def timeout_s(predicted_s: float, least_s: float = MIN_TIMEOUT_S) -> float:
    """Seconds after which a change that was thought to take `predicted_s` counts as hung."""
    return max(_PREDICTED_TIMES * predicted_s, least_s)


def new_costs() -> dict[str, Any]:
    """The record of a run whose layout never changed."""
    return {
        "pauses_s": [],
        "paused_s": 0.0,
        "last_iteration": None,
        "barred": [],
        "num_failed": 0,
        "left": None,
    }


class Costs:
    """Reads and fills the record.

    Args:
        record: from `new_costs`, or of a checkpoint.
        prior_s: seconds of a change before one was measured.
    """

    def __init__(self, record: dict[str, Any], *, prior_s: float) -> None:
        self.record, self._prior_s = record, prior_s

    @property
    def seconds(self) -> float:
        """Seconds of a change at their upper estimate: the most of the last three, or the
        prior."""
        return max(self.record["pauses_s"], default=self._prior_s)

    @property
    def is_open(self) -> bool:
        """Whether the layout may change at all."""
        return self.record["num_failed"] < MOST_FAILURES

    def of(self, layout: Layout) -> dict[str, Any]:
        """The fields of a `DecisionInputs` under a layout."""
        barred = tuple(
            Layout.from_record(to)
            for start, to, _ in self.record["barred"]
            if start is None or Layout.from_record(start) == layout
        )
        return {
            "switch_cost_s": self.seconds,
            "paused_s": self.record["paused_s"],
            "last_relayout_iteration": self.record["last_iteration"],
            "barred_layouts": barred,
            "relayouts_ended": not self.is_open,
        }

    def moved(self, *, seconds: float, iteration: int) -> None:
        """Takes in a change that came about."""
        self.record["pauses_s"] = [*self.record["pauses_s"], seconds][-_NEWEST:]
        self.record["paused_s"] += seconds
        self.record["last_iteration"] = iteration

    def failed(self, start: Layout, to: Layout, reason: str, *, seconds: float) -> None:
        """Takes in one that did not: it is not tried again."""
        self.record["barred"].append([str(start), str(to), reason])
        self.record["num_failed"] += 1
        self.record["paused_s"] += seconds

    def bar(self, to: Layout, reason: str) -> None:
        """Takes in that a layout is not to be chosen, from wherever."""
        self.record["barred"].append([None, str(to), reason])

    def lift_bars(self) -> None:
        """A new launch may try again."""
        self.record["barred"].clear()
        self.record["num_failed"] = 0


def prior_s(
    config: Any, *, is_relaunch: bool = False, link_bytes_per_s: float | None = None
) -> float:
    """Seconds of a change before one was measured: every rank's share of the state over its link,
    and the building.

    Args:
        config: of the run.
        is_relaunch: through new processes.
        link_bytes_per_s: of a rank to other nodes, as timed; None on one node.
    """
    if is_relaunch:
        return RELAUNCH_S
    model, device = config.model, config.runtime.device
    h, ffn = model.hidden_size, model.ffn_hidden_size
    layer = 4 * h * h + (3 if model.gated_linear_unit else 2) * h * ffn
    layers = model.num_layers + (model.mtp_num_layers or 0)
    parameters = layers * layer + 2 * model.padded_vocab_size * h
    rate = min(LINK_BYTES_PER_S[device], link_bytes_per_s or math.inf)
    return 12 * parameters / config.layout.world_size / rate + BUILD_S[device]
