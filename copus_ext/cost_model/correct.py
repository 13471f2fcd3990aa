"""Corrects predictions of configurations not measured by those that were.

A step is a sum of parts (`copus_ext.cost_model.step.PARTS`), and ln(measured / predicted) is

- what independent factors of the parts make of it: computation, bubble, tensor-parallel
  collectives with what goes to experts and between ranks that share samples, pipeline messages,
  gradients, messages between nodes of both kinds, optimizer; and a constant time of every step;
- a factor that all configurations share, one for the tensor size, one for the pipeline size and one
  for all pipelines;
- one for the pair of the two, which changes slowly with the micro-batch;
- one for each configuration, and one for how it grows with its micro-batches;
- noise, and for measurements of an earlier time a factor for what has changed since.

All are Gaussian with mean zero. So two configurations, one that mostly reduces gradients and one
that mostly sends through the pipeline, say much about all others. The factors of the parts are the
likeliest ones, found by Newton's steps, because a link may be several times slower than was
thought. Around them one linear solve gives the posterior, the same in whatever order data come.

One time cannot tell how much of a step every batch has. A run therefore measures the end of a step,
too, which follows the last backward pass: reduction, optimizer and host. The constant time lies
before it.

Where the measurements are far off together, the variance that explains it joins the prior. It goes
to the shared factor, but for half of the share that computation has in the steps measured: the
links of a slow machine may be no slower. Layouts that compute alike then keep their order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from copus_ext.cost_model.step import shown_s


@dataclass(frozen=True, kw_only=True)
class PartSpread:
    """Standard deviations of the logarithms of what the seconds of a part are multiplied by."""

    compute: float = 0.06
    """Of all computation, the bubble among it."""
    launch: float = 0.6
    """Of starting kernels, which small models wait for, in place of `compute`: 11 to 36 us around
    20."""
    bubble: float = 0.12
    """Of the bubble besides."""
    tp: float = 0.45
    """Of tensor-parallel collectives."""
    pp: float = 0.6
    """Of pipeline messages, besides `across` where they go between nodes."""
    dp: float = 0.6
    """Of what goes among the replicas, besides `across`."""
    optimizer: float = 0.4
    """Of the optimizer, and of the host besides."""
    across: float = 0.3
    """Of pipeline messages and of what goes among the replicas, where they go between nodes."""


_NAMES = tuple(f.name for f in fields(PartSpread))
_FACTORS_OF = {
    "compute": ("compute",),
    "recompute": ("compute",),
    "bubble": ("compute", "bubble"),
    "host": ("compute", "optimizer"),
    **{name: (name,) for name in ("tp", "pp", "dp", "optimizer")},
}
"""Which factors multiply the seconds of a part of a step. That of launches enters `_WORK`."""
_WITHIN = ("tp", "ep", "cp")
"""Parts that are exchanges within layers, which have one factor."""
_PP, _DP, _HOST = (list(_FACTORS_OF).index(name) for name in ("pp", "dp", "host"))
_WORK = [list(_FACTORS_OF).index(name) for name in ("compute", "recompute", "bubble")]
_AT_END = np.isin(list(_FACTORS_OF), ("dp", "optimizer", "host"))
"""Which parts follow the last backward pass."""
_COMPUTE, _LAUNCH, _ACROSS = (_NAMES.index(name) for name in ("compute", "launch", "across"))
_SHARPNESS = 3.2
"""Exponent with which launches and work join, as `Constants.launch_sharpness` where it was fitted:
what waits for launches only now and then waits for all of them once they take thrice as long."""
_MIXING = np.array([[f in names for f in _NAMES] for names in _FACTORS_OF.values()], dtype=float)
_CONSTANT = 0.06
"""Standard deviation of the constant time that every step may have besides, over the median
predicted step of those measured."""
_END_SD = 0.15
"""Of the logarithm of the measured end of a step, at least. It is short, so that others disturb it
more than the whole."""
_TAILS = 4 / 3
"""Standard deviations of one configuration over another count so many times where runs choose. The
few large errors are larger than a normal distribution has them, and a trial pays by these."""
_UNSEEN = 0.12
"""Standard deviation of the factor that all configurations share, before anything was measured on a
machine (decision 078)."""
_OF_COMPUTE = 0.5
"""Share of the variance that measurements add which goes to computation, where the steps measured
only compute."""
_NEWTON_STEPS = 30
_CONVERGED = 1e-9


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Standard deviations of the other parts of ln(measured / predicted)."""

    common: float = 0.045
    """Of the factor that all configurations share, at least; measurements say how much more."""
    tensor: float = 0.03
    """Of that of a tensor size."""
    pipeline: float = 0.03
    """Of that of a pipeline size."""
    piped: float = 0.04
    """Of that of all pipelines of more than one stage."""
    pair: float = 0.04
    """Of that of a (tensor, pipeline) pair, which changes slowly with the micro-batch."""
    octaves: float = 3.0
    """Doublings of the micro-batch after which the pair's factor is another one by 1 - 1/e."""
    own: float = 0.05
    """Of that of a configuration, whatever its global batch."""
    growth: float = 0.02
    """Of the part of a configuration's factor that goes with the logarithm of its micro-batches."""
    drift: float = 0.05
    """Of the factor that all measurements of an earlier time have besides."""
    noise: float = 0.01
    """Of a measurement, at least."""

    def variance(self, steps: Steps) -> Any:
        """[n] of the logarithm of a factor before anything was measured, besides what the parts
        make of it."""
        parts = (self.common, self.tensor, self.pipeline, self.pair, self.own)
        piped = self.piped**2 * (steps.keys[:, 1] > 1)
        return sum(part**2 for part in parts) + piped + np.square(steps.over) * self.growth**2


