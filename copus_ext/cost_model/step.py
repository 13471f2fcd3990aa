"""Seconds of one optimizer step, and where they go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from copus_ext.cost_model import layer_time
from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.extras import terms_of
from copus_ext.cost_model.kernels import gemm_s
from copus_ext.cost_model.layer_time import MicroBatch
from copus_ext.cost_model.memory import (
    owned_parameters,
    stage_parameters,
    stage_routed_parameters,
)
from copus_ext.cost_model.rows import ConfigBatch, bucket_parameters
from copus_ext.cost_model.schedule import pipeline_time

PARTS = ("compute", "recompute", "bubble", "tp", "pp", "dp", "optimizer", "host", "ep", "cp")
_ADAM_BYTES = 30.0
"""Adam reads gradient, master and two moments, and writes master, moments and weight, per owned
parameter."""
_SWEEP_BYTES = 16.0
"""Gradient norm, clipping and zeroing, per parameter."""
_HIDDEN_SHARE = 0.7
"""Part of the last backward pass behind which a reduction can hide."""
Ring = Callable[[Any], Any]
"""Seconds to send so many bytes once round a ring."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step of many configurations."""

    step_s: Any
    """[n] seconds."""
    parts: dict[str, Any]
    """[n] seconds of each of `PARTS`, along the stage that finishes last; they add up to
    `step_s`."""
    hiding: Any
    """[2, 5, n] of reducing the gradients and of gathering the weights, both in `dp`: seconds that
    nothing hides; then twice seconds that are sent, and those that pass meanwhile. What shows is
    the greatest of the first and of both differences."""
    launch_s: Any
    """[n] seconds of `compute` and `recompute` that starting kernels takes."""
    across: Any
    """[2, n] shares of `pp` and of `dp` that go between nodes."""

    @classmethod
    def unknown(cls, num: int) -> StepTime:
        """Room for so many configurations, none priced yet."""
        parts = {name: np.full(num, np.nan) for name in PARTS}
        return cls(
            step_s=np.full(num, np.nan),
            parts=parts,
            hiding=np.full((2, 5, num), np.nan),
            launch_s=np.full(num, np.nan),
            across=np.full((2, num), np.nan),
        )

    def put(self, at: Any, found: StepTime) -> None:
        self.step_s[at] = found.step_s
        self.hiding[..., at] = found.hiding
        self.launch_s[at] = found.launch_s
        self.across[:, at] = found.across
        for name in PARTS:
            self.parts[name][at] = found.parts[name]

    def take(self, at: Any) -> StepTime:
        parts = {name: values[at] for name, values in self.parts.items()}
        return StepTime(
            step_s=self.step_s[at],
            parts=parts,
            hiding=self.hiding[..., at],
            launch_s=self.launch_s[at],
            across=self.across[:, at],
        )


@dataclass(frozen=True, kw_only=True)
class _Stages:
    """Seconds of one micro-batch on every stage: [pp, n], chunks together."""

    compute: Any
    recompute: Any
    launch: Any
    tp_forward: Any
    tp_backward: Any
    ep: Any
    """Rows that go to experts and back; None for a dense model."""
    cp: Any
    """Exchange between ranks that share samples; None where none do."""
    forward: Any
    backward: Any


