"""Values that the parts of the controller hand to each other. Frozen, JSON both ways, no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

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
    tokens_per_sample: float
    """Loss tokens of a sample, smoothed: phi_tokens = phi_samples x this."""
    effective_steps: float
    """Measured steps that the average is worth."""
    estimator: str
    """`micro`, `rank`, `half`, or `none` where the layout allows no measurement."""
    age_tokens: float
    """Tokens trained since the last measurement."""

    @property
    def phi_tokens(self) -> float | None:
        """phi in loss tokens."""
        return None if self.phi_samples is None else self.phi_samples * self.tokens_per_sample

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> NoiseScale:
        """Inverse of `to_json`; the names `g2` and `v` are read for one release."""
        names = {"g2": "grad_norm_sq", "v": "grad_variance_trace"}
        return cls(**{names.get(name, name): value for name, value in data.items()})
