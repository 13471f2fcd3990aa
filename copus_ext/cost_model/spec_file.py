"""Reading descriptions of models and machines that people wrote."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron.trainer.common.outside import parse_json
from megatron.trainer.common.program import nearest

_UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_THEM = {False: "it", True: "them"}


class SpecError(ValueError):
    """A model or cluster that cannot be described; one line that names field, value and fix."""


def read_json(path: Path) -> Any:
    """The value that a file holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not valid JSON, or nested too deeply.
    """
    return parse_json(path.read_bytes())


def is_positive(value: Any) -> bool:
    """Whether it is a finite number above 0."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0


def checked(kind: type, data: dict[str, Any], what: str, example: str = "") -> dict[str, Any]:
    """The fields of a dataclass from JSON, texts with units as numbers.

    Args:
        data: what was read.
        what: to call it in an error.
        example: a whole description, for the error on keys that are missing.

    Raises:
        SpecError: an unknown key, or one that is missing.
    """
    names = {f.name: f for f in fields(kind)}  # pyright: ignore[reportArgumentType]
    unknown = sorted(set(data) - set(names))
    if unknown:
        others = [name for name in names if name not in data]
        hint = next(filter(None, (nearest(key, others) for key in unknown)), "")
        hint = hint or f"; known: {', '.join(names)}"
        raise SpecError(f"unknown {what} keys: {', '.join(unknown)}{hint}")
    missing = [n for n, f in names.items() if n not in data and f.default is f.default_factory]
    if missing:
        also = ", or a name such as A100-80GB" if "peak_flops" in missing else ""
        also += f", as in {example}" if example else ""
        raise SpecError(f"{what} lacks {', '.join(missing)}; give {_THEM[len(missing) > 1]}{also}")
    texts = ("name", "constants")
    found = dict(data)
    for name, value in data.items():
        if isinstance(value, str) and name not in texts:
            try:
                found[name] = quantity(value)
            except SpecError as error:
                raise SpecError(f"{what}.{name} {error}") from error
    return found


def quantity(text: str) -> float:
    """Bytes, bytes per second or FLOP/s of a text such as `80GiB`, `400Gbit/s` or `50GB/s`.

    Raises:
        SpecError: not such a text.
    """
    found = re.fullmatch(
        r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*(k|[KMGT]i|[MGT])?(bps|bit|b|B|FLOP)?(/s)?",
        text.strip(),
    )
    if not found:
        raise SpecError(f"{text!r} is not a size; write 80GiB, 400Gb/s (bits) or 50GB/s (bytes)")
    number, prefix, unit, _ = found.groups()
    return float(number) * _UNITS[prefix or ""] / (8 if unit in ("b", "bit", "bps") else 1)
