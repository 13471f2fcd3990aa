"""Hugging Face models as a format of the checkpoint converter."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.trainer.checkpoint import files
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.outside import parse_json
from megatron.trainer.extras.huggingface.names import CONFIG, CONFIG_BYTES, SIDE, WEIGHTS

if TYPE_CHECKING:
    from megatron.trainer.extras.convert.convert import ConversionResult
    from megatron.trainer.extras.convert.target import Changes

_KEYS = ("model_type", "architectures")
"""Of every `config.json` that `transformers` wrote."""


class HuggingFace:
    name = "hf"
    title = "a Hugging Face model"

    def is_model(self, folder: Path) -> bool:
        """Whether its `config.json` names a kind of model or lies beside weights. A run has a
        `config.json`, too, from its first step on."""
        if not (folder / CONFIG).is_file() or files.is_of_checkpoints(folder):
            return False
        return _names_a_model(folder / CONFIG) or any(
            path.is_file() for pattern in WEIGHTS for path in folder.glob(pattern)
        )

    def add_flags(self, group: Any) -> None:
        words = "size of a safetensors file, in GB"
        group.add_argument("--max-shard-gb", type=float, default=5.0, help=words)

    def load(
        self, source: Path, destination: Path, changes: Changes, *, verify: bool
    ) -> ConversionResult:
        from megatron.trainer.extras.huggingface import exchange

        return exchange.load(source, destination, changes, verify=verify)

    def save(
        self,
        source: Path,
        destination: Path,
        changes: Changes,
        *,
        step: int | None,
        verify: bool,
        trust_unverified: bool,
        flags: argparse.Namespace,
    ) -> ConversionResult:
        from megatron.trainer.extras.huggingface import exchange

        if flags.max_shard_gb <= 0:
            raise UsageError(f"--max-shard-gb {flags.max_shard_gb} must be above 0")
        return exchange.save(
            source,
            destination,
            changes,
            step=step,
            verify=verify,
            trust_unverified=trust_unverified,
            shard_bytes=int(flags.max_shard_gb * 1e9),
        )

    def side_files(self, checkpoint: Path) -> dict[str, Path]:
        from megatron.trainer.extras.huggingface.generation import kept_beside

        return {f"{SIDE}/{name}": path for name, path in kept_beside(checkpoint).items()}

    def end_tokens(self, checkpoint: Path, arguments: Mapping[str, Any]) -> set[int]:
        from megatron.trainer.extras.huggingface import generation

        return generation.end_tokens(checkpoint, arguments)


def _names_a_model(path: Path) -> bool:
    try:
        config = parse_json(files.read_text(path, max_bytes=CONFIG_BYTES))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and any(config.get(key) for key in _KEYS)
