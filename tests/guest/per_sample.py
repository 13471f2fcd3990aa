"""Gradients of single samples in the program without a controller, for one step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch


def write(file: Path, training: Any) -> None:
    """Writes squared norms by parameter group in place of the first step, and ends the process.

    Args:
        file: gets the mean over the samples as `small`, and the norm of the mean as `big`.
        training: the module `megatron.training.training`, of one rank.
    """

    def measured(forward_step: Any, data_iterator: Any, model: Any, *_: Any, **__: Any) -> Any:
        (chunk,) = model
        weights = dict(chunk.module.named_parameters())
        samples = training.get_args().global_batch_size
        chunk.eval()  # dropout is off as it is; hooks of the reduction see nothing
        rows = [_gradients(forward_step, data_iterator, chunk.module) for _ in range(samples)]
        found: dict[str, dict[str, float]] = {"small": {}, "big": {}}
        for name in weights:
            each = torch.stack([row[name] for row in rows])
            group = _group_of(name, weights[name])
            for kind, value in (
                ("small", each.square().sum() / samples),
                ("big", each.mean(dim=0).square().sum()),
            ):
                found[kind][group] = found[kind].get(group, 0.0) + float(value)
        file.write_text(json.dumps(found))
        os._exit(0)

    training.train_step = measured


def _gradients(forward_step: Any, data_iterator: Any, model: Any) -> dict[str, torch.Tensor]:
    """The gradient of one sample's mean loss, in float64."""
    output, loss_of = forward_step(data_iterator, model)
    total, count, _ = loss_of(output)
    weights = dict(model.named_parameters())
    grads = torch.autograd.grad(total / count, list(weights.values()))
    return {name: grad.double() for name, grad in zip(weights, grads, strict=True)}


def _group_of(name: str, weight: torch.Tensor) -> str:
    if weight.dim() == 1:
        return "vectors"
    for part, group in (("embedding", "embedding"), ("output_layer", "head")):
        if part in name:
            return group
    return "attention" if "self_attention" in name else "mlp"
