"""Every configuration of a model on a cluster, and which rule speaks against it.

The rules are those of megatron-core 0.16.1; `tests/distributed/test_planner_rules.py` holds them
against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from copus_ext.cost_model.cluster_spec import ClusterSpec
from copus_ext.cost_model.context import CP_COMM_TYPES
from copus_ext.cost_model.model_spec import ModelSpec, divisors
from copus_ext.cost_model.rows import (
    RECOMPUTE_BLOCK,
    ConfigBatch,
)
from copus_ext.cost_model.spec_file import SpecError
from copus_ext.planner.configuration import RECOMPUTE, Configuration
from copus_ext.planner.sharing import Sharing, can_exchange, has_engine
from megatron.trainer.common.extras import problems_of
from megatron.trainer.config.layout import Layout

REJECTION_CODES = (
    "heads",
    "query_groups",
    "ffn",
    "sequence",
    "context",
    "context_heads",
    "layers",
    "virtual",
    "batch",
    "interleave_microbatches",
    "extra",
    "cross_node_tp",
    "experts",
    "expert_ffn",
    "shared_expert",
    "expert_bias",
    "expert_alltoall",
    "expert_copies",
    "memory",
    "dominated",
)
"""Why a configuration is not a candidate; every enumerated one is ranked or carries one code."""
LEGAL = -1
"""Code of a point that no rule speaks against."""
LAYOUT = ("tp", "pp", "vpp", "ep", "etp", "cp", "dp")
SIZES = (*LAYOUT[:-1], "cp_comm_type", "dp", "micro_batch_size")
NARROW = 256
"""Columns of an expert on a rank below which it is not worth cutting."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    fixed: dict[str, int] = field(default_factory=dict)
    """Sizes (`tp`, `pp`, `vpp`, `ep`, `etp`, `cp`, `dp`, `micro_batch`, `recompute_num_layers`)
    that must have a value."""
    largest: dict[str, int] = field(default_factory=dict)
    """Sizes that must not exceed a value."""
    recompute: tuple[str, ...] = RECOMPUTE
    """Recomputation to consider."""
    use_distributed_optimizer: tuple[bool, ...] = (True, False)
    """Whether to consider optimizer state that is split over the replicas, and whole."""
    overlap: bool = True
    """Whether gradients and weights travel while passes compute."""
    use_tp_pp_dp_mapping: bool = False
    """Whether ranks are numbered tensor, pipeline, data."""
    sequence_parallel: bool = True
    """Whether activations are split over the sequence wherever tensor parallelism is."""
    cross_node_tp: bool = False
    """Whether a tensor-parallel group may span nodes."""
    cross_node_ep: bool = False
    """Whether the ranks that hold the experts of a layer may span nodes even if `ep` is not among
    the sizes above."""
    narrow_experts: bool = False
    """Whether experts may be cut below 256 columns even if `etp` is not among the sizes above."""
    whole_samples: bool = False
    """Whether experts must see whole samples: `ep` times `etp` a multiple of `tp` times `cp`."""
    cp_comm_types: tuple[str, ...] = ()
    """How ranks that share samples may exchange keys and values, of `CP_COMM_TYPES`; none: as suits
    the layers of the model (`sharing.cp_comm_types_of`)."""
    logits_chunks: tuple[int, ...] = (1,)
    """Into how many parts tokens may be cut for the logits, ascending; the first is used wherever
    it fits."""
    max_micro_batch: int = 64
    """Largest micro-batch to consider."""
    round_down: bool = False
    """Whether a layout that cannot split the global batch may take the next smaller one it can."""

    def allows(self, **sizes: int) -> bool:
        """Whether some sizes may be used together."""
        if not (self.fixed or self.largest):
            return True
        return all(
            self.fixed.get(name, value) == value and value <= self.largest.get(name, value)
            for name, value in sizes.items()
        )


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Enumerated configurations as columns."""

    tp: Any
    """[n] tensor size."""
    pp: Any
    """[n] pipeline size."""
    vpp: Any
    """[n] chunks of a stage."""
    ep: Any
    """[n] expert parallel size; 1 in a dense model."""
    etp: Any
    """[n] tensor parallel size of experts; `tp` in a dense model."""
    cp: Any
    """[n] context parallel size."""
    cp_comm_type: Any
    """[n] index into `CP_COMM_TYPES`; 0 where `cp` is 1."""
    dp: Any
    """[n] replicas."""
    micro_batch_size: Any
    """[n] samples of a micro-batch."""
    global_batch_size: Any
    """[n] samples of a step."""
    asked_batch_size: Any
    """[n] the same before rounding down (`Limits.round_down`)."""
    recompute: Any
    """[n] codes of `rows.RECOMPUTE_*`."""
    recompute_num_layers: Any
    """[n] recomputed layers of a chunk, with `RECOMPUTE_BLOCK`; else 0."""
    logits_chunks: Any
    """[n] parts of a rank's tokens for the logits."""
    sequence_parallel: Any
    """[n] bool."""
    use_distributed_optimizer: Any
    """[n] bool."""
    overlap: Any
    """[n] bool."""
    use_tp_pp_dp_mapping: Any
    """[n] bool."""
    code: Any
    """[n] index into `REJECTION_CODES`, or `LEGAL`."""

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def num_microbatches(self) -> Any:
        """[n] micro-batches of a replica."""
        return self.global_batch_size // (self.dp * self.micro_batch_size)

    def take(self, at: Any) -> Candidates:
        return Candidates(**{f.name: getattr(self, f.name)[at] for f in fields(self)})

    def configuration(self, i: int) -> Configuration:
        sizes: dict[str, Any] = {name: int(getattr(self, name)[i]) for name in LAYOUT}
        return Configuration(
            layout=Layout(**sizes),
            cp_comm_type=CP_COMM_TYPES[self.cp_comm_type[i]] if self.cp[i] > 1 else None,
            micro_batch_size=int(self.micro_batch_size[i]),
            global_batch_size=int(self.global_batch_size[i]),
            recompute=RECOMPUTE[int(self.recompute[i])],
            recompute_num_layers=int(self.recompute_num_layers[i]),
            logits_chunks=int(self.logits_chunks[i]),
            sequence_parallel=bool(self.sequence_parallel[i]),
            use_distributed_optimizer=bool(self.use_distributed_optimizer[i]),
            overlap=bool(self.overlap[i]),
            use_tp_pp_dp_mapping=bool(self.use_tp_pp_dp_mapping[i]),
        )


