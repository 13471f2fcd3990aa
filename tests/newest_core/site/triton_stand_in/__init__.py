"""Stands in for Triton on CPU, where megatron-core imports it and launches none of its kernels.

megatron-core 0.18 and later import it unasked and do not declare it. A kernel that is launched
raises, so that a test which needs one cannot pass by accident.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton_stand_in import language as language

__version__ = "0.0.0"


class _Kernel:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = getattr(function, "__name__", "kernel")

    def __getitem__(self, _: object) -> Callable[..., Any]:
        return self

    def __call__(self, *_: object, **__: object) -> Any:
        raise NotImplementedError(f"{self._name} is a Triton kernel, and this is a stand-in")


class Config:
    def __init__(self, *_: object, **__: object) -> None:
        pass


def jit(function: Callable[..., Any] | None = None, **_: object) -> Any:
    return _Kernel if function is None else _Kernel(function)


def autotune(*_: object, **__: object) -> Callable[..., Any]:
    return lambda kernel: kernel


heuristics = autotune


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
