"""Bytes that every pipeline stage needs, by kind.

Saved activations follow arXiv 2205.05198 (section 4), widened to grouped queries, gated MLPs and
fused attention.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from copus_ext.cost_model import context, experts
from copus_ext.cost_model.extras import terms_of
from copus_ext.cost_model.peak_correction import AS_PREDICTED, MOVING, Memory, PeakCorrection
from copus_ext.cost_model.rows import RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, ConfigBatch

FRAGMENTATION = 1.06
"""Reserved over allocated, of what comes and goes, on GPUs with segments that grow (expandable ones
of torch's allocator, which the trainer asks for). Predictions are then 1.5 % (one standard
deviation) from what is reserved (`bench/gpu_stub_memory.py`), less than `MIN_PEAK_SD`. With fixed
segments, where small tensors settle in the place of large ones, 1.03 to 1.66 were seen."""
CPU_CONTEXT_BYTES = 0.3e9
"""Of a CPU rank before it has any tensor."""
_GPU_CONTEXT_BYTES, _GROUP_BYTES = 0.8e9, 0.3e9
"""Of a process: its CUDA context with loaded kernels (about .5 GB) and workspaces of libraries; and
of each kind of group that it has, the buffers of NCCL: some 10 MB a channel and connection, for as
many as 24 channels over NVLink."""
_MOVING_SD, _MOVING_SD_GIVEN = 0.2, 0.12
"""Standard deviation of the factor on what comes and goes, where nobody said how layers are
implemented, and where somebody did."""
_FIXED_SD, _CPU_FIXED_SD = 1.5e9, 0.3e9
"""Standard deviation of the bytes of a process besides: of a GPU, and of a CPU rank."""


def layer_parameters(rows: ConfigBatch) -> Any:
    """Parameters of one layer on one tensor-parallel rank, without routed experts. Of a mixture,
    the mean over its layers."""
    dense = _layer_parameters(rows, rows.ffn_hidden_size)
    if (x := rows.experts) is None:
        return dense
    shared = x.moe_shared_expert_intermediate_size
    other = _layer_parameters(rows, shared) + experts.router_parameters(rows)
    # Without a shared expert there is no second bias.
    other = other - np.where(
        np.logical_and(rows.has_bias, np.equal(shared, 0)), rows.hidden_size, 0
    )
    return x.share * other + (1 - x.share) * dense


def _layer_parameters(rows: ConfigBatch, ffn_hidden_size: Any) -> Any:
    """Of a layer with an MLP of some width."""
    h, tp = rows.hidden_size, rows.tp
    heads = rows.num_attention_heads * rows.kv_channels
    matrices = h * rows.attention_width + heads * h + rows.mlp_matrices * h * ffn_hidden_size
    up = (rows.mlp_matrices - 1) * ffn_hidden_size
    split_biases = np.where(rows.has_bias, rows.attention_width + up, 0)
    whole_biases = np.where(rows.has_bias, 2 * h, 0)
    return (matrices + split_biases) / tp + whole_biases + 2 * rows.norm_vectors * h


def end_parameters(rows: ConfigBatch) -> tuple[Any, Any]:
    """Parameters of the embedding, and of the final norm with the output layer, on one
    tensor-parallel rank."""
    word = rows.padded_vocab_size / rows.tp * rows.hidden_size
    first = word + rows.learned_positions * rows.hidden_size
    # A tied output layer of another stage is a copy; of the same stage it is the embedding itself.
    output = np.where(np.logical_and(rows.tied, rows.pp == 1), 0.0, word)
    return first, output + rows.norm_vectors * rows.hidden_size


def all_stages(rows: ConfigBatch) -> Any:
    """[max pp, 1] numbers of the stages of the longest pipeline."""
    return np.arange(int(np.max(rows.pp)))[:, None]


def stage_parameters(rows: ConfigBatch, stage: Any = None) -> Any:
    """Parameters of every stage on one tensor-parallel rank.

    Args:
        rows: configurations.
        stage: [m, 1 or n] which stages; None is `all_stages`.

    Returns:
        [m, n]: zero beyond a row's own stages.
    """
    stage = all_stages(rows) if stage is None else stage
    rows = rows.of_stages(stage)
    pp = np.broadcast_to(rows.pp, len(rows))
    inside = stage < pp
    last = stage == pp - 1
    of_layer = layer_parameters(rows)
    if rows.experts is not None:
        of_layer = of_layer + experts.routed_parameters(rows)
    layers = rows.num_layers / rows.pp * of_layer
    first, end = end_parameters(rows)
    return np.where(inside, layers + np.where(stage == 0, first, 0.0) + np.where(last, end, 0.0), 0)


def stage_routed_parameters(rows: ConfigBatch, stage: Any = None) -> Any:
    """Of `stage_parameters` those of routed experts; None for a dense model."""
    if rows.experts is None:
        return None
    stage = all_stages(rows) if stage is None else stage
    rows = rows.of_stages(stage)
    held = rows.num_layers / rows.pp * experts.routed_parameters(rows)
    return np.where(stage < np.broadcast_to(rows.pp, len(rows)), held, 0.0)


def owned_parameters(rows: ConfigBatch, held: Any, routed: Any) -> Any:
    """Parameters whose optimizer state a rank has: its share among the copies of the weights, and
    among those of its experts.

    Args:
        rows: configurations.
        held: all parameters of the rank.
        routed: of them those of routed experts; None for a dense model.
    """
    shared = held / rows.copies if routed is None else _shared(rows, held, routed)
    return np.where(rows.use_distributed_optimizer, shared, held)


def _shared(rows: ConfigBatch, held: Any, routed: Any) -> Any:
    return (held - routed) / rows.copies + routed / rows.expert_copies


def layer_activation_bytes(rows: ConfigBatch) -> Any:
    """Bytes that one layer keeps of one micro-batch for its backward pass."""
    return np.where(rows.plain_torch, _local_layer_bytes(rows), _fused_layer_bytes(rows))


def _local_layer_bytes(rows: ConfigBatch) -> Any:
    """The same in plain torch, byte for byte what autograd saves: on CPU ranks seen with
    saved-tensor hooks (`tests/distributed/test_activations.py`), on a GPU in its allocator
    (`bench/gpu_stub_memory.py`)."""
    gpu = rows.plain_on_gpu
    e, tokens, h = rows.element_bytes, rows.tokens, rows.hidden_size
    rms, rope = rows.norm_vectors == 1, rows.learned_positions == 0
    # On a CPU RMSNorm computes in fp32 and keeps its input and output so. LayerNorm keeps two
    # statistics, in fp32 unless on a CPU rank; the kernel of RMSNorm one.
    statistics = np.where(rows.on_cpu, 2.0 * e, 8.0)
    norm = np.where(rms & np.logical_not(gpu), (8.0 + e) * h + 4.0, 2.0 * e * h + statistics)
    norm = np.where(rms & gpu, 2.0 * e * h + 4.0, norm)
    norm = np.where(rows.has_torch_norms, norm, 2.0 * e * h)
    # Whole numbers on a GPU, factors on a CPU.
    mask = np.where(rows.dropout, np.where(gpu, 1.0, e) * h, 0.0)
    streams = 2.0 * tokens * (norm + mask) / np.where(rows.sequence_parallel, rows.tp, 1)
    query = rows.num_attention_heads * rows.kv_channels
    groups = rows.num_query_groups * rows.kv_channels
    # Rotated queries and keys are new tensors; so are queries gathered from several groups.
    gathered = (groups != query) & (rows.num_query_groups > rows.tp)
    moved = np.where(rope | gathered, query, 0) + np.where(rope, groups, 0)
    inputs = rows.attention_width + moved + query
    selective = rows.recompute == RECOMPUTE_SELECTIVE
    flash = e * inputs + np.where(selective, 0.0, 4.0 * rows.num_attention_heads)
    copies = np.where(rows.dropout, 3.0, 1.0)
    # Values that no repetition copied keep the whole projection alive.
    held = np.where(rope & (groups == query), 6.0, 4.0) * query
    # Of an fp32 softmax its output is kept, too; with dropout in place of the half one.
    copies = copies * e + np.where(rows.softmax_in_fp32, np.where(rows.dropout, 4.0 - e, 4.0), 0.0)
    scores = e * held + copies * rows.num_attention_heads * rows.seq_length
    # A CPU has no flash kernel with dropout.
    whole = rows.fused_attention & (gpu | np.logical_not(rows.dropout))
    core = np.where(selective | whole, flash, scores)
    masks = 0.0
    if context.is_shared(rows):
        moved = np.where(rope | gathered, query, rows.attention_width)
        shared, cut = context.core_columns(rows, moved), context.score_columns(rows)
        shared = e * shared + np.where(whole, 4.0 * rows.num_attention_heads, copies * cut)
        core = np.where(np.greater(rows.cp, 1) & np.logical_not(selective), shared, core)
        masks = np.where(whole & np.logical_not(selective), context.mask_bytes(rows), 0.0)
    # A gated activation is one kernel on a GPU.
    gated = np.where(gpu, 3.0, 5.0)
    mlp = e * np.where(rows.mlp_matrices == 3, gated, 2.0) * rows.ffn_hidden_size
    angles = np.where(rope, 4.0 * e * rows.seq_length / rows.cp * rows.kv_channels, 0.0)
    return streams + tokens * (core + mlp) / rows.tp + angles + masks


def _fused_layer_bytes(rows: ConfigBatch) -> Any:
    h, tokens = rows.hidden_size, rows.tokens
    shared = np.where(rows.sequence_parallel, rows.tp, 1)
    # Norms that are not fused keep fp32 copies of their inputs.
    norms = np.where(rows.has_torch_norms, 16.0, 0.0)
    streams = (8.0 + norms + np.where(rows.dropout, 2.0, 0.0)) * tokens * h / shared
    heads = 2.0 * tokens * 2 * (rows.num_attention_heads + rows.num_query_groups)
    scores = tokens * rows.num_attention_heads * rows.seq_length
    # The fused softmax keeps its half output; dropout a byte of its mask and its own output. A
    # softmax in fp32 keeps its fp32 output and, without dropout, the half one that is multiplied.
    half = np.where(rows.dropout, 5.0, 2.0)
    scores = scores * np.where(rows.softmax_in_fp32, np.where(rows.dropout, 7.0, 6.0), half)
    kept = np.where(rows.recompute == RECOMPUTE_SELECTIVE, 0.0, scores)
    core = np.where(rows.fused_attention, 4.0 * tokens * rows.num_attention_heads, kept)
    mlp = 2.0 * rows.mlp_matrices * tokens * rows.ffn_hidden_size
    return (streams + (heads * rows.kv_channels + core + mlp) / rows.tp) * rows.element_bytes / 2


def in_flight(rows: ConfigBatch, stage: Any) -> Any:
    """Micro-batches (of all chunks of a stage together) whose activations a stage keeps at most."""
    ahead = rows.pp - stage
    plain = np.minimum(ahead, rows.num_microbatches)
    chunks = np.minimum(
        2 * (ahead - 1) + (rows.vpp - 1) * rows.pp + 1, rows.num_microbatches * rows.vpp
    )
    return np.where(rows.vpp > 1, chunks / rows.vpp, plain)


def process_bytes(rows: ConfigBatch) -> Any:
    """[n] bytes of a process before it has any tensor: context, libraries, and buffers of NCCL for
    each kind of group it is in."""
    groups = sum(np.greater(size, 1).astype(float) for size in (rows.tp, rows.pp, rows.copies))
    return np.where(rows.on_cpu, CPU_CONTEXT_BYTES, _GPU_CONTEXT_BYTES + _GROUP_BYTES * groups)


def memory(
    rows: ConfigBatch,
    *,
    context_bytes: float | None = None,
    correction: PeakCorrection = AS_PREDICTED,
) -> Memory:
    """Predicts the bytes of every stage of every row.

    Args:
        rows: configurations.
        context_bytes: of a process; None: `process_bytes`.
        correction: what measured peaks say.
    """
    rows = rows.full()
    stages = _of_stages(rows, all_stages(rows), context_bytes, correction)
    total = np.sum(list(stages.values()), axis=0)
    return Memory(
        stages=stages,
        peak_bytes=total.max(axis=0),
        worst_stage=total.argmax(axis=0),
        prior_sd=_prior_sd(rows),
    )


def _prior_sd(rows: ConfigBatch) -> Any:
    """[2, n] as `Memory.prior_sd`."""
    moving = np.where(rows.implementation_given, _MOVING_SD_GIVEN, _MOVING_SD)
    return np.stack([moving, np.where(rows.on_cpu, _CPU_FIXED_SD, _FIXED_SD)])


def peaks(
    rows: ConfigBatch,
    *,
    context_bytes: float | None = None,
    correction: PeakCorrection = AS_PREDICTED,
) -> tuple[Any, Any]:
    """Bytes of the stage that needs most, as `memory` but sooner, and their relative uncertainty:
    [n] each. The first or the last stage it is: those between hold fewer parameters than both and
    fewer micro-batches than the first; unless stages have unlike layers."""
    rows = rows.full()
    ends = np.stack([np.zeros(len(rows), dtype=np.int64), rows.pp - 1])
    if rows.experts is not None and rows.experts.stage_shares is not None:
        ends = all_stages(rows)
    stages = _of_stages(rows, ends, context_bytes, correction)
    total = np.sum(list(stages.values()), axis=0)
    worst = total.argmax(axis=0), np.arange(len(rows))
    moving = np.sum([stages[kind][worst] for kind in MOVING], axis=0) / correction.moving
    return total[worst], correction.relative_sd(total[worst], moving, _prior_sd(rows))


def _of_stages(
    rows: ConfigBatch, stage: Any, context_bytes: float | None, correction: PeakCorrection
) -> dict[str, Any]:
    """Bytes by kind of some stages ([m, 1 or n]) of every row: [m, n]."""
    inside, last = stage < rows.pp, stage == rows.pp - 1
    held = stage_parameters(rows, stage)
    owned = owned_parameters(rows, held, stage_routed_parameters(rows, stage))
    layers = rows.num_layers / rows.pp
    message, terms = message_bytes(rows), terms_of(rows)
    kept, layer = layer_bytes(rows.of_stages(stage))
    head = np.where(last, head_bytes(rows), 0.0)
    flying = in_flight(rows, stage)
    activations = flying * layers * kept + np.maximum(layer - head, 0.0)
    ends, buffers = _ends_on_gpu(rows, stage)
    activations = activations + flying * ends
    context = process_bytes(rows) if context_bytes is None else float(context_bytes)
    # Sent outputs are given up on a GPU; on a CPU rank `buffer_bytes` covers the few of plain 1F1B.
    stages = {
        "weights": rows.element_bytes * held,
        "grads": rows.gradient_bytes * held,
        "optimizer": rows.optimizer_bytes * owned
        + (terms.parameter_bytes * held + terms.layer_bytes * layers),
        "activations": activations,
        "logits": head,
        "buffers": np.broadcast_to(buffer_bytes(rows), held.shape)
        + buffers
        + np.where(rows.on_cpu & (rows.vpp > 1), rows.vpp * flying * message, 0.0),
        "context": np.broadcast_to(context, held.shape),
    }
    moving = stages["activations"] + stages["logits"] + stages["buffers"]
    stages["fragmentation"] = (FRAGMENTATION - 1) * moving + _embedding_gap(rows, stage)
    if correction != AS_PREDICTED:
        for name in MOVING:
            stages[name] = correction.moving * stages[name]
        stages["context"] = np.maximum(stages["context"] + correction.fixed_bytes, 0.0)
    if np.any(copied := gradient_copy_bytes(rows)):
        free = correction.moving * FRAGMENTATION * moving
        stages["optimizer"] = stages["optimizer"] + np.maximum(copied * owned - free, 0.0)
    return {name: np.where(inside, values, 0.0) for name, values in stages.items()}


def _embedding_gap(rows: ConfigBatch, stage: Any) -> Any:
    """[m, n] bytes for the gradient of the embedding before it is added to the others, in plain
    torch on a GPU. Where logits have been it finds room. A first stage without them frees its
    activations by then, but in pieces with others between them."""
    gradient = rows.element_bytes * rows.padded_vocab_size / rows.tp * rows.hidden_size
    return np.where(rows.plain_on_gpu & (rows.pp > 1) & (stage == 0), gradient, 0.0)


def _ends_on_gpu(rows: ConfigBatch, stage: Any) -> tuple[Any, Any]:
    """What the ends of a pipeline make different in plain torch on a GPU, [m, n] each: bytes of a
    micro-batch in flight, and others."""
    gpu, message, last = rows.plain_on_gpu, message_bytes(rows), stage == rows.pp - 1
    # A stage gives up what it has sent, unless it is only the input of what is recomputed.
    sent = np.where(last, 0.0, (1 - rows.recomputed_share) * message)
    mask = np.where(rows.dropout & (stage == 0), message / rows.element_bytes, 0.0)
    unused = np.where(last & (rows.pp > 1), 2.0 * message, 0.0)
    return np.where(gpu, mask - sent, 0.0), np.where(gpu, -unused, 0.0)


def gradient_copy_bytes(rows: ConfigBatch) -> Any:
    """[n] bytes for each parameter that a rank owns, when the optimizer steps: an fp32 copy of half
    gradients (`shard_model_grad.float()` of megatron-core's distrib_optimizer.py, and likewise
    without it). What a step keeps for its passes is free by then. The precision-aware optimizer,
    whose state is less than 12 bytes, makes none."""
    makes = np.less(rows.gradient_bytes, 4) & np.greater_equal(rows.optimizer_bytes, 12)
    return np.where(makes, 4.0, 0.0)


def message_bytes(rows: ConfigBatch) -> Any:
    """Bytes of what one rank sends to the next stage, or receives, of one micro-batch."""
    shared = np.where(rows.sequence_parallel, rows.tp, 1)
    return rows.element_bytes * rows.tokens * rows.hidden_size / shared


def layer_bytes(rows: ConfigBatch) -> tuple[Any, Any]:
    """Bytes that a layer keeps of a micro-batch in flight, the mean over those that are recomputed
    and those that are not; and what its backward pass adds.

    The latter when the head is done and its bytes are free again; a layer recomputed whole stands
    there too, unless others of its chunk have just made room.
    """
    if (x := rows.experts) is None:
        return _layer_bytes(rows)
    plain = rows.change(experts=None)
    shared = plain.change(ffn_hidden_size=x.moe_shared_expert_intermediate_size)
    dense = _layer_bytes(plain)
    other = _layer_bytes(shared, experts.saved_bytes(rows), experts.working_bytes(rows))
    kept = x.share * other[0] + (1 - x.share) * dense[0]
    some, rest = np.greater(x.share, 0), np.less(x.share, 1)
    return kept, np.maximum(np.where(rest, dense[1], 0.0), np.where(some, other[1], 0.0))


def _layer_bytes(rows: ConfigBatch, routed: Any = None, working: Any = 0.0) -> tuple[Any, Any]:
    """Of a layer whose experts keep some bytes and work on others."""
    saved, share = layer_activation_bytes(rows), rows.recomputed_share
    core = _recomputed_core_bytes(rows, saved)
    if routed is not None:
        saved = saved + routed
    kept = share * message_bytes(rows) + (1 - share) * saved
    # In plain torch what the activation gave has a gradient of its own, and of GELU the derivative
    # is made of columns, unless a compiler makes it one kernel.
    derivative = np.where(rows.mlp_matrices == 2, 4.0, 1.0)
    matrices = rows.mlp_matrices + np.where(rows.plain_on_gpu, derivative, 0.0)
    mlp = matrices * rows.ffn_hidden_size / rows.tp
    again = np.where(share == 1, saved, core)
    gathered = np.where(rows.plain_on_gpu, gathered_bytes(rows), 0.0)
    return kept, rows.element_bytes * rows.tokens * mlp + again + working + gathered


def _recomputed_core_bytes(rows: ConfigBatch, saved: Any) -> Any:
    """What selective recomputation brings back of one layer."""
    selective = rows.recompute == RECOMPUTE_SELECTIVE
    if not np.any(selective):
        return 0.0
    whole = layer_activation_bytes(rows.change(recompute=np.full(len(rows), RECOMPUTE_NONE)))
    return np.where(selective, np.maximum(whole - saved, 0.0), 0.0)


def head_bytes(rows: ConfigBatch) -> Any:
    """Logits of a part of the tokens and what becomes of them, and the final norm; in plain torch
    also the gradient of the output weights before it is added to the others. Where logits are not
    sharded, a rank has those of all tensor ranks at once."""
    columns = rows.padded_vocab_size / np.where(rows.logits_sharded, rows.tp, 1)
    width = rows.logits_bytes
    shared = np.where(rows.sequence_parallel, rows.tp, 1)
    norm = 4.0 * rows.element_bytes * rows.tokens * rows.hidden_size / shared
    weights = rows.element_bytes * rows.padded_vocab_size / rows.tp * rows.hidden_size
    # Of parts the last one's and the sum of those before.
    alone = np.where(rows.plain_torch, weights, 0.0) * np.where(
        np.greater(rows.logits_chunks, 1), 2, 1
    )
    logits = rows.tokens * columns / rows.logits_chunks
    # On a GPU the wide copies are given up before the weights have a gradient.
    together = np.maximum(width * logits, rows.element_bytes * logits + alone) + norm / 2
    return np.where(rows.plain_on_gpu, together, width * logits + norm + alone)


def gathered_bytes(rows: ConfigBatch) -> Any:
    """The input of a matrix product that sequence parallel ranks have gathered."""
    whole = rows.element_bytes * rows.tokens * rows.hidden_size
    return np.where(rows.sequence_parallel, whole, 0.0)


def buffer_bytes(rows: ConfigBatch) -> Any:
    """Gathered inputs, workspace of unfused attention (`DotProductAttention` of megatron-core),
    messages under way, and what ranks that share samples exchange."""
    # In plain torch on a GPU a layer's own: the head has none.
    gathered = np.where(rows.plain_on_gpu, 0.0, gathered_bytes(rows))
    scores = rows.tokens * rows.num_attention_heads / rows.tp * rows.seq_length
    # Beside what the softmax keeps: the buffer and the result of the product (or, backward, the
    # gradient of what the softmax gave). In fp32 four copies of 4 bytes and the buffer, less the
    # six bytes that are kept.
    each = np.where(rows.softmax_in_fp32, 8.0, 2.0 * rows.element_bytes)
    workspace = np.where(rows.fused_attention, 0.0, each * scores)
    # In plain torch on a GPU two, of stages but the last.
    messages = np.where(rows.plain_on_gpu, 2.0, 4.0) * message_bytes(rows)
    found = gathered + workspace + np.where(rows.pp > 1, messages, 0.0)
    return found + context.working_bytes(rows) if context.is_shared(rows) else found


def static_bytes(rows: ConfigBatch) -> Any:
    """Bytes of weights, gradients and optimizer on the stage that holds most: [n]; a lower bound of
    the peak that is cheap."""
    rows = rows.full()
    held = stage_parameters(rows)
    owned = owned_parameters(rows, held, stage_routed_parameters(rows))
    return ((rows.element_bytes + rows.gradient_bytes) * held + rows.optimizer_bytes * owned).max(
        axis=0
    )
