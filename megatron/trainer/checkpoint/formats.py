"""Formats of other libraries that checkpoints are made from and written as. Extras bring them."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron.trainer.common.extras import extras_with


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

    def load(self, source: Path, destination: Path, changes: Any, *, verify: bool) -> Any:
        """Makes a new `--save` directory from a model; arguments, errors and what it returns as of
        `convert` of the extra of that name."""
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
    ) -> Any:
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
