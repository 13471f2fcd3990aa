"""What a change of the layout costs, and which changes have failed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from megatron.training.config.layout import Layout

_NEWEST = 3
MOST_FAILURES = 3
"""After so many failures the layout stays."""
BUILD_S = {"cpu": 2.0, "cuda": 10.0}
"""Seconds of a change without its messages, before one was measured."""
LINK_BYTES_PER_S = {"cpu": 0.5e9, "cuda": 5e9}
"""Assumed bytes per second of a rank before they were measured; low."""
RELAUNCH_S = 60.0
"""Seconds of leaving, starting and loading, before one was measured."""
MIN_TIMEOUT_S = 60.0
"""Least seconds that a change in the running processes may take before it counts as hung."""
_PREDICTED_TIMES = 10.0


def timeout_s(predicted_s: float, least_s: float = MIN_TIMEOUT_S) -> float:
    """Seconds after which a change that was predicted to take `predicted_s` counts as hung."""
    return max(_PREDICTED_TIMES * predicted_s, least_s)


@dataclass(kw_only=True)
class FailedChange:
    """A change of the layout that is not tried again in this launch."""

    start: str | None
    """Layout from which it failed; None: from any."""
    to: str
    """Layout to which it failed."""
    reason: str
    """Why, in one line."""


@dataclass(kw_only=True)
class PendingRelaunch:
    """A change of the layout for which this launch ends and another one starts."""

    number: int
    """Of the decision."""
    start: str
    """Layout before."""
    to: str
    """Layout after."""
    time: float
    """Wall clock when training stopped, seconds."""


@dataclass(kw_only=True)
class LayoutChangeCosts:
    """What changes of the layout cost, and which of them have failed; part of the controller's
    state."""

    prior_s: float = 0.0
    """Seconds that a change is assumed to take before one was measured."""
    pauses_s: list[float] = field(default_factory=list)
    """Seconds of the newest changes."""
    paused_s: float = 0.0
    """Seconds of all changes, failed ones included."""
    last_iteration: int | None = None
    """Step after which the layout last changed."""
    failed: list[FailedChange] = field(default_factory=list)
    """Changes that are not tried again."""
    num_failed: int = 0
    """Changes that failed in this launch."""
    pending_relaunch: PendingRelaunch | None = None
    """A change that the next launch completes."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LayoutChangeCosts:
        """Reads what `dataclasses.asdict` gives."""
        pending = data.get("pending_relaunch")
        parts = {
            "failed": [FailedChange(**change) for change in data.get("failed", [])],
            "pending_relaunch": None if pending is None else PendingRelaunch(**pending),
        }
        return cls(**{**data, **parts})

    @property
    def seconds(self) -> float:
        """Upper estimate of the seconds of a change: the most of the last three, or the prior."""
        return max(self.pauses_s, default=self.prior_s)

    @property
    def has_given_up(self) -> bool:
        """Whether so many changes have failed that the layout stays."""
        return self.num_failed >= MOST_FAILURES

    def blocked_layouts(self, layout: Layout) -> tuple[Layout, ...]:
        """Layouts to which a change from the given one has failed."""
        here = str(layout)
        return tuple(Layout.from_text(f.to) for f in self.failed if f.start in (here, None))

    def record_success(self, *, seconds: float, iteration: int) -> None:
        """Adds a change that came about."""
        self.pauses_s = [*self.pauses_s, seconds][-_NEWEST:]
        self.paused_s += seconds
        self.last_iteration = iteration

    def record_failure(self, start: Layout, to: Layout, reason: str, *, seconds: float) -> None:
        """Adds a change that failed: it is not tried again."""
        self.failed.append(FailedChange(start=str(start), to=str(to), reason=reason))
        self.num_failed += 1
        self.paused_s += seconds

    def block(self, to: Layout, reason: str) -> None:
        """Keeps the run from changing to a layout, whatever the present one is."""
        self.failed.append(FailedChange(start=None, to=str(to), reason=reason))

    def forget_failures(self) -> None:
        """Lets a new launch try again."""
        self.failed.clear()
        self.num_failed = 0


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