@dataclass(frozen=True, kw_only=True)
class EndOfStep:
    """What follows the last backward pass on every stage: [pp, n] or what broadcasts to it."""

    gradient_bytes: Any
    """Gradients of a rank that go round the replicas."""
    passes: Any
    """How often: once to reduce-scatter, twice to all-reduce, as gloo always does."""
    min_bytes: Any
    """Gradients whose reduction nothing can hide, sent as often; 0 where nothing hides any."""
    hidden_s: Any
    """Seconds of computation behind which the others can hide."""
    gather_bytes: Any
    """Weights gathered again; 0 without."""
    optimizer_s: Any
    tied_s: Any = 0.0
    """Seconds to add up gradients of an embedding that two stages hold."""
    first_bytes: Any = 0.0
    """Of the weights, those of the first bucket: nothing hides them on the first stage."""
    needed: tuple[tuple[Any, Any], tuple[Any, Any]] = ((1.0, 0.0), (1.0, 0.0))
    """Two shares of the weights, and the seconds that pass before a pass needs so many of them."""
    further_bytes: Any = 0.0
    """What extras send once round the replicas besides."""
    routed: EndOfStep | None = None
    """The same of routed experts, whose bytes go round their own copies and are not among those
    above; None for a dense model."""

    def seconds(self, ring: Ring, routed_ring: Ring | None = None) -> tuple[Any, Any, Any]:
        """Seconds of the exposed reduction; of gathering, with those of a tied embedding; and of
        the optimizer.

        Args:
            ring: seconds to reduce-scatter or all-gather so many bytes over the replicas.
            routed_ring: the same over the copies of experts; needed for a mixture.
        """
        reduction, weights = self.hiding(ring, routed_ring)
        return shown_s(reduction), shown_s(weights) + self.further_s(ring), self.optimizer_s

    def hiding(self, ring: Ring, routed_ring: Ring | None = None) -> tuple[list[Any], list[Any]]:
        """The reduction and the weights as `StepTime.hiding`; arguments as of `seconds`."""
        whole, least = self.passes * ring(self.gradient_bytes), _sent_s(self.min_bytes, ring)
        gather, first = _sent_s(self.gather_bytes, ring), _sent_s(self.first_bytes, ring)
        if (r := self.routed) is not None:
            assert routed_ring is not None
            whole = whole + self.passes * _sent_s(r.gradient_bytes, routed_ring)
            least = least + _sent_s(r.min_bytes, routed_ring)
            gather = gather + _sent_s(r.gather_bytes, routed_ring)
            first = first + _sent_s(r.first_bytes, routed_ring)
        (part, early), (all_, late) = self.needed
        reduction = [self.passes * least, whole, self.hidden_s, whole, self.hidden_s]
        return reduction, [first, part * gather, early, all_ * gather, late]

    def further_s(self, ring: Ring) -> Any:
        """Seconds of what is sent besides: by extras, and for an embedding that two stages hold."""
        return _sent_s(self.further_bytes, ring) + self.tied_s


def shown_s(hiding: Sequence[Any]) -> Any:
    """Seconds of a reduction, or of gathering weights, that nothing hides."""
    least, one, passed, other, passed_later = hiding
    return np.maximum(least, np.maximum(one - passed, other - passed_later))


def _sent_s(num_bytes: Any, ring: Ring) -> Any:
    """Seconds to send so many bytes once round a ring; 0 for none."""
    return np.where(np.greater(num_bytes, 0), ring(num_bytes), 0.0)


def step_time(rows: ConfigBatch, c: Constants) -> StepTime:
    """Predicts the seconds of a step of every row."""
    rows = rows.full()
    times = StepTime.unknown(len(rows))
    shapes = np.stack([rows.pp, rows.vpp], axis=1).astype(np.int64)
    for pp, vpp in np.unique(shapes, axis=0):
        at = np.flatnonzero((shapes == (pp, vpp)).all(axis=1))
        times.put(at, _of_one_shape(rows.take(at), c, int(pp), int(vpp)))
    return times


def min_step_s(rows: ConfigBatch, c: Constants) -> Any:
    """A lower bound of the seconds of a step, for less than a simulation: every stage's own work,
    after the first micro-batch has come down to it; and, for the first stage, before the last
    gradient has come back up from there.

    Returns:
        [n] seconds.
    """
    rows = rows.full()
    least = np.empty(len(rows))
    for pp in np.unique(rows.pp):
        at = np.flatnonzero(rows.pp == pp)
        part = rows.take(at)
        stages = _stages(part, _micro_batch(part, c, int(pp)), int(pp))
        hop = layer_time.p2p_time_s(part, c)
        down = stages.forward / part.vpp + hop
        up = stages.backward / part.vpp + hop
        work = part.num_microbatches * (stages.forward + stages.backward)
        own = work + np.cumsum(down, axis=0) - down
        end = np.sum(_end_of_step(part, c, stages, int(pp)).seconds(*_rings(part, c)), axis=0)
        back = (own + np.cumsum(up, axis=0) - up).max(axis=0)
        least[at] = (
            np.maximum((own + end).max(axis=0), back + end[0]) + c.factors.compute * c.step_s
        )
    return least


