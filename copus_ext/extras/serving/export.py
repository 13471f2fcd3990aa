"""A checkpoint with quantised weights as a Hugging Face model that transformers and vLLM read: the
format `pack-quantized` of compressed-tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from copus_ext.extras.serving.measure import matrices_of, round_all, serving_dtype
from copus_ext.extras.serving.quantise import (
    Quantised,
    check_group_size,
    pack,
    quantise,
    unpack,
)
from megatron.trainer.common.errors import UsageError, VerificationFailed
from megatron.trainer.extras.convert.target import DTYPES, Changes
from megatron.trainer.extras.convert.writing import Piece, staged
from megatron.trainer.extras.generate.model import OpenedModel
from megatron.trainer.extras.huggingface.exchange import (
    IN_LAYER,
    TOP,
    Export,
    export_of,
    join,
    write_config,
)
from megatron.trainer.extras.huggingface.safetensors_files import SafetensorsFolder, write_folder
from megatron.trainer.extras.inspect_checkpoint.archive import open_archive

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+_proj)\.weight")
_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, kw_only=True)
class Written:
    """A model in a folder that has no name yet."""

    folder: Path
    bits: Sequence[int]
    group_size: int
    notes: tuple[str, ...]


def quantisation_config(
    bits: Sequence[int], group_size: int, linears: Sequence[str]
) -> dict[str, Any]:
    """`quantization_config` of `config.json`: a group for each number of bits, which names its
    layers; all else is left alone.
    """
    groups = {}
    for number, one in enumerate(sorted(set(bits) - {16})):
        layers = "|".join(str(i) for i, b in enumerate(bits) if b == one)
        groups[f"group_{number}"] = {
            "targets": [rf"re:model\.layers\.({layers})\.(self_attn|mlp)\..*_proj$"],
            "weights": {
                "num_bits": one,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": group_size,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
        }
    whole = [x for x in linears if bits[int(x.split(".")[2])] == 16]
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [*whole, "lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


@contextmanager
def written(
    opened: OpenedModel,
    destination: Path,
    bits: Sequence[int],
    *,
    group_size: int,
    trust_unverified: bool = False,
) -> Iterator[Written]:
    """Writes the model that becomes `destination` if the block succeeds, and else is deleted.

    Raises:
        Refused: `config.json` cannot express the network.
        UsageError: the destination is taken, or groups do not fill the rows.
        VerificationFailed: the files do not read back as they were written.
    """
    source = opened.stored.folder
    if destination.exists():
        raise UsageError(f"--apply {destination} exists; name another or remove it")
    archive = open_archive(source, step=None, trust_unverified=trust_unverified)
    name = next(n for n, dtype in DTYPES.items() if dtype == serving_dtype(opened.model))
    export = export_of(archive, Changes(dtype=name))
    pieces = [x for piece in export.tensors for x in _packed(piece, bits, group_size)]
    with staged(source, destination) as folder:
        write_config(folder, _config(export, bits, group_size))
        export.companions.write(folder)
        write_folder(folder, pieces, shard_bytes=_SHARD_BYTES)
        _check(folder, pieces)
        yield Written(folder=folder, bits=bits, group_size=group_size, notes=export.notes)


def _config(export: Export, bits: Sequence[int], group_size: int) -> dict[str, Any]:
    found = (_LAYER.fullmatch(piece.key) for piece in export.tensors)
    linears = [match[0].removesuffix(".weight") for match in found if match]
    if set(bits) == {16}:
        return export.config
    quantised = quantisation_config(bits, group_size, linears)
    return {**export.config, "quantization_config": quantised}


def _packed(piece: Piece, bits: Sequence[int], group_size: int) -> list[Piece]:
    """The tensors that stand for one of a model of 16 bits."""
    match = _LAYER.fullmatch(piece.key)
    if match is None or bits[int(match[1])] == 16:
        return [piece]
    own, (rows, columns) = bits[int(match[1])], piece.shape
    check_group_size(group_size, columns, piece.key)
    made: list[Quantised] = []

    def quantised(*, last: bool) -> Quantised:
        # Words and scales are written one after the other: made once, kept no longer.
        found = made.pop() if made else quantise(piece.make(), own, group_size)
        if not last:
            made.append(found)
        return found

    stem = piece.key.removesuffix(".weight")
    words = rows, columns * own // 32
    scales = rows, columns // group_size
    return [
        Piece.whole(
            f"{stem}.weight_packed",
            torch.int32,
            words,
            lambda: pack(quantised(last=False).values, own),
        ),
        Piece.whole(
            f"{stem}.weight_scale", piece.dtype, scales, lambda: quantised(last=True).scales
        ),
        Piece.whole(
            f"{stem}.weight_shape", torch.int64, (2,), partial(torch.tensor, [rows, columns])
        ),
    ]


def _check(folder: Path, pieces: Sequence[Piece]) -> None:
    """Proves that every tensor reads back bit for bit."""
    stored = SafetensorsFolder(folder)
    if stored.names != {piece.key for piece in pieces}:
        raise VerificationFailed("the result has other tensors than it should")
    for piece in pieces:
        if not torch.equal(stored.read(piece.key), piece.make()):
            raise VerificationFailed(f"{piece.key} does not read back as it was written")


@torch.no_grad()
def load_written(opened: OpenedModel, found: Written) -> None:
    """Fills the opened model with the weights that a server would use, read from the files.

    Norms and rows that only pad the vocabulary stay, rounded to the number format of the files.
    """
    stored, (chunk,) = SafetensorsFolder(found.folder), opened.model.unwrapped
    arguments = opened.stored.arguments
    round_all(opened.model, serving_dtype(opened.model))
    own = dict(chunk.named_parameters())
    for ours, theirs in TOP.items():
        if ours in own and theirs in stored.names:
            whole = stored.read(theirs)
            own[ours][: len(whole)].copy_(whole)
    for layer, bits in enumerate(found.bits):
        for name, parameter in matrices_of(opened.model, layer).items():
            parts = [
                _read(stored, f"model.layers.{layer}.{one}".removesuffix(".weight"), bits)
                for one in IN_LAYER[name]
            ]
            parameter.copy_(join(name, parts, arguments))


def _read(stored: SafetensorsFolder, stem: str, bits: int) -> torch.Tensor:
    """A matrix of a written model, as it multiplies."""
    if bits == 16:
        return stored.read(f"{stem}.weight")
    values = unpack(stored.read(f"{stem}.weight_packed"), bits)
    return Quantised(values=values, scales=stored.read(f"{stem}.weight_scale"), bits=bits).whole()
