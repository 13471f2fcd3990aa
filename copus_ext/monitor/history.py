"""What is known of a run: its steps, evaluations, launches and layouts, as values."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from copus_ext.monitor.signs import RunLiveness
from copus_ext.monitor.values import whole


class Step(NamedTuple):
    """One step; None where the record does not say."""

    iteration: int
    """Its number, from 1."""
    samples: int
    """Consumed since the start of the run, this step's included."""
    t: float | None
    """Seconds since the epoch."""
    loss: float | None
    """Nats per token; None if it is no finite number."""
    rate: float | None
    """Learning rate."""
    batch: int | None
    """Samples of the step."""
    micro: int | None
    """Samples of a micro-batch."""
    seconds: float | None
    """Wall time of the step."""
    updated: bool
    """Whether the weights changed."""
    phi: float | None
    """Noise scale, samples."""
    low: float | None
    """Lower end of its interval, samples."""
    high: float | None
    """Upper end, samples; None while it is unbounded."""


class Evaluation(NamedTuple):
    """One evaluation."""

    iteration: int
    """Steps done."""
    samples: int
    """Training samples done."""
    t: float | None
    """Seconds since the epoch."""
    loss: float | None
    """Nats per token."""
    split: str
    """`valid` or `test`."""


@dataclass(kw_only=True)
class Launch:
    """One start of the processes."""

    name: str
    """Of the launch."""
    t: float | None
    """When, seconds since the epoch."""
    iteration: int
    """Steps done before."""
    samples: int
    """Samples done before."""
    layout: str
    """Parallel layout at its start; empty if the record does not say."""
    loaded: str
    """Checkpoint it went on from; empty if none."""
    why: str = ""
    """How it ended, in the words of the record; empty if no end is recorded."""
    last_t: float | None = None
    """Its last record, seconds since the epoch."""
    last_iteration: int = 0
    """Its last step, whether a later launch did that again or not."""


class Event(NamedTuple):
    """What else the record holds: alerts, faults, signals, failed saves."""

    kind: str
    """Of the record."""
    t: float | None
    """Seconds since the epoch."""
    iteration: int | None
    """Steps done."""
    samples: int | None
    """Samples done."""
    line: str
    """What it says."""


class LayoutAt(NamedTuple):
    """From where on a layout holds."""

    iteration: int
    """Steps done before."""
    samples: int
    """Samples done before."""
    t: float | None
    """Seconds since the epoch."""
    layout: str
    """Such as `tp2.pp1.dp4`."""


@dataclass(kw_only=True)
class RunHistory:
    """All of it."""

    path: Path
    """Directory of the run, or its journal."""
    name: str
    """To tell it from others."""
    config: dict[str, Any]
    """Resolved flags of the last launch."""
    signs: RunLiveness
    """What it is about, as far as can be seen."""
    steps: list[Step] = field(default_factory=list)
    """In order; none twice."""
    evaluations: list[Evaluation] = field(default_factory=list)
    """In order."""
    launches: list[Launch] = field(default_factory=list)
    """In order."""
    layouts: list[LayoutAt] = field(default_factory=list)
    """In order, each another than the one before."""
    events: list[Event] = field(default_factory=list)
    """In the order written."""
    train_iterations: int | None = None
    """Steps of the whole run, as estimated at the last one."""
    undone_s: float = 0.0
    """Seconds of steps that are no part of the run any more: a later launch did them again."""
    saves_s: list[float] = field(default_factory=list)
    """Seconds of each committed checkpoint."""
    asked: list[str] = field(default_factory=list)
    """What `control/` asks of the run now, in words."""

    @property
    def tokens_per_sample(self) -> int | None:
        """Length of a sequence; None if unknown."""
        length = whole(self.config.get("seq_length"))
        return length if length and length > 0 else None

    @property
    def begin(self) -> float | None:
        """When it began, seconds since the epoch."""
        times = (x.t for x in [*self.launches[:1], *self.steps[:1]])
        return next((t for t in times if t is not None), None)

    @property
    def last(self) -> float | None:
        """Its last record, seconds since the epoch."""
        times = [launch.last_t for launch in self.launches if launch.last_t is not None]
        return max(times, default=self.steps[-1].t if self.steps else None)

    def at(self, iteration: int) -> tuple[int | None, float | None]:
        """Samples and time at which so many steps were done, by the steps' own records."""
        i = bisect_left(self.steps, iteration, key=lambda step: step.iteration)
        if i < len(self.steps) and self.steps[i].iteration == iteration:
            return self.steps[i].samples, self.steps[i].t
        first = self.launches[0] if self.launches else None
        if first is not None and iteration == first.iteration:
            return first.samples, first.t
        return None, None

    def layout_at(self, iteration: int) -> str:
        """The layout after so many steps."""
        i = bisect_right(self.layouts, iteration, key=lambda change: change.iteration)
        return self.layouts[i - 1].layout if i else ""
