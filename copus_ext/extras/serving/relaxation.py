"""A linear program below a problem: its value bounds the objective, its prices guide the search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from copus_ext.extras.serving.problem import ServingProblem


@dataclass(frozen=True, kw_only=True)
class Prices:
    """A lower bound, and what the constraints of the linear program are worth there."""

    bound: float
    """No plan has a lower objective; infinite where there is none."""
    prefill: Any
    """[devices] of the longest prefill stage, at least 0, at most its weight in all."""
    decode: Any
    """[devices] of the longest decoding stage, likewise."""
    pieces: Any
    """Shares of the pieces of decoding, 1 in all."""
    loss: float
    """Of a loss increase, besides theta."""


def relax(p: ServingProblem) -> Prices:
    """Solves the problem with parts of layers, whose order does not matter."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    layers, devices, bits = p.num_layers, p.num_devices, len(p.bits)
    held = devices * bits
    ends = held + layers * bits
    most = ends + 2 * devices  # columns: held, layers' bits, first, last, max Tp, max Td, decoding
    entries: list[tuple[int, int, float]] = []
    upper: list[float] = []

    def row(limit: float, *parts: tuple[Any, Any]) -> None:
        for columns, values in parts:
            number = len(upper)
            entries.extend((number, int(c), float(v)) for c, v in zip(columns, values))
        upper.append(limit)

    own = np.arange(held).reshape(devices, bits)
    first, last = ends + np.arange(devices), ends + devices + np.arange(devices)
    scale = max(float(np.max(p.capacity_bytes)), float(np.max(p.layer_bytes)))
    for j in range(devices):
        parts = np.append(p.layer_bytes, [p.first_bytes, p.last_bytes]) / scale
        row(p.capacity_bytes[j] / scale, ([*own[j], first[j], last[j]], parts))
    for k, phase in enumerate((p.prefill, p.decode)):
        for j in range(devices):
            parts = [*phase.layer_s[j], phase.first_s[j], phase.last_s[j], -1.0]
            row(0.0, ([*own[j], first[j], last[j], most + k], parts))
    seconds = np.append(np.ravel(p.decode.layer_s), [*p.decode.first_s, *p.decode.last_s])
    columns = np.append(np.arange(held), np.arange(ends, most))
    for c, d in p.objective.decode:
        row(0.0, (columns, c * seconds), ([most + 1, most + 2], [d, -1.0]))
    limit, omega = p.max_loss_increase, np.ravel(p.loss_increase)
    if limit is not None:
        row(limit, (np.arange(held, ends), omega))
    matrix = coo_array(
        ([v for *_, v in entries], tuple(zip(*[(r, c) for r, c, _ in entries]))),
        shape=(len(upper), most + 3),
    )
    equal, right = _equalities(layers, devices, bits)
    cost = np.zeros(most + 3)
    cost[:held] = np.ravel(p.prefill.layer_s)
    cost[ends:most] = [*p.prefill.first_s, *p.prefill.last_s]
    cost[held:ends] = p.objective.theta * omega
    cost[most], cost[most + 2] = p.objective.max_prefill, 1.0
    found = linprog(cost, A_ub=matrix, b_ub=upper, A_eq=equal, b_eq=right, method="highs")
    nothing = np.zeros(devices)
    shares = np.ones(len(p.objective.decode)) / len(p.objective.decode)
    if found.status != 0:
        bound = np.inf if found.status == 2 else -np.inf
        return Prices(bound=bound, prefill=nothing, decode=nothing, pieces=shares, loss=0.0)
    worth = np.maximum(-found.ineqlin.marginals, 0.0)
    pieces = worth[3 * devices : 3 * devices + len(shares)]
    pieces = pieces / pieces.sum() if pieces.sum() > 0 else shares
    decode_weight = float(pieces @ [d for _, d in p.objective.decode])
    return Prices(
        bound=float(found.fun) - 1e-9 * abs(float(found.fun)),
        prefill=_at_most(worth[devices : 2 * devices], p.objective.max_prefill),
        decode=_at_most(worth[2 * devices : 3 * devices], decode_weight),
        pieces=pieces,
        loss=float(worth[-1]) if limit is not None else 0.0,
    )


def _equalities(layers: int, devices: int, bits: int) -> tuple[Any, Any]:
    """Each layer has some bits; as many layers are held; there is one first and one last stage."""
    held, ends = devices * bits, (devices + layers) * bits
    most = ends + 2 * devices
    matrix = np.zeros((layers + bits + 2, most + 3))
    for layer in range(layers):
        matrix[layer, held + layer * bits : held + (layer + 1) * bits] = 1.0
    for bit in range(bits):
        matrix[layers + bit, bit:held:bits] = 1.0
        matrix[layers + bit, held + bit : ends : bits] = -1.0
    matrix[-2, ends : ends + devices] = matrix[-1, ends + devices : most] = 1.0
    return matrix, np.concatenate([np.ones(layers), np.zeros(bits), np.ones(2)])


def _at_most(weights: Any, total: float) -> Any:
    """The same, made smaller where rounding has them add up to more."""
    found = weights.sum()
    return weights * (total / found) if found > total else weights
