"""What was decided in a run, how it was carried out and what came of it, as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from copus_ext.monitor.values import whole
from megatron.training.config.layout import Layout

MOVED, CALLED_OFF, ABANDONED = "moved", "called off", "abandoned"
"""Ways for a change of layout to end: it came about; the run ended before it began; the run left to
start again."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A configuration by name."""

    batch: int | None
    """Samples of a step."""
    micro: int | None
    """Samples of a micro-batch."""
    layout: str
    """Such as `tp2.pp1.dp4`."""

    def __str__(self) -> str:
        return f"batch {self.batch} in micro-batches of {self.micro} on {self.layout}"


@dataclass(kw_only=True)
class Switch:
    """A change of layout that was tried."""

    number: int | None
    """Of the decision."""
    iteration: int | None
    """Steps done before."""
    samples: int | None
    """Samples done before."""
    t: float | None
    """When it had ended, seconds since the epoch."""
    start: str
    """Layout before."""
    to: str
    """Layout wanted."""
    kind: str
    """`moved`, `called off`, `abandoned`, `cancelled` before anything was touched or
    `rolled_back`."""
    reason: str
    """Why it did not come about."""
    pause_s: float | None
    """Seconds of the whole."""
    predicted_s: float | None
    """Seconds that it was taken to cost."""
    phases: dict[str, float]
    """Seconds of each phase."""


@dataclass(kw_only=True)
class Outcome:
    """What came of a change, 50 steps later."""

    number: int | None
    """Of the decision."""
    iteration: int | None
    """Step after which it was made."""
    samples: int | None
    """Samples done then."""
    before: Sizes
    """Configuration before."""
    after: Sizes
    """Configuration since."""
    gain: float | None
    """Predicted gain in goodput."""
    predicted: float | None
    """Samples/s predicted."""
    speed_before: float | None
    """Samples/s before."""
    speed: float | None
    """Samples/s after."""
    slope_before: float | None
    """Loss per thousand samples before."""
    slope: float | None
    """Loss per thousand samples after."""
    steps: int | None
    """Steps that it is judged by."""
    pause_s: float | None
    """Seconds by which the first step after took longer than others."""
    spiked: bool
    """Whether the loss rose like a spike."""

    @property
    def ratio(self) -> float | None:
        """Throughput after over the predicted one."""
        return self.speed / self.predicted if self.speed and self.predicted else None


@dataclass(kw_only=True)
class Decided:
    """One decision."""

    place: int
    """Where its record begins in the journal."""
    number: int | None
    """Its number."""
    iteration: int | None
    """Steps done."""
    samples: int | None
    """Samples done."""
    t: float | None
    """Seconds since the epoch."""
    kind: str
    """`stay`, `batch` or `relayout`."""
    obeyed: bool
    """Whether it was carried out."""
    reason: str
    """One line with the numbers."""
    gain: float | None
    """Predicted gain in goodput: of what was chosen, else of the best move within reach."""
    needed: float | None
    """Gain that this needs."""
    now: Sizes
    """Configuration at that time."""
    to: Sizes
    """Configuration to go on with."""
    predicted: float | None
    """Samples/s predicted of that."""
    target: float | None
    """Batch that the policy aims at."""
    undone: bool = False
    """Whether a restart went back to before it."""
    switch: Switch | None = None
    """How the layout was changed for it."""
    outcome: Outcome | None = None
    """What came of it."""

    @property
    def is_change(self) -> bool:
        """Whether another configuration was chosen."""
        return self.kind != "stay"

    @property
    def was_made(self) -> bool:
        """Whether another configuration was taken on, and is part of the run's history."""
        if not self.is_change or not self.obeyed or self.undone:
            return False
        if self.switch is not None:
            return self.switch.kind == MOVED
        return self.kind != "relayout" or self.outcome is not None


@dataclass(kw_only=True)
class Note:
    """Any other line: a start, a pause, a failure."""

    kind: str
    """Of the line."""
    t: float | None
    """Seconds since the epoch."""
    iteration: int | None
    """Steps done."""
    line: str
    """What it says."""


@dataclass(kw_only=True)
class Decisions:
    """A journal, or the end of one."""

    mode: str = ""
    """`act` or `observe`; empty if no start is there."""
    flags: dict[str, Any] = field(default_factory=dict)
    """Of the last launch, as the controller wrote them."""
    peak_flops: float | None = None
    """Of a rank of the last launch, FLOP/s, as the controller found it."""
    failure: str = ""
    """Why the controller of the last launch decides no more; empty if it does."""
    decided: list[Decided] = field(default_factory=list)
    """In the order made, undone ones too."""
    switches: list[Switch] = field(default_factory=list)
    """All that were tried, in order."""
    outcomes: list[Outcome] = field(default_factory=list)
    """In order."""
    notes: list[Note] = field(default_factory=list)
    """In order."""
    layouts: list[tuple[int, str]] = field(default_factory=list)
    """Steps done and the layout from there on, as launches and changes of layout have it, in the
    order written."""
    requested: tuple[int | None, float | None] = (None, None)
    """Number of the change of layout that was asked for last, and the seconds it was taken to
    cost."""
    begun_t: float | None = None
    """When a change of layout began that has not ended, seconds since the epoch."""

    @property
    def is_empty(self) -> bool:
        """Whether there is no journal."""
        return not (self.decided or self.switches or self.outcomes or self.notes)

    @property
    def standing(self) -> list[Decided]:
        """Those that no restart has undone."""
        return [d for d in self.decided if not d.undone]

    @property
    def made(self) -> list[Decided]:
        """Changes that were made and are part of the run's history."""
        return [d for d in self.decided if d.was_made]


def layout_name(row: dict[str, Any]) -> str:
    """The name of a row's layout; empty if it has none."""
    tp, pp, vpp, dp = (whole(row.get(size)) for size in ("tp", "pp", "vpp", "dp"))
    if tp is None or pp is None or dp is None:
        return ""
    try:
        return str(Layout(tp=tp, pp=pp, vpp=vpp or 1, dp=dp, cut=row.get("cut")))
    except ValueError:
        return ""


def sizes_of(row: dict[str, Any]) -> Sizes:
    """The configuration of a row of the journal."""
    return Sizes(
        batch=whole(row.get("global_batch_size")),
        micro=whole(row.get("micro_batch_size")),
        layout=layout_name(row),
    )
