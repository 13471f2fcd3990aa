"""JSON from files that anybody may have written. It is read within bounds, and what is wrong with
it is said in one line."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from megatron.trainer.common.outside import parse_json
from megatron.trainer.common.plain_file import open_plain

MAX_NUMBER = 1 << 53
"""Largest whole number that JSON readers agree on."""
_MAX_FILE_BYTES = 1 << 16

Value = TypeVar("Value")


def check_number(name: str, value: Any, lowest: int, highest: int) -> None:
    """Refuses what is not a whole number between two others.

    Raises:
        ValueError: one line naming the field.
    """
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number or not lowest <= value <= highest:
        raise ValueError(f"{name} {shown(value)} must be a whole number from {lowest} on")


def check_text(name: str, value: Any, longest: int) -> None:
    """Refuses what is not a text, or too long.

    Raises:
        ValueError: one line naming the field.
    """
    if not isinstance(value, str) or len(value) > longest:
        raise ValueError(f"{name} {shown(value)} must be a text of at most {longest}")


def check_fields(data: Any, names: Collection[str], needed: Collection[str]) -> dict[str, Any]:
    """The fields of a JSON object.

    Raises:
        ValueError: one line, if it is none, has others or lacks one.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{shown(data)} is not valid JSON object")
    if unknown := sorted(set(data) - set(names)):
        raise ValueError(f"unknown field {shown(unknown[0])}")
    if missing := sorted(set(needed) - set(data)):
        raise ValueError(f"{missing[0]} is missing")
    return data


class JsonRecord:
    """Base of a dataclass that is stored as a JSON object. Its `__post_init__` checks the values
    and raises ValueError naming the field."""

    @classmethod
    def from_json(cls: Any, data: Any) -> Any:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: one line: a missing or unknown field, or a value out of bounds.
        """
        own = fields(cls)
        needed = [f.name for f in own if f.default is MISSING and f.default_factory is MISSING]
        return cls(**check_fields(data, [f.name for f in own], needed))

    def to_json(self: Any) -> dict[str, Any]:
        return asdict(self)


def one_line(text: str, longest: int = 300) -> str:
    """The start of a text that may be anything, without control characters."""
    return "".join(c for c in " ".join(text.split()) if c.isprintable())[:longest]


def shown(value: Any) -> str:
    """The start of a value that may be anything, on one line."""
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        return "(a number too large to show)"
    return ascii(value)[:60]


def read_value(
    path: Path, parse: Callable[[Any], Value], *, max_bytes: int = _MAX_FILE_BYTES
) -> Value | None:
    """Reads a plain file that holds one JSON value; returns None if there is no file.

    Args:
        path: the file; a link or a pipe is refused.
        parse: makes the value and raises ValueError.
        max_bytes: a larger file is refused.

    Raises:
        ValueError: one line naming the file.
    """
    try:
        with open_plain(path) as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise ValueError(f"it has more than {max_bytes} bytes")
        return parse(parse_json(data))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {one_line(str(error))}") from error
