"""Measured step times: kept in a file, prolonged to other batches, never mixed between machines.

A step grows with its micro-batches along a straight line from `pp` micro-batches on (exactly so for
plain 1F1B, docs/planner.md), so that two counts give every batch of a layout and micro-batch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

PROFILED_SD = 0.03
"""Relative uncertainty of a time read off the line between two measured ones."""
OUTSIDE_SD = 0.06
"""The same beyond twice the larger count, or below the smaller."""


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
        if not (np.isfinite(self.step_s) and self.step_s > 0):
            raise ValueError(f"step_s {self.step_s!r} must be positive")

    @property
    def line(self) -> tuple[Any, ...]:
        """What the straight line over the number of micro-batches belongs to."""
        return (
            self.tp,
            self.pp,
            self.vpp,
            self.dp,
            self.micro_batch_size,
            self.recompute,
            self.use_distributed_optimizer,
        )


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
    if not machine:
        raise ForeignProfile(f"{path} is no profile; make one with tools/profile_layouts.py")
    own, others = _sorted_out(path, fingerprint(machine))
    if others:
        raise ForeignProfile(f"{path} mixes machines; measure into a file of its own")
    return machine, own


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
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
        timing = Timing(**{k: v for k, v in record.items() if k in names})
        own[(*timing.line, timing.num_microbatches)] = timing
    return list(own.values()), others


class Lines:
    """Seconds of a step as a straight line over the micro-batches, by layout and micro-batch."""

    def __init__(self, timings: Sequence[Timing]) -> None:
        self._points: dict[Any, list[Timing]] = {}
        for timing in timings:
            self._points.setdefault(timing.line, []).append(timing)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self._points)

    def seconds(self, line: Any, num_microbatches: int) -> tuple[float, float] | None:
        """Seconds and relative uncertainty at some number of micro-batches.

        None where the line is not known: nothing measured, one count only that is another, or fewer
        micro-batches than stages.
        """
        points = self._points.get(line, [])
        exact = [p for p in points if p.num_microbatches == num_microbatches]
        if exact:
            return exact[-1].step_s, max(0.01, exact[-1].spread_s / exact[-1].step_s)
        pp = line[1]
        steady = [p for p in points if p.num_microbatches >= pp]
        if len({p.num_microbatches for p in steady}) < 2 or num_microbatches < pp:
            return None
        counts = np.array([p.num_microbatches for p in steady], dtype=float)
        times = np.array([p.step_s for p in steady])
        slope, start = np.polyfit(counts, times, 1)
        found = float(start + slope * num_microbatches)
        if found <= 0:
            return None
        inside = counts.min() <= num_microbatches <= 2 * counts.max()
        return found, PROFILED_SD if inside else OUTSIDE_SD
