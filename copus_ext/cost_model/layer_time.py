"""Seconds of one micro-batch: computation by part of the model, and its messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from copus_ext.cost_model import context, experts
from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.extras import terms_of
from copus_ext.cost_model.kernels import (
    collective_s,
    gemm_s,
    hidden_s,
    meeting_s,
    moved_s,
    network_bytes_per_s,
    node_bytes_per_s,
)
from copus_ext.cost_model.rows import RECOMPUTE_SELECTIVE, ConfigBatch

FORWARD_LAUNCHES, BACKWARD_LAUNCHES = 28, 40
"""Kernels of a layer, unfused."""
_FUSED_ATTENTION_SAVES = 6
_MLP_LAUNCHES = 6
"""Of them, those of an MLP in one direction."""
_SCORE_BYTES, _SCORE_DROPOUT_BYTES = 8.0, 5.0
"""Of a score of unfused attention in half precision, forward: written, read and written by the
fused softmax, read; and what dropout moves more, its mask among it."""
_CPU_SCORE_BYTES = 14.0
"""The same on CPU ranks, whose constants go with it."""
_FP32_SOFTMAX_BYTES, _FP32_SOFTMAX_BACKWARD_BYTES = 32.0, 48.0
"""Of a score in plain torch: written, cast to fp32, masked, softmax, cast back, read; and backward,
where the mask is put on a copy. tests/unit/test_attention_bytes.py traces both."""
_TORCH_NORMS_BYTES = 104.0
"""Of an element of the residual stream, forward, what two RMSNorms in plain torch move more than
fused ones. Their kernels (to fp32, square, mean, scale, back, times the weight) read and write 36
bytes forward in place of 4, and backward about three times as much, where everything else here
moves 1.5 times as much. That is in this number, too."""
_ROTATED_BYTES, _ROTATED_TORCH_BYTES = 4.0, 16.0
"""Of an element of queries and keys that are rotated, forward: in one kernel, and in plain torch
(a rotated copy, two products, their sum)."""
_LEGACY_GATE_BYTES = 4.0
"""Of an element of a gated MLP, forward, what two kernels move more than one."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Seconds of one micro-batch through one layer or part, without communication."""

    forward: Any
    backward: Any
    """Backward pass without recomputation."""
    recompute: Any
    """What is computed again in the backward pass."""
    launch: Any = 0.0
    """Of all three together, what starting kernels takes."""
    behind: tuple[tuple[Any, Any], ...] = ()
    """Of the backward pass, the gradients of the inputs and of the weights of each wide product,
    behind which collectives can hide."""

    def times(self, factor: float) -> Pass:
        return Pass(
            forward=factor * self.forward,
            backward=factor * self.backward,
            recompute=factor * self.recompute,
            launch=factor * self.launch,
        )


def attention_s(rows: ConfigBatch, c: Constants) -> Any:
    """Seconds of the core of the attention, forward: scores, softmax, values."""
    width = rows.num_attention_heads * rows.kv_channels / rows.tp
    keys = context.keys_of_a_token(rows)
    flops = 4.0 * rows.tokens * keys * width
    unfused = _unfused(rows) * _scores(rows)
    num_bytes = np.where(rows.fused_attention, 8.0 * rows.tokens * width, unfused)
    if context.is_shared(rows):
        num_bytes = num_bytes + context.joined_bytes(rows)
    return flops / (rows.peak_flops * c.attention_efficiency) + moved_s(rows, c, num_bytes)


def _unfused(rows: ConfigBatch) -> Any:
    """Bytes moved for a score, forward, where attention is not one kernel."""
    each = np.where(rows.softmax_in_fp32, _FP32_SOFTMAX_BYTES, _SCORE_BYTES)
    each = each + np.where(rows.dropout, _SCORE_DROPOUT_BYTES, 0.0)
    return np.where(rows.on_cpu, _CPU_SCORE_BYTES, each)


def core_backward(rows: ConfigBatch, c: Constants, core: Any) -> Any:
    """Seconds of the same backward; a fused kernel computes the scores again, and a softmax in
    plain torch moves less than twice as much.

    Args:
        core: [n] seconds forward.
    """
    less = 2.0 * _FP32_SOFTMAX_BYTES - _FP32_SOFTMAX_BACKWARD_BYTES
    less = np.where(rows.softmax_in_fp32 & np.logical_not(rows.on_cpu), less, 0.0)
    twice = np.where(rows.fused_attention, 2.5, 2.0) * core
    return twice - moved_s(rows, c, less * _scores(rows))