@dataclass(frozen=True, kw_only=True)
class Correction:
    factor: Any
    """[n]: multiply the predicted seconds by this."""
    relative_sd: Any
    """[n]: uncertainty of the corrected seconds, without the noise of a measurement."""
    part_factors: dict[str, float]
    """What the seconds of the parts are multiplied by, by the name of `PartSpread`."""
    of_parts: Any
    """[n]: what those, and the constant time, make of `factor`."""
    seconds: Any
    """[n, parts]: those of the parts then, in the order of `_FACTORS_OF`; they add up to `of_parts`
    times the step. The constant time is the host's, or less of every part."""
    against_sd: Any = None
    """[n]: uncertainty of the corrected seconds over those of one of them, times `_TAILS`; None if
    none was named. Much of two uncertainties is common, and counts in none of the two."""

    def parts(self, predicted: Mapping[str, Any]) -> dict[str, Any]:
        """[n] `seconds` by the names of some predicted parts, of which those with one factor share
        what became of them."""
        now = dict(zip(_FACTORS_OF, self.seconds.T))
        alike = sum(predicted[name] for name in _WITHIN if name in predicted)
        share = now["tp"] / np.maximum(alike, 1e-30)
        return {n: x * share if n in _WITHIN else now[n] for n, x in predicted.items()}

    def over_sd(self) -> Any:
        """[n]: the same as a standard deviation, not times `_TAILS`."""
        return self.against_sd / _TAILS

    def common_sd(self) -> float:
        """Uncertainty that the others have in common with the one that was named."""
        one = int(np.argmin(self.against_sd))
        apart = np.square(self.over_sd())
        both = (np.square(self.relative_sd) + self.relative_sd[one] ** 2 - apart) / 2
        both = np.delete(both, one) if len(both) > 1 else both
        return math.sqrt(max(float(both.mean()), 0.0))


