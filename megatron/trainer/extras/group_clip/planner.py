"""What clipping groups of samples costs a step, for the planner."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron.trainer.common.extras import CostTerms


def cost_terms(candidates: Any) -> CostTerms:
    """See `Extra.cost_terms`. Its time is lost in the noise of a step."""
    copies = clipping_copies(candidates)
    return CostTerms(parameter_bytes=candidates.gradient_bytes * copies)


def clipping_copies(candidates: Any) -> Any:
    """[n] copies of its gradients that a rank keeps: the sum, and one for each group whose norm may
    be under way over tensor and pipeline ranks."""
    size = np.maximum(candidates.extras["clip_group_size"], 1)
    samples = candidates.num_microbatches * candidates.micro_batch_size
    under_way = -(-candidates.pp * candidates.micro_batch_size // size)
    is_alone = np.equal(candidates.tp * candidates.pp, 1)
    copies = 1 + np.where(is_alone, 0, np.minimum(under_way, samples // size))
    return np.where(np.greater(candidates.extras["clip_group_size"], 0), copies, 0)