def points_of(configurations: Sequence[Configuration]) -> Candidates:
    """Configurations as points that no rule has judged."""

    def column(values: list[int], kind: Any = np.int64) -> Any:
        return np.array(values, dtype=kind)

    some = configurations
    batches = column([c.global_batch_size for c in some])
    names = {**{name: name for name in LAYOUT}, "etp": "expert_tensor_parallel_size"}
    sizes = {name: column([getattr(c.layout, of) for c in some]) for name, of in names.items()}
    return Candidates(
        **sizes,
        cp_comm_type=column(
            [CP_COMM_TYPES.index(c.cp_comm_type or CP_COMM_TYPES[0]) for c in some]
        ),
        micro_batch_size=column([c.micro_batch_size for c in some]),
        global_batch_size=batches,
        asked_batch_size=batches,
        recompute=column([RECOMPUTE.index(c.recompute) for c in some]),
        recompute_num_layers=column([c.recompute_num_layers for c in some]),
        logits_chunks=column([c.logits_chunks for c in some]),
        sequence_parallel=column([c.sequence_parallel for c in some], bool),
        use_distributed_optimizer=column([c.use_distributed_optimizer for c in some], bool),
        overlap=column([c.overlap for c in some], bool),
        use_tp_pp_dp_mapping=column([c.use_tp_pp_dp_mapping for c in some], bool),
        code=np.full(len(some), LEGAL),
    )


def joined(parts: Sequence[Candidates]) -> Candidates:
    names = [f.name for f in fields(Candidates)]
    return Candidates(**{n: np.concatenate([getattr(p, n) for p in parts]) for n in names})