USUAL_COUNT = 4.0
"""Micro-batches at which a configuration's growth counts nothing."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Configurations as a correction sees them, n of them."""

    keys: Any
    """[n, k] tensor, pipeline and micro-batch size; further columns only tell configurations
    apart."""
    over: Any
    """[n] logarithm of the micro-batches over the usual number."""
    seconds: Any
    """[n, parts] predicted, in the order of `_FACTORS_OF`."""
    hiding: Any
    """[n, 5, 2] as `StepTime.hiding`."""
    launch: Any
    """[n] share of the computation that would go if kernels started at once, by its slope."""
    across: Any
    """[n, 2] as `StepTime.across`."""
    constant: Any
    """[n] 1, or 0 for the end of a step, which has no part of the constant time."""

    @classmethod
    def of(
        cls,
        keys: Any,
        counts: Any = USUAL_COUNT,
        parts: Mapping[str, Any] | None = None,
        hiding: Any = 0.0,
        launch_s: Any = 0.0,
        across: Any = 0.0,
    ) -> Steps:
        """Steps of some configurations.

        Args:
            keys: as above; whole numbers.
            counts: [n] micro-batches.
            parts: [n] predicted seconds of each of `PARTS`; None: all is computation.
            hiding: [2, 5, n] as `StepTime.hiding`; 0: nothing hides.
            launch_s: [n] as `StepTime.launch_s`.
            across: [2, n] as `StepTime.across`; 0: all is within nodes.
        """
        whole = np.asarray(keys, dtype=np.int64)
        whole = np.atleast_2d(whole) if whole.size else whole.reshape(0, 3)
        over = np.log(np.broadcast_to(np.asarray(counts, dtype=float), len(whole)) / USUAL_COUNT)
        parts = {"compute": np.ones(len(whole))} if parts is None else parts
        nothing = np.zeros(len(whole))
        known = {name: parts.get(name, nothing) for name in _FACTORS_OF}
        # What goes to experts, or between ranks that share samples, has the factor of the other
        # collectives within layers.
        for name in _WITHIN[1:]:
            if name in parts:
                known["tp"] = known["tp"] + parts[name]
        work = np.maximum(known["compute"] + known["recompute"], 1e-12)
        share = np.minimum(launch_s / work, 1.0)
        columns = [np.broadcast_to(column, len(whole)) for column in known.values()]
        hiding = np.broadcast_to(np.asarray(hiding, dtype=float), (2, 5, len(whole)))
        return cls(
            keys=whole,
            over=over,
            seconds=np.stack(columns, axis=1),
            hiding=hiding.T,
            launch=np.broadcast_to(share, len(whole)),
            across=np.broadcast_to(np.asarray(across, dtype=float), (2, len(whole))).T,
            constant=np.ones(len(whole)),
        )

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def step_s(self) -> Any:
        """[n] predicted seconds of a step."""
        return self.seconds.sum(axis=1)

    def take(self, at: Any) -> Steps:
        return Steps(**{f.name: getattr(self, f.name)[at] for f in fields(Steps)})

    def and_(self, other: Steps) -> Steps:
        """Both, one after the other."""
        names = (f.name for f in fields(Steps))
        return Steps(**{n: np.concatenate([getattr(self, n), getattr(other, n)]) for n in names})

    def cut(self) -> tuple[Steps, Steps]:
        """The steps without their ends, and the ends."""
        nothing = np.zeros(len(self))
        ends = replace(self, seconds=_AT_END * self.seconds, launch=nothing, constant=nothing)
        return replace(self, seconds=~_AT_END * self.seconds, hiding=0.0 * self.hiding), ends


