"""Small checkpoints made without training, whole or with one thing wrong."""

from __future__ import annotations

import itertools
import random
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.trainer.checkpoint import files
from megatron.trainer.common.train_state import TrainState
from megatron.trainer.distributed.sharding import flat_to_rects
from megatron.trainer.extras.convert.target import DTYPES
from megatron.trainer.extras.convert.writing import (
    FILE_BYTES,
    Piece,
    write_common,
    write_tensors,
)
from megatron.trainer.extras.inspect_checkpoint import contents
from megatron.trainer.extras.inspect_checkpoint.archive import Chunk
from megatron.trainer.extras.inspect_checkpoint.checks import Contents
from tests.helpers.checkpoints import FLAGS, HORIZON, ITERATION

_CUT = ("linear_proj.weight", "linear_fc2.weight", "word_embeddings.weight")
GROUPS = {"param_groups": [{"lr": 1e-3, "step": ITERATION}, {"lr": 1e-3, "step": ITERATION}]}


def whole_pieces(
    flags: dict[str, Any], dtype: torch.dtype, optimizer: str, seed: int = 1, *, muon: bool = False
) -> list[Piece]:
    """Random weights with the states an optimizer keeps; some in two chunks along the last axis."""
    generator = torch.Generator().manual_seed(seed)
    shapes = contents.expected_weights(flags)
    matrices = frozenset(weight for weight in shapes if muon and is_matrix(weight, shapes[weight]))
    wanted = Contents(weights={}, optimizer=optimizer, dtype=dtype, matrices=matrices)
    pieces = []
    for weight, shape in shapes.items():
        master = torch.randn(shape, generator=generator)
        is_buffer = contents.is_buffer(weight)
        data = {weight: master if is_buffer else master.to(dtype)}
        for kind in () if is_buffer else wanted.kinds(weight):
            is_master = kind == wanted.master
            state = master if is_master else torch.rand(shape, generator=generator)
            data[contents.state_key(kind, weight)] = state
        for key, tensor in data.items():
            half = shape[-1] // 2 if key.endswith(_CUT) else shape[-1]
            for start, end in ((0, half), (half, shape[-1]))[: 2 if half < shape[-1] else 1]:
                part = Chunk(
                    offset=(0,) * (len(shape) - 1) + (start,), size=(*shape[:-1], end - start)
                )
                made = tensor[..., start:end].clone()
                pieces.append(
                    Piece(key=key, dtype=tensor.dtype, shape=shape, part=part, make=made.clone)
                )
    return pieces


def is_matrix(weight: str, shape: tuple[int, ...]) -> bool:
    """Whether Muon keeps a momentum of a weight, as it does of matrices of layers."""
    return weight.startswith(contents.LAYERS) and len(shape) - contents.leading_axes(weight) == 2


def make_checkpoint(
    root: Path,
    *,
    dtype: str = "bf16",
    optimizer: str = "distributed",
    muon: bool = False,
    change: Callable[[list[Piece]], None] | None = None,
    blobs: dict[str, bytes] | None = None,
    content: dict[str, Any] | None = None,
    file_bytes: int = FILE_BYTES,
    ours: bool = False,
    state: TrainState | None = None,
    **flags: Any,
) -> Path:
    """Writes a `--save` directory with one iteration.

    Args:
        root: becomes the directory.
        dtype: of the weights.
        optimizer: `distributed`, `plain` or `none`.
        muon: matrices have a momentum in place of moments.
        change: spoils the list of pieces before they are written.
        blobs: stored objects.
        content: content metadata.
        file_bytes: tensors that share a file.
        ours: COPUS wrote it, not Megatron-LM.
        state: counters of a checkpoint of COPUS.
        flags: stored flags other than `FLAGS`.
    """
    arguments = {**FLAGS, **flags, "params_dtype": dtype, "bf16": dtype == "bf16"}
    arguments["use_distributed_optimizer"] = optimizer == "distributed"
    arguments["optimizer"] = "muon" if muon else "adam"
    pieces = whole_pieces(arguments, DTYPES[dtype], optimizer, muon=muon)
    if change is not None:
        change(pieces)
    folder = files.begin(root, ITERATION)
    objects = {"decoder.layers.mlp.linear_fc1._extra_state/shard_0_4": b"extra", **(blobs or {})}
    makers = {key: partial(bytes, data) for key, data in objects.items()}
    write_tensors(folder, pieces, makers, file_bytes=file_bytes)
    common: dict[str, Any] = {"args": Namespace(**arguments), "iteration": ITERATION}
    common["content_metadata"] = content or {"distrib_optim_sharding_type": "fully_reshardable"}
    stored = _optimizer_state(dtype, optimizer)
    if stored is not None and arguments.get("num_experts"):
        empty = {"param_state": {}} if optimizer == "distributed" else {}
        stored = {0: stored, 1: {**stored, **empty}}
    if stored is not None:
        common["optimizer"] = stored
    if ours:
        counters = state or TrainState(iteration=ITERATION, consumed_samples=40)
        common[files.OUR_KEY] = {
            "train_state": counters.to_json(),
            "horizon": HORIZON.to_json(),
            "layout": {"tp": 2, "pp": 1, "vpp": 1, "dp": 2},
        }
    write_common(folder, common)
    files.finish(root, ITERATION, files.checksums(folder, files.data_files(folder)))
    return root


def _optimizer_state(dtype: str, optimizer: str) -> dict[str, Any] | None:
    """The optimizer's part of the common state."""
    if optimizer == "distributed":
        return {"optimizer": GROUPS, "param_state_sharding_type": "fully_reshardable"}
    if optimizer == "plain":
        return GROUPS if dtype == "fp32" else {"optimizer": GROUPS}
    return None


def cut_like_ranks(pieces: list[Piece], seed: int = 3) -> None:
    """Cuts every tensor as distributed optimizers do: layers one by one, each at random elements
    of its row-major order, in an order that scatters a tensor over files."""
    chance = random.Random(seed)
    tensors: dict[str, torch.Tensor] = {}
    for piece in pieces:
        data = tensors.setdefault(piece.key, torch.empty(piece.shape, dtype=piece.dtype))
        data[tuple(slice(a, b) for a, b in zip(piece.part.offset, piece.part.end))] = piece.make()
    pieces.clear()
    for key, data in tensors.items():
        counted = data.shape[: contents.leading_axes(key)]
        leads = list(itertools.product(*(range(n) for n in counted)))
        for lead in leads:
            block = tuple(data.shape[len(lead) :])
            size = data[lead].numel()
            edges = sorted({0, size, *chance.sample(range(size), k=2)})
            for start, stop in itertools.pairwise(edges):
                for lo, hi in flat_to_rects(block, start, stop):
                    low, high = (*lead, *lo), (*(i + 1 for i in lead), *hi)
                    size_of = tuple(b - a for a, b in zip(low, high))
                    made = data[tuple(slice(a, b) for a, b in zip(low, high))].clone()
                    part = Chunk(offset=low, size=size_of)
                    pieces.append(
                        Piece(
                            key=key,
                            dtype=data.dtype,
                            shape=tuple(data.shape),
                            part=part,
                            make=made.clone,
                        )
                    )
    chance.shuffle(pieces)
