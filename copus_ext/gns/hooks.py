"""Takes squared gradient norms out of megatron-core's gradient buffers while it trains.

The only file that knows where an unreduced gradient can be seen:

- `micro`: a hook on each parameter is given one micro-batch's gradient before it is accumulated;
- `rank`: a bucket's entry into its data-parallel reduction, where this replica's gradient is whole;
- `half`: a hook behind the accumulation, after half of the micro-batches.

Nothing is changed: the steps are bit for bit those of a run without the hooks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from copus_ext.gns.estimators import Estimate, Estimator, Weights, estimate_gns, group_weights
from copus_ext.gns.shared_gradient import share_of_sum

GROUPS = ("embedding", "attention", "mlp", "vectors", "head", "experts", "router")
"""Parameter groups, kept apart: word and position embedding; weight matrices of attention and MLP,
those of further tokens and of shared experts among them; norms and biases, and with them the
compressing layers of multi-latent attention; the output layer if it is not the word embedding;
routed experts; routers and the gates of shared experts."""
OF_EXPERTS = ("experts", "router")
"""Groups that a dense model does not have."""

CONTROL_SET = ("attention", "mlp", "experts")
"""What decisions are made on: the same parameters, whole before the reduction, under every
layout that a controller may choose."""

_NUM = len(GROUPS)
# Behind the squares of small and big gradients: small signal and noise, batch W and A, tokens.
# Then, where samples of several replicas meet in an expert, the roots of the signal of each small
# gradient of experts: they add up over those replicas, their squares do not.
_WEIGHTS, _ROOTS = 2 * _NUM, 2 * _NUM + 5


@dataclass(frozen=True, kw_only=True)
class StepNorms:
    """What was measured in one step; the same on every rank."""

    estimator: Estimator
    """How the small norms came about."""
    small: dict[str, float]
    """Sum over the small gradients of their squared norm, by parameter group."""
    big: dict[str, float]
    """Squared norm of the batch's gradient, by parameter group."""
    small_weights: Weights
    """What averaging did, summed over the small gradients."""
    small_expert_weights: Weights
    """The same for experts, whose small gradients hold the samples of several replicas."""
    big_weights: Weights
    """What averaging did in the batch's gradient."""
    tokens: float
    """Loss tokens of the batch."""
    tokens_per_sample: float
    """Loss tokens of a sample."""
    are_small_equal: bool
    """Whether the small gradients have equal weights, so that their mean square cannot be less than
    the batch's (Jensen)."""

    def estimate(self, names: tuple[str, ...]) -> Estimate:
        """Signal and noise of some parameter groups together: both add up over parameters.

        Raises:
            NoiseNotIdentifiable: for one of the groups.
        """
        dense = [name for name in names if name != "experts"]
        parts = [(dense, self.small_weights)] if dense else []
        parts += [(["experts"], self.small_expert_weights)] if "experts" in names else []
        found = [
            estimate_gns(
                sum(self.small[name] for name in part),
                weights,
                sum(self.big[name] for name in part),
                self.big_weights,
            )
            for part, weights in parts
        ]
        return Estimate(
            grad_norm_sq=sum(one.grad_norm_sq for one in found),
            grad_variance_trace=sum(one.grad_variance_trace for one in found),
        )

    def squares(self, names: list[str]) -> dict[str, dict[str, float]]:
        """Mean squared norm of a small gradient, and squared norm of the batch's, by parameter
        group; both as if averaged with total weight 1."""
        dense, experts = self.small_weights.signal, self.small_expert_weights.signal
        return {
            "small": {
                name: self.small[name] / (experts if name == "experts" else dense) for name in names
            },
            "big": {name: self.big[name] / self.big_weights.signal for name in names},
        }

    @property
    def all_squares(self) -> float:
        """Squared norm of the whole gradient, which the optimizer also computes."""
        return sum(self.big.values())


