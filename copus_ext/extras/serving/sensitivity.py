"""How much the loss grows when the weights of one layer are quantised: the results of `measure`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.outside import parse_json

SCHEMA = "copus-serving-sensitivity/1"
FILE = "serving_sensitivity.json"
"""Name of the results beside a checkpoint."""
_BITS = ("2", "3", "4", "5", "6", "7", "8", "16")
_LARGEST = 1e300
_FIELDS = ("group_size", "loss", "loss_16", "loss_increase", "settings", "standard_error")


@dataclass(kw_only=True)
class Sensitivity:
    settings: dict[str, Any]
    """What was measured: checkpoint, data, groups."""
    group_size: int
    loss: float
    """Of the checkpoint, in nats per token."""
    loss_16: float
    """With all weights rounded to the number format of 16 bits that is served."""
    loss_increase: list[dict[str, float]] = field(default_factory=list)
    """Of each layer, by bits: over `loss_16`, with this layer alone quantised."""
    standard_error: list[dict[str, float]] = field(default_factory=list)
    """Of those, over samples."""

    def table(self, bits: Sequence[int]) -> list[list[float]]:
        """[layers, bits] increases for a plan: 0 at 16 bits; one below 0 counts as 0.

        Raises:
            UsageError: some bits were not measured.
        """
        lacking = [b for b in bits if b != 16 and any(str(b) not in x for x in self.loss_increase)]
        if lacking:
            raise UsageError(
                f"the sensitivity has no loss with {lacking[0]} bits; leave it out of --bits, or "
                "measure again"
            )
        return [
            [0.0 if b == 16 else max(layer[str(b)], 0.0) for b in bits]
            for layer in self.loss_increase
        ]

    @property
    def rounding(self) -> float:
        """What rounding to 16 bits costs, at least 0: part of any plan's increase."""
        return max(self.loss_16 - self.loss, 0.0)

    def write(self, path: Path) -> None:
        """Writes a JSON file, whole or not at all."""
        record = {"schema": SCHEMA, **{name: getattr(self, name) for name in _FIELDS}}
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(record, indent=1) + "\n")
        os.replace(temporary, path)

    @classmethod
    def read(cls, path: Path) -> Sensitivity:
        """Inverse of `write`.

        Raises:
            UsageError: it cannot be read, or holds something else.
        """
        try:
            return cls(**_checked(parse_json(path.read_bytes())))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{path} holds no measured sensitivity: {error}; docs/serving.md describes the file"
            ) from error


def _checked(record: Any) -> dict[str, Any]:
    """The fields of a record, in `_FIELDS`.

    Raises:
        ValueError: naming the field that is missing, unknown or of another kind.
    """
    if not isinstance(record, dict):
        raise ValueError("it must be an object")
    if record.get("schema") != SCHEMA:
        raise ValueError(f"schema is {record.get('schema')!r} and must be {SCHEMA!r}")
    values = {"settings": {}, "standard_error": [], **record}
    del values["schema"]
    for name in sorted(values.keys() ^ set(_FIELDS)):
        raise ValueError(f"{name} is {'not a field of it' if name in values else 'missing'}")
    size = values["group_size"]
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"group_size is {size!r} and must be a whole number of at least 1")
    for name in ("loss", "loss_16"):
        _check_number(name, values[name])
    for name in ("loss_increase", "standard_error"):
        _check_layers(name, values[name])
    if not isinstance(values["settings"], dict):
        raise ValueError("settings must be an object")
    if not values["loss_increase"]:
        raise ValueError("loss_increase must have an object for each layer")
    return values


def _check_layers(name: str, layers: Any) -> None:
    if not isinstance(layers, list):
        raise ValueError(f"{name} must be a list with an object for each layer")
    for i, layer in enumerate(layers):
        if not isinstance(layer, dict):
            raise ValueError(f"{name}[{i}] must be an object of bits and nats")
        for bits, value in layer.items():
            if bits not in _BITS:
                raise ValueError(f"{name}[{i}] has {bits!r} bits; known: {', '.join(_BITS)}")
            _check_number(f"{name}[{i}][{bits!r}]", value)


def _check_number(name: str, value: Any) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) < _LARGEST:
        raise ValueError(f"{name} is {value!r} and must be a finite number")
