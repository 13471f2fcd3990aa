"""Many configurations as columns of numbers: what the cost model computes on.

A row is one model on one kind of hardware under one layout. Fields are arrays of one length or
scalars; nothing here knows where they come from (a search, a fit, a single question).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, RECOMPUTE_FULL, RECOMPUTE_BLOCK = 0, 1, 2, 3
"""Codes of `ConfigBatch.recompute`: nothing, the core of the attention, every layer, the first
layers of every chunk."""


@dataclass(frozen=True, kw_only=True)
class ExpertBatch:
    """What a mixture of experts adds to a row: arrays of shape [n], or scalars that hold for
    all."""

    num_experts: Any
    """Experts of a layer."""
    moe_router_topk: Any
    moe_ffn_hidden_size: Any
    moe_shared_expert_intermediate_size: Any
    """Width of the expert that sees every token; 0: there is none."""
    moe_shared_expert_gate: Any
    """Whether the shared expert is scaled for each token."""
    share: Any
    """Part of the layers that have experts: of the whole model, or [m, n] of some stages after
    `ConfigBatch.of_stages`."""
    uses_allgather: Any
    """Whether every rank gathers all rows and keeps its own, in place of an all-to-all."""
    is_grouped: Any
    """Whether the experts of a rank are computed in one kernel."""
    ep: Any
    etp: Any
    stage_shares: Any = None
    """[n, max pp] the same of every stage, its chunks together; None: all stages are alike."""
    load: Any = None
    """Rows of the busiest rank over the mean of those that hold other experts. None: what is
    usual."""

    @property
    def busiest(self) -> Any:
        """Rows of the busiest rank over the mean."""
        if self.load is not None:
            return self.load
        # A prior: nearly even, a little less so the more ranks there are. One rank has all rows.
        return np.where(np.equal(self.ep, 1), 1.0, 1.1 + 0.05 * np.log2(self.ep))

    def unevenly_loaded(self) -> ExpertBatch:
        """The same where the busiest rank has twice the mean: what memory must allow for."""
        return replace(self, load=np.minimum(np.asarray(self.ep, dtype=float), 2.0))


@dataclass(frozen=True, kw_only=True)
class ConfigBatch:
    """Arrays of shape [n], or scalars that hold for all."""

    num_layers: Any
    hidden_size: Any
    ffn_hidden_size: Any
    num_attention_heads: Any
    num_query_groups: Any
    """Key-value heads."""
    kv_channels: Any
    """Width of a head."""
    padded_vocab_size: Any
    seq_length: Any
    mlp_matrices: Any
    """3 with a gated MLP, else 2."""
    fused_attention: Any
    """Whether attention runs as one kernel that skips the masked half."""
    dropout: Any
    """Whether hidden dropout is on."""
    tied: Any
    """Whether the output layer is the word embedding."""
    learned_positions: Any
    """Rows of a learned position embedding; 0 without one."""
    has_bias: Any
    """Whether linear layers have biases."""
    norm_vectors: Any
    """Vectors of one normalisation: 1 RMSNorm, 2 LayerNorm."""
    element_bytes: Any
    """Bytes of an activation element and of a weight: 2 or 4."""
    gradient_bytes: Any
    """Bytes of a gradient element as it is reduced."""
    peak_flops: Any
    """Dense peak of one GPU at this precision, FLOP/s."""
    hbm_bytes_per_s: Any
    """Memory bandwidth of one GPU."""
    num_sms: Any
    """Multiprocessors of one GPU."""
    gpus_per_node: Any
    """GPUs that share fast links."""
    intra_bytes_per_s: Any
    """Link of one GPU inside a node, one direction, nominal."""
    nic_bytes_per_s: Any
    """Network of one node, one direction; nominal unless `nic_is_measured`."""
    tp: Any
    pp: Any
    vpp: Any
    """Chunks of a stage."""
    dp: Any
    micro_batch_size: Any
    """Samples of a micro-batch."""
    num_microbatches: Any
    """Micro-batches of a replica and step."""
    recompute: Any
    sequence_parallel: Any
    """Whether activations are split over the sequence."""
    use_distributed_optimizer: Any
    """Whether optimizer state is split over the copies of the weights."""
    overlap_grad_reduce: Any
    """Whether gradients are reduced while the backward pass runs."""
    overlap_param_gather: Any
    """Whether weights are gathered while the forward pass runs."""
    optimizer_bytes: Any = 12
    """Bytes of optimizer state of a parameter."""
    implementation: Any = 0
    """Index into `model_spec.IMPLEMENTATIONS`."""
    implementation_given: Any = False
    """Whether somebody said so."""
    norm: Any = 0
    """0: as the layers' own implementation has it; else 1 + index into `model_spec.NORMS`."""
    softmax_in_fp32: Any = False
    """Whether plain torch makes fp32 copies of half-precision scores."""
    logits_sharded: Any = True
    """Whether a tensor-parallel rank has its columns of the logits alone."""
    logits_bytes: Any = 6
    """Bytes of a logit and what the loss makes of it."""
    intra_share: Any = 1.0
    """`intra_bytes_per_s` over that of the machine whose constants are used."""
    on_cpu: Any = False
    """Whether ranks are CPU ranks: there outputs that were sent are kept."""
    nic_is_measured: Any = False
    """Whether `nic_bytes_per_s` was measured, so that messages reach all of it."""
    use_tp_pp_dp_mapping: Any = False
    """Whether ranks are numbered tensor, pipeline, data in place of tensor, data, pipeline."""
    scatter_gather: Any = False
    """Whether tensor-parallel ranks each send a part of a pipeline message without sequence
    parallelism, too. Megatron-LM did before megatron-core (arXiv 2104.04473, section 4.1), and
    DeepSpeed's pipeline does."""
    tp_overlap: Any = True
    """Whether tensor-parallel collectives of the backward pass travel while matrix products
    compute, as in megatron-core."""
    recompute_num_layers: Any = 0
    """Layers of a chunk that are recomputed, with `RECOMPUTE_BLOCK`."""
    cp: Any = 1
    logits_chunks: Any = 1
    """Parts into which the tokens of a rank are cut for the logits; in more than one each is
    computed twice."""
    cp_comm_type: Any = 0
    """Index into `context.CP_COMM_TYPES`, where `cp` is above 1."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """By field name, the flags of extras that are numbers; those of extras that are off are not
    there, or 0."""
    experts: ExpertBatch | None = None
    """Sizes of a mixture of experts; None: a dense model."""

    def __len__(self) -> int:
        return self._num

    @functools.cached_property
    def _num(self) -> int:
        return max(np.size(getattr(self, f.name)) for f in fields(self))

    @property
    def tokens(self) -> Any:
        """Tokens of a micro-batch on one of the ranks that share its samples."""
        return self.micro_batch_size * self.seq_length / self.cp

    @property
    def layers_of_chunk(self) -> Any:
        """Layers of a model chunk, all chunks being equal."""
        return self.num_layers / (self.pp * self.vpp)

    @property
    def plain_torch(self) -> Any:
        """Whether layers are in plain torch; there is no Transformer Engine for CPU ranks."""
        return np.logical_or(np.equal(self.implementation, 1), self.on_cpu)

    @property
    def plain_on_gpu(self) -> Any:
        """Whether layers are in plain torch on a GPU, where some of its operations are one kernel
        that keeps less."""
        return self.plain_torch & np.logical_not(self.on_cpu)

    @property
    def has_torch_norms(self) -> Any:
        """Whether norms keep fp32 copies of their inputs."""
        return np.where(np.equal(self.norm, 0), self.plain_torch, np.equal(self.norm, 2))

    @property
    def scatters_messages(self) -> Any:
        """`scatter_gather`, as the cost of messages names it."""
        return self.scatter_gather

    @property
    def recomputed_share(self) -> Any:
        """Part of the layers that are recomputed whole."""
        some = np.where(self.recompute == RECOMPUTE_BLOCK, self.recompute_num_layers, 0.0)
        return np.where(self.recompute == RECOMPUTE_FULL, 1.0, some / self.layers_of_chunk)

    @property
    def attention_width(self) -> Any:
        """Columns of queries, keys and values together."""
        return (self.num_attention_heads + 2 * self.num_query_groups) * self.kv_channels

    @property
    def expert_copies(self) -> Any:
        """Copies of each expert in a stage."""
        assert self.experts is not None
        return self.tp * self.copies / (self.experts.ep * self.experts.etp)

    @property
    def copies(self) -> Any:
        """Copies of every weight that is not an expert's, over which optimizer state is split."""
        return self.cp * self.dp

    @property
    def bucket_parameters(self) -> Any:
        """`bucket_parameters` of what is no expert's."""
        return bucket_parameters(self.copies)

    def full(self) -> ConfigBatch:
        """The same with every field an array of the common length."""
        num = len(self)

        def whole(values: Any) -> Any:
            shape = np.shape(values)
            return values if shape[:1] == (num,) else np.broadcast_to(values, (num, *shape[1:]))

        return self._each(whole)

    def take(self, at: Any) -> ConfigBatch:
        return self._each(lambda values: np.asarray(values)[at])

    def _each(self, change: Callable[[Any], Any]) -> ConfigBatch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        experts, extras = values.pop("experts"), values.pop("extras")
        changed: dict[str, Any] = {name: change(value) for name, value in values.items()}
        changed["extras"] = {name: change(value) for name, value in extras.items()}
        if experts is not None:
            of = {f.name: getattr(experts, f.name) for f in fields(experts)}
            some = {n: None if value is None else change(value) for n, value in of.items()}
            experts = ExpertBatch(**some)
        return ConfigBatch(**changed, experts=experts)

    def change(self, **values: Any) -> ConfigBatch:
        return replace(self, **values)

    def of_stages(self, stage: Any) -> ConfigBatch:
        """The same with the share of layers with experts of some stages, where stages differ.

        Args:
            stage: [m, 1 or n] numbers of stages.
        """
        x = self.experts
        if x is None or x.stage_shares is None:
            return self
        at = np.broadcast_to(stage, (len(stage), len(self)))
        share = x.stage_shares[np.arange(len(self)), at.clip(0, x.stage_shares.shape[1] - 1)]
        return self.change(experts=replace(x, share=share))

    def unevenly_loaded(self) -> ConfigBatch:
        """The same with the load of experts that memory must allow for."""
        experts = self.experts
        return self if experts is None else self.change(experts=experts.unevenly_loaded())