def correct(
    ask: Steps,
    known: Steps,
    log_ratios: Any,
    *,
    noise: Sequence[float] | None = None,
    earlier: Sequence[bool] | None = None,
    ends: Sequence[float | None] | None = None,
    against: int | None = None,
) -> Correction:
    """The posterior of the factors of some configurations.

    Args:
        ask: configurations to correct, n of them.
        known: configurations measured, m of them, repeats allowed.
        log_ratios: [m] ln(measured / predicted).
        noise: [m] standard deviation of each measurement, where it is more than the spread's.
        earlier: [m] whether a measurement is of an earlier time than the rest; the answer is for
            the time of the rest. All or none of them: there is but one time.
        ends: [m] share of a measured step that follows its last backward pass; None: not measured.
        against: index of the configuration that all are compared with.

    Returns:
        Factor 1 and the prior's deviation where nothing was measured.
    """
    s = Spread()
    parts = _Parts(constant_s=_CONSTANT * float(np.median(known.step_s)) if len(known) else 0.0)
    theta = np.zeros(len(parts.sd))
    if not len(known):
        s, nothing = replace(s, common=_UNSEEN), np.zeros((len(ask), 0))
        return _answer(ask, s, parts, theta, nothing, nothing, np.zeros(0), against)
    sd = np.maximum(s.noise, np.zeros(len(known)) if noise is None else noise)
    ratios = np.asarray(log_ratios, dtype=float)
    old = np.zeros(len(sd)) if earlier is None else np.asarray(earlier, dtype=float)
    body, body_ratios, at = known, ratios, np.arange(len(known))
    shares = np.array([] if ends is None else ends, dtype=float)
    if np.isfinite(shares).any():
        at = np.flatnonzero(np.isfinite(shares))
        body, end = known.take(at).cut()
        log_s, share = ratios[at] + np.log(known.step_s[at]), shares[at]
        body_ratios = log_s + np.log((1.0 - share) / body.step_s)
        ratios = np.append(ratios, log_s + np.log(share / end.step_s))
        known, old = known.and_(end), np.append(old, old[at])
        sd = np.append(sd, np.maximum(sd[at], _END_SD))
    apart = np.diag(sd**2) + (0.0 if old.all() else s.drift**2 * np.outer(old, old))
    apart += _kernel(known, known, s)
    inner = apart[np.ix_(at, at)] + parts.covariance(body, body, theta)
    more = _more_in_common(inner, body_ratios)
    of_compute = _OF_COMPUTE * more * float(parts.slopes(body, theta)[:, _COMPUTE].mean())
    s = replace(s, common=math.sqrt(s.common**2 + more - of_compute))
    apart += more - of_compute
    parts = replace(parts, compute_sd=math.sqrt(parts.compute_sd**2 + of_compute))
    theta = parts.likeliest(known, ratios, apart)
    rest = ratios - parts.log_factors(known, theta)
    inner = apart + parts.covariance(known, known, theta)
    other = _kernel(ask, known, s)
    cross = other + parts.covariance(ask, known, theta)
    weights = np.linalg.solve(inner, cross.T).T
    mean = parts.log_factors(ask, theta) + other @ np.linalg.solve(apart, rest)
    return _answer(ask, s, parts, theta, weights, cross, mean, against)


