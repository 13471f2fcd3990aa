"""Values that come back from files which anybody may have written: read in bounds, told in one
line."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from megatron.training.logging.tail_reader import open_plain

MAX_NUMBER = 1 << 53
"""Largest whole number that JSON readers agree on."""
MAX_FILE_BYTES = 1 << 16
"""Of a file that holds one value, if nothing else is said."""

Value = TypeVar("Value")


def check_number(name: str, value: Any, lowest: int, highest: int) -> None:
    """Refuses what is no whole number between two others.

    Raises:
        ValueError: one line naming the field.
    """
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number or not lowest <= value <= highest:
        raise ValueError(f"{name} {shown(value)} must be a whole number from {lowest} on")


def check_text(name: str, value: Any, longest: int) -> None:
    """Refuses what is no text, or too long.

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
        raise ValueError(f"{shown(data)} is no JSON object")
    if unknown := sorted(set(data) - set(names)):
        raise ValueError(f"unknown field {shown(unknown[0])}")
    if missing := sorted(set(needed) - set(data)):
        raise ValueError(f"{missing[0]} is missing")
    return data


def one_line(text: str, longest: int = 300) -> str:
    """The start of a text that may be anything, without control characters."""
    return "".join(c for c in " ".join(text.split()) if c.isprintable())[:longest]


def shown(value: Any) -> str:
    """The start of a value that may be anything, on one line."""
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        return "(a number too large to show)"
    return ascii(value)[:60]


def read_value(
    path: Path, parse: Callable[[Any], Value], *, most_bytes: int = MAX_FILE_BYTES
) -> Value | None:
    """What a file of JSON holds, or None if there is no file.

    Args:
        path: the file.
        parse: makes the value, raising ValueError.
        most_bytes: size from which it is refused.

    Raises:
        ValueError: one line naming the file.
    """
    try:
        return parse(json.loads(_read_small(path, most_bytes)))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {one_line(str(error))}") from error


def _read_small(path: Path, most_bytes: int) -> bytes:
    """The bytes of a plain file that nobody made to hurt: no link, no pipe, not large."""
    with open_plain(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"it has more than {most_bytes} bytes")
    return data
