"""The noise scale over the training (a power law, a file, or a run's journal), and the estimates of
it that a run sees.

Progress is counted in samples of a run with small batches: the number that it needs to get as far
(`GroundTruth` says how many a larger batch needs).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from copus_ext.controller.decision_log import NAME, read_journal
from copus_ext.cost_model.spec_file import read_json
from copus_ext.gns.estimators import Estimate
from copus_ext.goodput.inputs import DecisionInputs
from copus_ext.simulate.training_dynamics import GroundTruth

_LARGEST = 1e15
DIMENSION = 200
"""Effective directions of the noise; the tests of `bench/noise.py` had 170."""
_AHEAD = 256


class TrajectoryError(ValueError):
    """A trajectory that cannot be used; one line."""


@dataclass(frozen=True, kw_only=True)
class NoiseTrajectory:
    """Noise scale and loss at some points; between them both are powers of the progress."""

    progress: tuple[float, ...]
    """Progress, samples, ascending and positive."""
    phi: tuple[float, ...]
    """Noise scale as it would be measured, samples."""
    loss: tuple[float, ...] = ()
    """Loss, falling; empty where it is not known."""

    def __post_init__(self) -> None:
        if len(self.progress) < 2 or len(self.phi) != len(self.progress):
            raise TrajectoryError("progress and phi must be lists of one length, at least 2")
        if self.loss and len(self.loss) != len(self.progress):
            raise TrajectoryError("loss must be as long as progress, or left out")
        for name in ("progress", "phi", "loss"):
            if not all(_is_positive(value) for value in getattr(self, name)):
                raise TrajectoryError(f"{name} must hold positive numbers")
        if any(b <= a for a, b in zip(self.progress, self.progress[1:])):
            raise TrajectoryError("progress must rise from point to point")

    def phi_at(self, progress: Any) -> Any:
        """The noise scale; beyond the ends it goes on as a power of the progress."""
        return _power(progress, self.progress, self.phi)

    @property
    def end(self) -> float:
        """Progress of the last point."""
        return self.progress[-1]

    def stretched(self, end: float) -> NoiseTrajectory:
        """The same with every progress multiplied so that it ends there."""
        factor = end / self.end
        return replace(self, progress=tuple(p * factor for p in self.progress))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> NoiseTrajectory:
        """Inverse of `to_json`.

        Raises:
            TrajectoryError: something else.
        """
        if not isinstance(data, dict) or set(data) - {"progress", "phi", "loss"}:
            raise TrajectoryError("it must be an object of progress, phi and, if known, loss")
        lists = {name: data.get(name, []) for name in ("progress", "phi", "loss")}
        if not all(isinstance(value, (list, tuple)) for value in lists.values()):
            raise TrajectoryError("progress, phi and loss must be lists of numbers")
        return cls(**{name: tuple(value) for name, value in lists.items()})


def power_law(*, end: float, phi_end: float, exponent: float) -> NoiseTrajectory:
    """phi = phi_end (progress / end)^exponent."""
    start = end / 1e4
    phi = phi_end * (start / end) ** exponent
    return NoiseTrajectory(progress=(start, end), phi=(phi, phi_end))


def from_journal(path: Path, truth: GroundTruth) -> NoiseTrajectory:
    """The noise scale that a run saw at its decisions. Its steps are turned into progress by a
    truth; its losses are not in the journal.

    Args:
        path: the journal, or the directory of the run.
        truth: of progress.

    Raises:
        OSError: it cannot be read.
        TrajectoryError: it holds less than two decisions with a noise scale.
    """
    progress, consumed = 0.0, 0
    points: list[tuple[float, float]] = []
    batch = 1
    for record in read_journal(path / NAME if path.is_dir() else path):
        if record["kind"] != "decision":
            continue
        try:
            s = DecisionInputs.from_json(record["situation"])
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise TrajectoryError(f"a decision of another form: {error!r}") from error
        phi = s.noise.phi_samples
        batch = s.now.global_batch_size
        if phi is None or not phi > 0 or s.consumed_samples <= consumed:
            continue
        new = s.consumed_samples - consumed
        progress += new * float(truth.per_sample(batch, phi))
        consumed = s.consumed_samples
        points.append((progress, phi))
    if len(points) < 2:
        raise TrajectoryError("it holds less than two decisions with a noise scale")
    return NoiseTrajectory(progress=tuple(p for p, _ in points), phi=tuple(x for _, x in points))


def load(path: Path, truth: GroundTruth) -> NoiseTrajectory:
    """A file of `to_json`, or a journal.

    Raises:
        TrajectoryError: it is neither.
    """
    try:
        if path.suffix == ".jsonl" or path.is_dir():
            return from_journal(path, truth)
        return NoiseTrajectory.from_json(read_json(path))
    except (OSError, ValueError) as error:
        raise TrajectoryError(f"{path}: {error}") from error


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and 0 < value < _LARGEST


def _power(at: Any, x: Sequence[float], y: Sequence[float]) -> Any:
    """Straight lines between points in logarithms, going on beyond the ends."""
    at, lx, ly = np.log(np.asarray(at, dtype=float)), np.log(x), np.log(y)
    i = np.clip(np.searchsorted(lx, at) - 1, 0, len(lx) - 2)
    slope = (ly[i + 1] - ly[i]) / (lx[i + 1] - lx[i])
    return np.exp(ly[i] + slope * (at - lx[i]))


class NoiseEstimatorModel:
    """A stream of one-step estimates.

    Gradient noise is Gaussian and alike in `dimension` directions. So the squared norm of the batch
    is a non-central chi-square, and the scatter of the micro-batches around it an independent
    chi-square. Real noise has tr(Sigma)^2 / tr(Sigma^2) such directions.

    Args:
        seed: of the draws.
        dimension: effective directions of the noise.
    """

    def __init__(self, seed: int, *, dimension: int = DIMENSION) -> None:
        self._random = np.random.default_rng([seed, 0x6E5])
        self.dimension = dimension
        self._drawn: dict[int, Any] = {}

    def draw(self, phi: float, batch: int, groups: int) -> Estimate | None:
        """The estimates of one step, in units of the noise's trace; None with a single group.

        Args:
            phi: noise scale, samples.
            batch: samples of the step.
            groups: small gradients that are compared, of equal size.
        """
        if groups < 2:
            return None
        along, across, scatter = self._next(groups)
        # In every direction the mean gradient has variance 1/(B d); |G|^2 is 1/phi.
        unit = batch * self.dimension
        shift = math.sqrt(unit / phi)
        big = ((along + shift) ** 2 + across) / unit
        v = scatter / (self.dimension * (groups - 1))
        return Estimate(grad_norm_sq=big - v / batch, grad_variance_trace=v)

    def _next(self, groups: int) -> tuple[float, float, float]:
        stock = self._drawn.get(groups)
        if not stock:
            d = self.dimension
            columns = (
                self._random.standard_normal(_AHEAD),
                self._random.chisquare(d - 1, _AHEAD),
                self._random.chisquare(d * (groups - 1), _AHEAD),
            )
            stock = self._drawn[groups] = list(zip(*(column.tolist() for column in columns)))
        return stock.pop()
