"""Measured step times: kept in a file, never mixed between machines.

Two counts of micro-batches per layout and micro-batch say how a step grows, and so give every batch
(`copus_ext.cost_model.correct`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np


class ForeignProfile(ValueError):
    """Times of another machine, model or software."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One measured configuration."""

    tp: int
    """Tensor size."""
    pp: int
    """Pipeline size."""
    vpp: int = 1
    """Chunks of a stage."""
    dp: int
    """Replicas."""
    micro_batch_size: int
    """Samples of a micro-batch."""
    recompute: str = "none"
    """Recomputation."""
    recompute_num_layers: int = 0
    """Layers of a chunk that are recomputed, with `block`."""
    use_distributed_optimizer: bool = True
    """Whether optimizer state is split."""
    num_microbatches: int
    """Micro-batches of a replica and step."""
    step_s: float
    """Median seconds of a step."""
    spread_s: float = 0.0
    """Median absolute deviation."""
    num_steps: int = 1
    """Steps measured."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "dp", "micro_batch_size", "num_microbatches", "num_steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} {value!r} must be a whole number from 1 on")
        kinds = {"recompute": str, "recompute_num_layers": int, "use_distributed_optimizer": bool}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} {getattr(self, name)!r} must be of type {kind.__name__}")
        for name, least in (("step_s", np.nextafter(0, 1)), ("spread_s", 0)):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not least <= value < np.inf:
                raise ValueError(f"{name} {value!r} must be positive")

    @property
    def line(self) -> tuple[Any, ...]:
        """Everything but the number of micro-batches."""
        return (
            self.tp,
            self.pp,
            self.vpp,
            self.dp,
            self.micro_batch_size,
            self.recompute,
            self.recompute_num_layers,
            self.use_distributed_optimizer,
        )

    @property
    def relative_sd(self) -> float:
        """Relative standard deviation of `step_s`: that of a step, 1.4826 median absolute
        deviations, times that of a median of independent ones, 1.2533/sqrt(n). Steps next to each
        other are alike: half of them count."""
        independent = max(self.num_steps / 2.0, 1.0)
        return 1.2533 * 1.4826 * self.spread_s / self.step_s / math.sqrt(independent)


def fingerprint(parts: dict[str, Any]) -> str:
    """A short name of model, software and hardware: equal parts, equal name."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class ProfileStore:
    """A JSON-lines file of timings; the last good line of a configuration wins."""

    def __init__(self, path: Path, parts: dict[str, Any]) -> None:
        """Names file and machine.

        Args:
            path: made when the first timing is added.
            parts: model, software and hardware that the times belong to.
        """
        self.path, self.parts = path, parts
        self.key = fingerprint(parts)

    def add(self, timing: Timing) -> None:
        """Appends a timing; a kill loses at most this line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        header = {"machine": self.parts, "fingerprint": self.key}
        known = any("machine" in r and r.get("fingerprint") == self.key for r in _lines(self.path))
        text = "" if known else json.dumps(header) + "\n"
        text += json.dumps({"fingerprint": self.key, **asdict(timing)}) + "\n"
        cut = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a") as file:
            # A line that a kill cut short ends here, so that it spoils no other.
            file.write("\n" * (cut and self.path.stat().st_size > 0) + text)
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[Timing]:
        """The timings of this machine.

        Raises:
            ForeignProfile: the file holds timings, but none of this machine.
        """
        own, others = _sorted_out(self.path, self.key)
        if others and not own:
            raise ForeignProfile(
                f"{self.path} was measured with another model, machine or software; measure again "
                "with tools/profile_layouts.py or name another file"
            )
        return own


def read_profile(path: Path) -> tuple[dict[str, Any], list[Timing]]:
    """Machine and timings of a file, whatever machine it is of.

    Raises:
        OSError: it cannot be read.
        ForeignProfile: it is no profile, or of several machines.
    """
    machine: dict[str, Any] = {}
    for record in _lines(path):
        if "machine" in record:
            machine = record["machine"]
    if not machine or not isinstance(machine, dict):
        raise ForeignProfile(f"{path} is no profile; make one with tools/profile_layouts.py")
    own, others = _sorted_out(path, fingerprint(machine))
    if others:
        raise ForeignProfile(f"{path} mixes machines; measure into a file of its own")
    return machine, own


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    if not path.exists():
        return
    with path.open(errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue  # cut short by a kill
            if isinstance(record, dict):
                yield record


def _sorted_out(path: Path, key: str) -> tuple[list[Timing], int]:
    names = {f.name for f in fields(Timing)}
    own: dict[Any, Timing] = {}
    others = 0
    for record in _lines(path):
        if "step_s" not in record:
            continue
        if record.get("fingerprint") != key:
            others += 1
            continue
        try:
            timing = Timing(**{k: v for k, v in record.items() if k in names})
        except (TypeError, ValueError) as error:
            raise ForeignProfile(f"{path} holds a line that is no timing: {error}") from error
        own[(*timing.line, timing.num_microbatches)] = timing
    return list(own.values()), others
