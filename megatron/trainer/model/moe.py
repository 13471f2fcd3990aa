"""Mixture of experts: the layers, the router, and the balance of its experts' load.

The loss `aux_loss` of one layer is `coefficient * E * sum_i f_i P_i` over E experts (arXiv
2101.03961). f_i is the share of (token, expert) pairs that went to expert i, P_i the mean score of
i. megatron-core takes f of a micro-batch, so that the loss depends on the layout. Here f is that of
a global batch and is known before its first micro-batch (`--moe-balance`). The loss is then a sum
over tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
    z_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron.trainer.common.train_state import TrainState

CHOICES, SCORES, ROUTED = 0, 1, 2
"""Rows of a router's sums: experts chosen by score alone, scores, experts that tokens went to."""


class BalancedRouter(TopKRouter):
    """megatron-core's router with expert fractions from outside, whose losses do not depend on the
    layout; it counts what it chooses.

    Put right of 0.16.1: with `--calculate-per-token-loss` and tensor parallelism all losses of the
    router are divided by the tensor parallel size; the count of the expert bias is compiled anew
    for every shape, which takes a minute on CPU.
    """

    is_counting = False
    """Whether this forward pass, without gradients, only finds the fractions (`exact`)."""
    mean_tokens: float | None = None
    """Tokens of an average micro-batch of this step, over all tensor-parallel ranks; None: of every
    micro-batch."""

    def __init__(
        self, config: Any, pg_collection: ProcessGroupCollection | None = None, **others: Any
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection, **others)
        experts, device = config.num_moe_experts, torch.cuda.current_device()
        # No buffers: those are cast to half precision with the model.
        self.sums = torch.zeros(3, experts, dtype=torch.float64, device=device)
        self.fractions: torch.Tensor | None = None
        """[E] fp64 fractions of the loss; None: those of the micro-batch, as megatron-core."""

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_trained = self.training and torch.is_grad_enabled()
        if self.is_counting or (is_trained and not self.is_aux_loss_enabled()):
            with torch.no_grad():
                rows = logits.reshape(-1, logits.shape[-1])
                self._count(
                    *compute_routing_scores_for_aux_loss(rows, self.topk, self.score_function)
                )
        return super().routing(logits, padding_mask=padding_mask)

    def _count(self, chosen: torch.Tensor, scores: torch.Tensor) -> None:
        with torch.no_grad():
            self.sums[CHOICES] += chosen.sum(dim=0)
            self.sums[SCORES] += scores.double().sum(dim=0)

    def _apply_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        # Called in training with gradients only: under recomputation in the second pass.
        self._count(routing_map, scores_for_aux_loss)
        if self.fractions is None:
            return super()._apply_aux_loss(
                probs, scores_for_aux_loss, routing_map, with_padding_mask
            )
        weight = self.get_aux_loss_coeff("aux_loss") * len(self.fractions)
        means = scores_for_aux_loss.sum(dim=0) / self._tokens(probs)
        loss = weight * (self.fractions.to(means.dtype) * means).sum()
        return MoEAuxLossAutoScaler.apply(probs, loss * self._weight(probs))

    def _tokens(self, rows: torch.Tensor) -> int:
        """Of this micro-batch, over all tensor-parallel ranks."""
        return rows.shape[0] * self.tp_cp_group.size()

    def _weight(self, rows: torch.Tensor) -> float:
        """Of a loss that is a mean over a micro-batch. megatron-core divides the sum over
        micro-batches by their number, or per token by all tokens; the last one may be smaller."""
        tokens = self._tokens(rows)
        if self.calculate_per_token_loss:
            return tokens
        return 1.0 if self.mean_tokens is None else tokens / self.mean_tokens

    def attach_and_log_load_balancing_loss(
        self,
        activation: torch.Tensor,
        aux_loss_coeff: float,
        aux_loss: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        # Not the count that megatron-core gives: of `seq_aux_loss` that is one of a sample.
        return MoEAuxLossAutoScaler.apply(activation, aux_loss * self._weight(activation))

    def apply_z_loss(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not (self.training and torch.is_grad_enabled()):
            return logits
        share = coefficient / self.tp_cp_group.size()
        loss = z_loss_func(logits, share, padding_mask=padding_mask)
        return MoEAuxLossAutoScaler.apply(logits, loss * self._weight(logits))

    def _apply_expert_bias(
        self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> None:
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.sums[ROUTED] += routing_map.sum(dim=0)


class _SecondLinear(RowParallelLinear):
    """The second matrix of an expert with biases. megatron-core adds the bias in place, which
    autograd refuses where one group holds all experts: the output is then the input of a function
    that only passes it on."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(input_)
        return output.clone(), bias


def _submodules_of(part: Any) -> Any:
    """Of a `ModuleSpec`, or of the `functools.partial` that newer releases have in its place."""
    return part.keywords.get("submodules") if isinstance(part, partial) else part.submodules


def use_router(spec: ModuleSpec) -> None:
    """Puts our router into the specification of a layer with experts."""
    parts: Any = spec.submodules
    moe = _submodules_of(parts.mlp)
    moe.router = BalancedRouter
    of_expert = _submodules_of(moe.experts)
    if of_expert is not None and of_expert.linear_fc2 is RowParallelLinear:
        of_expert.linear_fc2 = _SecondLinear
    # As Transformer Engine's layers: the norm before experts is a module of its own.
    names = {k: v for k, v in parts.sharded_state_dict_keys_map.items() if "mlp" not in k}
    parts.sharded_state_dict_keys_map = names


def mark_experts(chunk: torch.nn.Module) -> None:
    """Has the gradients of experts reduced over the copies of experts and nothing else, before the
    chunk is wrapped.

    megatron-core 0.16.1 does so for expert parallel sizes above 1 only. With 1, and another tensor
    parallel size for experts than for the rest, their gradients would be wrong without an error.
    And it takes the second bias of experts for the same on all tensor-parallel ranks, which hold
    other experts: it would add it up over them, and count it on one of them in the gradient norm.
    """
    for name, param in chunk.named_parameters():
        if ".mlp.experts." in name:
            param.allreduce = False  # pyright: ignore[reportAttributeAccessIssue]
            param.sequence_parallel = False  # pyright: ignore[reportAttributeAccessIssue]
            param.tensor_model_parallel = True  # pyright: ignore[reportAttributeAccessIssue]


def routers_of(chunks: Sequence[Any]) -> Iterator[tuple[int, BalancedRouter]]:
    """The routers that this rank holds, each with the number of its layer, from 0; layers of
    further tokens come after all others.
    """
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if isinstance(module, BalancedRouter):
                further = re.search(r"\bmtp\.layers\.(\d+)\.", name)
                if further is not None:
                    yield module.config.num_layers + int(further[1]), module
                else:
                    assert module.layer_number is not None
                    yield module.layer_number - 1, module


def set_counting(chunks: Sequence[Any], is_counting: bool) -> None:
    """Begins or ends a pass without gradients that only counts, for `--moe-balance exact`."""
    for _, router in routers_of(chunks):
        router.is_counting = is_counting


@dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """How tokens of a step were shared out, by layer with experts."""

    balance_losses: list[float]
    """`E sum_i f_i P_i` with both of this global batch; 1 is an even load."""
    max_over_mean: list[float]
    """Load of the busiest expert over the mean."""


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Carries fractions and biases of the routers from step to step, in the counters of the run.

    Both are the same on every rank, so that they hold under every layout. Before fractions are
    known there is no balance loss.
    """

    layers: tuple[int, ...]
    """Numbers of the layers with experts, from 0; see `routers_of`."""
    num_experts: int
    """Of a layer."""
    mode: str
    """`--moe-balance`."""
    has_bias: bool
    """Whether there is an expert bias."""
    bias_update_rate: float
    """Step of the expert bias."""
    samples: int
    """Over which `lagged` averages."""

    @classmethod
    def of(cls, config: Any) -> Balance | None:
        """For a configuration; None for a dense model."""
        moe = config.moe
        if moe.num_experts is None:
            return None
        pattern = moe.moe_layers
        # A layer of a further token is like the last one.
        pattern += pattern[-1:] * (config.model.mtp_num_layers or 0)
        return cls(
            layers=tuple(i for i, is_moe in enumerate(pattern) if is_moe),
            num_experts=moe.num_experts,
            mode=moe.moe_balance or "megatron",
            has_bias=moe.moe_router_enable_expert_bias,
            bias_update_rate=moe.moe_router_bias_update_rate,
            samples=moe.moe_balance_samples,
        )

    def prepare(
        self,
        chunks: Sequence[Any],
        state: TrainState,
        *,
        mean_tokens: float,
        fractions: list[list[float]] | None = None,
    ) -> None:
        """Gives the routers of this rank what a step needs, and starts their sums anew.

        Args:
            state: before the step.
            fractions: [layers with experts, E] of the loss; None: those of the state.
        """
        # A state that was put back has biases of its own.
        self.give_biases(chunks, state)
        for layer, router in routers_of(chunks):
            router.sums.zero_()
            router.mean_tokens = mean_tokens
            if self.mode != "megatron":
                # 1/E would be no loss either, because scores sum to one, but for rounding.
                none = [0.0] * self.num_experts
                known = fractions or state.expert_fractions
                own = known[self.layers.index(layer)] if known else none
                fractions_of_layer = torch.tensor(own, dtype=router.sums.dtype)
                router.fractions = fractions_of_layer.to(router.sums.device, non_blocking=True)

    def give_biases(self, chunks: Sequence[Any], state: TrainState) -> None:
        """Gives the routers of this rank the biases of the run."""
        for layer, router in routers_of(chunks) if state.expert_biases else ():
            own = torch.tensor(state.expert_biases[self.layers.index(layer)])
            router._maintain_float32_expert_bias()  # a half-precision model has cast it
            router.expert_bias.copy_(own, non_blocking=True)  # pyright: ignore[reportAttributeAccessIssue]

    def biases_of(self, chunks: Sequence[Any], device: torch.device) -> list[list[float]]:
        """[layers with experts, E] the biases that the routers hold. All ranks of the world."""
        if not self.has_bias:
            return []
        rows = self._zeros(2, device)
        for layer, router in routers_of(chunks):
            k = self.layers.index(layer)
            rows[k, 0], rows[k, 1] = router.expert_bias.double(), 1.0  # pyright: ignore[reportAttributeAccessIssue]
        dist.all_reduce(rows)
        return (rows[:, 0] / rows[:, 1]).tolist()

    def counted(self, chunks: Sequence[Any], device: torch.device) -> torch.Tensor:
        """[layers with experts, 3, E] sums over the global batch, fp64, in memory of the host. From
        a GPU they are on their way until somebody waits for it. All ranks of the world."""
        sums = self._zeros(3, device)
        for layer, router in routers_of(chunks):
            sums[self.layers.index(layer)] = router.sums
        dist.all_reduce(sums)
        on_host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=sums.is_cuda)
        return on_host.copy_(sums, non_blocking=True)

    def _zeros(self, rows: int, device: torch.device) -> torch.Tensor:
        """[layers with experts, rows, E] fp64."""
        size = len(self.layers), rows, self.num_experts
        return torch.zeros(size, dtype=torch.float64, device=device)

    def fractions_of(self, sums: torch.Tensor) -> list[list[float]]:
        """[layers with experts, E] shares of the experts chosen by score alone."""
        return _shares(sums[:, CHOICES]).tolist()

    def load(self, sums: torch.Tensor) -> ExpertLoad:
        counts, scores, routed = sums.unbind(dim=1)
        losses = _shares(counts) * _shares(scores)
        return ExpertLoad(
            balance_losses=(self.num_experts * losses.sum(dim=1)).tolist(),
            max_over_mean=(self.num_experts * _shares(routed).max(dim=1).values).tolist(),
        )

    def advance(self, state: TrainState, sums: torch.Tensor, *, global_batch_size: int) -> None:
        """Counts a step that updated the weights.

        `lagged` averages fractions over earlier samples with a half-life of half of `samples`, so
        that their noise hardly depends on the batch.
        """
        if self.mode == "lagged":
            now, known = _shares(sums[:, CHOICES]), state.expert_fractions
            weight = 1.0 - 2.0 ** (-global_batch_size / (self.samples / 2)) if known else 1.0
            old = torch.tensor(known, dtype=torch.float64) if known else now
            state.expert_fractions = ((1.0 - weight) * old + weight * now).tolist()
        if self.has_bias:
            routed, known = sums[:, ROUTED], state.expert_biases
            up = torch.sign(routed.mean(dim=1, keepdim=True) - routed).float()
            # fp32, as megatron-core adds it.
            old = torch.tensor(known) if known else torch.zeros_like(up)
            state.expert_biases = (old + up * self.bias_update_rate).tolist()


def _shares(rows: torch.Tensor) -> torch.Tensor:
    """Each row over its sum; even shares where nothing was counted."""
    total = rows.sum(dim=1, keepdim=True)
    return torch.where(total > 0, rows / total.clamp(min=1e-30), 1.0 / rows.shape[1])
