"""How much the loss grows when the weights of one layer are quantised: the results of `measure`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.training.common.errors import UsageError

SCHEMA = "copus-serving-sensitivity/1"
FILE = "serving_sensitivity.json"
"""Name of the results beside a checkpoint."""
_FIELDS = ("group_size", "loss", "loss_16", "loss_increase", "settings", "standard_error")


@dataclass(kw_only=True)
class Sensitivity:
    """Measured loss increases of one checkpoint."""

    settings: dict[str, Any]
    """What was measured: checkpoint, data, groups."""
    group_size: int
    """Weights that share a scale."""
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
            record = json.loads(path.read_text())
            if record.pop("schema") != SCHEMA:
                raise ValueError("another schema")
            found = cls(**{name: record[name] for name in _FIELDS})
            numbers = [found.loss, found.loss_16, found.group_size]
            numbers += [x for layer in found.loss_increase for x in layer.values()]
            if not all(math.isfinite(x) for x in numbers):
                raise ValueError("a loss that is no finite number")
            return found
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} holds no measured sensitivity: {error}") from error
