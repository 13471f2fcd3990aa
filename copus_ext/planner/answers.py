"""What a search answers. JSON both for people's tools and for the controller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from copus_ext.planner.configuration import Configuration, Prediction, Rejected
from copus_ext.planner.node_order import NodeOrder


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A candidate and what is predicted for it."""

    configuration: Configuration
    """How to run."""
    prediction: Prediction
    """What it gives."""
    against_rel_sd: float | None = None
    """Relative uncertainty of its step over that of the configuration that all were compared with,
    if any."""
    order: NodeOrder | None = None
    """Which node goes where, if that was asked for."""

    def to_json(self, rank: int) -> dict[str, Any]:
        """Plain JSON types."""
        answer = {
            "rank": rank,
            "flags": self.configuration.to_flags(),
            "configuration": self.configuration.to_json(),
            "prediction": self.prediction.to_json(),
        }
        if self.order is not None:
            answer["configuration"]["node_order"] = self.order.names
            answer["order"] = self.order.to_json()
        return answer


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer for one global batch."""

    global_batch_size: int
    """Samples of a step."""
    ranked: list[Ranked]
    """The best, fastest first."""
    num_ranked: int
    """Configurations that are legal and fit."""
    rejected: list[Rejected]
    """The others, by reason."""

    @property
    def status(self) -> str:
        """`ok`, `no_legal` or `none_fits`."""
        if self.num_ranked:
            return "ok"
        return "none_fits" if any(r.code == "memory" for r in self.rejected) else "no_legal"
