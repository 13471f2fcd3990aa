"""Which part of a step has become slower or faster, from the step time of one configuration.

Links, and a matrix product, can be timed by themselves. Links enter as they were timed. What is
left of the change of the step time has several explanations, which one number cannot tell apart.
So each is solved by itself, and they share the probability: by how likely so large a change of
those parts was before, and by what was timed. Where none stands out, the answer is their mean.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from copus_ext.cost_model.constants import USUAL, PartFactors

Predict = Callable[[PartFactors], float]
"""Seconds of a step of the present configuration under some factors."""


@dataclass(frozen=True, kw_only=True)
class _Kind:
    parts: tuple[str, ...]
    """What becomes slower by one factor."""
    weight: float
    """How often, before anything is known."""
    scale: float
    """Usual size of the logarithm of the factor."""


_KINDS = (
    _Kind(parts=("compute",), weight=0.3, scale=0.25),
    _Kind(parts=("tp",), weight=0.1, scale=0.7),
    _Kind(parts=("pp",), weight=0.15, scale=1.0),
    _Kind(parts=("dp",), weight=0.2, scale=1.0),
    _Kind(parts=("pp", "dp"), weight=0.15, scale=1.0),
    _Kind(parts=("tp", "pp", "dp"), weight=0.1, scale=1.0),
)
"""Assumed. GPUs become slower by tens of percents, networks by factors."""
_RETURN_WEIGHT = 0.5
_SD = 0.03
"""Of the logarithm of a ratio of step times that conditions explain, model and noise together."""
_TIMED_SD, _TIMED_ALIKE = 0.05, 0.15
"""Of the logarithm of what was timed by itself; and a change of it that is none."""
_SAME_MACHINE = math.log(2.0)
"""Largest difference of what two launches timed on machines of the same speed."""
_MAX = 5.0
"""Largest logarithm of a factor."""
_HALVINGS = 26
_STANDS_OUT = 1 / 3
_SMALL = 0.08
"""Logarithm of a ratio below which it is small."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One way to explain a change, and how likely it is."""

    factors: PartFactors
    """The parts then."""
    weight: float
    """Of 1 in all."""


@dataclass(frozen=True, kw_only=True)
class Timings:
    """What is timed by itself, in seconds; None: not timed."""

    ring_s: float | None = None
    """A message round all ranks."""
    compute_s: float | None = None
    """A matrix product on the slowest rank."""
    is_one_node: bool = False
    """Whether the ring stays within a node."""

    def links(self, now: PartFactors, usual: Timings) -> PartFactors:
        """Some factors with the link as it was timed. One that was timed about as before, or about
        as usual, stays as it was: no timing gives the same twice."""
        if self.ring_s is None or usual.ring_s is None:
            return now
        name = "within" if self.is_one_node else "across"
        timed = self.ring_s / usual.ring_s
        nearest = min(getattr(now, name), 1.0, key=lambda factor: abs(math.log(timed / factor)))
        alike = abs(math.log(timed / nearest)) < _TIMED_ALIKE
        return replace(now, **{name: nearest if alike else timed})

    def is_like(self, other: Timings) -> bool:
        """Whether what both have timed is of machines of about the same speed. Between launches a
        busy neighbour makes more of a difference than within one."""
        pairs = (self.ring_s, other.ring_s), (self.compute_s, other.compute_s)
        logs = [math.log(one / two) for one, two in pairs if one is not None and two is not None]
        return all(abs(log) < _SAME_MACHINE for log in logs)

    def compute_ratio(self, usual: Timings) -> float | None:
        """Seconds of computation over the usual ones."""
        if self.compute_s is None or usual.compute_s is None:
            return None
        return self.compute_s / usual.compute_s


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What was timed by itself after a change, over what was taken for granted; None: not timed."""

    link: float | None = None
    """Seconds of a message between all ranks."""
    compute: float | None = None
    """Seconds of a matrix product."""

    def density(self, now: PartFactors, then: PartFactors) -> float:
        """How well a change of the parts goes with it."""
        network = max((math.log(getattr(then, n) / getattr(now, n)) for n in ("pp", "dp")), key=abs)
        found = 1.0
        if self.link is not None:
            found *= _heavy_tailed(math.log(self.link) - network)
        if self.compute is not None:
            compute = math.log(then.compute / now.compute)
            found *= _heavy_tailed(math.log(self.compute) - compute)
        return found


def explanations(
    predict: Predict, *, ratio: float, now: PartFactors = USUAL, timed: Timed | None = None
) -> list[Explanation]:
    """The ways to explain a change, the likeliest first.

    Args:
        predict: of the present configuration.
        ratio: its seconds since the change over those before.
        now: what the parts were taken to be before the change.
        timed: what was timed by itself since.
    """
    timed = timed or Timed()
    target, before = math.log(ratio), math.log(predict(now))

    def log_ratio(factors: PartFactors) -> float:
        return math.log(predict(factors)) - before

    found: list[tuple[PartFactors, float]] = []
    for kind in _KINDS:
        after = functools.partial(_log_ratio_after, log_ratio, now, kind)
        step = _solved(after, target)
        if step is None:
            continue
        near = [after(step + d) for d in (-0.01, 0.01)]
        slope = (near[1] - near[0]) / 0.02
        if slope <= 0:
            continue
        # The density of the ratio that this kind of change leads to.
        density = math.exp(-abs(step) / kind.scale) / (2 * kind.scale * slope)
        factors = now.times(_only(kind.parts, step))
        found.append((factors, kind.weight * density * timed.density(now, factors)))
    usual = replace(USUAL, within=now.within, across=now.across)
    if now != usual:
        back = _gaussian(log_ratio(usual) - target, _SD)
        found.append((usual, _RETURN_WEIGHT * back * timed.density(now, usual)))
    total = sum(weight for _, weight in found)
    if not total:
        return [Explanation(factors=now, weight=1.0)]
    ways = [Explanation(factors=factors, weight=weight / total) for factors, weight in found]
    return sorted(ways, key=lambda way: -way.weight)


def judged(ways: list[Explanation]) -> PartFactors:
    """The likeliest explanation, or the mean of all where none stands out."""
    if ways[0].weight >= _STANDS_OUT:
        return ways[0].factors
    logs = dict.fromkeys(asdict(USUAL), 0.0)
    for way in ways:
        for name, factor in asdict(way.factors).items():
            logs[name] += way.weight * math.log(factor)
    return PartFactors(**{name: math.exp(x) for name, x in logs.items()})


def is_small(ratio: float) -> bool:
    """Whether a change of step times is put down to no part of a step. Parts become slower by tens
    of percents or by factors; a few percents are the whole machine's."""
    return abs(math.log(ratio)) < _SMALL