def _rings(rows: ConfigBatch, c: Constants) -> tuple[Ring, Ring]:
    """Seconds of a ring through the replicas, and of one through the copies of experts."""
    return (
        functools.partial(layer_time.ring_s, rows, c),
        functools.partial(layer_time.expert_ring_s, rows, c),
    )


def _of_one_shape(rows: ConfigBatch, c: Constants, pp: int, vpp: int) -> StepTime:
    micro_batch = _micro_batch(rows, c, pp)
    stages = _stages(rows, micro_batch, pp)
    hop = layer_time.p2p_time_s(rows, c)
    count = rows.num_microbatches.astype(np.int64)
    forward, backward = _chunks(rows, c, micro_batch, stages, pp, vpp)
    clocks = pipeline_time(forward, backward, hop, count, vpp=vpp)
    rings = _rings(rows, c)
    end = _end_of_step(rows, c, stages, pp)
    both, optimizer = end.hiding(*rings), end.optimizer_s
    reduce, gather = shown_s(both[0]), shown_s(both[1]) + end.further_s(rings[0])
    done = clocks + reduce
    worst, columns = np.argmax(done + optimizer + gather, axis=0), np.arange(len(rows))

    def of(values: Any) -> Any:
        return np.broadcast_to(values, done.shape)[worst, columns]

    transfers = _transfers(hop, count, pp, vpp) + 2 * count * vpp * handled_s(rows, c, vpp)
    parts = {
        "compute": of(count * stages.compute),
        "recompute": of(count * stages.recompute),
        "tp": of(count * (stages.tp_forward + stages.tp_backward)),
        "pp": of(transfers),
        "dp": of(reduce + gather),
        "optimizer": of(optimizer),
        "host": np.full(len(count), c.factors.compute * c.step_s),
        "ep": np.zeros(len(count)),
        "cp": np.zeros(len(count)),
    }
    busy = parts["compute"] + parts["recompute"] + parts["tp"] + parts["pp"]
    if stages.ep is not None:
        parts["ep"] = of(count * stages.ep)
        busy = busy + parts["ep"]
    if stages.cp is not None:
        parts["cp"] = of(count * stages.cp)
        busy = busy + parts["cp"]
    bubble = of(clocks) - busy
    # Messages of the interleaved schedule may hide: what does not fit was not waited for.
    parts["pp"] = np.maximum(parts["pp"] + np.minimum(bubble, 0.0), 0.0)
    parts["bubble"] = np.maximum(bubble, 0.0)
    hiding = np.stack([[of(x) for x in one] for one in both])
    return StepTime(
        step_s=sum(parts.values()),
        parts=parts,
        hiding=hiding,
        launch_s=of(count * stages.launch),
        across=_across(rows, hop, pp),
    )


def _across(rows: ConfigBatch, hop: Any, pp: int) -> Any:
    """[2, n] shares of pipeline messages, and of what the replicas send, between nodes."""
    crosses = layer_time.boundaries_between_nodes(rows)
    between = pp if np.any(rows.vpp > 1) else pp - 1
    seconds = np.stack([hop, np.where(crosses, hop, 0.0)])[:, :between].sum(axis=1)
    messages = seconds[1] / seconds[0] if between else np.zeros(len(rows))
    return np.stack([messages, layer_time.copies_in_node(rows) < rows.copies])


def _micro_batch(rows: ConfigBatch, c: Constants, pp: int) -> MicroBatch:
    """Seconds of a layer are [n], or [pp, n] where stages differ in their layers with experts."""
    return MicroBatch.of(rows.of_stages(np.arange(pp)[:, None]), c)