def enumerate_points(
    model: ModelSpec,
    cluster: ClusterSpec,
    global_batch_size: int,
    limits: Limits,
    measured: Candidates | None = None,
) -> Candidates:
    """All points of one global batch.

    Args:
        model: what is trained.
        cluster: on what.
        global_batch_size: samples of a step.
        limits: what to leave out.
        measured: where times are known; nothing of their kin is left out as never faster.

    Raises:
        SpecError: the limits leave no size to enumerate.
    """
    shapes = _shapes(model, cluster, limits)
    sharing = Sharing.of(model, cluster, limits, measured)
    columns: list[tuple[int, ...]] = []
    before: tuple[tuple[int, int], list[tuple[int, ...]]] = (0, 0), []
    for tp, pp, vpp in shapes:
        # Chunks matter only beside layouts that were timed.
        if before[0] != (tp, pp) or sharing.measured:
            found = _beside(model, cluster, global_batch_size, limits, sharing, (tp, pp, vpp))
            before = (tp, pp), found
        columns += [(tp, pp, vpp, *others) for others in before[1]]
    if not columns:
        raise SpecError(_nothing_left(model, cluster, limits))
    table = np.array(columns, dtype=np.int64)
    column, recompute, layers = _recomputations(model, table, limits)
    if not len(column):
        raise SpecError("--recompute block needs chunks of two layers or more; use another way too")
    split = limits.use_distributed_optimizer
    column, recompute, layers = (np.repeat(x, len(split)) for x in (column, recompute, layers))
    num = len(column)
    asked = np.full(num, global_batch_size)
    chunks = table[column, 2] > 1
    unit = table[column, -2] * table[column, -1] * np.where(chunks, table[column, 1], 1)
    rounds = limits.round_down & (asked >= unit)
    points = Candidates(
        **dict(zip(SIZES, table[column].T)),
        global_batch_size=np.where(rounds, asked // unit * unit, asked),
        asked_batch_size=asked,
        recompute=recompute,
        recompute_num_layers=layers,
        logits_chunks=np.full(num, limits.logits_chunks[0]),
        sequence_parallel=(table[column, 0] > 1) & limits.sequence_parallel,
        use_distributed_optimizer=np.resize(np.array(split, dtype=bool), num),
        overlap=np.full(num, limits.overlap),
        use_tp_pp_dp_mapping=np.full(num, limits.use_tp_pp_dp_mapping),
        code=np.full(num, LEGAL),
    )
    return judge(model, cluster, points, limits)


def _beside(
    model: ModelSpec,
    cluster: ClusterSpec,
    global_batch_size: int,
    limits: Limits,
    sharing: Sharing,
    shape: tuple[int, int, int],
) -> list[tuple[int, ...]]:
    """What stands beside a tensor size, a pipeline size and chunks: `SIZES` from `ep` on."""
    tp, copies = shape[0], cluster.world_size // (shape[0] * shape[1])
    found: list[tuple[int, ...]] = []
    experts: dict[int, list[tuple[int, int]]] = {}
    of_dp: dict[int, list[int]] = {}
    for cp, form in sharing.ways(tp, copies):
        dp = copies // cp
        if not limits.allows(dp=dp):
            continue
        if dp not in of_dp:
            sizes = _micro_batches(global_batch_size, dp, limits)
            of_dp[dp] = [b for b in sizes if limits.allows(micro_batch=b)]
        sizes = of_dp[dp]
        if cp > 1:
            sizes = [b for b in sizes if not sharing.is_never_faster(shape, cp, form, dp, b)]
        if sizes and cp not in experts:
            experts[cp] = _expert_sizes(model, cluster, limits, tp, copies, tp * cp)
        found += [
            (ep, etp, cp, form, dp, b) for ep, etp in (experts[cp] if sizes else []) for b in sizes
        ]
    return found


def _micro_batches(global_batch_size: int, dp: int, limits: Limits) -> list[int]:
    """Micro-batches worth a look on so many replicas."""
    if "micro_batch" in limits.fixed:
        return [limits.fixed["micro_batch"]]
    share = global_batch_size // dp
    if limits.round_down:
        return list(range(1, min(max(share, 1), limits.max_micro_batch) + 1))
    if global_batch_size % dp or not share:
        return [1]
    return [b for b in divisors(share) if b <= limits.max_micro_batch]


def _recomputations(model: ModelSpec, table: Any, limits: Limits) -> tuple[Any, Any, Any]:
    """Index, way of recomputation and recomputed layers: every row of a table of `SIZES` in every
    way, by blocks with every number of layers but none and all."""
    ways = [r for r in range(RECOMPUTE_BLOCK) if RECOMPUTE[r] in limits.recompute]
    blocks = np.zeros(len(table), dtype=np.int64)
    if "block" in limits.recompute:
        blocks = np.maximum(model.num_layers // (table[:, 1] * table[:, 2]) - 1, 0)
    counts = len(ways) + blocks
    column = np.repeat(np.arange(len(table)), counts)
    number = np.arange(len(column)) - np.repeat(np.cumsum(counts) - counts, counts)
    layers = np.maximum(number - len(ways) + 1, 0)
    recompute = np.where(layers > 0, RECOMPUTE_BLOCK, np.append(ways, 0)[number.clip(0, len(ways))])
    wanted = layers == limits.fixed.get("recompute_num_layers", layers)
    wanted |= layers == 0
    return column[wanted], recompute[wanted].astype(np.int64), layers[wanted]


def _nothing_left(model: ModelSpec, cluster: ClusterSpec, limits: Limits) -> str:
    asked = ",".join(f"{name}={value}" for name, value in limits.fixed.items())
    nothing = f"--fix {asked} and --max leave nothing to consider on {cluster.world_size} GPUs"
    ep, etp = limits.fixed.get("ep", 1), limits.fixed.get("etp", 1)
    if model.num_experts is None and (ep > 1 or "etp" in limits.fixed):
        return f"{nothing}: the model has no experts; drop ep and etp"
    tp, world = limits.fixed.get("tp", 1), cluster.world_size
    cp = limits.fixed.get("cp", 1)
    if model.num_attention_heads % tp:
        legal = [t for t in divisors(model.num_attention_heads) if world % t == 0]
        return (
            f"--fix {asked}: {model.num_attention_heads} attention heads are not divisible by "
            f"{tp}; legal: {', '.join(map(str, legal))}"
        )
    if world % (tp * cp * limits.fixed.get("pp", 1)):
        sizes = "tp x cp x pp" if cp > 1 else "tp x pp"
        return f"--fix {asked}: {sizes} does not divide {world} GPUs; use divisors of {world}"
    of_stage = world // limits.fixed.get("pp", 1)
    if of_stage % (ep * etp):
        return (
            f"--fix {asked}: ep x etp does not divide the {of_stage} ranks of a stage; choose ep "
            f"from {', '.join(map(str, divisors(of_stage)))}"
        )
    return f"{nothing}; relax one of them"


def _shapes(model: ModelSpec, cluster: ClusterSpec, limits: Limits) -> list[tuple[int, int, int]]:
    world = cluster.world_size
    widest = world if limits.cross_node_tp else cluster.gpus_per_node
    shapes = []
    for tp in divisors(world):
        # A size asked for is judged; others beyond a node or the heads are not worth listing.
        asked = limits.fixed.get("tp") == tp
        if not limits.allows(tp=tp) or not (asked or tp <= widest):
            continue
        for pp in divisors(world // tp):
            if pp > model.num_layers or not limits.allows(pp=pp):
                continue
            per_stage = model.num_layers // pp
            chunks = divisors(per_stage) if pp > 1 else [1]
            if "vpp" in limits.fixed:
                # Without a pipeline there are no chunks to interleave.
                chunks = [v for v in [limits.fixed["vpp"]] if pp > 1 or v == 1]
            shapes += [(tp, pp, v) for v in chunks if limits.allows(vpp=v)]
    return shapes


def _expert_sizes(
    model: ModelSpec, cluster: ClusterSpec, limits: Limits, tp: int, copies: int, of_sample: int
) -> list[tuple[int, int]]:
    """Expert parallel sizes and tensor parallel sizes of experts worth a look, where so many ranks
    share a sample."""
    if model.num_experts is None:
        return [(1, tp)] if limits.allows(ep=1, etp=tp) else []
    # A size asked for is judged; others are not worth listing where they are surely slow.
    asked = {*limits.fixed, *limits.largest}
    found = []
    for etp in sorted({1, tp, limits.fixed.get("etp", 1)}):
        is_narrow = etp > 1 and model.expert_ffn < NARROW * etp
        may_be_narrow = limits.narrow_experts or "etp" in asked
        if tp * copies % etp or not limits.allows(etp=etp) or (is_narrow and not may_be_narrow):
            continue
        for ep in divisors(tp * copies // etp):
            is_wide = ep > 1 and ep * etp > cluster.gpus_per_node
            if (
                limits.allows(ep=ep)
                and (model.num_experts % ep == 0 or limits.fixed.get("ep") == ep)
                and (not is_wide or limits.cross_node_ep or "ep" in asked)
                and (not limits.whole_samples or ep * etp % of_sample == 0)
            ):
                found.append((ep, etp))
    return found


def judge(model: ModelSpec, cluster: ClusterSpec, points: Candidates, limits: Limits) -> Candidates:
    """The same points with the code of the first rule that each breaks."""
    code = np.full(len(points), LEGAL)

    def reject(name: str, broken: Any) -> None:
        code[(code == LEGAL) & broken] = REJECTION_CODES.index(name)

    p, groups = points, model.groups
    reject("heads", model.num_attention_heads % p.tp != 0)
    reject("query_groups", (groups % p.tp != 0) & (p.tp % groups != 0))
    reject("ffn", model.ffn % p.tp != 0)
    reject("sequence", p.sequence_parallel & (model.seq_length // p.cp % p.tp != 0))
    reject("context", (p.cp > 1) & (model.seq_length % (2 * p.cp) != 0))
    is_dealt = can_exchange(
        model, p.tp, p.cp, p.cp_comm_type, has_engine=has_engine(model, cluster)
    )
    reject("context_heads", ~is_dealt)
    if not limits.cross_node_tp:
        reject("cross_node_tp", p.tp > cluster.gpus_per_node)
    reject("layers", model.num_layers % p.pp != 0)
    reject("virtual", model.num_layers // p.pp % p.vpp != 0)
    reject("batch", p.global_batch_size % (p.dp * p.micro_batch_size) != 0)
    reject("interleave_microbatches", (p.vpp > 1) & (p.num_microbatches % p.pp != 0))
    for name, broken in _broken_by_experts(model, cluster, p).items():
        reject(name, broken)
    if model.extras:
        reject("extra", _refused_by_extras(model, p, code == LEGAL))
    return Candidates(**{**{f.name: getattr(p, f.name) for f in fields(p)}, "code": code})


def may_overlap(model: ModelSpec) -> bool:
    """Whether no extra of a model forbids that gradients are reduced while passes compute."""
    arguments = {**model.arguments, "overlap_grad_reduce": True}
    return not (model.extras and problems_of("layout_problems", arguments, Layout()))


def extra_problems(model: ModelSpec, c: Configuration) -> list[str]:
    """What the extras of a model say against a configuration: the sentences of a launch."""
    arguments = {
        **model.arguments,
        "overlap_grad_reduce": c.overlap,
        "use_distributed_optimizer": c.use_distributed_optimizer,
    }
    sizes = c.layout, c.micro_batch_size, c.global_batch_size
    return problems_of("layout_problems", arguments, c.layout) + problems_of(
        "batch_problems", arguments, *sizes
    )


def _refused_by_extras(model: ModelSpec, points: Candidates, is_asked: Any) -> Any:
    """[n] which of some points the extras of a model cannot have. Each layout and batch is asked
    for once."""
    names = (*SIZES, "global_batch_size", "overlap", "use_distributed_optimizer")
    refused = np.zeros(len(points), dtype=bool)
    at = np.flatnonzero(is_asked)
    table = np.stack([getattr(points, name)[at] for name in names], axis=1)
    _, first, number = np.unique(table, axis=0, return_index=True, return_inverse=True)
    found = [bool(extra_problems(model, points.configuration(int(at[i])))) for i in first]
    refused[at] = np.array(found, dtype=bool)[number.reshape(-1)]
    return refused


def _broken_by_experts(model: ModelSpec, cluster: ClusterSpec, p: Candidates) -> dict[str, Any]:
    """[n] by code which points the rules of `layout.expert_problems` speak against, in its order;
    none of a dense model."""
    shape = model.shape()
    if (experts := shape.experts) is None:
        return {}
    only_allgather = cluster.is_gloo and model.moe_token_dispatcher_type == "alltoall"
    copies = p.tp * p.cp * p.dp // (p.ep * p.etp)
    return {
        "experts": experts.num_experts % p.ep != 0,
        "expert_ffn": experts.moe_ffn_hidden_size % p.etp != 0,
        "shared_expert": experts.moe_shared_expert_intermediate_size % p.tp != 0,
        "expert_bias": (p.etp > 1) & shape.linear_bias,
        "expert_alltoall": (p.ep > 1) & (p.etp > 1) & only_allgather,
        "expert_copies": p.use_tp_pp_dp_mapping & (p.pp > 1) & (copies != p.dp),
    }


def fastest_of(points: Candidates, seconds: Any, at: Any) -> tuple[Configuration, float] | None:
    """The point of least seconds of a sample, of those at some indices, with the seconds of its
    step; None of no points."""
    if not len(at):
        return None
    best = int(at[np.argmin(seconds[at])])
    return points.configuration(best), float(seconds[best] * points.global_batch_size[best])


def to_config_batch(model: ModelSpec, cluster: ClusterSpec, points: Candidates) -> ConfigBatch:
    """Legal points as rows of the cost model."""
    sharded = points.use_distributed_optimizer
    return ConfigBatch(
        **model.batch_fields(points.tp),
        **cluster.batch_fields(model.precision),
        tp=points.tp,
        pp=points.pp,
        vpp=points.vpp,
        cp=points.cp,
        cp_comm_type=points.cp_comm_type,
        dp=points.dp,
        micro_batch_size=points.micro_batch_size,
        num_microbatches=points.num_microbatches,
        recompute=points.recompute,
        recompute_num_layers=points.recompute_num_layers,
        logits_chunks=points.logits_chunks,
        sequence_parallel=points.sequence_parallel,
        use_distributed_optimizer=sharded,
        overlap_grad_reduce=points.overlap,
        overlap_param_gather=sharded & points.overlap,
        use_tp_pp_dp_mapping=points.use_tp_pp_dp_mapping,
        experts=model.expert_batch(points.ep, points.etp, points.pp, points.vpp),
    )