def factors_after(
    predict: Predict, *, ratio: float | None, now: PartFactors, timings: Timings, usual: Timings
) -> PartFactors:
    """The parts after conditions have changed, or were looked at again.

    Args:
        predict: seconds of a step of the present configuration.
        ratio: its seconds since the change over those before; None: no change was noticed. Then
            computation is as usual again only if the product takes what it usually does.
        now: what the parts were taken to be so far.

    Returns:
        `now`, where links were timed as before and what they do not explain is small.
    """
    seen = timings.links(now, usual)
    if ratio is None:
        compute = timings.compute_ratio(usual)
        if compute is not None and abs(math.log(compute)) < _TIMED_SD:
            seen = replace(seen, compute=1.0)
        # The link as it is now explains what messages of one kind were blamed for.
        is_other = (seen.within, seen.across) != (now.within, now.across)
        return replace(seen, tp=1.0, pp=1.0, dp=1.0) if is_other else seen
    rest = ratio * predict(now) / predict(seen)
    if is_small(rest):
        return seen
    compute = timings.compute_ratio(usual)
    timed = Timed(
        link=None if timings.ring_s is None else 1.0,
        compute=None if compute is None else compute / seen.compute,
    )
    return judged(explanations(predict, ratio=rest, now=seen, timed=timed))


def _log_ratio_after(
    log_ratio: Callable[[PartFactors], float], now: PartFactors, kind: _Kind, log_factor: float
) -> float:
    return log_ratio(now.times(_only(kind.parts, log_factor)))


def _only(parts: tuple[str, ...], log_factor: float) -> PartFactors:
    return PartFactors(**dict.fromkeys(parts, math.exp(log_factor)))


def _solved(log_ratio: Callable[[float], float], target: float) -> float | None:
    """The logarithm of a factor at which a growing function meets its target; None if nowhere."""
    low, high = (-_MAX, 0.0) if target < 0 else (0.0, _MAX)
    if not log_ratio(low) - 1e-9 <= target <= log_ratio(high) + 1e-9:
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if log_ratio(middle) < target else (low, middle)
    return (low + high) / 2


def _heavy_tailed(x: float) -> float:
    """Student's density with two degrees of freedom: a timing may be disturbed."""
    return (1.0 + (x / _TIMED_SD) ** 2 / 2) ** -1.5


def _gaussian(x: float, sd: float) -> float:
    return math.exp(-((x / sd) ** 2) / 2) / (sd * math.sqrt(2 * math.pi))
