"""The flags of the controller."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.config.fields import option


@dataclass(frozen=True, kw_only=True)
class CopusConfig:
    """What `--copus` does. Without it the trainer is the plain one."""

    copus: bool = option(False)
    """Measure the gradient noise scale while training."""
    copus_mode: str = option("observe", choices=("observe", "act"))
    """observe: measure and record, change nothing. act (change batch and layout) is not built
    yet."""
    copus_gns_estimator: str = option("auto", choices=("auto", "micro", "rank", "half"))
    """Small gradients to compare with the whole batch's: of each micro-batch, of each data-parallel
   rank, or of the first half of the micro-batches; auto takes the first of these that the layout
   allows."""
    copus_gns_interval: int = option(1)
    """Steps between two measurements."""
    copus_gns_half_life_tokens: float | None = option(None)
    """Tokens after which a measurement counts half. Default: 0.44 million or a twentieth of the
    tokens trained, whichever is more, at most a quarter of them, at least 16 measurements."""
