"""Names of `triton.language`: they are looked up where kernels are defined, and never called."""

from __future__ import annotations

from typing import Any


class constexpr:
    def __init__(self, value: Any = None) -> None:
        self.value = value


class dtype:
    pass


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return constexpr