def most_informative(
    steps: Steps, number: int, *, known: Steps | None = None, samples: Any = 1.0
) -> list[int]:
    """Indices of the configurations whose times would say most of the fast ones: together they make
    the sum of the variances of the logarithms small. The fastest counts as one, a configuration
    that takes twice as long for a sample as an eighth.

    One after the other is chosen; then each gives way to a better one, if there is one.

    Args:
        steps: to choose from, and to be known of.
        number: how many; all, if there are no more.
        known: what was measured already.
        samples: [n] of a step.
    """
    if not len(steps):
        return []
    s, num = Spread(), len(steps)
    seconds = steps.step_s / samples
    weights = (seconds.min() / seconds) ** 3
    every = steps if known is None or not len(known) else steps.and_(known)
    parts = _Parts(constant_s=_CONSTANT * float(np.median(every.step_s)))
    prior = _kernel(every, every, s) + parts.covariance(every, every, np.zeros(len(parts.sd)))
    measured = list(range(num, len(every)))

    def best_with(others: list[int]) -> int:
        left = prior
        for i in (*measured, *others):
            left = left - np.outer(left[i], left[i]) / (left[i, i] + s.noise**2)
        left = left[:num, :num]
        gains = np.square(left) @ weights / (np.diag(left) + s.noise**2)
        gains[others] = -1.0
        return int(np.argmax(gains))

    chosen: list[int] = []
    while len(chosen) < min(number, num):
        chosen.append(best_with(chosen))
    if len(chosen) < num:
        for k in range(len(chosen)):
            chosen[k] = best_with([*chosen[:k], *chosen[k + 1 :]])
    return chosen


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """The factors of the parts of a step, and the constant time of every step: theta holds the
    logarithms of `_NAMES`, then the time over `constant_s`."""

    constant_s: float
    compute_sd: float = PartSpread().compute
    """Standard deviation of the factor of computation."""

    @property
    def sd(self) -> Any:
        spread = replace(PartSpread(), compute=self.compute_sd)
        return np.array([*(getattr(spread, name) for name in _NAMES), 1.0])

    def log_factors(self, steps: Steps, theta: Any) -> Any:
        """[n] what theta makes of ln(measured / predicted)."""
        return np.log(self.now(steps, theta).sum(axis=1) / steps.step_s)

    def now(self, steps: Steps, theta: Any) -> Any:
        """[n, parts + 1] seconds of every part, and the constant time."""
        seconds = steps.seconds * np.exp(_MIXING @ theta[:-1])
        seconds[:, _WORK] *= self._waiting(steps, theta)[0][:, None]
        seconds[:, [_PP, _DP]] *= np.exp(theta[_ACROSS] * steps.across)
        seconds[:, _DP] += self._uncovered(steps, theta)[0]
        constant = theta[-1] * self.constant_s * steps.constant[:, None]
        # No step takes less than a tenth of what its parts do.
        return np.concatenate(
            [seconds, np.maximum(constant, -0.9 * seconds.sum(axis=1, keepdims=True))], axis=1
        )

    def slopes(self, steps: Steps, theta: Any) -> Any:
        """[n, k] derivatives of `log_factors`."""
        now = self.now(steps, theta)
        total = now.sum(axis=1, keepdims=True)
        waited = now[:, _WORK].sum(axis=1) * self._waiting(steps, theta)[1]
        now[:, _DP] += self._uncovered(steps, theta)[1]
        slopes = now[:, :-1] @ _MIXING
        slopes[:, _LAUNCH] += waited
        slopes[:, _COMPUTE] -= waited
        slopes[:, _ACROSS] += (now[:, [_PP, _DP]] * steps.across).sum(axis=1)
        slopes = np.concatenate([slopes, self.constant_s * steps.constant[:, None]], axis=1)
        return slopes / total

    def spread(self, steps: Steps, theta: Any) -> Any:
        """[n, k] what one standard deviation of each of theta makes of the logarithm of a step.

        Launches rule more of a step the longer they take. So theirs is the root mean square of a
        deviation up and one down, and no slope.
        """
        found = self.slopes(steps, theta) * self.sd
        here, square = self.log_factors(steps, theta), np.zeros(len(steps))
        for sign in (-1.0, 1.0):
            there = theta.copy()
            there[_LAUNCH] += sign * self.sd[_LAUNCH]
            square += np.square(self.log_factors(steps, there) - here) / 2
        found[:, _LAUNCH] = np.sqrt(square)
        return found

    def _waiting(self, steps: Steps, theta: Any) -> tuple[Any, Any]:
        """[n] seconds of the work, which waits for kernels to start, over those that the factor of
        computation makes of it; and the share of launches in it then."""
        slower = np.exp(_SHARPNESS * (theta[_LAUNCH] - theta[_COMPUTE]))
        total = 1.0 - steps.launch + steps.launch * slower
        return total ** (1 / _SHARPNESS), steps.launch * slower / total

    def _uncovered(self, steps: Steps, theta: Any) -> tuple[Any, Any]:
        """[n] seconds of the reduction and of gathering weights that come out of hiding, or go into
        it, as the replicas take longer or shorter than predicted; and what their slope is above
        that."""
        factor = np.exp(theta[_NAMES.index("dp")] + theta[_ACROSS] * steps.across[:, 1])[:, None]
        least, one, passed, other, passed_later = np.moveaxis(steps.hiding, 1, 0)
        before = factor * shown_s([least, one, passed, other, passed_later])
        ways = np.stack([least * factor, one * factor - passed, other * factor - passed_later])
        way = ways.argmax(axis=0)[None]
        now = np.take_along_axis(ways, way, axis=0)[0]
        slope = np.take_along_axis(np.stack([least, one, other]), way, axis=0)[0] * factor
        return (now - before).sum(axis=1), (slope - now).sum(axis=1)

    def covariance(self, one: Steps, other: Steps, theta: Any) -> Any:
        """[n, m] of what the factors make of both, near theta."""
        a, b = (self.spread(x, theta) for x in (one, other))
        return a @ b.T

    def likeliest(self, known: Steps, ratios: Any, apart: Any) -> Any:
        """Theta at which the posterior is greatest.

        Args:
            known: what was measured.
            ratios: [m] ln(measured / predicted).
            apart: [m, m] covariance of all else.
        """
        whiten = np.linalg.inv(np.linalg.cholesky(apart))

        def loss(theta: Any) -> float:
            left = whiten @ (ratios - self.log_factors(known, theta))
            return float(left @ left + np.sum((theta / self.sd) ** 2))

        theta = np.zeros(len(self.sd))
        best = loss(theta)
        for _ in range(_NEWTON_STEPS):
            slopes = whiten @ self.slopes(known, theta)
            left = whiten @ (ratios - self.log_factors(known, theta))
            step = np.linalg.solve(
                slopes.T @ slopes + np.diag(self.sd**-2.0), slopes.T @ left - theta / self.sd**2
            )
            size = 1.0
            while size > 1e-4 and (now := loss(theta + size * step)) > best:
                size /= 2
            if size <= 1e-4:
                break
            theta, gained, best = theta + size * step, best - now, now
            if gained < _CONVERGED:
                break
        return theta


