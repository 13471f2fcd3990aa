"""Weights to and from Hugging Face models like Llama and mixtures like Mixtral, as safetensors and
`config.json`.

Nothing is unpickled.
"""

from __future__ import annotations

import io
import itertools
import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from megatron.trainer.checkpoint import files
from megatron.trainer.common.errors import Refused, UsageError, VerificationFailed
from megatron.trainer.common.outside import parse_json
from megatron.trainer.config.vocabulary import pad_vocab_size, padding_unit
from megatron.trainer.extras.convert.convert import (
    ConversionResult,
    Recipe,
    with_zero_rows,
    write_checkpoint,
)
from megatron.trainer.extras.convert.target import (
    DTYPES,
    LAYOUT_FLAGS,
    Changes,
    arguments_of,
    check_vocabulary,
    target_of,
)
from megatron.trainer.extras.convert.writing import FILE_BYTES, Piece, staged
from megatron.trainer.extras.huggingface import config_json, experts, generation
from megatron.trainer.extras.huggingface.names import CONFIG, CONFIG_BYTES, SIDE
from megatron.trainer.extras.huggingface.safetensors_files import (
    SafetensorsFolder,
    write_folder,
)
from megatron.trainer.extras.inspect_checkpoint import contents
from megatron.trainer.extras.inspect_checkpoint.archive import Archive, Chunk, open_archive
from megatron.trainer.extras.inspect_checkpoint.checks import (
    Contents,
    check_files,
    check_truth,
    check_weights,
    num_different,
)

_ADAPTER = "adapter_config.json"
Folder: TypeAlias = SafetensorsFolder | experts.UnstackedExperts
SHARD_BYTES = 5_000_000_000
_DIVISIBLE_BY = 128
_CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


TOP = {
    contents.EMBEDDING: "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    contents.HEAD: "lm_head.weight",
}
"""Tensors outside the layers: our key -> theirs."""
_QKV = tuple(f"self_attn.{x}_proj" for x in "qkv")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
IN_LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": tuple(f"{x}.weight" for x in _QKV),
    "self_attention.linear_qkv.bias": tuple(f"{x}.bias" for x in _QKV),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "self_attention.linear_proj.bias": ("self_attn.o_proj.bias",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": tuple(f"{x}.weight" for x in _GATE_UP),
    "mlp.linear_fc1.bias": tuple(f"{x}.bias" for x in _GATE_UP),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
    "mlp.linear_fc2.bias": ("mlp.down_proj.bias",),
}
"""Tensors of a dense layer: our key in it -> theirs after `model.layers.N.`."""


