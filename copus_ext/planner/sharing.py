"""Ranks that share samples, in the search: which sizes and exchanges are worth a look."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from copus_ext.cost_model.cluster_spec import ClusterSpec
from copus_ext.cost_model.context import CP_COMM_TYPES, HEADS
from copus_ext.cost_model.model_spec import ModelSpec, divisors

if TYPE_CHECKING:
    from copus_ext.planner.space import Candidates, Limits


def cp_comm_types_of(model: ModelSpec, cluster: ClusterSpec) -> tuple[str, ...]:
    """How ranks that share samples exchange keys and values by default: as the trainer does without
    a flag, and by heads. A gather of Transformer Engine has the bytes of a ring and hides none. Its
    latent attention goes round a ring alone."""
    is_plain = model.implementation == "local" or cluster.is_gloo
    if has_engine(model, cluster) and model.kv_lora_rank is not None:
        return ("p2p",)
    return ("all_gather" if is_plain else "p2p", "a2a")


def has_engine(model: ModelSpec, cluster: ClusterSpec) -> bool:
    """Whether Transformer Engine attends."""
    return model.implementation == "te" and not cluster.is_gloo


def runs_in(model: ModelSpec, cluster: ClusterSpec) -> str:
    """Which trainer runs a layout whose ranks share samples, in a line."""
    where = "in Megatron-LM, too, but not with --copus there, which takes no context parallelism"
    if not has_engine(model, cluster):
        where = "in `copus pretrain` alone: Megatron-LM shares samples only with Transformer Engine"
    return f"cp above 1 runs {where}; --max cp=1 leaves such rows out"


def can_exchange(model: ModelSpec, tp: Any, cp: Any, form: Any, *, has_engine: bool) -> Any:
    """Whether heads can be dealt to the ranks that share samples, where that is how they do. Only
    without Transformer Engine are too few key and value heads repeated."""
    heads, groups = model.num_attention_heads // tp, np.maximum(model.groups // tp, 1)
    whole = (heads % cp == 0) & ((groups % cp == 0) | ((cp % groups == 0) & (not has_engine)))
    return whole | (form != HEADS) | (cp == 1)


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Which context parallel sizes are worth a look, and with which micro-batches.

    With g = gcd(cp, micro-batch) > 1, the layout of cp / g, g times the replicas and micro-batches
    of g times fewer samples has as many tokens and as much attention on every rank, the same
    micro-batches, copies, pipeline and rings; it exchanges less, over fewer ranks, and keeps no
    more. So it is never slower, and the other is left out. That does not hold of layers in plain
    torch, whose attention computes more or less by the form of its masks, nor where ranks of a
    sample are nearer than replicas; and it is not used where a time of such a layout was measured.
    """

    model: ModelSpec
    """What is trained."""
    limits: Limits
    """What is left out."""
    has_engine: bool
    """Whether Transformer Engine attends."""
    forms: tuple[int, ...]
    """Indices into `CP_COMM_TYPES`."""
    has_kernel: bool
    """Whether it has a kernel for ranks that share samples."""
    leaves_out: bool
    """Whether the rule above holds."""
    measured: frozenset[tuple[int, ...]]
    """Layouts of which a time is known: tp, pp, vpp, copies, samples at once of all replicas."""
    exchanges: dict[tuple[int, int, int], bool] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Answers of `can_exchange`, which a search asks for some ten thousand times."""

    @classmethod
    def of(
        cls, model: ModelSpec, cluster: ClusterSpec, limits: Limits, measured: Candidates | None
    ) -> Sharing:
        """Of a search; see `space.enumerate_points`."""
        is_plain = not has_engine(model, cluster)
        named = limits.cp_comm_types or cp_comm_types_of(model, cluster)
        if is_plain:
            # As the trainer does: without Transformer Engine nothing goes round a ring.
            named = tuple(dict.fromkeys("all_gather" if x == "p2p" else x for x in named))
        known: set[tuple[int, ...]] = set()
        if measured is not None and len(measured):
            m = measured
            table = (m.tp, m.pp, m.vpp, m.cp * m.dp, m.dp * m.micro_batch_size)
            known = set(map(tuple, np.stack(table, axis=1).tolist()))
        return cls(
            model=model,
            limits=limits,
            has_engine=not is_plain,
            forms=tuple(CP_COMM_TYPES.index(name) for name in named),
            has_kernel=is_plain or (model.fused_attention and model.precision != "fp32"),
            leaves_out=not is_plain and not limits.use_tp_pp_dp_mapping,
            measured=frozenset(known),
        )

    def ways(self, tp: int, copies: int) -> list[tuple[int, int]]:
        """Context parallel sizes, each with every form, for so many copies of the weights."""
        found = [(1, 0)] if self.limits.allows(cp=1) else []
        length, asked = self.model.seq_length, self.limits.fixed.get("cp")
        for cp in divisors(copies)[1:]:
            # A size asked for is judged; others that the rules refuse are not worth listing.
            is_legal = length % (2 * cp) == 0 and (tp == 1 or length // cp % tp == 0)
            is_legal = is_legal and self.has_kernel
            if not self.limits.allows(cp=cp) or not (is_legal or cp == asked):
                continue
            forms = [f for f in self.forms if self.can_exchange(tp, cp, f)]
            found += [(cp, f) for f in forms or (self.forms[:1] if cp == asked else ())]
        return found

    def is_never_faster(
        self, shape: tuple[int, int, int], cp: int, form: int, dp: int, micro_batch: int
    ) -> bool:
        """Whether the rule above leaves a configuration out."""
        g = math.gcd(cp, micro_batch)
        if g == 1 or not self.leaves_out or not self.can_exchange(shape[0], cp // g, form):
            return False
        if self.measured and (*shape, cp * dp, dp * micro_batch) in self.measured:
            return False
        return self.limits.allows(cp=cp // g, dp=dp * g, micro_batch=micro_batch // g)

    def can_exchange(self, tp: int, cp: int, form: int) -> bool:
        """Whether the rules of a launch allow this form."""
        key = tp, cp, form
        if (answer := self.exchanges.get(key)) is None:
            found = can_exchange(self.model, tp, cp, form, has_engine=self.has_engine)
            answer = self.exchanges[key] = bool(found)
        return answer
