"""The noise scale of a run: one average per parameter group, its age and its evidence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from copus_ext.gns.estimators import Estimate
from copus_ext.gns.smoothing import (
    MIN_HALF_LIFE_TOKENS,
    Smoothed,
    half_life_of_factor,
    half_life_tokens,
    measuring_interval,
)

VERSION = 2
"""Of the record in a checkpoint. No other version is read."""
CONTROL = "layers"
_NEW_BATCH_VARIANCE = 2.0
_PAPER_FACTORS, _PAPER_TOKENS = (0.95, 0.99), 8e6


NoiseStatus = Literal["ok", "lower_bound_only", "none"]


@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """The gradient noise scale phi = tr(Sigma)/|G|^2 as known after a step (arXiv 1812.06162)."""

    status: NoiseStatus
    """`ok`; `lower_bound_only` when the upper end is unbounded; `none` before any measurement."""
    phi_samples: float | None
    """phi in samples: the batch at which noise and signal are equal. None while |G|^2 is
    not positive."""
    low_samples: float | None
    """Lower end of the 95 % interval, samples. None when nothing was measured."""
    high_samples: float | None
    """Upper end, samples; None when unbounded."""
    grad_norm_sq: float | None
    """Smoothed |G|^2, of the control set."""
    grad_variance_trace: float | None
    """Smoothed tr(Sigma), |gradient|^2 samples."""
    smoothed_tokens_per_sample: float
    """Loss tokens of a sample, averaged as the two numbers above are."""
    step_tokens_per_sample: float | None
    """Loss tokens of a sample in the last measured step, exact; None before any measurement."""
    effective_steps: float
    """Measured steps that the average is worth."""
    estimator: str
    """`micro`, `rank`, `half`, or `none` where the layout allows no measurement."""
    age_tokens: float
    """Tokens trained since the last measurement."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> NoiseScale:
        return cls(**data)