def names_in_layer(arguments: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Tensors of a layer, dense or with experts: our key in it -> theirs after `model.layers.N.`,
    with a place for the number of an expert."""
    if not arguments.get("num_experts"):
        return IN_LAYER
    return {**IN_LAYER, **experts.FAMILIES[experts.kind_of(arguments)].in_layer}


def save(
    source: Path,
    destination: Path,
    changes: Changes,
    *,
    step: int | None = None,
    verify: bool = False,
    trust_unverified: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> ConversionResult:
    """Writes the weights of a checkpoint as a Hugging Face model.

    Padding rows are cut: `changes.vocab` rows stay, or as many as the tokenizer has tokens, or all
    where that is unknown. Another number format than the stored one is made from the masters.

    Raises:
        Refused: the checkpoint cannot be proved complete, or `config.json` cannot express its
            network.
        VerificationFailed: the result is not what it should be.
        UsageError: changes that make no sense for this format.
    """
    for name in LAYOUT_FLAGS:
        if getattr(changes, name) is not None:
            raise UsageError(f"--{name} goes with checkpoints; a Hugging Face model has no layout")
    if changes.optimizer not in (None, "none"):
        raise UsageError(f"--optimizer {changes.optimizer}: Hugging Face models hold weights only")
    archive = open_archive(source, step=step, trust_unverified=trust_unverified)
    exported = export_of(archive, changes)
    tensors = exported.tensors
    with staged(source, destination) as folder:
        write_config(folder, exported.config)
        exported.companions.write(folder)
        write_folder(folder, tensors, shard_bytes=shard_bytes)
        _check_written(folder, tensors, verify=verify)
        num_bytes = files.stored_bytes(folder)
    return ConversionResult(
        source=str(archive.folder),
        destination=str(destination),
        iteration=None,
        layout=None,
        num_tensors=len(tensors),
        num_rewritten=len(tensors),
        num_bytes=num_bytes,
        num_compared=len(tensors) if verify else None,
        notes=exported.notes,
    )


@dataclass(frozen=True, kw_only=True)
class Export:
    """A checkpoint as a Hugging Face model, before anything is written."""

    config: dict[str, Any]
    """Its `config.json`."""
    companions: generation.Companions
    """What `generate()` needs beside the network."""
    tensors: list[Piece]
    """Its weights, made when their turn comes."""
    notes: tuple[str, ...]


def export_of(archive: Archive, changes: Changes) -> Export:
    """What `save` writes of an opened checkpoint.

    Raises:
        Refused: the checkpoint cannot be proved complete, or `config.json` cannot express its
            network.
        UsageError: changes that make no sense for this format.
    """
    notes = check_files(archive)
    found = check_weights(archive, DTYPES[changes.dtype] if changes.dtype else None)
    dtype = DTYPES[changes.dtype] if changes.dtype else found.dtype
    check_truth(archive, found)  # nothing to compare unless weights are made from masters
    vocab = _exported_rows(archive, changes, notes)
    config = config_json.config_of(archive.arguments, vocab, dtype)
    dropout = archive.arguments.get("hidden_dropout")
    if dropout:
        notes.append(f"hidden_dropout {dropout} acts in training only and has no field in {CONFIG}")
    notes += experts.notes_on(archive.arguments)
    companions = generation.companions_of(archive.folder, archive.arguments)
    return Export(
        config=companions.config(config),
        companions=companions,
        tensors=_exported(archive, found, dtype, vocab),
        notes=(*notes, *companions.notes),
    )


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes `config.json`."""
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _exported_rows(archive: Archive, changes: Changes, notes: list[str]) -> int:
    stored = int(archive.arguments["padded_vocab_size"])
    true = check_vocabulary(archive.arguments, changes)
    rows = changes.vocab or true
    if rows is None:
        notes.append(f"the flags do not say how many of the {stored} rows are tokens: all are kept")
        return stored
    if rows > stored:
        flag = "--vocab" if changes.vocab else "--true-vocab"
        raise UsageError(f"{flag} {rows} is more than the {stored} rows that are stored")
    return rows


def _exported(archive: Archive, found: Contents, dtype: torch.dtype, vocab: int) -> list[Piece]:
    master = found.master if dtype != found.dtype else None

    def read(source: _Counterpart) -> torch.Tensor:
        full = found.weights[source.key].shape
        key = contents.state_key(master, source.key) if master else source.key
        if source.index is None:
            return archive.read(key, Chunk.whole(source.shape), dtype)
        data = archive.read(key, Chunk.at(full, source.index), dtype)
        data = data.reshape(full[len(source.index) :])
        return split(source.key, data, archive.arguments)[source.part].clone()

    return [
        Piece.whole(name, dtype, source.shape, partial(read, source))
        for name, source in counterparts(archive.arguments, vocab).items()
    ]


def _check_written(folder: Path, tensors: list[Piece], *, verify: bool) -> None:
    try:
        written = SafetensorsFolder(folder)
    except Refused as error:
        raise VerificationFailed(f"the result does not read back: {error}") from error
    expected = {tensor.key for tensor in tensors}
    if written.names != expected:
        raise VerificationFailed(f"the result differs in {min(written.names ^ expected)}")
    for tensor in tensors:
        if written.describe(tensor.key) != (tensor.dtype, tensor.shape):
            raise VerificationFailed(f"{tensor.key} is {written.describe(tensor.key)}")
        if verify and num_different(tensor.make, partial(written.read, tensor.key)):
            raise VerificationFailed(f"{tensor.key} differs from the checkpoint")


def load(
    source: Path,
    destination: Path,
    changes: Changes,
    *,
    verify: bool = False,
    file_bytes: int = FILE_BYTES,
) -> ConversionResult:
    """Makes a checkpoint of iteration 0 from a Hugging Face model, to start from with `--finetune`,
    which makes the masters from the weights.

    The vocabulary is padded with zero rows for `changes.tp`, or to `changes.vocab` rows.

    Raises:
        Refused: files or configuration are incomplete, or ask for another network than this
            trainer's.
        VerificationFailed: the result is not what it should be.
        UsageError: changes that make no sense.
    """
    arguments = config_json.arguments_of(_read_config(source / CONFIG))
    if (source / _ADAPTER).is_file():
        raise Refused(f"{source / _ADAPTER} changes the weights; merge the adapter into its model")
    stored = experts.unstacked(SafetensorsFolder(source), arguments)
    dtype = _check_model(stored, arguments)
    true = arguments["vocab_size"]
    padded = changes.vocab or pad_vocab_size(true, padding_unit(_DIVISIBLE_BY, [changes.tp or 1]))
    if padded < true:
        raise Refused(
            f"--vocab {padded} would drop tokens: the model has {true}; give at least that"
        )
    arguments["padded_vocab_size"] = padded
    target = target_of(arguments, Contents(weights={}, optimizer="none", dtype=dtype), changes)
    name = next(name for name, value in DTYPES.items() if value == target.dtype)
    arguments |= generation.tokenizer_arguments(source, destination)
    arguments |= arguments_of({**arguments, "virtual_pipeline_model_parallel_size": 1}, target)
    arguments |= {"params_dtype": name, "bf16": name == "bf16", "fp16": name == "fp16"}
    arguments |= {"iteration": 0, "consumed_train_samples": 0, "consumed_valid_samples": 0}
    common = {
        "args": Namespace(**arguments),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": dict(_CONTENT),
    }
    side = {f"{SIDE}/{n}": path for n, path in generation.files_of_model(source).items()}
    recipe = Recipe(
        pieces=_imported(stored, arguments, target.dtype),
        blobs=_empty_extra_states(arguments),
    )
    return write_checkpoint(
        source,
        destination,
        recipe,
        common=common,
        target=target,
        archive=None,
        side=side,
        verify=verify,
        file_bytes=file_bytes,
        notes=(
            "it holds weights only: start from it with --load and --finetune",
            *experts.notes_on(arguments),
        ),
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = parse_json(files.read_text(path, max_bytes=CONFIG_BYTES))
    except ValueError as error:
        raise Refused(f"{path} is damaged ({error})") from error
    if not isinstance(config, dict):
        raise Refused(f"{path} holds no configuration")
    return config


def _check_model(stored: Folder, arguments: dict[str, Any]) -> torch.dtype:
    """Proves names, shapes and one number format, and returns that."""
    found = counterparts(arguments, arguments["vocab_size"])
    expected = {name: source.shape for name, source in found.items()}
    names = {name for name in stored.names if not name.endswith("rotary_emb.inv_freq")}
    head, table = TOP[contents.HEAD], TOP[contents.EMBEDDING]
    # A tied head may be stored once more.
    is_repeated = head in names and head not in expected and table in names
    if is_repeated and not num_different(partial(stored.read, head), partial(stored.read, table)):
        names.discard(head)
    for name in sorted(names ^ expected.keys()):
        known = "is unknown to" if name in names else "is missing from"
        raise Refused(f"{name} {known} a model with this config.json ({stored.folder})")
    dtype, _ = stored.describe(table)
    for name, shape in expected.items():
        if stored.describe(name) != (dtype, shape):
            have = stored.describe(name)
            raise Refused(f"{name} in {stored.folder} is {have}, expected {(dtype, shape)}")
    return dtype


def _imported(stored: Folder, arguments: dict[str, Any], dtype: torch.dtype) -> list[Piece]:
    names_of = names_in_layer(arguments)

    def top(key: str, rows: int) -> torch.Tensor:
        data = stored.read(TOP[key]).to(dtype)
        return data if data.shape[0] == rows else with_zero_rows(data, rows)

    def in_layer(key: str, index: tuple[int, ...]) -> torch.Tensor:
        layer, own = contents.layer_of(key, index), contents.in_layer(key)
        names = [f"model.layers.{layer}.{name.format(*index[-1:])}" for name in names_of[own]]
        parts = [stored.read(name).to(dtype) for name in names]
        return join(key, parts, arguments)[(None,) * len(index)]

    made = []
    for key, shape in contents.expected_weights(arguments).items():
        if key in TOP:
            made.append(Piece.whole(key, dtype, shape, partial(top, key, shape[0])))
            continue
        for index in contents.leading_indices(key, shape):
            part, make = Chunk.at(shape, index), partial(in_layer, key, index)
            made.append(Piece(key=key, dtype=dtype, shape=shape, part=part, make=make))
    return made


def _empty_extra_states(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The objects that megatron-core's layers ask for beside their weights, without FP8 scales."""
    data = io.BytesIO()
    torch.save([None], data)
    found = {}
    for key, shape in contents.expected_weights(arguments).items():
        module, _, name = key.rpartition(".")
        if name != "weight" or ".linear_" not in module:
            continue
        counts = shape[: contents.leading_axes(key)] or (1,)
        for index in itertools.product(*(range(count) for count in counts)):
            shard = f"{'.'.join(map(str, index))}_{'.'.join(map(str, counts))}"
            found[f"{module}._extra_state/shard_{shard}"] = data.getvalue
    return found


@dataclass(frozen=True, kw_only=True)
class _Counterpart:
    """Where a checkpoint has the values of one tensor of a Hugging Face model."""

    key: str
    """Key in the checkpoint."""
    shape: tuple[int, ...]
    """Shape in the model."""
    index: tuple[int, ...] | None = None
    """Place on the leading axes, for tensors of a layer."""
    part: int = 0
    """Which of those that `split` returns."""


def counterparts(arguments: Mapping[str, Any], vocab: int) -> dict[str, _Counterpart]:
    """The tensors of a Hugging Face model by name, layer by layer.

    Args:
        arguments: flags that `config.json` can express.
    """
    weights = contents.expected_weights({**arguments, "padded_vocab_size": vocab})
    found = {
        theirs: _Counterpart(key=ours, shape=weights[ours])
        for ours, theirs in TOP.items()
        if ours in weights
    }
    by_layer: list[dict[str, _Counterpart]] = [{} for _ in range(arguments["num_layers"])]
    for ours, names in names_in_layer(arguments).items():
        for prefix in dict.fromkeys(contents.layer_prefixes(arguments)):
            key = prefix + ours
            for index in contents.leading_indices(key, weights[key]) if key in weights else ():
                layer = contents.layer_of(key, index)
                rows, *width = weights[key][len(index) :]
                for part, (name, size) in enumerate(zip(names, _sizes(key, rows, arguments))):
                    whole = f"model.layers.{layer}.{name.format(*index[-1:])}"
                    by_layer[layer][whole] = _Counterpart(
                        key=key, shape=(size, *width), index=index, part=part
                    )
    for of_layer in by_layer:
        found |= of_layer
    return found


def _sizes(key: str, rows: int, arguments: Mapping[str, Any]) -> list[int]:
    """Rows of each tensor that `split` makes of one layer's tensor, or of one expert's."""
    if _is_qkv(key):
        width = contents.head_width(arguments)
        key_value = contents.query_groups(arguments) * width
        return [arguments["num_attention_heads"] * width, key_value, key_value]
    parts = _num_parts(key, arguments)
    return [rows // parts] * parts


def _num_parts(key: str, arguments: Mapping[str, Any]) -> int:
    return len(names_in_layer(arguments)[contents.in_layer(key)])


def _is_qkv(key: str) -> bool:
    return key.endswith(("linear_qkv.weight", "linear_qkv.bias"))


def split(key: str, data: torch.Tensor, arguments: Mapping[str, Any]) -> list[torch.Tensor]:
    """Cuts the tensor of one layer, or of one expert, into those of `names_in_layer`.

    Queries, keys and values are stored by group: the query heads of the group, its key head, its
    value head. Gate and up projection lie one after the other.
    """
    if not _is_qkv(key):
        return list(data.chunk(_num_parts(key, arguments)))
    groups, width = contents.query_groups(arguments), contents.head_width(arguments)
    per_group = arguments["num_attention_heads"] // groups
    view = data.reshape(groups, per_group + 2, width, *data.shape[1:])
    parts = (view[:, :per_group], view[:, per_group], view[:, per_group + 1])
    return [part.reshape(-1, *data.shape[1:]) for part in parts]


def join(key: str, parts: list[torch.Tensor], arguments: Mapping[str, Any]) -> torch.Tensor:
    if not _is_qkv(key):
        return torch.cat(parts)
    groups, width = contents.query_groups(arguments), contents.head_width(arguments)
    views = [part.reshape(groups, -1, width, *part.shape[1:]) for part in parts]
    return torch.cat(views, dim=1).reshape(-1, *parts[0].shape[1:])
