"""What a search answers: a plan for every global batch. JSON for tools and for the controller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from copus_ext.planner.configuration import Configuration

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds and bytes of a configuration."""

    step_s: float
    """Seconds of a step."""
    samples_per_s: float
    """Throughput of all ranks."""
    tokens_per_s: float
    """The same in tokens."""
    tflops_per_gpu: float
    """Model arithmetic per GPU as Megatron logs it, TFLOP/s."""
    mfu: float
    """That over the peak."""
    step_rel_sd: float
    """Relative uncertainty of `step_s`."""
    source: str
    """`profiled`: times of this layout and micro-batch were measured; `corrected` by those of
    others; or `predicted`."""
    blind: bool
    """Whether the noise scale cannot be measured there."""
    time_s: dict[str, float]
    """Seconds by part, along the stage that finishes last; they add up to `step_s`."""
    peak_bytes: float
    """Bytes of the stage that needs most."""
    peak_source: str
    """Where they come from; of `known_peaks.WORDS`."""
    worst_stage: int
    limit_bytes: float
    """Bytes that may be used."""
    fit_probability: float
    """That the peak is below the limit."""
    stage_bytes: list[dict[str, float]] = field(default_factory=list)
    """Bytes by kind, for every stage."""

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        names = ("peak_bytes", "peak_source", "worst_stage", "limit_bytes", "fit_probability")
        memory = {name: data.pop(name) for name in names}
        memory["stages"] = data.pop("stage_bytes")
        return {**data, "memory": memory}


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """Configurations that are no candidates, for one reason."""

    code: str
    """One of `REJECTION_CODES`."""
    count: int
    example: Configuration
    """One of them; with `memory` the one that needs least."""
    detail: str
    """The numbers."""
    fix: str
    """What would help."""
    members: list[Configuration] | None = None
    """All of them, where they were asked for."""

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"code": self.code, "count": self.count, "detail": self.detail}
        data |= {"fix": self.fix, "example": self.example.to_json()}
        if self.members is not None:
            data["members"] = [c.to_json() for c in self.members]
        return data


class Addition(Protocol):
    """What the command of an extra says about a configuration, or about a batch."""

    @property
    def fits(self) -> bool:
        """Whether it has a configuration, also where the ranking has none."""
        ...

    def add_to(self, record: dict[str, Any]) -> None:
        """Adds fields to the JSON of the configuration or of the batch."""
        ...

    def show(self, console: Console) -> None:
        """Prints it below the table, or below the parts of a configuration."""
        ...


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A candidate and what is predicted for it."""

    configuration: Configuration
    """How to run."""
    prediction: Prediction
    against_rel_sd: float | None = None
    """Relative uncertainty of its step over that of the configuration that all were compared with,
    if any."""
    addition: Addition | None = None
    """What the command of an extra says about it."""
    over_first_sd: float | None = None
    """Relative uncertainty of its step over that of the first of the plan; None where nobody
    asked."""
    equals: Sequence[Ranked] = ()
    """Others of the row that it stands for (`equals.grouped`)."""

    def to_json(self, rank: int) -> dict[str, Any]:
        """Plain JSON types. What is worth trying has rank 0."""
        answer: dict[str, Any] = {
            "rank": rank,
            "flags": self.configuration.to_flags(),
            "configuration": self.configuration.to_json(),
            "prediction": self.prediction.to_json(),
        }
        if self.over_first_sd is not None:
            answer["over_first_rel_sd"] = self.over_first_sd
        if self.equals:
            answer["equals"] = [
                {
                    "configuration": str(other.configuration),
                    "step_s": other.prediction.step_s,
                    "fit_probability": other.prediction.fit_probability,
                }
                for other in self.equals
            ]
        if self.addition is not None:
            self.addition.add_to(answer)
        return answer


@dataclass(frozen=True, kw_only=True)
class BetterBatch:
    """A batch near another one that more layouts can split."""

    global_batch_size: int
    gain: float
    """Tokens a second over those of the other, less 1; each by its fastest layout."""
    configuration: Configuration
    """The fastest layout."""
    step_s: float
    """Seconds of its step."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        found = {"global_batch_size": self.global_batch_size, "gain": self.gain}
        return {**found, "configuration": str(self.configuration), "step_s": self.step_s}

    def line(self, batch: int) -> str:
        """The hint in words, beside the batch that was asked for."""
        return (
            f"global batch {batch} splits badly over {self.configuration.layout.world_size} GPUs: "
            f"--global-batch-size {self.global_batch_size} trains {100 * self.gain:.0f} % more "
            f"tokens a second, with {self.step_s:.4g} s a step on {self.configuration}"
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    global_batch_size: int
    """Samples of a step."""
    ranked: list[Ranked]
    """The best, in the order of `equals.in_order`."""
    num_ranked: int
    """Configurations that are legal and fit."""
    rejected: list[Rejected]
    """The others, by reason."""
    tries: list[Ranked] = field(default_factory=list)
    """Of those rejected for memory, faster ones that may fit after all: the one worth trying first,
    then faster ones that are less likely to."""
    fastest: tuple[Configuration, float] | None = None
    """The one of least predicted time, however rare, and seconds of its step; None where nothing
    fits."""
    better_batch: BetterBatch | None = None
    """The nearest batch that trains faster; None where there is none, or nobody asked."""
    common_sd: float | None = None
    """Relative uncertainty that all ranked times share; None where nobody asked."""

    @property
    def status(self) -> str:
        """`ok`, `no_legal` or `none_fits`."""
        if self.num_ranked:
            return "ok"
        return "none_fits" if any(r.code == "memory" for r in self.rejected) else "no_legal"
