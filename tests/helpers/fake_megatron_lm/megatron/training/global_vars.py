"""The checkout's arguments."""

from __future__ import annotations

from typing import Any

_ARGS: Any = None


def set_args(args: Any) -> None:
    """Sets them."""
    global _ARGS
    _ARGS = args


def get_args() -> Any:
    """Returns them."""
    return _ARGS
