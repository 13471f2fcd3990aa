"""A finished step for tests of what is made of steps."""

from __future__ import annotations

from typing import Any

from megatron.trainer.common.step_settings import StepInfo


def step_info(iteration: int = 1, **changes: Any) -> StepInfo:
    """A step of 8 samples that went well, but for what is given."""
    values: dict[str, Any] = {
        "iteration": iteration,
        "consumed_samples": 8 * iteration,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "num_microbatches": 4,
        "loss": 2.0,
        "grad_norm": 1.0,
        "num_zeros": None,
        "learning_rate": 1e-3,
        "updated": True,
        "elapsed_s": 0.5,
    }
    return StepInfo(**{**values, **changes})
