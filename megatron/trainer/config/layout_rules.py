"""The rules that make a layout legal for a model and for a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron.trainer.common.extras import problems_of
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.model_shape import ModelShape


def layout_problems(
    layout: Layout,
    arguments: Mapping[str, Any],
    *,
    seq_length: int,
    sequence_parallel: bool,
    knows_vocabulary: bool = True,
) -> list[str]:
    """Lists why a model cannot be laid out this way.

    Args:
        arguments: flags by field name, as derived or as stored.
        sequence_parallel: whether activations are split over the sequence between tensor-parallel
            regions.
        knows_vocabulary: whether the padded vocabulary is that of the run; else a launch pads it.

    Returns:
        One sentence per broken rule, naming the flag, the values and the fix; empty if the layout
        is legal.
    """
    shape = ModelShape.of(arguments)
    is_gloo = arguments.get("distributed_backend") == "gloo"
    dispatcher = arguments.get("moe_token_dispatcher_type") or "allgather"
    problems = shape_problems(layout, shape, knows_vocabulary=knows_vocabulary)
    problems += context_problems(
        layout,
        shape,
        seq_length=seq_length,
        sequence_parallel=sequence_parallel,
        exchange=ContextExchange.of(arguments),
    )
    problems += expert_problems(
        layout,
        shape,
        sequence_parallel=sequence_parallel,
        only_allgather_over_both=is_gloo and dispatcher == "alltoall",
    )
    return problems + problems_of("layout_problems", arguments, layout)


def shape_problems(
    layout: Layout, shape: ModelShape, *, knows_vocabulary: bool = True
) -> list[str]:
    """Lists why stages and tensor-parallel ranks cannot share the weights; as `layout_problems`."""
    tp, problems = layout.tp, _stage_problems(layout, shape)
    tp_fix = f"choose another --tensor-model-parallel-size (now {tp})"
    groups = shape.num_query_groups
    if groups % tp != 0 and tp % groups != 0:
        problems.append(
            f"--num-query-groups {groups} neither divides nor is divided by {tp}; {tp_fix}"
        )
    split = {
        "--num-attention-heads": shape.num_attention_heads,
        "--ffn-hidden-size": shape.ffn_hidden_size,
    }
    if (latent := shape.latent) is not None:
        split["--q-lora-rank"] = latent.q_lora_rank or 0
        width = latent.kv_lora_rank + latent.qk_pos_emb_head_dim
        split["--kv-lora-rank + --qk-pos-emb-head-dim"] = width
    if shape.mtp_num_layers:
        split["--mtp-num-layers with --hidden-size"] = shape.hidden_size
    problems += [
        f"{flags} {width} is not divisible by {tp}; {tp_fix}"
        for flags, width in split.items()
        if width % tp != 0
    ]
    if knows_vocabulary and shape.padded_vocab_size % tp != 0:
        problems.append(
            f"the padded vocabulary of {shape.padded_vocab_size} rows is not divisible by {tp}; "
            f"start the run with --pad-vocab-for-tensor-parallel-size {tp}"
        )
    return problems


def _stage_problems(layout: Layout, shape: ModelShape) -> list[str]:
    problems = []
    num_layers, stages = shape.num_layers, layout.pp * layout.vpp
    if layout.layer_partition and sum(layout.layer_partition) != num_layers:
        problems.append(
            f"the chunks of {layout} have {sum(layout.layer_partition)} layers and --num-layers is "
            f"{num_layers}; give --pipeline-model-parallel-layout as many"
        )
    if num_layers % stages != 0 and not layout.layer_partition:
        problems.append(
            f"--num-layers {num_layers} cannot be split over {layout.pp} pipeline ranks x "
            f"{layout.vpp} virtual stages evenly; use a multiple of {stages}, change "
            "--pipeline-model-parallel-size or give --pipeline-model-parallel-layout"
        )
    if shape.mtp_num_layers and shape.tied and layout.pp > 1:
        problems.append(
            "--mtp-num-layers in a pipeline needs --untie-embeddings-and-output-weights; add it or "
            f"choose --pipeline-model-parallel-size 1 (now {layout.pp})"
        )
    return problems


def context_problems(
    layout: Layout,
    shape: ModelShape,
    *,
    seq_length: int,
    sequence_parallel: bool,
    exchange: ContextExchange,
) -> list[str]:
    """Lists why the tokens of a sample cannot be shared this way; as `layout_problems`."""
    tp, cp = layout.tp, layout.cp
    tp_fix = f"choose another --tensor-model-parallel-size (now {tp})"
    cp_fix = f"choose another --context-parallel-size (now {cp})"
    problems = [
        f"--context-parallel-size {cp} does not go with {flag_and_fix}"
        for flag_and_fix in exchange.excluding
        if cp > 1
    ]
    if cp > 1 and seq_length % (2 * cp) != 0:
        problems.append(
            f"--seq-length {seq_length} is not divisible by {2 * cp}, two chunks for each rank "
            f"that shares a sample; {cp_fix}"
        )
    elif sequence_parallel and seq_length // cp % tp != 0:
        tokens = f"the {seq_length // cp} tokens of a rank of" if cp > 1 else ""
        problems.append(
            f"{tokens}{' ' if tokens else ''}--seq-length {seq_length} "
            f"{'are' if tokens else 'is'} not divisible by {tp} as --sequence-parallel needs; "
            f"{tp_fix}"
        )
    if (size := exchange.ranks_that_deal_heads(cp)) > 1:
        heads = shape.num_attention_heads // tp
        groups = max(shape.num_query_groups // tp, 1)
        # Without Transformer Engine each of the groups is repeated where there are too few.
        is_repeated = not exchange.has_engine and size % groups == 0
        if heads % size != 0 or not (groups % size == 0 or is_repeated):
            plain = "p2p" if exchange.has_engine else "all_gather"
            problems.append(
                f"--cp-comm-type {exchange.cp_comm_type} cannot deal the {heads} attention heads "
                f"and {groups} query groups of a rank to {size} ranks; give --cp-comm-type {plain} "
                f"or {cp_fix}"
            )
    return problems


@dataclass(frozen=True, kw_only=True)
class ContextExchange:
    """What limits the ranks that share a sample: how they exchange keys and values."""

    cp_comm_type: str | None = None
    """`--cp-comm-type`; None: a later launch chooses it."""
    sizes: tuple[int, ...] = ()
    """`--hierarchical-context-parallel-sizes`, the ranks that deal heads first."""
    has_engine: bool = False
    """Whether Transformer Engine attends."""
    excluding: tuple[str, ...] = ()
    """Flags that do not go with context parallelism, each with what to do."""

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> ContextExchange:
        """Reads flags by field name, as derived or as stored."""
        word = (arguments.get("cp_comm_type") or (None,))[0]
        implementation = arguments.get("transformer_impl")
        has_engine = implementation == "transformer_engine"
        softmax, found = arguments.get("softmax_type") or "vanilla", []
        if arguments.get("mtp_num_layers"):
            # megatron-core 0.16.1 gives the losses of further tokens a wrong weight then.
            found.append("--mtp-num-layers; drop one of the two")
        if implementation == "local" and softmax != "vanilla":
            found.append(
                f"--softmax-type {softmax} without Transformer Engine; drop one of the two"
            )
        return cls(
            cp_comm_type=word,
            sizes=tuple(arguments.get("hierarchical_context_parallel_sizes") or ()),
            has_engine=has_engine,
            excluding=(*found, *(_excluded_by_engine(arguments, word) if has_engine else ())),
        )

    def ranks_that_deal_heads(self, cp: int) -> int:
        """How many of the `cp` ranks of a sample exchange tokens for heads; 1: none do."""
        if self.cp_comm_type == "a2a":
            return cp
        # Without Transformer Engine, or under another size than theirs, two levels do not apply.
        is_two_level = self.cp_comm_type == "a2a+p2p" and self.has_engine
        return self.sizes[0] if is_two_level and self.sizes and math.prod(self.sizes) == cp else 1


def _excluded_by_engine(arguments: Mapping[str, Any], word: str | None) -> list[str]:
    """What the attention of Transformer Engine cannot do where ranks share a sample, each with what
    to do. It would end with an error in the first forward pass."""
    backend = "flash" if arguments.get("use_flash_attn") else arguments.get("attention_backend")
    softmax, found = arguments.get("softmax_type") or "vanilla", []
    if backend in ("unfused", "local"):
        found.append(f"--attention-backend {backend} of Transformer Engine; use auto")
    if not (arguments.get("bf16") or arguments.get("fp16")):
        found.append("fp32 weights in Transformer Engine; give --bf16 or --transformer-impl local")
    if softmax != "vanilla" and word != "a2a":
        found.append(f"--softmax-type {softmax} and --cp-comm-type {word}; give a2a")
    if arguments.get("multi_latent_attention") and word in ("all_gather", "a2a"):
        # From 2.15 on it can; megatron-core 0.16.1 is made for versions below 2.12.
        found.append(f"--multi-latent-attention and --cp-comm-type {word}; give p2p")
    return found


def expert_problems(
    layout: Layout,
    shape: ModelShape,
    *,
    sequence_parallel: bool,
    only_allgather_over_both: bool = False,
) -> list[str]:
    """Lists why experts cannot be laid out this way; as `layout_problems`.

    Args:
        sequence_parallel: as there.
        only_allgather_over_both: whether rows cannot go to experts by all-to-all where both expert
            parallel sizes are above 1, as with gloo.
    """
    ep, etp = layout.ep, layout.expert_tensor_parallel_size
    if (experts := shape.experts) is None:
        is_plain = ep == 1 and layout.etp is None
        return [] if is_plain else [f"{layout} has sizes of experts and the model has none"]
    fix = f"choose another --expert-tensor-parallel-size (now {etp})"
    problems = []
    if experts.num_experts % ep != 0:
        problems.append(
            f"--num-experts {experts.num_experts} is not divisible by {ep}; choose another "
            f"--expert-model-parallel-size (now {ep})"
        )
    width = experts.moe_ffn_hidden_size
    if width % etp != 0:
        problems.append(f"--moe-ffn-hidden-size {width} is not divisible by {etp}; {fix}")
    shared = experts.moe_shared_expert_intermediate_size
    if shared % layout.tp != 0:
        problems.append(
            f"--moe-shared-expert-intermediate-size {shared} is not divisible by {layout.tp}; "
            f"choose another --tensor-model-parallel-size (now {layout.tp})"
        )
    if layout.tp > 1 and not sequence_parallel:
        problems.append(
            "--num-experts under tensor parallelism needs --sequence-parallel; add it or choose "
            f"--tensor-model-parallel-size 1 (now {layout.tp})"
        )
    if etp > 1 and shape.linear_bias:
        problems.append(
            f"--expert-tensor-parallel-size {etp} needs --disable-bias-linear; add it or choose 1"
        )
    if ep > 1 and etp > 1 and only_allgather_over_both:
        problems.append(
            f"gloo has no all-to-all over --expert-model-parallel-size {ep} and "
            f"--expert-tensor-parallel-size {etp}; give --moe-token-dispatcher-type allgather"
        )
    copies = layout.expert_data_parallel_size
    if shape.use_tp_pp_dp_mapping and layout.pp > 1 and copies != layout.dp:
        problems.append(
            f"--use-tp-pp-dp-mapping in a pipeline needs as many copies of the experts ({copies}) "
            f"as of the model ({layout.dp}); drop the flag, or make --expert-model-parallel-size x "
            f"--expert-tensor-parallel-size = {layout.tp * layout.cp}, the tensor x context "
            "parallel size"
        )
    return problems


def recompute_problems(
    layout: Layout, *, num_layers: int, method: str | None, recompute_num_layers: int
) -> list[str]:
    """Lists why whole layers cannot be computed again this way.

    Args:
        method: `uniform` or `block`.
        recompute_num_layers: layers of a unit, or layers of every chunk.

    Returns:
        One sentence per broken rule, naming the flag, the values and the fix.
    """
    counts = set(layout.layers_of_chunks(num_layers)) - {0}
    if recompute_num_layers > max(counts):
        return [
            f"--recompute-num-layers {recompute_num_layers} is more than the {max(counts)} layers "
            "of one pipeline stage; lower it"
        ]
    broken = sorted(n for n in counts if n % max(recompute_num_layers, 1))
    if method == "uniform" and broken:
        # megatron-core would end with an IndexError in the first forward pass.
        return [
            f"--recompute-num-layers {recompute_num_layers} does not divide the {broken[0]} layers "
            "of a pipeline stage, as --recompute-method uniform needs; lower it or use block"
        ]
    return []


def group_of_microbatches(layout: Layout, num_microbatches: int, asked: int | None = None) -> int:
    """Micro-batches that a chunk of an interleaved pipeline takes in a row.

    Args:
        asked: `--microbatch-group-size-per-virtual-pipeline-stage`.

    Returns:
        What is asked for, if megatron-core can schedule that; else the pipeline size.
    """
    if asked is None or not layout.pp <= asked <= num_microbatches:
        return layout.pp
    rest = num_microbatches % asked
    return asked if rest == 0 or rest >= layout.pp else layout.pp


def batch_problems(
    layout: Layout,
    micro_batch_size: int,
    global_batch_size: int,
    *,
    uneven: bool = False,
    group_size: int | None = None,
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> list[str]:
    """Lists why a global batch cannot be split into micro-batches on this layout.

    Args:
        micro_batch_size: samples of one forward pass on one data-parallel rank.
        uneven: whether the last micro-batch of every replica may be smaller; without effect on a
            pipeline, whose stages exchange one shape.
        group_size: `--microbatch-group-size-per-virtual-pipeline-stage`.
        arguments: flags by field name, for the rules of extras.

    Returns:
        One sentence per broken rule, naming the flag, the values and the fix; empty if it fits.
    """
    if micro_batch_size < 1 or global_batch_size < 1:
        return [
            f"--micro-batch-size {micro_batch_size} and --global-batch-size {global_batch_size} "
            "must both be at least 1"
        ]
    if uneven and layout.pp == 1:
        if global_batch_size % layout.dp == 0:
            return []
        return [
            f"--global-batch-size {global_batch_size} is not divisible by the data parallel size "
            f"{layout.dp}; use {nearest_multiples(global_batch_size, layout.dp)}"
        ]
    unit = micro_batch_size * layout.dp
    # The interleaved schedule works on groups of PP micro-batches and cannot split the last one.
    group = layout.pp if layout.vpp > 1 else 1
    if global_batch_size % unit != 0:
        return [
            f"--global-batch-size {global_batch_size} is not divisible by --micro-batch-size "
            f"{micro_batch_size} x data parallel size {layout.dp} = {unit}; use "
            f"{nearest_multiples(global_batch_size, unit * group)}"
        ]
    num_microbatches = global_batch_size // unit
    taken = group_of_microbatches(layout, num_microbatches, group_size)
    if num_microbatches % group != 0 and taken == group:
        return [
            f"--global-batch-size {global_batch_size} gives {num_microbatches} micro-batches, "
            f"which a virtual pipeline over {layout.pp} ranks cannot schedule; use "
            f"{nearest_multiples(global_batch_size, unit * group)}"
        ]
    return problems_of("batch_problems", arguments, layout, micro_batch_size, global_batch_size)


def nearest_multiples(value: int, unit: int) -> str:
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