def _scores(rows: ConfigBatch) -> Any:
    """Of all tokens and heads of a rank."""
    return rows.tokens * rows.num_attention_heads / rows.tp * context.keys_of_a_token(rows)


def _products(rows: ConfigBatch, width: Any) -> list[tuple[Any, Any]]:
    """(inner, columns) of the four matrix products of a layer on one rank, its MLP so wide."""
    heads = rows.num_attention_heads * rows.kv_channels / rows.tp
    up = (rows.mlp_matrices - 1) * width / rows.tp
    return [
        (rows.hidden_size, rows.attention_width / rows.tp),
        (heads, rows.hidden_size),
        (rows.hidden_size, up),
        (width / rows.tp, rows.hidden_size),
    ]


def layer(rows: ConfigBatch, c: Constants, waits: tuple[Any, Any] = (0.0, 0.0)) -> Pass:
    """One transformer layer, the mean over those that are recomputed and those that are not, and
    over those with experts and those without.

    Args:
        waits: further seconds of the GPU, forward and backward, behind which kernels are started.
    """
    ffn = rows.ffn_hidden_size
    dense = _layer(rows, c, _products(rows, ffn), ffn, waits)
    if rows.experts is None:
        return dense
    width = rows.experts.moe_shared_expert_intermediate_size
    # Efficiencies are of one column at least; without a shared expert there are no such products.
    products = _products(rows, np.maximum(width, 1))
    other = _layer(rows, c, products, width, waits, is_moe=True)
    share = rows.experts.share
    return Pass(
        forward=share * other.forward + (1 - share) * dense.forward,
        backward=share * other.backward + (1 - share) * dense.backward,
        recompute=share * other.recompute + (1 - share) * dense.recompute,
        launch=share * other.launch + (1 - share) * dense.launch,
        behind=tuple(
            tuple(share * a + (1 - share) * b for a, b in zip(*pair))
            for pair in zip(other.behind, dense.behind)
        ),
    )


def _layer(
    rows: ConfigBatch,
    c: Constants,
    shapes: list[tuple[Any, Any]],
    width: Any,
    waits: tuple[Any, Any],
    *,
    is_moe: bool = False,
) -> Pass:
    """A layer with an MLP of some width, and with routed experts besides."""
    tokens = rows.tokens
    forward_s = [gemm_s(rows, c, tokens, n, k) for k, n in shapes]
    wide = [(gemm_s(rows, c, tokens, k, n), gemm_s(rows, c, k, n, tokens)) for k, n in shapes]
    backward_s = [inputs + weights for inputs, weights in wide]
    first_launches, second_launches = FORWARD_LAUNCHES, BACKWARD_LAUNCHES
    if is_moe:
        shared = np.asarray(width) > 0
        forward_s = forward_s[:2] + [np.where(shared, s, 0.0) for s in forward_s[2:]]
        backward_s = backward_s[:2] + [np.where(shared, s, 0.0) for s in backward_s[2:]]
        routed = experts.work_s(rows, c)
        forward_s.append(routed[0])
        backward_s.append(routed[1])
        starts = experts.launches(rows)
        first_launches = FORWARD_LAUNCHES - np.where(shared, 0, _MLP_LAUNCHES) + starts
        second_launches = BACKWARD_LAUNCHES - np.where(shared, 0, _MLP_LAUNCHES) + 2 * starts
    products, gradients = sum(forward_s), sum(backward_s)
    elementwise = moved_s(rows, c, tokens * _elementwise_bytes(rows, width))
    core = attention_s(rows, c)
    if context.is_shared(rows):
        more = context.launches(rows)
        first_launches, second_launches = first_launches + more, second_launches + 2 * more
    saved = np.where(rows.fused_attention, _FUSED_ATTENTION_SAVES, 0)
    forward, first = _with_launches(
        products + core + elementwise + waits[0], first_launches - saved, c
    )
    work = gradients + core_backward(rows, c, core) + 1.5 * elementwise + waits[1]
    backward, second = _with_launches(work, second_launches - 2 * saved, c)
    selective = np.where(rows.recompute == RECOMPUTE_SELECTIVE, core, 0.0)
    again = rows.recomputed_share * forward + selective
    launch = (1.0 + rows.recomputed_share) * first + second
    # Products that wait for their kernels hide as much more.
    behind = tuple((a * backward / work, b * backward / work) for a, b in wide[::2])
    return Pass(forward=forward, backward=backward, recompute=again, launch=launch, behind=behind)


