"""Wrong inputs of this extra for `tests.helpers.bad_inputs`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import torch

from megatron.trainer.common.errors import Refused
from megatron.trainer.extras.convert.writing import Piece
from megatron.trainer.extras.huggingface import config_json, exchange
from megatron.trainer.extras.huggingface.safetensors_files import (
    INDEX,
    SafetensorsFolder,
    write_folder,
)
from tests.helpers import spoil
from tests.helpers.bad_files import MODEL


def config(rng: random.Random, folder: Path) -> str | None:
    """`config.json`, by the converter."""
    path = folder / "config.json"
    path.write_bytes(spoil.spoiled_json(rng, MODEL))
    return spoil.problem_of(lambda: config_json.arguments_of(exchange._read_config(path)), Refused)


def safetensors(rng: random.Random, folder: Path) -> str | None:
    """Weights in safetensors, with an index."""
    pieces = [
        Piece.whole(key, torch.float32, (2, 3), lambda: torch.ones(2, 3)) for key in ("a", "b")
    ]
    write_folder(folder, pieces, shard_bytes=30)
    victim = folder / rng.choice((INDEX, "model-00001-of-00002.safetensors"))
    if victim.name == INDEX:
        victim.write_bytes(spoil.spoiled_json(rng, json.loads(victim.read_text())))
    elif rng.random() < 0.5:
        head = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
        text = spoil.spoiled_json(rng, head)
        size = rng.choice((len(text), len(text), 1 << 60, (1 << 64) - 1, 0))
        victim.write_bytes(size.to_bytes(8, "little") + text + bytes(24))
    else:
        victim.write_bytes(spoil.spoiled_bytes(rng, victim.read_bytes()))

    def read() -> None:
        found = SafetensorsFolder(folder)
        for name in sorted(found.names):
            found.describe(name)
            found.read(name)

    return spoil.problem_of(read, Refused)


KINDS: dict[str, Callable[[random.Random, Path], str | None]] = {
    "hugging face": config,
    "safetensors": safetensors,
}
"""What can be wrong, and its check."""