class NoiseObserver:
    """Averages the estimates of a run; the same on every rank, and part of every checkpoint.

    Args:
        half_life_tokens: of the averages; None takes the default, which grows with the run.
        interval: steps from one measurement to the next; None takes the default, which grows with
            the half-life.
        per_step: forget by a factor per measured step as arXiv 2604.26687 does: 0.95 for the first
            8 million tokens, then 0.99.
        seq_length: tokens of a sample, which hold until its loss tokens are measured.
    """

    def __init__(
        self,
        *,
        half_life_tokens: float | None = None,
        interval: int | None = None,
        per_step: bool = False,
        seq_length: int = 1,
    ) -> None:
        self._half_life, self._interval, self._per_step = half_life_tokens, interval, per_step
        self._seq_length = seq_length
        self._averages: dict[str, Smoothed] = {}
        self._measured_at: dict[str, int] = {}
        self._consumed_samples = 0
        self._batch: int | None = None
        self._tokens_per_sample = 0.0
        self._step_tokens_per_sample: float | None = None
        self._estimator = "none"
        self._last_half_life = MIN_HALF_LIFE_TOKENS
        self.layout_estimator: str | None = None
        """What could measure the present step, or None."""
        self.is_broken = False
        """Whether a measurement contradicted itself: nothing is published any more."""
        self.latest: dict[str, Estimate] = {}
        """One-step estimates of the last step, by parameter set; empty if it was not measured."""
        self.num_measured = 0
        """Measurements taken in."""
        self.num_skipped = 0
        """Steps without one."""

    def update(
        self,
        estimates: dict[str, Estimate],
        *,
        estimator: str,
        global_batch_size: int,
        consumed_samples: int,
        tokens: float,
    ) -> None:
        """Takes in a measured step.

        Args:
            estimates: by parameter set; sets that the layout cannot measure are left out.
            estimator: how they came about.
            consumed_samples: samples of the run, this step's included.
            tokens: loss tokens of the step.
        """
        per_sample = tokens / global_batch_size
        usual_samples = self.interval_at(global_batch_size) * global_batch_size
        usual = usual_samples * per_sample
        trained = consumed_samples * per_sample
        half_life = self._half_life or half_life_tokens(trained, usual)
        if self._per_step:
            factor = _PAPER_FACTORS[trained >= _PAPER_TOKENS]
            half_life = half_life_of_factor(factor, usual)
        self._last_half_life = half_life
        changed = self._batch is not None and self._batch != global_batch_size
        for name, estimate in estimates.items():
            average = self._averages.get(name, Smoothed())
            since = consumed_samples - self._measured_at.get(name, consumed_samples)
            gap = max(since - usual_samples, 0) * per_sample
            if gap and average.weight:
                average = average.add_drift_variance(tokens=gap, half_life=half_life)
                average = average.decay(tokens=gap, half_life=half_life)
            if changed:
                # The optimizer now moves through other curvature: half the evidence.
                average = average.inflate_variance(_NEW_BATCH_VARIANCE)
            self._averages[name] = average.update(estimate, tokens=usual, half_life=half_life)
            self._measured_at[name] = consumed_samples
        if CONTROL in estimates:
            a = 2.0 ** (-usual / half_life) if self._tokens_per_sample else 0.0
            self._tokens_per_sample = a * self._tokens_per_sample + (1 - a) * per_sample
            self._step_tokens_per_sample = per_sample
        self.latest, self._estimator = dict(estimates), estimator
        self._consumed_samples, self._batch = consumed_samples, global_batch_size
        self.num_measured += 1

    def interval_at(self, global_batch_size: int) -> int:
        """Steps from one measurement to the next, of the step that is about to be made."""
        if self._interval is not None or self._per_step or not self._tokens_per_sample:
            return self._interval or 1
        step = global_batch_size * self._tokens_per_sample
        trained = self._consumed_samples * self._tokens_per_sample
        return measuring_interval(self._half_life or half_life_tokens(trained, step), step)

    def skip(self, consumed_samples: int) -> None:
        """Counts a step that was not measured; the averages stay and age.

        Args:
            consumed_samples: samples of the run, this step's included.
        """
        self._consumed_samples = consumed_samples
        self.num_skipped += 1
        self.latest = {}

    @property
    def age_tokens(self) -> float:
        """Tokens trained since the last measurement of the control set."""
        at = self._measured_at.get(CONTROL, self._consumed_samples)
        return (self._consumed_samples - at) * self._tokens_per_sample

    @property
    def half_life_samples(self) -> float:
        """Half-life of the averages, in samples of the usual number of loss tokens."""
        return self._last_half_life / max(self._tokens_per_sample or self._seq_length, 1.0)

    def noise(self, name: str = CONTROL) -> NoiseScale:
        """The noise scale of a parameter set as known now."""
        average = Smoothed() if self.is_broken else self._averages.get(name, Smoothed())
        if self.age_tokens and average.weight:
            average = average.add_drift_variance(
                tokens=self.age_tokens, half_life=self._last_half_life
            )
        interval = average.interval()
        status: NoiseStatus = "none"
        if average.weight:
            status = "ok" if interval.high is not None else "lower_bound_only"
        known = self._estimator if average.weight else self.layout_estimator
        return NoiseScale(
            status=status,
            phi_samples=interval.ratio,
            low_samples=interval.low,
            high_samples=interval.high,
            grad_norm_sq=average.grad_norm_sq if average.weight else None,
            grad_variance_trace=average.grad_variance_trace if average.weight else None,
            smoothed_tokens_per_sample=self._tokens_per_sample,
            step_tokens_per_sample=self._step_tokens_per_sample,
            effective_steps=average.effective_steps,
            estimator=known if known and self.layout_estimator and not self.is_broken else "none",
            age_tokens=self.age_tokens,
        )

    def ratios(self, names: Iterable[str]) -> dict[str, float | None]:
        """phi in samples of some parameter sets, of those that were measured."""
        kept = [] if self.is_broken else [name for name in names if name in self._averages]
        return {name: self._averages[name].ratio for name in kept}

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; floats survive exactly."""
        return {
            "version": VERSION,
            "averages": {name: average.to_json() for name, average in self._averages.items()},
            "measured_at": dict(self._measured_at),
            "consumed_samples": self._consumed_samples,
            "batch": self._batch,
            "tokens_per_sample": self._tokens_per_sample,
            "step_tokens_per_sample": self._step_tokens_per_sample,
            "estimator": self._estimator,
            "half_life_tokens": self._last_half_life,
            "is_broken": self.is_broken,
            "num_measured": self.num_measured,
            "num_skipped": self.num_skipped,
        }

    @classmethod
    def from_json(
        cls,
        data: dict[str, Any],
        *,
        half_life_tokens: float | None,
        interval: int | None = None,
        per_step: bool = False,
        seq_length: int = 1,
    ) -> NoiseObserver:
        """Inverse of `to_json`.

        Raises:
            ValueError: the record is of another version, or of a measurement that contradicted
                itself.
        """
        if data.get("version") != VERSION:
            raise ValueError(
                f"it has version {data.get('version')}, and this copus reads {VERSION}"
            )
        if data["is_broken"]:
            raise ValueError("its measurement had ended with an error")
        new = cls(
            half_life_tokens=half_life_tokens,
            interval=interval,
            per_step=per_step,
            seq_length=seq_length,
        )
        new._averages = {n: Smoothed.from_json(a) for n, a in data["averages"].items()}
        new._measured_at = dict(data["measured_at"])
        new._consumed_samples, new._batch = data["consumed_samples"], data["batch"]
        new._tokens_per_sample, new._estimator = data["tokens_per_sample"], data["estimator"]
        new._step_tokens_per_sample = data["step_tokens_per_sample"]
        new._last_half_life = data["half_life_tokens"]
        new.num_measured, new.num_skipped = data["num_measured"], data["num_skipped"]
        return new