def _elementwise_bytes(rows: ConfigBatch, width: Any) -> Any:
    """Bytes that a layer moves for a token outside products and attention, forward.

    Norms, dropout and residuals are whole on every rank without sequence parallelism; what is
    wider than that is cut over the ranks. The constants of CPU ranks go without what plain torch
    moves more.
    """
    on_gpu = np.logical_not(rows.on_cpu)
    shared = np.where(rows.sequence_parallel, rows.tp, 1)
    # torch.nn.LayerNorm is one kernel.
    unfused = rows.has_torch_norms & (np.equal(rows.norm_vectors, 1) | np.equal(rows.norm, 2))
    stream = 28.0 + np.where(on_gpu & unfused, _TORCH_NORMS_BYTES, 0.0)
    is_te = np.equal(rows.implementation, 0)
    rotated = np.where(is_te, _ROTATED_BYTES, _ROTATED_TORCH_BYTES)
    rotated = np.where(on_gpu & np.equal(rows.learned_positions, 0), rotated, 0.0)
    heads = (rows.num_attention_heads + rows.num_query_groups) * rows.kv_channels
    two_kernels = np.equal(rows.implementation, 2) & np.equal(rows.mlp_matrices, 3)
    gate = 2.0 * rows.mlp_matrices + np.where(two_kernels, _LEGACY_GATE_BYTES, 0.0)
    return stream * rows.hidden_size / shared + (rotated * heads + gate * width) / rows.tp


def _with_launches(work: Any, launches: Any, c: Constants) -> tuple[Any, Any]:
    """A pass cannot beat the time it takes to start its kernels; the two join smoothly.

    Returns:
        Seconds of the pass, and how many of them would go if kernels started at once, by its slope.
    """
    q = c.launch_sharpness
    launch = (launches * c.launch_s) ** q
    total = work**q + launch
    seconds = total ** (1 / q)
    return seconds, seconds * launch / total


def head(rows: ConfigBatch, c: Constants) -> Pass:
    """Final norm, output layer and loss; computed again if they are in chunks of tokens."""
    chunks, columns = rows.logits_chunks, rows.padded_vocab_size / rows.tp
    tokens = rows.tokens / chunks
    # Legacy code gathers the logits, and every rank computes the whole loss.
    seen = np.where(rows.logits_sharded, columns, rows.padded_vocab_size)
    loss = moved_s(rows, c, 14.0 * tokens * seen)
    forward = gemm_s(rows, c, tokens, columns, rows.hidden_size) + loss
    backward = gemm_s(rows, c, tokens, rows.hidden_size, columns)
    backward = backward + gemm_s(rows, c, rows.hidden_size, columns, tokens) + loss
    again = np.where(np.greater(chunks, 1), forward, 0.0)
    # Gradients of the output weights are added up over the parts.
    sums = moved_s(rows, c, 6.0 * (chunks - 1) * columns * rows.hidden_size)
    backward = chunks * backward + np.where(rows.plain_torch, sums, 0.0)
    return Pass(forward=chunks * forward, backward=backward, recompute=chunks * again)


def embedding(rows: ConfigBatch, c: Constants) -> Pass:
    once = moved_s(rows, c, 6.0 * rows.tokens * rows.hidden_size)
    return Pass(forward=once, backward=once, recompute=0.0 * once)


def tp_collective_s(rows: ConfigBatch, c: Constants, num_bytes: Any) -> Any:
    """Seconds to reduce-scatter or to all-gather a message over the tensor-parallel ranks."""
    return collective_s(rows, c, num_bytes, rows.tp)


