"""Kinds of GPU, and sizes with units."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any

from copus_ext.cost_model.model_spec import SpecError

_UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """One kind of GPU (or CPU rank)."""

    name: str
    """What to call it."""
    memory_bytes: float
    """Memory of one."""
    peak_flops: float
    """Dense bf16 peak, FLOP/s."""
    hbm_bytes_per_s: float
    """Memory bandwidth."""
    num_sms: int
    """Multiprocessors."""
    fp32_peak_flops: float | None = None
    """Peak in fp32 (TF32 where that is the default); None: half of the bf16 one."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise SpecError(f"gpu.name {str(self.name)[:60]!r} must be a text")
        for field in fields(self):
            value = getattr(self, field.name)
            may_lack = field.name == "fp32_peak_flops" and value is None
            if not may_lack and field.name != "name" and not is_positive(value):
                raise SpecError(f"gpu.{field.name} {str(value)[:60]!r} must be positive")

    def peak(self, precision: str) -> float:
        """Dense peak at a precision."""
        if precision != "fp32":
            return self.peak_flops
        return self.fp32_peak_flops or self.peak_flops / 2


def is_positive(value: Any) -> bool:
    """Whether it is a finite number above 0."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0


def checked(kind: type, data: dict[str, Any], what: str) -> dict[str, Any]:
    """The fields of a dataclass from JSON, texts with units as numbers.

    Args:
        kind: the dataclass.
        data: what was read.
        what: to call it in an error.

    Raises:
        SpecError: an unknown key, or one that is missing.
    """
    names = {f.name: f for f in fields(kind)}  # pyright: ignore[reportArgumentType]
    unknown = sorted(set(data) - set(names))
    if unknown:
        raise SpecError(f"unknown {what} keys: {', '.join(unknown)}")
    missing = [n for n, f in names.items() if n not in data and f.default is f.default_factory]
    if missing:
        raise SpecError(f"{what} lacks {', '.join(missing)}")
    texts = ("name", "constants")
    return {n: quantity(v) if isinstance(v, str) and n not in texts else v for n, v in data.items()}


def quantity(text: str) -> float:
    """Bytes, bytes per second or FLOP/s of a text such as `80GiB`, `400Gb/s` (bits) or `50GB/s`.

    Raises:
        SpecError: not such a text.
    """
    found = re.fullmatch(
        r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*(k|[KMGT]i|[MGT])?(b|B|FLOP)?(/s)?", text.strip()
    )
    if not found:
        raise SpecError(f"{text!r} is no size; write 80GiB, 400Gb/s (bits) or 50GB/s (bytes)")
    number, prefix, unit, _ = found.groups()
    return float(number) * _UNITS[prefix or ""] / (8 if unit == "b" else 1)


def _gpu(name: str, gib: float, tflops: float, tbps: float, sms: int, fp32: float) -> GpuSpec:
    return GpuSpec(
        name=name,
        memory_bytes=gib * 2**30,
        peak_flops=tflops * 1e12,
        hbm_bytes_per_s=tbps * 1e12,
        num_sms=sms,
        fp32_peak_flops=fp32 * 1e12,
    )


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100-40GB", 40, 312, 1.555, 108, 156),
        _gpu("A100-80GB", 80, 312, 2.039, 108, 156),
        _gpu("H100-80GB", 80, 989, 3.35, 132, 494),
        _gpu("H200-141GB", 141, 989, 4.8, 132, 494),
        _gpu("B200-180GB", 180, 2250, 8.0, 148, 1125),
        _gpu("MI210-64GB", 64, 181, 1.6, 104, 22.6),
        _gpu("MI250-128GB", 128, 362, 3.2, 208, 45.3),
        _gpu("CPU-rank", 8, 0.06, 0.01, 1, 0.06),
    )
}
"""Data sheets: memory GiB, dense bf16 TFLOP/s, TB/s, multiprocessors, TF32 or fp32 TFLOP/s."""


def gpu_named(name: str) -> GpuSpec:
    """A GPU of the list.

    Raises:
        SpecError: it is not there.
    """
    if name not in GPUS:
        raise SpecError(
            f"--gpu {name}: unknown; known: {', '.join(GPUS)}, or give --cluster with memory_bytes "
            "and peak_flops"
        )
    return GPUS[name]
