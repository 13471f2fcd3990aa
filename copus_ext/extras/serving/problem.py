"""What a plan for serving is made of, and what it costs: arithmetic without a model or a machine.

A batch of prompts passes through a pipeline in two phases. In prefill, micro-batches of prompts
pass once. In decoding, micro-batches pass once for every further token. A stage is one device with
layers that follow each other. Every layer has weights of some bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

TOLERANCE = 1e-7
"""Relative: objectives this near to each other count as equal."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Seconds of one micro-batch in one phase."""

    layer_s: Any
    """[devices, bits] of one layer."""
    first_s: Any
    """[devices] of the embedding, on the device of the first layer."""
    last_s: Any
    """[devices] of the head, on the device of the last layer."""
    p2p_time_s: Any
    """[devices] of the message to the next stage, on all devices but that of the last layer."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Sum of Tp + `max_prefill` max Tp + max over `decode` of (c sum of Td + d max Td) + `theta` x
    sum of loss increases, where Tp and Td are the seconds of the stages in the two phases."""

    max_prefill: float
    """Micro-batches of prefill that wait for the slowest stage."""
    decode: tuple[tuple[float, float], ...]
    """(c, d) of each lower bound of the seconds of decoding."""
    theta: float = 0.0
    """Seconds that a loss increase of 1 is worth."""

    def value(self, prefill: Any, decode: Any, loss_increase: float) -> float:
        """The objective of a plan.

        Args:
            prefill: [stages] Tp.
            decode: [stages] Td.
        """
        total, longest = float(np.sum(decode)), float(np.max(decode))
        return (
            self.prefill_s(prefill)
            + max(c * total + d * longest for c, d in self.decode)
            + self.theta * loss_increase
        )

    def prefill_s(self, prefill: Any) -> float:
        """Seconds of prefill of all micro-batches."""
        return float(np.sum(prefill)) + self.max_prefill * float(np.max(prefill))


def pipeline_objective(
    *, prompts: int, prefill: int, decode: int, tokens: int, theta: float = 0.0
) -> Objective:
    """Seconds until a batch of prompts has all its tokens.

    A micro-batch cannot begin its next token before its last one has left the pipeline. So each
    token takes the longer of one pass, and of all micro-batches through the slowest stage. LLM-PQ
    counts sum Td + (M - 1)(n - 1) max Td, which is one token for all n where M is 1.

    Args:
        prompts: of the batch.
        prefill: of them in a micro-batch of prefill.
        decode: of them in a micro-batch of decoding.
        tokens: to generate for each; the first comes from prefill.
        theta: seconds that a loss increase of 1 is worth.
    """
    count, rounds = math.ceil(prompts / decode), max(tokens - 1, 0)
    pieces = ((0.0, 0.0),)
    if rounds:
        pieces = ((rounds, count - 1.0), (1.0, count * rounds - 1.0))
    return Objective(max_prefill=math.ceil(prompts / prefill) - 1.0, decode=pieces, theta=theta)


@dataclass(frozen=True, kw_only=True)
class ServingProblem:
    """Layers that cost alike, devices in the order of the pipeline, and what limits a plan."""

    bits: tuple[int, ...]
    """That a layer's weights may have, ascending."""
    loss_increase: Any
    """[layers, bits] increase of the loss if this layer alone has such weights."""
    prefill: Phase
    decode: Phase
    layer_bytes: Any
    """[bits] of one layer: its weights, and its keys and values of all prompts."""
    first_bytes: float
    """Of the embedding."""
    last_bytes: float
    """Of the final norm and the head."""
    capacity_bytes: Any
    """[devices] for layers, embedding and head."""
    objective: Objective
    max_loss_increase: float | None = None
    """Limit of the sum of loss increases; None: there is none."""

    @property
    def num_layers(self) -> int:
        return len(self.loss_increase)

    @property
    def num_devices(self) -> int:
        return len(self.capacity_bytes)

    def with_bits(self, *bits: int) -> ServingProblem:
        """The same with fewer bits to choose from."""
        at = [self.bits.index(one) for one in bits]

        def cut(phase: Phase) -> Phase:
            return replace(phase, layer_s=np.asarray(phase.layer_s)[:, at])

        return replace(
            self,
            bits=tuple(bits),
            loss_increase=np.asarray(self.loss_increase)[:, at],
            prefill=cut(self.prefill),
            decode=cut(self.decode),
            layer_bytes=np.asarray(self.layer_bytes)[at],
        )


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Layers that follow each other on one device."""

    device: int
    start: int
    bits: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Costs:
    objective: float
    prefill_s: tuple[float, ...]
    """Of a micro-batch on each stage, in prefill."""
    decode_s: tuple[float, ...]
    """Of a micro-batch and token on each stage."""
    num_bytes: tuple[float, ...]
    """Of layers, embedding and head on each stage."""
    loss_increase: float
    fits: bool
    """Whether memory and loss are within their limits."""


def costs_of(problem: ServingProblem, stages: tuple[Stage, ...]) -> Costs:
    """Prices a plan: what `search` finds the least of."""
    at = {bits: i for i, bits in enumerate(problem.bits)}
    seconds: list[list[float]] = [[], []]
    num_bytes, loss, fits = [], 0.0, True
    for stage in stages:
        chosen, device = [at[b] for b in stage.bits], stage.device
        is_first = stage.start == 0
        is_last = stage.start + len(chosen) == problem.num_layers
        for found, phase in zip(seconds, (problem.prefill, problem.decode)):
            own = sum(phase.layer_s[device][b] for b in chosen)
            own += phase.first_s[device] if is_first else 0.0
            found.append(own + (phase.last_s if is_last else phase.p2p_time_s)[device])
        held = sum(problem.layer_bytes[b] for b in chosen)
        held += problem.first_bytes * is_first + problem.last_bytes * is_last
        fits &= bool(held <= problem.capacity_bytes[device])
        num_bytes.append(float(held))
        loss += sum(problem.loss_increase[stage.start + i][b] for i, b in enumerate(chosen))
    limit = problem.max_loss_increase
    within = limit is None or loss <= limit + TOLERANCE * max(limit, 1e-9)
    return Costs(
        objective=problem.objective.value(seconds[0], seconds[1], float(loss)),
        prefill_s=tuple(map(float, seconds[0])),
        decode_s=tuple(map(float, seconds[1])),
        num_bytes=tuple(num_bytes),
        loss_increase=float(loss),
        fits=fits and within,
    )
