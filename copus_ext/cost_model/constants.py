"""What the cost model does not know from the data sheet: few constants, fitted or assumed."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from copus_ext.cost_model.spec_file import read_json


@dataclass(frozen=True, kw_only=True)
class PartFactors:
    """Seconds of the parts of a step over those under usual conditions; and of a byte on the links
    that they share."""

    compute: float = 1.0
    """Computation, recomputation, the optimizer, and the fixed time of a step."""
    tp: float = 1.0
    """Tensor-parallel collectives."""
    pp: float = 1.0
    """Pipeline messages."""
    dp: float = 1.0
    """Gradients and weights among the replicas."""
    within: float = 1.0
    """A byte between ranks of a node."""
    across: float = 1.0
    """A byte between nodes."""

    def times(self, other: PartFactors) -> PartFactors:
        names = (f.name for f in fields(self))
        return PartFactors(**{name: getattr(self, name) * getattr(other, name) for name in names})

    def __str__(self) -> str:
        off = {f.name: x for f in fields(self) if abs((x := getattr(self, f.name)) - 1.0) > 0.01}
        return ", ".join(f"{name} x {x:.2f}" for name, x in off.items()) or "as usual"


USUAL = PartFactors()


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Efficiencies and latencies of one kind of machine with one software stack; all positive."""

    gemm_efficiency: float = 0.75
    """Share of the peak that a large matrix product reaches."""
    gemm_half_inner: float = 300.0
    """Inner dimension at which half of that is reached."""
    gemm_half_outer: float = 300.0
    """Output columns at which half of that is reached."""
    memory_factor: float = 1.0
    """Bytes that memory-bound operations really move, over those of the model."""
    attention_efficiency: float = 0.4
    """Share of the peak that attention reaches."""
    launch_sharpness: float = 4.0
    """Exponent with which launch time and work of a layer join; large: the greater of the two."""
    launch_s: float = 20e-6
    """Time to start one kernel from Python, autograd and Megatron's own code among it: between
    vTrain's 34 us and the 12 that are assumed of faster hosts."""
    exchange_s: float = 30e-6
    """Fixed time of a pipeline message."""
    step_s: float = 10e-3
    """Fixed time of a step."""
    tp_bytes_per_s: float = 150e9
    """Bandwidth of a GPU in a tensor-parallel collective inside a node."""
    tp_latency_s: float = 20e-6
    """Fixed time of a tensor-parallel collective."""
    tp_cross_bytes_per_s: float = 100e9
    """The same across nodes, at most; what the network gives is the other bound."""
    dp_bytes_per_s: float = 100e9
    """Bandwidth of a GPU in a data-parallel ring inside a node."""
    nic_efficiency: float = 0.5
    """Share of a node's nominal network bandwidth that collectives and messages reach."""
    optimizer_factor: float = 1.0
    """Bytes that the end of a step really moves, over those of the model."""

    @property
    def factors(self) -> PartFactors:
        """How the parts of a step differ from usual conditions."""
        return USUAL

    def under(self, factors: PartFactors) -> Constants:
        own = {f.name: getattr(self, f.name) for f in fields(Constants)}
        return Constants(**own) if factors == USUAL else _ConstantsNow(**own, now=factors)

    def __post_init__(self) -> None:
        for field in fields(Constants):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"constant {field.name} must be positive, got {value!r}")

    def to_json(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Constants:
        """Inverse of `to_json`.

        Raises:
            ValueError: an unknown name or a value that is not positive.
        """
        if "nic_bytes_per_s" in data:
            raise ValueError(
                "nic_bytes_per_s is nic_efficiency now, the share of a node's nominal network that "
                "messages reach; replace it"
            )
        unknown = sorted(set(data) - {f.name for f in fields(cls)})
        if unknown:
            raise ValueError(f"unknown constants: {', '.join(unknown)}")
        return cls(**data)

    @classmethod
    def load(cls, path: Path) -> Constants:
        """Reads a file that `bench/planner.py` or a user wrote."""
        record = read_json(path)
        given = record.get("constants") if isinstance(record, dict) else None
        if not isinstance(given, dict):
            raise ValueError('it holds no "constants"')
        return cls.from_json(given)


@dataclass(frozen=True, kw_only=True)
class _ConstantsNow(Constants):
    """Constants of a machine under conditions that are not usual; not to be fitted or written."""

    now: PartFactors

    @property
    def factors(self) -> PartFactors:
        """How the parts of a step differ from usual conditions."""
        return self.now


def describe(path: Path) -> dict[str, Any]:
    """Name of a file of constants, what it was fitted on, and how well that went."""
    record = read_json(path)
    names = ("fitted_on", "residual")
    return {"name": path.stem, **{name: record.get(name) for name in names}}
