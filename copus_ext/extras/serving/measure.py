"""Measures what the loss grows by when the weights of one layer are quantised, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from copus_ext.extras.serving.held_out import HeldOut, Losses
from copus_ext.extras.serving.quantise import check_group_size, quantise
from copus_ext.extras.serving.sensitivity import Sensitivity
from megatron.trainer.model.gpt import Model


def matrices_of(model: Model, layer: int) -> dict[str, torch.nn.Parameter]:
    """The matrices of a layer that are quantised, by name in the layer."""
    (chunk,) = model.unwrapped
    return {
        name: parameter
        for name, parameter in chunk.decoder.layers[layer].named_parameters()
        if ".linear_" in name and name.endswith(".weight") and parameter.ndim == 2
    }


@torch.no_grad()
def round_all(model: Model, dtype: torch.dtype) -> None:
    """Rounds all parameters to a number format in place; their own stays."""
    (chunk,) = model.unwrapped
    for parameter in chunk.parameters():
        parameter.copy_(parameter.to(dtype))


def serving_dtype(model: Model) -> torch.dtype:
    """The number format of 16 bits that a model is served in: its own, or bf16."""
    (chunk,) = model.unwrapped
    own = next(chunk.parameters()).dtype
    return torch.bfloat16 if own == torch.float32 else own


@torch.no_grad()
def measure(
    held_out: HeldOut,
    *,
    bits: Iterable[int],
    group_size: int,
    settings: dict[str, Any],
    known: Sensitivity | None = None,
    on_layer: Callable[[int, Sensitivity], None] = lambda done, found: None,
) -> Sensitivity:
    """Quantises one layer after the other and measures the loss; rounds the model to 16 bits.

    Raises:
        UsageError: groups do not fill the rows.
    """
    model = held_out.opened.model
    (chunk,) = model.unwrapped
    for layer in range(len(chunk.decoder.layers)):
        for name, parameter in matrices_of(model, layer).items():
            check_group_size(group_size, parameter.shape[1], name)
    dtype, before = serving_dtype(model), held_out.losses()
    is_rounded = dtype == next(chunk.parameters()).dtype
    round_all(model, dtype)
    base = before if is_rounded else held_out.losses()
    found = Sensitivity(
        settings=settings, group_size=group_size, loss=before.mean, loss_16=base.mean
    )
    layers = range(len(chunk.decoder.layers))
    if known is not None and known.settings == settings:
        found.loss_increase = [dict(x) for x in known.loss_increase]
        found.standard_error = [dict(x) for x in known.standard_error]
    for kept in (found.loss_increase, found.standard_error):
        kept += [{} for _ in layers[len(kept) :]]
    for layer in layers:
        increase, error = found.loss_increase[layer], found.standard_error[layer]
        for one in bits:
            if one != 16 and str(one) not in increase:
                own = _of_layer(held_out, matrices_of(model, layer), one, group_size)
                increase[str(one)], error[str(one)] = own.increase_over(base)
        on_layer(layer + 1, found)
    return found


def _of_layer(
    held_out: HeldOut, matrices: dict[str, torch.nn.Parameter], bits: int, group_size: int
) -> Losses:
    """The losses with the matrices of one layer quantised; they are put back."""
    dtype = serving_dtype(held_out.opened.model)
    kept = {name: parameter.detach().clone() for name, parameter in matrices.items()}
    try:
        for parameter in matrices.values():
            parameter.copy_(quantise(parameter.to(dtype), bits, group_size).whole())
        return held_out.losses()
    finally:
        for name, parameter in matrices.items():
            parameter.copy_(kept[name])
