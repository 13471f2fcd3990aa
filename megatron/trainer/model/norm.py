"""LayerNorm and RMSNorm that also work under sequence parallelism without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig


class Norm(torch.nn.Module):
    """A normalisation layer built the way megatron-core's layer specs build one.

    Its parameters carry `sequence_parallel`. Each tensor-parallel rank has the gradient of its own
    tokens, and the mark makes megatron-core sum them after the backward pass.

    Args:
        config: names the kind (`normalization`), whether sequence parallelism is on, and whether
            the scale is stored minus 1 (`layernorm_zero_centered_gamma`).
        hidden_size: size of the last axis.
        eps: added to the variance.

    Raises:
        ValueError: for a kind that is neither LayerNorm nor RMSNorm.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any
    ) -> None:
        super().__init__()
        if config.normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(
                f"--normalization must be LayerNorm or RMSNorm: {config.normalization}"
            )
        self.hidden_size = (hidden_size,)
        self.eps = eps
        self.is_centred = config.layernorm_zero_centered_gamma
        first = torch.zeros if self.is_centred else torch.ones
        self.weight = torch.nn.Parameter(first(hidden_size, dtype=config.params_dtype))
        self.bias: torch.nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for param in self.parameters():
            param.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises the last axis of x, of any leading shape."""
        weight = self.weight + 1.0 if self.is_centred else self.weight
        if self.bias is None:
            return F.rms_norm(x, self.hidden_size, weight, self.eps)
        return F.layer_norm(x, self.hidden_size, weight, self.bias, self.eps)
