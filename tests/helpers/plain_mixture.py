"""The mixture of experts of `jobs.MOE` in plain torch and fp64: losses and gradients of whole
batches, cut by no layout and no micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F

HEADS, TOPK = 4, 2


@dataclass(frozen=True, kw_only=True)
class Losses:
    """What is added to the loss of the tokens, by layer."""

    balance: str
    """Whose experts the balance loss counts: `given` ones, those of this `batch`, or those of every
    `sample`."""
    coefficient: float
    """Of the balance loss."""
    z_coefficient: float = 0.0
    """Of the squared log-sum-exp of the logits."""
    is_sigmoid: bool = False
    """Scores of experts are sigmoids, to be divided by their sum, and not a softmax."""
    scale: float = 1.0
    """Of the outputs of experts."""


@dataclass(kw_only=True)
class Counts:
    """What experts got of a batch, [layers, E]."""

    by_score: list[torch.Tensor]
    """How often each was chosen by score alone."""
    routed: list[torch.Tensor]
    """How often with the bias of the experts."""
    scores: list[torch.Tensor]
    """Mean scores."""


class PlainMixture:
    """The model.

    Args:
        weights: by the names that they have in megatron-core where no dimension is split.
        losses: besides the one of the tokens.
    """

    def __init__(self, weights: dict[str, Any], losses: Losses) -> None:
        self._w = {k: torch.as_tensor(v).double().requires_grad_() for k, v in weights.items()}
        self._losses = losses
        self.num_layers = len([k for k in weights if k.endswith("router.weight")])

    def step(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        *,
        fractions: Sequence[torch.Tensor] | None = None,
        biases: Sequence[torch.Tensor] | None = None,
    ) -> tuple[dict[str, Any], Counts]:
        """Returns what a step's record has, and what was counted.

        Args:
            tokens: [samples, length].
            labels: the tokens that follow.
            fractions: [layers, E] of the balance loss where they are given; None: no such loss.
            biases: [layers, E] added to the scores that choose experts.
        """
        counts = Counts(by_score=[], routed=[], scores=[])
        extra = torch.zeros((), dtype=torch.float64)
        x = self._w["embedding.word_embeddings.weight"][tokens]
        for layer in range(self.num_layers):
            x = x + self._attention(f"decoder.layers.{layer}.", x)
            bias = biases[layer] if biases else None
            own = fractions[layer] if fractions else None
            output, loss = self._experts(f"decoder.layers.{layer}.", x, own, bias, counts)
            x, extra = x + output, extra + loss
        x = _norm(x, self._w["decoder.final_layernorm.weight"])
        logits = x @ self._w["output_layer.weight"].T
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        grads = torch.autograd.grad(loss + extra, list(self._w.values()), allow_unused=True)
        by_name = dict(zip(self._w, grads, strict=True))
        loads = [len(c) * c.max() / c.sum() for c in counts.routed]
        balances = [
            float(len(c) * (c / c.sum()) @ scores)
            for c, scores in zip(counts.by_score, counts.scores, strict=True)
        ]
        record = {
            "losses": {"lm loss": loss.item(), "load_balancing_loss": fmean(balances)},
            "grad_norm": sum(float(g.square().sum()) for g in grads if g is not None) ** 0.5,
            "max_expert_load": float(max(loads)),
            "routers": [
                by_name[f"decoder.layers.{layer}.mlp.router.weight"].tolist()
                for layer in range(self.num_layers)
            ],
        }
        return record, counts

    def _attention(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        n = _norm(x, self._w[f"{prefix}input_layernorm.weight"])
        mixed = n @ self._w[f"{prefix}self_attention.linear_qkv.weight"].T
        # [samples, heads, length, size of a head] each
        q, k, v = mixed.unflatten(-1, (HEADS, 3, -1)).permute(3, 0, 2, 1, 4)
        out = F.scaled_dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True)
        out = out.transpose(1, 2).flatten(2)
        return out @ self._w[f"{prefix}self_attention.linear_proj.weight"].T

    def _experts(
        self,
        prefix: str,
        x: torch.Tensor,
        fractions: torch.Tensor | None,
        bias: torch.Tensor | None,
        counts: Counts,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rule = self._losses
        n = _norm(x, self._w[f"{prefix}pre_mlp_layernorm.weight"])
        logits = n @ self._w[f"{prefix}mlp.router.weight"].T  # [samples, length, E]
        if rule.is_sigmoid:
            raw = logits.sigmoid()
            scores = raw / raw.sum(dim=-1, keepdim=True)
        else:
            raw = scores = logits.softmax(dim=-1)
        chosen = raw.topk(TOPK).indices
        routed = chosen if bias is None else (raw + bias).topk(TOPK).indices
        weights = raw.gather(-1, routed)
        weights = rule.scale * weights / weights.sum(dim=-1, keepdim=True)
        num_experts = logits.shape[-1]
        by_sample = F.one_hot(chosen, num_experts).sum(dim=(1, 2)).double()  # [samples, E]
        counts.by_score.append(by_sample.sum(dim=0))
        counts.scores.append(scores.detach().mean(dim=(0, 1)))
        counts.routed.append(torch.bincount(routed.flatten(), minlength=num_experts).double())
        if rule.balance == "given":
            f = torch.zeros(num_experts).double() if fractions is None else fractions
        else:
            f = by_sample if rule.balance == "sample" else by_sample.sum(dim=0)
            f = f / f.sum(dim=-1, keepdim=True)
        loss = rule.coefficient * num_experts * (f * scores.mean(dim=1)).sum(dim=-1).mean()
        loss = loss + rule.z_coefficient * logits.logsumexp(dim=-1).square().mean()
        output = torch.zeros_like(n)
        for expert in range(num_experts):
            name = f"{prefix}mlp.experts.local_experts.{expert}."
            gate, up = (n @ self._w[f"{name}linear_fc1.weight"].T).chunk(2, dim=-1)
            own = (F.silu(gate) * up) @ self._w[f"{name}linear_fc2.weight"].T
            output = output + own * (weights * (routed == expert)).sum(dim=-1, keepdim=True)
        return output, loss


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-5) * weight


def _rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions: both halves of a head's numbers are turned together."""
    length, size = x.shape[-2:]
    turns = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), turns)
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
