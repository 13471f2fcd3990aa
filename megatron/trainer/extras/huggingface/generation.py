"""What `generate()` of `transformers` needs beside weights: the ids of special tokens,
`generation_config.json`, and the files of the tokenizer.

An import keeps these files in a folder of the new checkpoint directory, and names that folder as
its tokenizer. So a run that goes on from it, and what is exported at its end, know them.
"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.outside import parse_json
from megatron.trainer.data.tokenizer import Tokenizer, build_tokenizer
from megatron.trainer.extras.huggingface.config_json import KEPT
from megatron.trainer.extras.huggingface.names import CONFIG, GENERATION, SIDE

_CONFIGURATIONS = (CONFIG, GENERATION)
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_HUGGING_FACE, _GPT2 = "HuggingFaceTokenizer", "GPT2BPETokenizer"
_WITHOUT_FILES = ("ByteLevelTokenizer", "NullTokenizer")
_OF_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "*.model", "*.tiktoken", "chat_template.*"),
    "additional_chat_templates/*",
)
"""Files that tokenizers of `transformers` are read from. Code is none of them."""
_SAME = {
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
}
"""Fields of `config.json` -> our flags: where all are equal, the files are of this network."""


@dataclass(frozen=True, kw_only=True)
class Companions:
    """What goes into a Hugging Face model beside its network."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `config.json`; one that is None is null there."""
    absent: frozenset[str] = frozenset()
    """Fields that the model it was imported from does not have."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """`generation_config.json`, where it is not one of the files; {}: there is none."""
    files: Mapping[str, Path | str] = field(default_factory=dict)
    """Name in the model -> the file, or its text."""
    notes: tuple[str, ...] = ()

    def config(self, network: Mapping[str, Any]) -> dict[str, Any]:
        """`config.json` of a network with these fields."""
        found = {**network, **self.fields}
        return {name: value for name, value in found.items() if name not in self.absent}

    def write(self, folder: Path) -> None:
        """Writes everything but `config.json`.

        Raises:
            OSError: a file cannot be read or written.
        """
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                (folder / name).write_text(content)
            else:
                shutil.copyfile(content, folder / name)
        if self.generation:
            (folder / GENERATION).write_text(_text(self.generation))


def _text(record: Mapping[str, Any]) -> str:
    return json.dumps(record, indent=2, sort_keys=True) + "\n"


def files_of_model(source: Path) -> dict[str, Path]:
    """Name -> path of the files that an import keeps: the tokenizer's and the two
    configurations."""
    found = _tokenizer_files(source)
    for name in _CONFIGURATIONS:
        if (source / name).is_file():
            found[name] = source / name
    return found


def _tokenizer_files(folder: Path) -> dict[str, Path]:
    paths = (path for pattern in _OF_TOKENIZER for path in sorted(folder.glob(pattern)))
    return {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}


def tokenizer_arguments(source: Path, destination: Path) -> dict[str, str]:
    """Flags of the tokenizer of an imported model, {} where it comes without one.

    Args:
        destination: the checkpoint directory that its files are kept in.
    """
    if not _tokenizer_files(source):
        return {}
    return {
        "tokenizer_type": _HUGGING_FACE,
        "tokenizer_model": str(destination.resolve() / SIDE),
    }


def kept_beside(checkpoint: Path) -> dict[str, Path]:
    """Name -> path of the files that an import kept beside a checkpoint.

    Args:
        checkpoint: folder of one iteration.
    """
    folder = checkpoint.parent / SIDE
    return files_of_model(folder) if folder.is_dir() else {}


def companions_of(checkpoint: Path, arguments: Mapping[str, Any]) -> Companions:
    """What belongs to the export of a checkpoint.

    What the model had that was imported stays, unless the run was given another tokenizer of
    Hugging Face. Else the tokenizer of the run says the ids, and its files are taken where they are
    those of a Hugging Face model.

    Args:
        checkpoint: folder of one iteration.
    """
    kind, model = arguments.get("tokenizer_type"), arguments.get("tokenizer_model")
    files, notes = kept_beside(checkpoint), ()
    if kind == _HUGGING_FACE and model:
        files, notes = _files_of_run(Path(model), files)
    recorded = _recorded(files.pop(CONFIG, None), arguments)
    if recorded is not None:
        return _of_import(recorded, files, notes)
    files.pop(GENERATION, None)  # of another network
    tokenizer, notes = _tokenizer_of(arguments)
    if tokenizer is None:
        return Companions(files=files, notes=notes)
    ids = {
        "bos_token_id": tokenizer.around.bos_token_id,
        "eos_token_id": tokenizer.eod if tokenizer.eod >= 0 else None,
        "pad_token_id": tokenizer.around.pad_token_id,
    }
    texts: dict[str, Path | str] = {**files}
    if kind in (_GPT2, None):
        texts |= {"vocab.json": Path(arguments["vocab_file"])}
        texts |= {"merges.txt": Path(arguments["merge_file"])}
        texts |= {"tokenizer_config.json": _text({"tokenizer_class": "GPT2Tokenizer"})}
    elif kind != _HUGGING_FACE and kind not in _WITHOUT_FILES:
        notes = (f"the files of {kind} are left to you: they are none of transformers",)
    return Companions(fields=ids, generation=_known(ids), files=texts, notes=notes)


def end_tokens(checkpoint: Path, arguments: Mapping[str, Any]) -> set[int]:
    """The `eos_token_id` of the model that a checkpoint was imported from, one or several; empty
    where it has none. Arguments as of `companions_of`."""
    if not kept_beside(checkpoint):
        return set()
    found = companions_of(checkpoint, arguments)
    file, record = found.files.get(GENERATION), found.fields
    if isinstance(file, Path):
        try:
            record = parse_json(file.read_bytes())
        except (OSError, ValueError):
            return set()
    ids = record.get("eos_token_id") if isinstance(record, Mapping) else None
    return {i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int}


def _files_of_run(model: Path, kept: dict[str, Path]) -> tuple[dict[str, Path], tuple[str, ...]]:
    """Files of the tokenizer that a run was given, or those kept of an import if it is the same.

    Returns:
        The files, and what the user should know.
    """
    folder = model if model.is_dir() else model.parent
    own, imported = _tokenizer_files(folder), {n: kept[n] for n in kept if n not in _CONFIGURATIONS}
    if not imported:
        return files_of_model(folder), ()
    if not own and folder.name != SIDE:
        note = f"--tokenizer-model {model} is gone: the tokenizer that was imported is taken"
        return kept, (note,)
    is_same = all(own[n].read_bytes() == imported[n].read_bytes() for n in own.keys() & imported)
    return (kept if is_same else files_of_model(folder)), ()


def _known(ids: Mapping[str, Any]) -> dict[str, Any]:
    return {name: ids[name] for name in _IDS if ids.get(name) is not None}


def _of_import(
    config: Mapping[str, Any], files: dict[str, Path], notes: tuple[str, ...]
) -> Companions:
    fields = {name: config[name] for name in KEPT if name in config}
    # Without a file of its own, transformers takes these fields and defaults of the class.
    return Companions(
        fields=fields, absent=frozenset(_IDS) - fields.keys(), files=files, notes=notes
    )


def _recorded(path: Path | None, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """`config.json` of the model that a checkpoint comes from, or None if it is of another."""
    try:
        config = parse_json(path.read_bytes()) if path is not None else None
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    is_same = all(config.get(theirs) == arguments.get(ours) for theirs, ours in _SAME.items())
    return config if is_same else None


def _tokenizer_of(arguments: Mapping[str, Any]) -> tuple[Tokenizer | None, tuple[str, ...]]:
    """The tokenizer of stored flags, or None and why not."""
    names = inspect.signature(build_tokenizer).parameters
    given: dict[str, Any] = {n: arguments[n] for n in names if arguments.get(n) is not None}
    if "tokenizer_type" not in given and "vocab_file" not in given:
        return None, ("the stored flags name no tokenizer: eos_token_id is not known",)
    try:
        return build_tokenizer(**{"tokenizer_type": None, **given}), ()
    except UsageError as error:
        return None, (f"eos_token_id is not known, since the tokenizer cannot be read: {error}",)