def bucket_parameters(copies: Any) -> Any:
    """Parameters of a bucket of gradients, as megatron-core chooses it with overlap."""
    return np.maximum(40e6, 1e6 * copies)


_NO_EXPERTS = ExpertBatch(
    num_experts=1,
    moe_router_topk=1,
    moe_ffn_hidden_size=1,
    moe_shared_expert_intermediate_size=0,
    moe_shared_expert_gate=False,
    share=0.0,
    uses_allgather=False,
    is_grouped=False,
    ep=1,
    etp=1,
    load=1.0,
)
"""Of dense models among mixtures."""


def concatenate(parts: list[ConfigBatch]) -> ConfigBatch:
    """All rows of several tables, as a fit to several clusters needs them."""
    if any(part.experts is not None for part in parts):
        parts = [part.change(experts=part.experts or _NO_EXPERTS) for part in parts]
    of_extras = {name: 0 for part in parts for name in part.extras}
    full = [part.change(extras={**of_extras, **part.extras}).full() for part in parts]
    names = [f.name for f in fields(ConfigBatch) if f.name not in ("experts", "extras")]
    values: dict[str, Any] = {n: np.concatenate([getattr(p, n) for p in full]) for n in names}
    values["extras"] = {n: np.concatenate([p.extras[n] for p in full]) for n in of_extras}
    experts = [p.experts for p in full if p.experts is not None]
    if not experts:
        return ConfigBatch(**values)
    of = {
        f.name: np.concatenate([getattr(e, f.name) for e in experts])
        for f in fields(ExpertBatch)
        if f.name not in ("load", "stage_shares")
    }
    load = np.concatenate([e.busiest for e in experts])
    return ConfigBatch(
        **values, experts=ExpertBatch(**of, load=load, stage_shares=_stage_shares(experts))
    )


def _stage_shares(experts: list[ExpertBatch]) -> Any:
    """Those of several tables, as wide as the widest."""
    given = [e.share[:, None] if e.stage_shares is None else e.stage_shares for e in experts]
    widest = max(s.shape[1] for s in given)
    if widest == 1:
        return None
    return np.concatenate([np.pad(s, ((0, 0), (0, widest - s.shape[1])), "edge") for s in given])