def _stages(rows: ConfigBatch, parts: MicroBatch, pp: int) -> _Stages:
    layers = rows.num_layers / rows.pp
    stage = np.arange(pp)[:, None]
    first, last = stage == 0, stage == pp - 1

    def whole(inner: Any, at_first: Any = 0.0, at_last: Any = 0.0) -> Any:
        return layers * inner + np.where(first, at_first, 0.0) + np.where(last, at_last, 0.0)

    layer, table, head, tp = parts.layer, parts.embedding, parts.head, parts.tp_layer
    work_forward = whole(layer.forward, table.forward, head.forward)
    work_backward = whole(layer.backward, table.backward, head.backward)
    again = whole(layer.recompute, 0.0, head.recompute)
    send_forward = whole(tp.forward, parts.tp_first, parts.tp_last / 2)
    at_end = parts.tp_last / 2 + parts.tp_last_again
    send_backward = whole(tp.backward + tp.recompute, 0.0, at_end)
    forward, backward = work_forward + send_forward, work_backward + again + send_backward
    further: dict[str, Any] = {"ep": None, "cp": None}
    for name, one in (("ep", parts.ep_layer), ("cp", parts.cp_layer)):
        if one is not None:
            there, back = whole(one.forward), whole(one.backward + one.recompute)
            forward, backward, further[name] = forward + there, backward + back, there + back
    return _Stages(
        compute=work_forward + work_backward,
        recompute=again,
        launch=whole(layer.launch),
        tp_forward=send_forward,
        tp_backward=send_backward,
        **further,
        forward=forward,
        backward=backward,
    )


def _chunks(
    rows: ConfigBatch, c: Constants, parts: MicroBatch, stages: _Stages, pp: int, vpp: int
) -> tuple[Any, Any]:
    """[pp, vpp, n] seconds of every chunk: the ends of the model sit on its first and last. The
    chunks of a stage are alike."""
    if vpp == 1:
        return stages.forward[:, None], stages.backward[:, None]
    handled = handled_s(rows, c, vpp)

    def whole(first: Any, inner: Any, last: Any) -> Any:
        layers = np.broadcast_to(rows.layers_of_chunk * inner, (pp, len(rows)))
        chunks = np.repeat(layers[:, None], vpp, axis=1)
        chunks[0, 0] += first
        chunks[-1, -1] += last
        return chunks + handled

    return whole(*parts.forward), whole(*parts.backward)


def handled_s(rows: ConfigBatch, c: Constants, vpp: int) -> Any:
    """Seconds in which the core of a CPU rank handles the messages of a pass, one that comes and
    one that goes, instead of computing: [n]. Only messages that hide take them from a pass; the
    others are waited for. A collective of two ranks has as many. Half of its latency fits what
    pipelines of one and of several chunks take."""
    return np.where(np.logical_and(rows.on_cpu, vpp > 1), c.factors.pp * c.tp_latency_s / 2, 0.0)


def _transfers(hop: Any, count: Any, pp: int, vpp: int) -> Any:
    """Seconds that each stage spends in its own pipeline messages: [pp, n]."""
    total = np.zeros((pp, len(count)))
    if pp == 1:
        return total
    if vpp > 1:
        # Sent eagerly: only those of the first and last pass are surely waited for.
        total += 2 * hop.sum(axis=0) / pp
        return total
    for r in range(pp - 1):
        meetings = count + np.minimum(pp - 1 - r, count)
        total[r] += meetings * hop[r]
        total[r + 1] += meetings * hop[r]
    return total


def stage_work(rows: ConfigBatch, c: Constants, pp: int, vpp: int) -> tuple[Any, Any, EndOfStep]:
    """What stages do, whatever the network between them is.

    Args:
        rows: of full length, all with this pp and vpp.

    Returns:
        [pp, vpp, n] seconds of a forward and of a backward pass, and the end of the step.
    """
    micro_batch = _micro_batch(rows, c, pp)
    stages = _stages(rows, micro_batch, pp)
    return *_chunks(rows, c, micro_batch, stages, pp, vpp), _end_of_step(rows, c, stages, pp)


def _end_of_step(rows: ConfigBatch, c: Constants, stages: _Stages, pp: int) -> EndOfStep:
    routed = stage_routed_parameters(rows)
    routed = None if routed is None else routed[:pp]
    forward = stages.forward.mean(axis=0)
    return end_of_step(rows, c, stage_parameters(rows)[:pp], stages.backward, forward, routed)


