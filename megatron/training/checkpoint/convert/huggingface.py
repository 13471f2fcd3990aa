"""Weights to and from Hugging Face models like Llama: safetensors and `config.json`; nothing is
unpickled."""

from __future__ import annotations

import io
import json
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.training.checkpoint import files
from megatron.training.checkpoint.convert import contents, llama
from megatron.training.checkpoint.convert.archive import Archive, open_archive
from megatron.training.checkpoint.convert.checks import (
    Contents,
    check_files,
    check_truth,
    check_weights,
    num_different,
)
from megatron.training.checkpoint.convert.convert import Outcome, Recipe, read_back
from megatron.training.checkpoint.convert.coverage import Chunk
from megatron.training.checkpoint.convert.refusal import Refused, VerificationFailed
from megatron.training.checkpoint.convert.safetensors_files import (
    NamedTensor,
    SafetensorsFolder,
    write_folder,
    write_json,
)
from megatron.training.checkpoint.convert.staging import staged
from megatron.training.checkpoint.convert.target import (
    DTYPES,
    Wish,
    arguments_of,
    check_vocabulary,
    judge,
)
from megatron.training.checkpoint.convert.writing import (
    FILE_BYTES,
    Piece,
    write_common,
    write_tensors,
)
from megatron.training.common.errors import UsageError
from megatron.training.config.vocabulary import pad_vocab_size, padding_unit

CONFIG = "config.json"
_ADAPTER = "adapter_config.json"
SHARD_BYTES = 5_000_000_000
_DIVISIBLE_BY = 128
_CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def is_model(source: Path) -> bool:
    """Whether a folder is a Hugging Face model and no checkpoint."""
    return (source / CONFIG).is_file() and not (
        (source / files.CORE_MARK).is_file() or (source / files.TRACKER).is_file()
    )


