"""Formats of other libraries that checkpoints are made from and written as. Extras bring them."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron.trainer.common.extras import extras_with


@dataclass(frozen=True, kw_only=True)
class ConversionResult:
    source: str
    """Folder read."""
    destination: str
    """Folder made."""
    iteration: int | None
    """Iteration of the checkpoint; None for a model of another format."""
    layout: str | None
    """Layout the flags of the result name."""
    num_tensors: int
    num_rewritten: int
    """Tensors that were written anew; 0 where files were copied."""
    num_bytes: int
    num_compared: int | None
    """Tensors compared element by element, or None without `--verify`."""
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "notes": list(self.notes)}


class ModelFormat(Protocol):
    """One format. Making it imports neither torch nor megatron-core."""

    name: str
    """Value of `--format`."""
    title: str
    """Such as `a Hugging Face model`."""

    def is_model(self, folder: Path) -> bool:
        """Whether a folder is a model of this format and no checkpoint."""
        ...

    def add_flags(self, group: Any) -> None:
        """Adds what `save` needs to a group of argparse."""
        ...

    def load(
        self, source: Path, destination: Path, changes: Any, *, verify: bool
    ) -> ConversionResult:
        """Makes a new `--save` directory from a model; arguments and errors as of `convert` of the
        extra of that name."""
        ...

    def save(
        self,
        source: Path,
        destination: Path,
        changes: Any,
        *,
        step: int | None,
        verify: bool,
        trust_unverified: bool,
        flags: argparse.Namespace,
    ) -> ConversionResult:
        """Writes a checkpoint as a model; arguments and errors as of `convert`, and the parsed
        flags of `add_flags`."""
        ...

    def side_files(self, checkpoint: Path) -> Mapping[str, Path]:
        """Files that `load` kept beside a checkpoint, the folder of one iteration: place in the
        `--save` directory -> path. Conversions take them along."""
        ...

    def end_tokens(self, checkpoint: Path, arguments: Mapping[str, Any]) -> Collection[int]:
        """Tokens that end a text of a checkpoint that `load` made, the folder of one iteration with
        these stored flags, beside the tokenizer's end of a document."""
        ...


def model_formats() -> dict[str, ModelFormat]:
    made = [kind() for _, kind in extras_with("model_format")]
    return {one.name: one for one in made}


def format_of(folder: Path) -> ModelFormat | None:
    """The format of the model in a folder; None where it is a checkpoint, or of no known format."""
    return next((one for one in model_formats().values() if one.is_model(folder)), None)


def side_files(checkpoint: Path) -> dict[str, Path]:
    """What the imports of all formats kept beside a checkpoint; see `ModelFormat.side_files`."""
    found: dict[str, Path] = {}
    for one in model_formats().values():
        found |= one.side_files(checkpoint)
    return found


def end_tokens(checkpoint: Path, arguments: Mapping[str, Any]) -> frozenset[int]:
    """The tokens of all formats that end a text; see `ModelFormat.end_tokens`."""
    formats = model_formats().values()
    return frozenset().union(*(one.end_tokens(checkpoint, arguments) for one in formats))