def tp_layer(rows: ConfigBatch, c: Constants, plain: Pass) -> Pass:
    """Seconds of tensor-parallel collectives of one layer and micro-batch, the mean over layers.

    Without sequence parallelism two all-reduces forward and two backward; with it the same volume
    as reduce-scatters and all-gathers, and two more gathers backward for the inputs that were kept
    in parts. Backward, what belongs to the inputs of a layer's two wide products travels while
    those compute: reductions behind the gradient of weights, gathers behind that of inputs
    (megatron-core, `LinearWithGradAccumulationAndAsyncCommunication`). Ranks meet twice a pass,
    behind attention and behind the MLP.
    """
    half = tp_collective_s(rows, c, rows.element_bytes * rows.tokens * rows.hidden_size)
    # gloo reduces everything and keeps a part: each of the two reduce-scatters counts twice.
    more = np.where(np.logical_and(rows.sequence_parallel, rows.on_cpu), 2.0, 0.0)
    forward = (4.0 + more) * half
    backward = (np.where(rows.sequence_parallel, 2.0, 0.0) + more) * half
    for inputs, weights in plain.behind:
        apart = hidden_s(rows, half, inputs) + hidden_s(rows, half, weights)
        whole = hidden_s(rows, 2.0 * half, weights)
        backward = backward + np.where(rows.sequence_parallel, apart, whole)
    meets = np.greater(rows.tp, 1)
    forward = forward + np.where(meets, 2.0 * meeting_s(rows, plain.forward / 2.0), 0.0)
    backward = backward + np.where(meets, 2.0 * meeting_s(rows, plain.backward / 2.0), 0.0)
    if (x := rows.experts) is not None:
        # Half of them are those of the MLP, or of the shared expert.
        lacks = np.equal(x.moe_shared_expert_intermediate_size, 0)
        there = 1.0 - np.where(lacks, 0.5, 0.0) * x.share
        forward, backward = there * forward, there * backward
    return Pass(forward=forward, backward=backward, recompute=rows.recomputed_share * forward)


def ep_layer(rows: ConfigBatch, c: Constants) -> Pass | None:
    """Seconds in which rows go to experts and back, of one layer and micro-batch, the mean over all
    layers; None for a dense model."""
    if rows.experts is None:
        return None
    forward, backward = (rows.experts.share * way for way in experts.messages_s(rows, c))
    return Pass(forward=forward, backward=backward, recompute=rows.recomputed_share * forward)


def cp_layer(rows: ConfigBatch, c: Constants, plain: Pass) -> Pass | None:
    """Seconds in which ranks that share samples wait for keys and values, of one layer and
    micro-batch; None where none do.
    """
    if not context.is_shared(rows):
        return None
    core, slow = attention_s(rows, c), c.factors.compute
    forward, backward = context.exchange_s(rows, c, core, core_backward(rows, c, core))
    meets = context.meetings(rows)
    each = np.maximum(meets, 1.0)
    forward = forward + c.factors.tp * meets * meeting_s(rows, plain.forward / each)
    backward = backward + c.factors.tp * meets * meeting_s(rows, plain.backward / each)
    # Attention alone is computed again without the rest of the layer.
    again = np.where(rows.recompute == RECOMPUTE_SELECTIVE, forward, 0.0)
    if np.any(is_ring := context.is_ring(rows)):
        # What comes round a ring comes while kernels are started, too.
        waits = np.where(is_ring, forward, 0.0) / slow, np.where(is_ring, backward, 0.0) / slow
        waiting = layer(rows, c, waits)
        forward = np.where(is_ring, slow * (waiting.forward - plain.forward), forward)
        backward = np.where(is_ring, slow * (waiting.backward - plain.backward), backward)
    again = again + rows.recomputed_share * forward
    return Pass(forward=forward, backward=backward, recompute=again)


