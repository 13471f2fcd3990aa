"""What a change of the layout costs, and which changes have failed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from copus_ext.cost_model.cluster_spec import ClusterSpec
from megatron.trainer.config.layout import Layout

_NEWEST = 3
MAX_FAILURES = 3
"""After so many failures the layout stays."""
FIXED_S = {
    "prepare": 0.0064,
    "drain": 0.0021,
    "extract": 0.0085,
    "tear down": 0.0135,
    "groups": 0.0144,
    "model": 0.0164,
    "optimizer": 0.0181,
    "copy": 0.0075,
    "transfer": 0.0212,
    "weights": 0.0038,
    "verify": 0.0191,
    "commit": 0.0008,
    "resume": 0.0011,
}
"""Seconds of each phase without any state: the lines through the medians of 8, 20 and 40 million
parameters on two CPU ranks in docs/results/relayout_cost.json, at 0 bytes."""
STATE_PASSES = {"extract": 2.79, "model": 3.38, "optimizer": 1.04, "copy": 1.19, "verify": 2.56}
"""How often a phase reads or writes the state of a rank: the slopes of the same lines, in bytes of
memory traffic of a CPU rank (10 GB/s) for each byte of state. The other phases have none."""
COMMUNICATORS, COMMUNICATOR_S = 6, 2.0
"""Assumed for CUDA, where nothing was measured yet: NCCL's communicators that a rank uses under a
new layout (tensor, pipeline, data, model, embedding, world), and the seconds of each.
github.com/NVIDIA/nccl/issues/534 has 2.0 s among 8 ranks and 4.1 s among 32 in 2021."""
WIRE_SHARE = 0.5
"""Bytes per second of a change over those of its links, copies included: 0.51 and 0.54 of gloo's
in docs/results/relayout_cost.json (`bandwidth_with_copies`)."""
LINK_BYTES_PER_S = {"cpu": 0.5e9, "cuda": 5e9}
"""Assumed bytes per second of a rank on a machine that nothing describes; low."""
_MEMORY_BYTES_PER_S = {"cpu": 10e9, "cuda": 1e12}
RELAUNCH_S = 60.0
"""Seconds of leaving, starting and loading, before one was measured."""
MIN_TIMEOUT_S = 60.0
"""Least seconds that a change in the running processes may take before it counts as hung."""
_PREDICTED_TIMES = 10.0


def timeout_s(predicted_s: float, min_s: float = MIN_TIMEOUT_S) -> float:
    """Seconds after which a change that was predicted to take `predicted_s` counts as hung."""
    return max(_PREDICTED_TIMES * predicted_s, min_s)


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
    ratios: list[float] = field(default_factory=list)
    """Those seconds over what was predicted for each change."""
    paused_s: float = 0.0
    """Seconds of all changes, failed ones included."""
    failed: list[FailedChange] = field(default_factory=list)
    """Changes that are not tried again."""
    num_failed: int = 0
    """Changes that failed in this launch."""
    pending_relaunch: PendingRelaunch | None = None
    """A change that the next launch completes."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LayoutChangeCosts:
        """Reads what `dataclasses.asdict` gives."""
        pending = data["pending_relaunch"]
        parts = {
            "failed": [FailedChange(**change) for change in data["failed"]],
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
        return self.num_failed >= MAX_FAILURES

    def blocked_layouts(self, layout: Layout) -> tuple[Layout, ...]:
        """Layouts to which a change from the given one has failed."""
        here = str(layout)
        return tuple(Layout.from_text(f.to) for f in self.failed if f.start in (here, None))

    def seconds_of(self, prior_s: float) -> float:
        """Upper estimate of the seconds of one change, of which so many are predicted: by as much
        more or less as the worst of the last three was off."""
        return prior_s * max(self.ratios) if self.ratios else max(self.pauses_s, default=prior_s)

    def record_success(self, *, seconds: float, prior_s: float | None = None) -> None:
        """Adds a change that came about.

        Args:
            seconds: of it.
            prior_s: what was predicted for it before any was measured; None if nothing was.
        """
        self.pauses_s = [*self.pauses_s, seconds][-_NEWEST:]
        if prior_s:
            self.ratios = [*self.ratios, seconds / prior_s][-_NEWEST:]
        self.paused_s += seconds

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


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a change of layout goes over."""

    device: str
    """`cpu` or `cuda`."""
    ranks_per_node: int
    """Consecutive ranks that share a node."""
    within_bytes_per_s: float
    """From a rank to others of its node, one direction."""
    across_bytes_per_s: float
    """From a node to others, one direction."""
    memory_bytes_per_s: float
    """Of the memory of a rank."""

    @classmethod
    def of(cls, cluster: ClusterSpec) -> Machine:
        """As the planner describes it; the slowest of measured links."""
        across = cluster.network_bytes_per_s(cluster.load_constants())
        if cluster.links is not None:
            rows = cluster.links.bytes_per_s
            pairs = [x for i, row in enumerate(rows) for j, x in enumerate(row) if i != j]
            across = min([across, *pairs])
        return cls(
            device="cpu" if cluster.constants == "cpu" else "cuda",
            ranks_per_node=cluster.gpus_per_node,
            within_bytes_per_s=cluster.intra_bytes_per_s,
            across_bytes_per_s=across,
            memory_bytes_per_s=cluster.gpu.hbm_bytes_per_s,
        )

    @classmethod
    def unknown(
        cls, device: str, *, ranks_per_node: int, across_bytes_per_s: float | None = None
    ) -> Machine:
        """One that nothing describes.

        Args:
            device: `cpu` or `cuda`.
            ranks_per_node: ranks of a node.
            across_bytes_per_s: from a node to others, as timed; None if it was not.
        """
        usual = LINK_BYTES_PER_S[device]
        return cls(
            device=device,
            ranks_per_node=ranks_per_node,
            within_bytes_per_s=usual,
            across_bytes_per_s=min(ranks_per_node * usual, across_bytes_per_s or math.inf),
            memory_bytes_per_s=_MEMORY_BYTES_PER_S[device],
        )


@dataclass(frozen=True, kw_only=True)
class MovedBytes:
    """What a change of layout moves, in bytes."""

    held: int
    """Most state that a rank holds, before or after."""
    within: int
    """Most that a rank gets from or gives to others of its node."""
    across: int
    """Most that a node gets from or gives to others."""


def pause_s(moved: MovedBytes, machine: Machine) -> float:
    """Predicted seconds of a change in the running processes: its phases without any state, its
    passes over the state of a rank, and its messages over the links."""
    built = sum(FIXED_S.values())
    if machine.device == "cuda":
        built += COMMUNICATORS * COMMUNICATOR_S
    memory = sum(STATE_PASSES.values()) * moved.held / machine.memory_bytes_per_s
    wire = moved.within / machine.within_bytes_per_s + moved.across / machine.across_bytes_per_s
    return built + memory + wire / WIRE_SHARE
