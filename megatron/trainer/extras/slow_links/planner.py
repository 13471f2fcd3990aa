"""What messages of 8 bits cost, for the planner. It does not know the other flags."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron.trainer.common.extras import CostTerms

_SCALE_BYTES = 4
"""Of the scale of a row."""
_MOVED_BYTES, _KERNELS = 60.0, 12
"""What rounding a number and reading one move in plain torch, and kernels of both."""


def cost_terms(candidates: Any) -> CostTerms:
    bits = candidates.extras.get("pipeline_message_bits", 0)
    is_on = np.greater(bits, 0)
    return CostTerms(
        message_row_bytes=is_on * (bits / 8 * candidates.hidden_size + _SCALE_BYTES),
        message_moved_bytes=is_on * _MOVED_BYTES,
        message_kernels=is_on * _KERNELS,
    )
