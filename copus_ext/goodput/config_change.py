"""A change of configuration and what came of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


def config_key(layout: str, micro_batch_size: int, global_batch_size: int) -> str:
    """Key of a configuration in `ControllerState.step_times`."""
    return f"{layout} {micro_batch_size} {global_batch_size}"


@dataclass(kw_only=True)
class ConfigChange:
    """A change of configuration and its outcome, as the journal's `outcome` records hold it."""

    decision: int
    iteration: int = 0
    """Steps done before the change."""
    consumed_samples: int = 0
    """Samples trained before the change."""
    from_batch: int
    """Global batch size before."""
    to_batch: int
    """Global batch size after."""
    from_micro_batch: int
    """Micro-batch size before."""
    to_micro_batch: int
    """Micro-batch size after."""
    from_layout: str | None = None
    """Layout before."""
    to_layout: str | None = None
    """Layout after."""
    predicted_samples_per_s: float | None = None
    """Throughput that was predicted; None where nothing had been timed that tells how fast this
    machine is."""
    predicted_sd: float | None = None
    """Relative standard deviation of that."""
    gain: float | None = None
    """Relative gain in goodput that was predicted; None where the policy predicts none."""
    gain_sd: float | None = None
    """Standard deviation of the logarithm of 1 plus that gain."""
    reason: str = ""
    """Why, in one line."""
    loss_before: float | None = None
    """Mean loss of the last steps before."""
    loss_sd_before: float | None = None
    """Standard deviation of these losses."""
    slope_before: float | None = None
    """Loss per thousand samples before."""
    samples_per_s_before: float | None = None
    """Throughput of the median timed step before, of the configuration before; None if none was
    timed."""
    timed_before: list[int] = field(default_factory=list)
    """First and last of these steps, and how many there are; empty for none."""
    spiked: bool = False
    """Whether the loss rose like a spike afterwards."""
    steps: int | None = None
    """Steps in the new configuration until the outcome was measured; None until then."""
    samples_per_s: float | None = None
    """Throughput of the median timed step after; None if none was timed."""
    timed_after: list[int] = field(default_factory=list)
    """First and last of these steps, and how many there are; empty for none."""
    speed_over_predicted: float | None = None
    """That throughput over the predicted one."""
    loss_slope: float | None = None
    """Loss per thousand samples after."""
    loss_rise: float | None = None
    """Largest loss after, less the mean before."""
    pause_s: float | None = None
    """Seconds that the first step took longer than the median one."""

    @property
    def from_key(self) -> str:
        """`config_key` of the configuration before."""
        return config_key(str(self.from_layout), self.from_micro_batch, self.from_batch)

    @property
    def to_key(self) -> str:
        """`config_key` of the configuration after."""
        return config_key(str(self.to_layout), self.to_micro_batch, self.to_batch)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ConfigChange:
        return cls(**data)