def save(
    source: Path,
    destination: Path,
    wish: Wish,
    *,
    step: int | None = None,
    verify: bool = False,
    trust_unverified: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Outcome:
    """Writes the weights of a checkpoint as a Hugging Face model.

    Padding rows are cut: `wish.vocab` rows stay, or as many as the tokenizer has tokens, or all
    where that is unknown. Another number format than the stored one is made from the masters.

    Raises:
        Refused: the checkpoint cannot be proved complete, or `config.json` cannot express its
            network.
        VerificationFailed: the result is not what it should be.
        UsageError: a wish that makes no sense for this format.
    """
    for name in ("tp", "pp", "vpp", "dp"):
        if getattr(wish, name) is not None:
            raise UsageError(f"--{name} goes with checkpoints; a Hugging Face model has no layout")
    if wish.optimizer not in (None, "none"):
        raise UsageError(f"--optimizer {wish.optimizer}: Hugging Face models hold weights only")
    archive = open_archive(source, step=step, trust_unverified=trust_unverified)
    notes = check_files(archive)
    found = check_weights(archive, DTYPES[wish.dtype] if wish.dtype else None)
    dtype = DTYPES[wish.dtype] if wish.dtype else found.dtype
    check_truth(archive, found)  # nothing to compare unless weights are made from masters
    vocab = _exported_rows(archive, wish, notes)
    config = llama.config_of(archive.arguments, vocab, dtype)
    dropout = archive.arguments.get("hidden_dropout")
    if dropout:
        notes.append(f"hidden_dropout {dropout} acts in training only and has no field in {CONFIG}")
    tensors = _exported(archive, found, dtype, vocab)
    with staged(source, destination) as folder:
        write_json(folder / CONFIG, config)
        write_folder(folder, tensors, shard_bytes=shard_bytes)
        _check_written(folder, tensors, verify=verify)
        num_bytes = files.stored_bytes(folder)
    return Outcome(
        source=str(archive.folder),
        destination=str(destination),
        iteration=None,
        layout=None,
        num_tensors=len(tensors),
        num_rewritten=len(tensors),
        num_bytes=num_bytes,
        num_compared=len(tensors) if verify else None,
        notes=tuple(notes),
    )


def _exported_rows(archive: Archive, wish: Wish, notes: list[str]) -> int:
    stored = int(archive.arguments["padded_vocab_size"])
    true = check_vocabulary(archive.arguments, wish)
    rows = wish.vocab or true
    if rows is None:
        notes.append(f"the flags do not say how many of the {stored} rows are tokens: all are kept")
        return stored
    if rows > stored:
        flag = "--vocab" if wish.vocab else "--true-vocab"
        raise UsageError(f"{flag} {rows} is more than the {stored} rows that are stored")
    return rows


def _exported(
    archive: Archive, found: Contents, dtype: torch.dtype, vocab: int
) -> list[NamedTensor]:
    arguments = archive.arguments
    shapes = llama.shapes_of(arguments, vocab)
    use_master = dtype != found.dtype and found.master is not None

    def read(ours: str, part: Chunk | None) -> torch.Tensor:
        key = contents.state_key(found.master, ours) if use_master and found.master else ours
        return archive.read(key, part).to(dtype)

    def top(ours: str, shape: tuple[int, ...]) -> torch.Tensor:
        return read(ours, Chunk(offset=(0,) * len(shape), size=shape))

    def layer(ours: str, number: int, which: int) -> torch.Tensor:
        full = found.weights[contents.LAYERS + ours].shape
        part = Chunk(offset=(number,) + (0,) * (len(full) - 1), size=(1, *full[1:]))
        data = read(contents.LAYERS + ours, part)[0]
        return llama.split(ours, data, arguments)[which].clone()

    makers = {
        theirs: partial(top, ours, shapes.get(theirs, ())) for ours, theirs in llama.TOP.items()
    }
    for number in range(arguments["num_layers"]):
        for ours, names in llama.IN_LAYER.items():
            for which, name in enumerate(names):
                makers[f"model.layers.{number}.{name}"] = partial(layer, ours, number, which)
    return [
        NamedTensor(name=name, dtype=dtype, shape=shape, make=makers[name])
        for name, shape in shapes.items()
    ]


def _check_written(folder: Path, tensors: list[NamedTensor], *, verify: bool) -> None:
    try:
        written = SafetensorsFolder(folder)
    except Refused as error:
        raise VerificationFailed(f"the result does not read back: {error}") from error
    expected = {t.name for t in tensors}
    if written.names != expected:
        raise VerificationFailed(f"the result differs in {min(written.names ^ expected)}")
    for tensor in tensors:
        if written.describe(tensor.name) != (tensor.dtype, tensor.shape):
            raise VerificationFailed(f"{tensor.name} is {written.describe(tensor.name)}")
        if verify and num_different(tensor.make, partial(written.read, tensor.name)):
            raise VerificationFailed(f"{tensor.name} differs from the checkpoint")


def load(
    source: Path,
    destination: Path,
    wish: Wish,
    *,
    verify: bool = False,
    file_bytes: int = FILE_BYTES,
) -> Outcome:
    """Makes a checkpoint of iteration 0 from a Hugging Face model, to start from with `--finetune`,
    which makes the masters from the weights.

    The vocabulary is padded with zero rows for `wish.tp`, or to `wish.vocab` rows.

    Raises:
        Refused: files or configuration are incomplete, or ask for another network than this
            trainer's.
        VerificationFailed: the result is not what it should be.
        UsageError: a wish that makes no sense.
    """
    arguments = llama.arguments_of(_read_config(source / CONFIG))
    if (source / _ADAPTER).is_file():
        raise Refused(f"{source / _ADAPTER} changes the weights; merge the adapter into its model")
    stored = SafetensorsFolder(source)
    dtype = _check_model(stored, arguments)
    true = arguments["vocab_size"]
    padded = wish.vocab or pad_vocab_size(true, padding_unit(_DIVISIBLE_BY, [wish.tp or 1]))
    if padded < true:
        raise Refused(
            f"--vocab {padded} would drop tokens: the model has {true}; give at least that"
        )
    arguments["padded_vocab_size"] = padded
    target = judge(arguments, Contents(weights={}, optimizer="none", dtype=dtype), wish)
    name = next(name for name, value in DTYPES.items() if value == target.dtype)
    arguments |= arguments_of({**arguments, "virtual_pipeline_model_parallel_size": 1}, target)
    arguments |= {"params_dtype": name, "bf16": name == "bf16", "fp16": name == "fp16"}
    arguments |= {"iteration": 0, "consumed_train_samples": 0, "consumed_valid_samples": 0}
    common = {
        "args": Namespace(**arguments),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": dict(_CONTENT),
    }
    recipe = Recipe(
        pieces=_imported(stored, arguments, target.dtype),
        blobs=_empty_extra_states(arguments["num_layers"]),
    )
    with staged(source, destination) as root:
        folder = files.begin(root, 0)
        write_tensors(folder, recipe.pieces, recipe.blobs, file_bytes=file_bytes)
        write_common(folder, common)
        files.finish(root, 0, files.checksums(folder, files.data_files(folder)))
        num_compared = read_back(folder, target, recipe if verify else None)
        num_bytes = files.stored_bytes(folder)
    num_tensors = len({piece.key for piece in recipe.pieces})
    return Outcome(
        source=str(source),
        destination=str(files.folder_of(destination, 0)),
        iteration=0,
        layout=str(target.layout),
        num_tensors=num_tensors,
        num_rewritten=num_tensors,
        num_bytes=num_bytes,
        num_compared=num_compared,
        notes=("it holds weights only: start from it with --load and --finetune",),
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise Refused(f"{path} is damaged ({error})") from error
    if not isinstance(config, dict):
        raise Refused(f"{path} holds no configuration")
    return config


def _check_model(stored: SafetensorsFolder, arguments: dict[str, Any]) -> torch.dtype:
    """Proves names, shapes and one number format, and returns that."""
    expected = llama.shapes_of(arguments, arguments["vocab_size"])
    names = {name for name in stored.names if not name.endswith("rotary_emb.inv_freq")}
    head, table = llama.TOP[contents.HEAD], llama.TOP[contents.EMBEDDING]
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


def _imported(
    stored: SafetensorsFolder, arguments: dict[str, Any], dtype: torch.dtype
) -> list[Piece]:
    def top(theirs: str, shape: tuple[int, ...]) -> torch.Tensor:
        data = stored.read(theirs).to(dtype)
        if data.shape == torch.Size(shape):
            return data
        table = torch.zeros(shape, dtype=dtype)
        table[: data.shape[0]] = data
        return table

    def layer(ours: str, number: int) -> torch.Tensor:
        names = (f"model.layers.{number}.{name}" for name in llama.IN_LAYER[ours])
        parts = [stored.read(name).to(dtype) for name in names]
        return llama.join(ours, parts, arguments)[None]

    pieces = []
    for key, shape in contents.expected_weights(arguments).items():
        ours = key.removeprefix(contents.LAYERS)
        if ours == key:
            part = Chunk(offset=(0,) * len(shape), size=shape)
            make = partial(top, llama.TOP[key], shape)
            pieces.append(Piece(key=key, dtype=dtype, shape=shape, part=part, make=make))
            continue
        for number in range(shape[0]):
            part = Chunk(offset=(number,) + (0,) * (len(shape) - 1), size=(1, *shape[1:]))
            make = partial(layer, ours, number)
            pieces.append(Piece(key=key, dtype=dtype, shape=shape, part=part, make=make))
    return pieces


def _empty_extra_states(num_layers: int) -> dict[str, Any]:
    """The objects that megatron-core's layers ask for beside their weights, without FP8 scales."""
    data = io.BytesIO()
    torch.save([None], data)
    modules = ("self_attention.linear_qkv", "self_attention.linear_proj")
    modules += ("mlp.linear_fc1", "mlp.linear_fc2")
    return {
        f"{contents.LAYERS}{module}._extra_state/shard_{i}_{num_layers}": data.getvalue
        for module in modules
        for i in range(num_layers)
    }