def end_of_step(
    rows: ConfigBatch, c: Constants, held: Any, backward: Any, forward: Any, routed: Any = None
) -> EndOfStep:
    """What follows the last backward pass.

    Args:
        held: [pp, n] parameters that a rank of every stage holds.
        backward: [pp, n] seconds of the backward pass of one micro-batch.
        forward: [n] seconds of its forward pass on a stage, mean of the stages.
        routed: [pp, n] of the parameters, those of routed experts; None for a dense model.
    """
    sharded = rows.use_distributed_optimizer
    first = np.arange(len(held))[:, None] == 0
    behind = rows.overlap_grad_reduce & first
    owned = owned_parameters(rows, held, routed)
    moved = _ADAM_BYTES * owned + _SWEEP_BYTES * held
    hidden = np.where(behind, _HIDDEN_SHARE * backward, 0.0)
    seconds = c.factors.compute * c.optimizer_factor * moved / rows.hbm_bytes_per_s
    terms, layers = terms_of(rows), rows.num_layers / rows.pp
    if terms.layer_products:
        of_layer = sum(count * gemm_s(rows, c, *sizes) for count, *sizes in terms.layer_products)
        seconds = seconds + c.factors.compute * layers * of_layer
    at_end = first | (np.arange(len(held))[:, None] == len(held) - 1)
    tied = np.where(at_end, layer_time.tied_s(rows, c), 0.0) if np.any(rows.tied) else 0.0

    def of_first(own: Any, copies: Any) -> Any:
        """Parameters of the first bucket of a chunk, which holds one kind alone."""
        return np.minimum(own / rows.vpp, bucket_parameters(copies))

    def of(own: Any, copies: Any, more: EndOfStep | None = None) -> EndOfStep:
        bucket = np.minimum(own, bucket_parameters(copies))
        return EndOfStep(
            gradient_bytes=rows.gradient_bytes * own,
            passes=np.where(np.logical_and(sharded, np.logical_not(rows.on_cpu)), 1.0, 2.0),
            min_bytes=np.where(behind, rows.gradient_bytes * bucket, 0.0),
            hidden_s=hidden,
            gather_bytes=np.where(sharded, rows.element_bytes * own, 0.0),
            optimizer_s=seconds,
            first_bytes=np.where(sharded & first, rows.element_bytes * of_first(own, copies), 0.0),
            further_bytes=layers * terms.sent_layer_bytes + terms.sent_parameter_bytes * own,
            routed=more,
        )

    if routed is None:
        found, begun = of(held, rows.copies), of_first(held, rows.copies)
    else:
        dense = held - routed
        found = of(dense, rows.copies, of(routed, rows.expert_copies))
        begun = of_first(dense, rows.copies) + of_first(routed, rows.expert_copies)
    share = rows.vpp * begun / np.maximum(held, 1.0)
    return replace(found, tied_s=tied, needed=_needed(rows, share, forward))


def _needed(
    rows: ConfigBatch, bucket: Any, forward: Any
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """When stages need the weights that they gather, as `EndOfStep.needed`; with overlap all stages
    begin at once.

    The first stage computes with one bucket while the next ones come, so that all passes but that
    of the last bucket hide some. Later stages have one bucket for all weights of a chunk, and need
    it when the first micro-batch comes. Every stage comes to its next chunk when it has passed as
    many micro-batches as there are stages.

    Args:
        bucket: [pp, n] share of a chunk's weights that its first bucket holds, at most 1.
        forward: [n] seconds of a forward pass, as of `end_of_step`.
    """
    stage = np.arange(len(bucket))[:, None]
    chunk_s = np.where(rows.overlap_param_gather, forward / rows.vpp, 0.0)
    first = np.where(stage == 0, 1.0 - bucket, stage)
    last = np.where(np.greater(rows.vpp, 1), stage + (rows.vpp - 1) * rows.pp, first)
    return (1.0 / rows.vpp, first * chunk_s), (1.0, last * chunk_s)
