"""A GPT whose logits are made, used and dropped for a part of the tokens at a time.

The logits of a micro-batch are often its largest activation: tokens x vocabulary in the type of the
model, again in fp32, and their gradient. In chunks only one part of them exists at a time. Each
part is computed twice, in the forward and in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch.utils.checkpoint import checkpoint


class ChunkedLogitsGPT(GPTModel):
    """megatron-core's GPT with a loss over chunks of tokens, and the same numbers."""

    logits_chunks: int = 1
    """Parts into which the tokens of a rank are cut; at most as many as there are tokens."""

    def _postprocess(
        self,
        hidden_states: Any,
        input_ids: Any,
        position_ids: Any,
        labels: Any,
        *args: Any,
        **more: Any,
    ) -> Any:
        if not self.post_process or labels is None or self.logits_chunks == 1:
            return super()._postprocess(
                hidden_states, input_ids, position_ids, labels, *args, **more
            )
        weight = None
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        # Under sequence parallelism a part of the tokens of each tensor-parallel rank meets in the
        # output layer; [micro batch, ranks, tokens of a rank].
        ranks = self.pg_collection.tp.size() if self.config.sequence_parallel else 1
        by_rank = labels.view(len(labels), ranks, -1)
        losses = [
            checkpoint(self._loss_of, hidden, own.flatten(1), weight, use_reentrant=False)
            for hidden, own in zip(
                hidden_states.chunk(self.logits_chunks),
                by_rank.chunk(self.logits_chunks, dim=2),
                strict=True,
            )
        ]
        return torch.cat([loss.view(len(labels), ranks, -1) for loss in losses], dim=2).flatten(1)  # pyright: ignore[reportOptionalMemberAccess]

    def _loss_of(
        self, hidden: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor | None
    ) -> torch.Tensor:
        """[micro batch, tokens] losses of some tokens."""
        logits, _ = self.output_layer(hidden, weight=weight)
        return self.compute_language_model_loss(labels, logits)