def tp_ends_s(rows: ConfigBatch, c: Constants) -> tuple[Any, Any]:
    """Seconds of collectives of embedding and head, per micro-batch: forward on the first stage;
    forward and backward together on the last."""
    message = rows.element_bytes * rows.tokens * rows.hidden_size
    first = 2.0 * tp_collective_s(rows, c, message)
    losses = 6.0 * tp_collective_s(rows, c, 4.0 * rows.tokens)
    logits = tp_collective_s(rows, c, rows.element_bytes * rows.tokens * rows.padded_vocab_size)
    losses = np.where(rows.logits_sharded, losses, logits)
    gather = np.where(rows.sequence_parallel, 3.0, 2.0) * tp_collective_s(rows, c, message)
    return first, losses + gather


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Seconds of one micro-batch by part of the model, computation and collectives apart."""

    layer: Pass
    """Computation of one layer."""
    embedding: Pass
    head: Pass
    """Of final norm, output layer and loss."""
    tp_layer: Pass
    """Tensor-parallel collectives of one layer."""
    ep_layer: Pass | None
    """Rows that go to experts and back, of one layer; None for a dense model."""
    cp_layer: Pass | None
    """Exchange between ranks that share samples, of one layer; None where none do."""
    tp_first: Any
    """Collectives of the embedding, forward."""
    tp_last: Any
    """Collectives of the head, forward and backward together; half of it each."""
    tp_last_again: Any
    """Those of the head when it is computed again."""

    @classmethod
    def of(cls, rows: ConfigBatch, c: Constants) -> MicroBatch:
        (first, last), slow = tp_ends_s(rows, c), c.factors
        rows_s, inner = ep_layer(rows, c), layer(rows, c)
        return cls(
            layer=inner.times(slow.compute),
            embedding=embedding(rows, c).times(slow.compute),
            head=head(rows, c).times(slow.compute),
            tp_layer=tp_layer(rows, c, inner).times(slow.tp),
            ep_layer=rows_s and rows_s.times(slow.tp),
            cp_layer=cp_layer(rows, c, inner),
            tp_first=slow.tp * first,
            tp_last=slow.tp * last,
            tp_last_again=slow.tp * np.where(np.greater(rows.logits_chunks, 1), last / 2, 0.0),
        )

    @property
    def forward(self) -> tuple[Any, Any, Any]:
        """Forward pass of the embedding, of one layer, and of the head, collectives included."""
        inner = self.layer.forward + self.tp_layer.forward
        for one in filter(None, (self.ep_layer, self.cp_layer)):
            inner = inner + one.forward
        return (
            self.embedding.forward + self.tp_first,
            inner,
            self.head.forward + self.tp_last / 2,
        )

    @property
    def backward(self) -> tuple[Any, Any, Any]:
        """The same of the backward pass, recomputation included."""
        inner = self.layer.backward + self.layer.recompute
        inner = inner + self.tp_layer.backward + self.tp_layer.recompute
        for one in filter(None, (self.ep_layer, self.cp_layer)):
            inner = inner + one.backward + one.recompute
        return (
            self.embedding.backward,
            inner,
            self.head.backward + self.head.recompute + self.tp_last / 2 + self.tp_last_again,
        )


def hop_bytes(rows: ConfigBatch) -> Any:
    """Bytes of a pipeline message of one rank: [n]."""
    shared = np.where(np.logical_or(rows.sequence_parallel, rows.scatters_messages), rows.tp, 1)
    of_extras = terms_of(rows).message_row_bytes
    whole = rows.element_bytes * rows.hidden_size
    row = np.where(np.greater(of_extras, 0), of_extras, whole)
    return row * rows.tokens / shared


def _handling_s(rows: ConfigBatch, c: Constants) -> Any:
    """Seconds in which extras write a message, and read one: [n]."""
    terms = terms_of(rows)
    numbers = rows.tokens * rows.hidden_size / np.where(rows.sequence_parallel, rows.tp, 1)
    moved = moved_s(rows, c, terms.message_moved_bytes * numbers)
    return c.factors.compute * (moved + terms.message_kernels * c.launch_s)


def boundaries_between_nodes(rows: ConfigBatch) -> Any:
    """Whether the messages over a boundary go between nodes: [max pp, n], in the order of
    `p2p_time_s`."""
    stage = np.arange(int(np.max(rows.pp)))[:, None]
    own = rows.tp * rows.cp
    stride = np.where(rows.use_tp_pp_dp_mapping, own, own * rows.dp)
    following = np.where(stage + 1 < rows.pp, stage + 1, 0)
    crosses = (stage * stride) // rows.gpus_per_node != (following * stride) // rows.gpus_per_node
    crosses |= stride >= rows.gpus_per_node
    # Pipelines that do not fill nodes evenly begin somewhere in a node: some replica crosses.
    whole = np.where(rows.use_tp_pp_dp_mapping, own * rows.pp, rows.gpus_per_node)
    uneven = (whole % rows.gpus_per_node != 0) & (rows.gpus_per_node % whole != 0)
    return crosses | (uneven & (rows.dp > 1))


def _boundary_bytes_per_s(rows: ConfigBatch, c: Constants, crosses: Any) -> Any:
    """Of a rank over boundaries between stages, of which some are between nodes."""
    network = network_bytes_per_s(rows, c) / rows.gpus_per_node
    return np.where(crosses, network, node_bytes_per_s(rows, c))


def tied_s(rows: ConfigBatch, c: Constants) -> Any:
    """Seconds in which the first and the last stage add up the gradients of an embedding that both
    hold: [n]. megatron-core does it once a step, after all other reductions
    (`_allreduce_word_embedding_grads`)."""
    crosses = np.take_along_axis(
        boundaries_between_nodes(rows), np.asarray(rows.pp, dtype=int)[None] - 1, axis=0
    )[0]
    num_bytes = rows.gradient_bytes * rows.padded_vocab_size / rows.tp * rows.hidden_size
    sent = num_bytes / _boundary_bytes_per_s(rows, c, crosses) + c.tp_latency_s
    return np.where(np.logical_and(rows.tied, rows.pp > 1), c.factors.pp * sent, 0.0)


def p2p_time_s(rows: ConfigBatch, c: Constants) -> Any:
    """Seconds of one pipeline message over every boundary.

    Every tensor-parallel rank sends its own copy, or its part under sequence parallelism and where
    messages are scattered; all GPUs of a node send at once.

    Returns:
        [max pp, n]: from stage r to r + 1; the last row from the last stage to the first.
    """
    bandwidth = _boundary_bytes_per_s(rows, c, boundaries_between_nodes(rows))
    sent = c.factors.pp * (c.exchange_s + hop_bytes(rows) / bandwidth)
    # With sequence parallelism the receivers go on with their parts.
    gathers = np.logical_and(rows.scatters_messages, np.logical_not(rows.sequence_parallel))
    whole = rows.element_bytes * rows.tokens * rows.hidden_size
    sent = sent + np.where(gathers, c.factors.tp * tp_collective_s(rows, c, whole), 0.0)
    return sent + _handling_s(rows, c)


def copies_in_node(rows: ConfigBatch) -> Any:
    """Copies of a weight that are on the same node: [n]."""
    node = rows.gpus_per_node
    # Ranks that share samples follow each other; so do replicas, unless pipelines come before.
    near = np.minimum(rows.cp, np.maximum(node // rows.tp, 1))
    whole = np.maximum(node // (rows.tp * rows.cp * rows.pp), 1)
    mapped = near * np.minimum(rows.dp, whole)
    inside = np.minimum(rows.copies, np.maximum(node // rows.tp, 1))
    return np.where(rows.use_tp_pp_dp_mapping, mapped, inside)


def ring_s(rows: ConfigBatch, c: Constants, num_bytes: Any) -> Any:
    """Seconds to reduce-scatter or all-gather a buffer over the copies of the weights (half an
    all-reduce)."""
    return _ring_s(rows, c, num_bytes, rows.copies, copies_in_node(rows))


def expert_ring_s(rows: ConfigBatch, c: Constants, num_bytes: Any) -> Any:
    """The same over the copies of an expert."""
    span = experts.experts_of(rows).ep * experts.experts_of(rows).etp
    apart = np.where(rows.use_tp_pp_dp_mapping, span * rows.pp, span)
    inside = np.minimum(rows.expert_copies, np.maximum(rows.gpus_per_node // apart, 1))
    return _ring_s(rows, c, num_bytes, rows.expert_copies, inside)


def _ring_s(rows: ConfigBatch, c: Constants, num_bytes: Any, ranks: Any, inside: Any) -> Any:
    """The smaller of one ring through all ranks and a ring inside the nodes followed by rings
    across them; `inside` of the ranks share a node.
    """
    nodes = np.ceil(ranks / inside)
    fast = node_bytes_per_s(rows, c)
    lane = network_bytes_per_s(rows, c) / rows.gpus_per_node
    slowest = np.where(nodes > 1, np.minimum(fast, lane * inside), fast)
    flat = (ranks - 1) / ranks * num_bytes / slowest
    staged = (inside - 1) / inside * num_bytes / fast
    staged = staged + (nodes - 1) / nodes * num_bytes / inside / lane
    once = c.factors.dp * (np.minimum(flat, staged) + c.tp_latency_s / 2)
    return np.where(ranks > 1, once, 0.0)