class GradientNormHooks:
    """Measures steps of one layout. Every rank makes one and calls the same methods.

    Args:
        per_token: `--calculate-per-token-loss`.
    """

    def __init__(
        self, chunks: list[Any], groups: Any, *, per_token: bool, device: torch.device
    ) -> None:
        self._groups, self._per_token = groups, per_token
        self._chunks, self._device = chunks, device
        self._measured = measured_parameters(chunks, groups)
        self._index = _indices(self._measured, device)
        self._cp = groups.cp if groups.cp.size() > 1 else None
        # megatron-core multiplies a mean by the context parallel size.
        self._factor = 1.0 if per_token else 1.0 / groups.cp.size()
        self._mode: Estimator | None = None
        self._num_microbatches = 0
        self._shares: list[float] | None = None
        # Sets of replicas whose samples meet in an expert, and the one that this replica is in.
        met = replicas_of_an_expert(groups)
        self._num_sets = math.ceil(groups.dp.size() / met) if met > 1 else 0
        self._set = groups.dp.rank() // met
        self._numbers = torch.zeros(_ROOTS, dtype=torch.float64, device=device)
        self._norms = torch.zeros((0, len(self._measured)), device=device)
        # Per parameter: its slots for norms, those not yet used in this step, accumulations seen.
        self._slots: list[tuple[torch.Tensor, ...]] = []
        self._free: list[Iterator[torch.Tensor]] = []
        self._seen = [0] * len(self._measured)
        owned = [m for m in self._measured if m.reduced is not None]
        self._reduced = [m.reduced for m in owned]
        self._reduced_index = _indices(owned, device)
        self._hooked: Estimator | None = None
        self._undo: list[Callable[[], None]] = []

    def _hook(self, estimator: Estimator) -> None:
        """Puts in the hooks that an estimator needs, in place of others."""
        self._unhook()
        self._hooked = estimator
        if estimator == "rank":
            by_param = {m.param: m for m in self._measured}
            for chunk in self._chunks:
                for bucket_group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                    self._wrap(bucket_group, by_param)
            return
        for number, m in enumerate(self._measured):
            if estimator == "micro":
                handle = m.param.register_hook(functools.partial(self._on_gradient, number))
            else:
                # The node that accumulates; the data-parallel wrapper holds it and its hook came
                # first.
                view: Any = m.param.expand_as(m.param)
                node = view.grad_fn.next_functions[0][0]
                handle = node.register_hook(functools.partial(self._on_accumulated, number))
            self._undo.append(handle.remove)

    def _unhook(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._hooked = None

    def _wrap(self, bucket_group: Any, by_param: dict[Any, Measured]) -> None:
        """Looks at a group of buckets on its way into the reduction."""
        part = [
            by_param[param]
            for bucket in bucket_group.buckets
            for param in bucket.params_list
            if param in by_param
        ]
        index = _indices(part, self._device)
        start = bucket_group.start_grad_sync

        def start_grad_sync(*args: Any, **kwargs: Any) -> Any:
            # With a reduction under way the call does nothing.
            if self._mode == "rank" and bucket_group.grad_reduce_handle is None:
                self._add_small(part, index)
            return start(*args, **kwargs)

        bucket_group.start_grad_sync = start_grad_sync
        self._undo.append(lambda: delattr(bucket_group, "start_grad_sync"))

    def begin(
        self,
        estimator: Estimator | None,
        num_microbatches: int,
        shares: list[float] | None = None,
    ) -> None:
        """Measures the step that follows, or with None lets it pass.

        Args:
            shares: of every micro-batch in the replica's gradient, where they differ in size.
        """
        self._mode, self._num_microbatches = estimator, num_microbatches
        self._shares = shares
        if estimator is None:
            return
        if estimator != self._hooked:
            self._hook(estimator)
        roots = self._num_sets * len(self._parts())
        self._numbers = self._numbers.new_zeros(_ROOTS + roots)
        self._make_slots({"micro": num_microbatches, "rank": 0, "half": 1}[estimator])

    def _make_slots(self, per_parameter: int) -> None:
        """Empties the slots, one number per parameter and small gradient of this rank."""
        if len(self._norms) != per_parameter:
            shape = (per_parameter, len(self._measured))
            self._norms = torch.zeros(shape, dtype=torch.float32, device=self._device)
            self._slots = [column.unbind() for column in self._norms.unbind(1)]
        self._norms.zero_()
        self._free = [iter(slots) for slots in self._slots]
        self._seen = [0] * len(self._measured)

    def _on_gradient(self, number: int, grad: torch.Tensor) -> None:
        if self._mode == "micro":
            self._note(number, grad)

    def _on_accumulated(self, number: int, *_: Any) -> None:
        if self._mode == "half":
            self._seen[number] += 1
            if self._seen[number] == self._num_microbatches // 2:
                self._note(number, self._measured[number].param.main_grad)  # pyright: ignore[reportAttributeAccessIssue]

    def _note(self, number: int, grad: torch.Tensor) -> None:
        # Most of a measurement's time is here. It goes into reading the gradient once: neither
        # `dot` nor one call for several gradients reads faster.
        if self._cp is not None and GROUPS[self._measured[number].group] != "experts":
            grad = share_of_sum([grad], self._cp)
        torch.linalg.vector_norm(grad, dtype=torch.float32, out=next(self._free[number]))

    def _add_small(self, part: list[Measured], index: torch.Tensor) -> None:
        """Adds the squares of a replica's gradient on its way into the reduction."""
        alone = part
        if self._cp is not None:
            # Experts of ranks that share samples have met all their tokens.
            alone = [m for m in part if GROUPS[m.group] == "experts"]
            index = _indices(alone, self._device)
            for group in sorted({m.group for m in part} - {GROUPS.index("experts")}):
                own = [m.param.main_grad for m in part if m.group == group]  # pyright: ignore[reportAttributeAccessIssue]
                norm = torch.linalg.vector_norm(share_of_sum(own, self._cp))
                self._numbers[group] += norm.double().square()
        self._add([m.param.main_grad for m in alone], index, 0)  # pyright: ignore[reportAttributeAccessIssue]

    def _add(self, grads: list[Any], index: torch.Tensor, offset: int) -> None:
        """Adds squared norms, fp32 within a tensor and fp64 across tensors."""
        if grads:
            norms = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)).double()
            self._numbers[offset : offset + _NUM].index_add_(0, index, norms.square())

    @torch.no_grad()
    def reduce(self, microbatch_tokens: list[float] | None) -> Any:
        """Starts the one all-reduce of a measured step, when the gradients are reduced and neither
        clipped nor used. The host waits for no kernel.

        Args:
            microbatch_tokens: loss tokens of this replica's micro-batches, on ranks of the last
                stage; None elsewhere.

        Returns:
            A handle for `finish`, or None if the step is not measured.
        """
        if self._mode is None:
            return None
        is_first = self._groups.tp.rank() == 0 and self._groups.cp.rank() == 0
        own = microbatch_tokens if is_first else None
        self._add(self._reduced, self._reduced_index, _NUM)
        if len(self._norms):
            squares = self._norms.double().square().sum(dim=0)
            self._numbers[:_NUM].index_add_(0, self._index, squares)
        self._numbers[:_NUM] *= self._factor**2
        if own is not None:
            weights = torch.tensor(self._local_weights(own), dtype=torch.float64)
            self._numbers[_WEIGHTS:] = weights.to(self._device, non_blocking=True)
        return dist.all_reduce(self._numbers, async_op=True)

    def _parts(self) -> list[slice]:
        """The micro-batches of each small gradient of a replica."""
        count = self._num_microbatches
        if self._mode == "micro":
            return [slice(i, i + 1) for i in range(count)]
        return [slice(count if self._mode == "rank" else count // 2)]

    def _local_weights(self, tokens: list[float]) -> list[float]:
        """This replica's share of small signal, small noise, batch W, batch A, tokens, and of the
        roots of experts.
        """

        def of(part: slice) -> Weights:
            return group_weights(
                tokens[part],
                divisor=1 if self._per_token else len(tokens),
                per_token=self._per_token,
                tokens_per_sample=1.0,
                shares=self._shares and self._shares[part],
            )

        small, whole = [of(part) for part in self._parts()], of(slice(None))
        total = sum(small, start=Weights(signal=0.0, noise=0.0))
        roots = [[0.0] * len(small) for _ in range(self._num_sets)]
        if roots:
            roots[self._set] = [one.signal**0.5 for one in small]
        batch = [whole.signal**0.5, whole.noise, sum(tokens)]
        return [total.signal, total.noise, *batch, *itertools.chain(*roots)]

    def finish(
        self, handle: Any, *, global_batch_size: int, loss_scale: torch.Tensor
    ) -> StepNorms | None:
        """What the step that `reduce` ended has shown; None if a number is not finite.

        Args:
            handle: of `reduce`.
            loss_scale: one number, which the gradients were multiplied by.
        """
        handle.wait()
        # The one wait for the GPU of a measured step.
        *numbers, scale = torch.cat([self._numbers, loss_scale.view(1)]).tolist()
        estimator, self._mode = self._mode, None
        assert estimator is not None
        small, experts, noise, w, a, tokens = _totals(numbers[_WEIGHTS:])
        if not all(map(math.isfinite, numbers)) or not tokens:
            return None
        dp, per_sample = self._groups.dp.size(), tokens / global_batch_size
        # After the reduction the sums over tokens have become a mean, the means of replicas one.
        big = (1.0, 1.0 / tokens) if self._per_token else ((w / dp) ** 2, a / dp**2)
        scale = scale**2
        count = {"micro": dp * self._num_microbatches, "rank": dp, "half": 0}[estimator]
        return StepNorms(
            estimator=estimator,
            small=dict(zip(GROUPS, (x / scale for x in numbers[:_NUM]))),
            big=dict(zip(GROUPS, (x / scale for x in numbers[_NUM : 2 * _NUM]))),
            small_weights=Weights(signal=small, noise=noise * per_sample),
            small_expert_weights=Weights(signal=experts, noise=noise * per_sample),
            big_weights=Weights(signal=big[0], noise=big[1] * per_sample),
            tokens=tokens,
            tokens_per_sample=per_sample,
            are_small_equal=abs(count * small - w * w) <= 1e-9 * w * w,
        )

    def close(self) -> None:
        """Takes out every hook. The hooks are not used after that."""
        self._unhook()
        self._measured, self._chunks, self._reduced = [], [], []
        self._slots, self._free = [], []


def _totals(weights: list[float]) -> tuple[float, float, float, float, float, float]:
    """Signal of small gradients and of those of experts, noise of both (it adds up over samples),
    batch W, batch A, tokens: from the sum over replicas of their `_local_weights`."""
    signal, noise, w, a, tokens, *roots = weights
    return signal, sum(x**2 for x in roots) if roots else signal, noise, w, a, tokens


def _indices(part: list[Measured], device: torch.device) -> torch.Tensor:
    return torch.tensor([m.group for m in part], dtype=torch.long, device=device)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One parameter of this rank whose gradient is measured."""

    param: torch.nn.Parameter
    """The parameter; its gradient accumulates in `main_grad`."""
    group: int
    """Index into `GROUPS`."""
    reduced: torch.Tensor | None
    """The part of `main_grad` that this rank counts after the reduction; None if none."""


def replicas_of_an_expert(groups: Any) -> int:
    """Replicas whose samples meet in the gradient of an expert on one rank; 1 also where a rank
    sees parts of samples."""
    ranks = groups.ep.size() * groups.expt_tp.size()
    return max(ranks // (groups.tp.size() * groups.cp.size()), 1)


def unavailable_groups(
    *,
    tp: int,
    pp: int,
    sequence_parallel: bool,
    qk_layernorm: bool,
    shared_embeddings: bool,
    expert_ranks: int | None = None,
    cp: int = 1,
) -> frozenset[str]:
    """Groups whose gradients are sums over ranks only after the data-parallel reduction: the square
    of a part is not a part of the square.

    Under sequence parallelism every rank sees part of the tokens of norms and of row-parallel
    biases, and norms of queries and keys see part of the heads. An embedding that is also the
    output layer, or that further tokens go through, has a part on the first and on the last stage.
    Routers see part of the tokens under tensor parallelism, and experts part of every sample where
    fewer ranks share them than share a layer.

    Args:
        shared_embeddings: whether the word embedding has a copy.
        expert_ranks: ranks that share all experts of a layer, that is expert parallel size times
            tensor parallel size of experts; None for a dense model.
    """
    partial: set[str] = set(OF_EXPERTS) if expert_ranks is None else set()
    if tp > 1:
        partial.add("router")
    if expert_ranks is not None and expert_ranks % (tp * cp):  # `Layout.experts_see_whole_samples`
        partial.add("experts")
    if tp > 1 and (sequence_parallel or qk_layernorm):
        partial.add("vectors")
    if shared_embeddings and pp > 1:
        partial.add("embedding")
    return frozenset(partial)


def group_of(name: str, param: torch.Tensor) -> str:
    """The group of a parameter of megatron-core's GPTModel, by its name."""
    if name.startswith("embedding."):
        return "embedding"
    if name.startswith("output_layer.") and param.ndim > 1:
        return "head"
    if ".mlp.experts." in name:
        return "experts"  # their biases, too, have the unit of experts
    if param.ndim == 1:
        return "vectors"
    if ".linear_q_down_proj." in name or ".linear_kv_down_proj." in name:
        # Every tensor-parallel rank has a copy, and under sequence parallelism a part of the
        # gradient, as with a norm.
        return "vectors"
    if ".self_attention." in name:
        return "attention"
    if ".mlp.router." in name or name.endswith(".shared_experts.gate_weight"):
        return "router"
    if ".mlp." in name or ".eh_proj." in name:
        return "mlp"
    raise ValueError(f"the noise scale does not know where the parameter {name} belongs")


def measured_parameters(chunks: list[Any], groups: Any) -> list[Measured]:
    """The parameters of this rank that count once over tensor and pipeline parallel ranks."""
    found = []
    for chunk in chunks:
        reduced = dict(_reduced_views(chunk, groups))
        for name, param in _named_parameters(chunk):
            is_expert = not getattr(param, "allreduce", True)
            counts = param_is_not_tensor_parallel_duplicate(param) and param_is_not_shared(param)
            # Every rank that shares the experts of a layer has others, or other parts of them.
            if not (is_expert or counts):
                continue
            index = GROUPS.index(group_of(name, param))
            found.append(Measured(param=param, group=index, reduced=reduced.get(param)))
    return found


def _named_parameters(chunk: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk.named_parameters()


def _reduced_views(chunk: Any, groups: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """The part of each gradient that this rank counts once it is reduced over its copies.

    With the distributed optimizer that is its shard of the bucket, the rest being stale; else all
    ranks hold everything and each takes an equal part.
    """
    sharded = chunk.ddp_config.use_distributed_optimizer
    dense = [(buffer, groups.dp_cp) for buffer in chunk.buffers]
    experts = [(buffer, groups.expt_dp) for buffer in chunk.expert_parallel_buffers]
    for buffer, group in (*dense, *experts):
        rank, size = group.rank(), group.size()
        for param, (start, end, bucket_id) in buffer.param_index_map.items():
            flat = param.main_grad.view(-1)
            if sharded:
                bucket = buffer.buckets[bucket_id]
                length = bucket.grad_data.numel() // size
                low = max(start, bucket.offset + rank * length) - start
                high = min(end, bucket.offset + (rank + 1) * length) - start
            else:
                low, high = (flat.numel() * r // size for r in (rank, rank + 1))
            if low < high:
                yield param, flat[low:high]