def _answer(
    ask: Steps,
    s: Spread,
    parts: _Parts,
    theta: Any,
    weights: Any,
    cross: Any,
    mean: Any,
    against: int | None,
) -> Correction:
    """The posterior.

    Args:
        ask: configurations, n of them.
        s: spread of what is not a part.
        parts: the factors of the parts.
        theta: their values.
        weights: [n, m] of the measurements.
        cross: [n, m] covariance with the measurements.
        mean: [n] of the logarithm of the factor; empty: nothing was measured.
        against: see `correct`.
    """
    slopes = parts.spread(ask, theta)
    prior = s.variance(ask) + np.square(slopes).sum(axis=1)
    variance = np.maximum(prior - np.einsum("ij,ij->i", weights, cross), 0.0)
    seconds = parts.now(ask, theta)
    constant, seconds = seconds[:, -1:], seconds[:, :-1].copy()
    less = 1.0 + np.minimum(constant, 0.0) / seconds.sum(axis=1, keepdims=True)
    seconds *= less
    seconds[:, _HOST] += np.maximum(constant[:, 0], 0.0)
    found = Correction(
        factor=np.exp(mean) if len(mean) else np.ones(len(ask)),
        relative_sd=np.sqrt(variance),
        part_factors=dict(zip(_NAMES, np.exp(theta[:-1]).tolist())),
        of_parts=np.exp(parts.log_factors(ask, theta)),
        seconds=seconds,
    )
    if against is None:
        return found
    one = ask.take([against])
    shared = _kernel(ask, one, s)[:, 0] + slopes @ slopes[against] - weights @ cross[against]
    gap = variance + variance[against] - 2.0 * shared
    gap[against] = 0.0
    return replace(found, against_sd=_TAILS * np.sqrt(np.maximum(gap, 0.0)))


def _more_in_common(covariance: Any, ratios: Any) -> float:
    """The variance to add to what all measurements have in common, so that their mean is likeliest.
    It is 0 where their covariance explains the mean already.

    Args:
        covariance: [m, m] of the measurements.
        ratios: [m] of the measurements.
    """
    weights = np.linalg.solve(covariance, np.ones(len(ratios)))
    mean = weights @ ratios / weights.sum()
    return max(0.0, mean**2 - 1.0 / weights.sum())


def _kernel(one: Steps, other: Steps, s: Spread) -> Any:
    """[n, m] covariance of what is not a part."""
    a, b = one.keys, other.keys
    tensor, pipeline = (a[:, None, i] == b[None, :, i] for i in (0, 1))
    own = (a[:, None, :] == b[None, :, :]).all(axis=2)
    octaves = np.abs(np.log2(a[:, None, 2] / b[None, :, 2]))
    pair = (tensor & pipeline) * np.exp(-octaves / s.octaves)
    return (
        s.common**2
        + s.tensor**2 * tensor
        + s.pipeline**2 * pipeline
        + s.piped**2 * np.outer(a[:, 1] > 1, b[:, 1] > 1)
        + s.pair**2 * pair
        + own * (s.own**2 + s.growth**2 * np.outer(one.over, other.over))
    )
