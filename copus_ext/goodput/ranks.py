"""How many ranks a run should have, where an hour of waiting has a price.

With n ranks and the batch B a run makes the progress g(n, B; Phi) a second. To save rank-hours at
equal time is to minimise the integral of n + cost_of_time over the time, the second term a Lagrange
multiplier. So at each moment the best configuration has the least price of progress,

    (n + cost_of_time) / g(n, B; Phi).

The cost of time is in ranks: what an hour of waiting is worth in rank-hours. At 0 a run takes the
fewest rank-hours, at infinity the least time. As Phi grows, larger batches and more ranks pay.

`choose_ranks` is the rule of a run that knows Phi up to noise. `schedule` works out a whole run of
which the course of Phi is known, and `at_equal_time` one that takes a given time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from copus_ext.goodput import objectives, switch_rule
from copus_ext.goodput.constraints import swing_factor
from copus_ext.goodput.decide import gain_words
from copus_ext.goodput.headroom import Course
from copus_ext.goodput.inputs import ConfigThroughput, DecisionInputs
from copus_ext.goodput.state import RankChange
from megatron.training.config.layout import Layout

OBJECTIVE = "goodput"
MARGIN = 0.01
"""Least gain of another number of ranks, as a logarithm."""
MOST_NUMBERS = 12
"""Numbers of nodes up to which all of them are looked at."""
ELASTIC_S = 1.6
"""Seconds of a change of ranks beside what moves and NCCL's groups: nine tenths of 76 recoveries on
four CPU ranks took less (docs/results/elastic_kills.json of d1f89c1)."""
_BISECTIONS, _SAME = 60, 1e-9
"""Steps of a search, and the relative difference of times that count as equal."""
_FASTEST, _CHEAPEST = 1e6, 1e-6
"""Costs of time between which one is looked for, over the most and the fewest ranks."""

Pause = Callable[[Layout, Layout], float]
"""Seconds of a change between two layouts; 0 between equal ones."""


def no_pause(before: Layout, after: Layout) -> float:
    """Changes cost nothing."""
    return 0.0


def ranks_of(row: ConfigThroughput) -> int:
    """The ranks that a configuration uses."""
    return row.layout.world_size


def read_range(text: str) -> tuple[int, int]:
    """Reads the fewest and the most ranks, such as `16-64`.

    Raises:
        ValueError: another text; what to write.
    """
    least, dash, most = text.partition("-")
    if not dash or not all(x.isascii() and x.isdecimal() and int(x) for x in (least, most)):
        raise ValueError("write MIN-MAX, such as 16-64")
    if int(least) > int(most):
        raise ValueError("the first number must not exceed the second")
    return int(least), int(most)


def whole_nodes(least: int, most: int, gpus_per_node: int) -> list[int]:
    """Numbers of whole nodes in a range of ranks. Where they are many, both ends and those of the
    form 2^k and 3 x 2^k, which batches can be divided by."""
    first, last = max(math.ceil(least / gpus_per_node), 1), most // gpus_per_node
    if last - first < MOST_NUMBERS:
        return list(range(first, last + 1))
    handy = {k * 2**i for k in (1, 3) for i in range(last.bit_length())}
    return sorted({first, last, *(n for n in handy if first < n < last)})


def weight(ranks: np.ndarray, cost_of_time: float) -> np.ndarray:
    """The price of a second with so many ranks, in rank-seconds. An infinite cost of time prices
    the time alone."""
    ranks = np.asarray(ranks, dtype=float)
    return np.ones_like(ranks) if math.isinf(cost_of_time) else ranks + cost_of_time


def progress_per_s(
    rows: Sequence[ConfigThroughput], critical_batch_size: float | np.ndarray
) -> np.ndarray:
    """[..., rows] samples of small batches a second that make the same progress.

    Args:
        rows: configurations.
        critical_batch_size: Phi, samples; of any shape.
    """
    phi = np.asarray(critical_batch_size, dtype=float)[..., None]
    speeds = np.array([row.samples_per_s for row in rows])
    batches = np.array([float(row.global_batch_size) for row in rows])
    return phi * objectives.goodput(OBJECTIVE, speeds, batches, phi, reference_batch=1.0)


def price(
    rows: Sequence[ConfigThroughput], critical_batch_size: float | np.ndarray, cost_of_time: float
) -> np.ndarray:
    """[..., rows] what a sample of progress costs, in rank-seconds; see `weight`."""
    weights = weight(np.array([ranks_of(row) for row in rows]), cost_of_time)
    return weights / progress_per_s(rows, critical_batch_size)


def best_row(
    rows: Sequence[ConfigThroughput], critical_batch_size: float, cost_of_time: float
) -> ConfigThroughput:
    """The configuration with the least price of progress; of equals the one with fewest ranks."""
    found = price(rows, critical_batch_size, cost_of_time).tolist()
    return rows[min(range(len(rows)), key=lambda i: (found[i], ranks_of(rows[i]), i))]


# The rule of a run.


@dataclass(frozen=True, kw_only=True)
class RankInputs:
    """All that a decision about the number of ranks depends on."""

    rows: tuple[ConfigThroughput, ...]
    """Configurations of every number of ranks to choose from."""
    now: ConfigThroughput
    """The present one."""
    cost_of_time: float
    """In ranks, from 0 to infinity."""
    critical_batch_size: float | None
    """In samples; None without any knowledge."""
    log_noise_variance: float = 0.0
    """Variance of the logarithm of the noise scale; 0 where a bound decides."""
    remaining_s: float
    """Seconds that the rest of the run takes in the present configuration."""
    pause_s: float
    """Upper estimate of the pause of a change, seconds."""
    last: RankChange | None = None
    """The last change."""
    blocked_reason: str = ""
    """Why ranks must not change now; empty if they may."""

    @classmethod
    def of(
        cls,
        s: DecisionInputs,
        rows: Sequence[ConfigThroughput],
        *,
        cost_of_time: float,
        pause_s: float,
        last: RankChange | None,
    ) -> RankInputs:
        """From the inputs of a decision about batch and layout. Ranks wait as long as layouts do
        after a change of either.

        Args:
            s: of the same moment.
            rows: configurations of all numbers of ranks. Those that the batch may not become at
                once, or that hide the noise scale, are left out.
            cost_of_time: see `RankInputs`.
            pause_s: upper estimate of the pause of a change, seconds.
            last: the last change of the ranks.
        """
        batch, growth = s.now.global_batch_size, s.rules.growth
        known = [
            row
            for row in rows
            if batch / growth <= row.global_batch_size <= batch * growth and not row.is_blind
        ]
        since_steps = since_s = None
        if s.last_relayout_iteration is not None:
            since_steps = s.iteration - s.last_relayout_iteration
            since_s = since_steps * batch / s.now.samples_per_s
        blocked = switch_rule.relayout_blocked_reason(
            cost_s=pause_s,
            elapsed_s=s.elapsed_s,
            paused_s=s.paused_s,
            steps_since=since_steps,
            seconds_since=since_s,
            run_steps=s.total_samples / batch,
        )
        if s.in_ramp:
            blocked = blocked or "the learning rate is in a ramp"
        if not s.is_noise_measured:
            blocked = blocked or "the noise scale is not known yet"
        return cls(
            rows=tuple(known),
            now=s.now,
            cost_of_time=cost_of_time,
            critical_batch_size=s.critical_batch_size,
            log_noise_variance=s.log_noise_variance,
            remaining_s=s.samples_left / s.now.samples_per_s,
            pause_s=pause_s,
            last=last,
            blocked_reason=blocked,
        )


@dataclass(frozen=True, kw_only=True)
class RankDecision:
    """The number of ranks to go on with, and how to begin there."""

    to: ConfigThroughput
    """The present configuration if the ranks stay."""
    changes: bool
    """Whether the ranks change."""
    gain: float = 0.0
    """Price of progress of the best alternative under that of now: now / then - 1."""
    needed: float = math.inf
    """The gain that it needs."""
    reason: str
    """One line with the numbers."""


def choose_ranks(s: RankInputs) -> RankDecision:
    """Whether the run should go on with another number of ranks. The same inputs give the same
    decision.

    Each number of ranks is judged by its best batch and layout. A change must pay for its pause in
    the rest of the run, with confidence. One that turns the last change round needs a critical
    batch size that has moved by more than its noise explains.
    """
    present, phi = ranks_of(s.now), s.critical_batch_size
    if phi is None or s.blocked_reason:
        reason = s.blocked_reason or "the critical batch size is not known yet"
        return RankDecision(to=s.now, changes=False, reason=reason)
    best = {
        n: best_row([row for row in s.rows if ranks_of(row) == n], phi, s.cost_of_time)
        for n in sorted({ranks_of(row) for row in s.rows})
    }
    own = best.pop(present, s.now)
    if not best:
        return RankDecision(to=s.now, changes=False, reason="there is no other number of ranks")
    decisions = [_weighed(s, own, to, phi) for to in best.values()]
    net = [_net(s, one) if one.changes else -math.inf for one in decisions]
    at = int(np.argmax(net))
    if math.isinf(net[at]):
        at = max(range(len(decisions)), key=lambda i: decisions[i].gain - decisions[i].needed)
    return decisions[at]


def _weighed(
    s: RankInputs, own: ConfigThroughput, to: ConfigThroughput, phi: float
) -> RankDecision:
    """What a change to a configuration gains and needs."""
    here, there = price([own, to], phi, s.cost_of_time).tolist()
    gain = here / there - 1.0
    log_sd = _log_sd(s, own, to, phi)
    needed = switch_rule.forward_needed(
        cost_s=_cost_s(s, to),
        remaining_s=s.remaining_s,
        log_sd=log_sd,
        margin=MARGIN,
    )
    blocked = _turn_reason(s, to, phi)
    words = f"ranks {ranks_of(s.now)} -> {ranks_of(to)}: "
    words += gain_words(gain, None, log_sd, is_tried=False)
    if not blocked and gain <= needed:
        blocked = "the pause would not pay off in the rest of the run"
        if math.isfinite(needed):
            blocked = f"needs {100 * needed:.1f} %"
    return RankDecision(
        to=s.now if blocked else to,
        changes=not blocked,
        gain=gain,
        needed=needed,
        reason=f"{words}, {blocked}" if blocked else f"{words}, needs {100 * needed:.1f} %",
    )


def _cost_s(s: RankInputs, to: ConfigThroughput) -> float:
    """The price of the pause in seconds of the present price: the larger number of ranks waits."""
    ranks = np.array([ranks_of(s.now), ranks_of(to)])
    weights = weight(ranks, s.cost_of_time)
    return s.pause_s * float(weights.max() / weights[0])


def _net(s: RankInputs, one: RankDecision) -> float:
    """The gain of a change less its pause."""
    return (1.0 + one.gain) / (1.0 + switch_rule.break_even(_cost_s(s, one.to), s.remaining_s))


def _log_sd(s: RankInputs, own: ConfigThroughput, to: ConfigThroughput, phi: float) -> float:
    """Standard deviation of the logarithm of the gain: of the noise scale, as far as it changes the
    two differently, and of the throughput over the present one."""
    slopes = [
        objectives.sensitivity(OBJECTIVE, row.global_batch_size, phi, reference_batch=1.0)
        for row in (own, to)
    ]
    variance = (slopes[0] - slopes[1]) ** 2 * s.log_noise_variance
    return math.sqrt(variance + to.relative_sd**2)


def _turn_reason(s: RankInputs, to: ConfigThroughput, phi: float) -> str:
    """Why the ranks must not turn round; empty if they may, or if they go on as before."""
    if s.last is None:
        return ""
    grew, grows = s.last.after > s.last.before, ranks_of(to) > ranks_of(s.now)
    if grew == grows:
        return ""
    factor, then = swing_factor(s.log_noise_variance), s.last.critical_batch_size
    if grew and phi > then / factor:
        return f"they grew, and the critical batch size is not {factor:.1f} times smaller"
    if not grew and phi < factor * then:
        return f"they became fewer, and the critical batch size is not {factor:.1f} times larger"
    return ""


# A run whose course is known.


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A part of a run in one configuration."""

    row: ConfigThroughput
    """Layout, batch and speed."""
    progress: float
    """Where it begins, in samples of small batches from the beginning of the course."""
    seconds: float
    """It takes, without the pause before it."""
    pause_s: float = 0.0
    """Seconds of the change to it."""
    pause_rank_s: float = 0.0
    """Rank-seconds of that."""

    @property
    def ranks(self) -> int:
        """Of it."""
        return ranks_of(self.row)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A whole run."""

    stretches: tuple[Stretch, ...]
    """In order."""

    @property
    def seconds(self) -> float:
        """Of the run, pauses included."""
        return sum(one.seconds + one.pause_s for one in self.stretches)

    @property
    def rank_seconds(self) -> float:
        """Ranks times seconds. In a pause the larger number of ranks waits."""
        return sum(one.seconds * one.ranks + one.pause_rank_s for one in self.stretches)

    @property
    def ranks(self) -> list[int]:
        """The numbers of ranks, one after another."""
        return [n for n, _ in itertools.groupby(one.ranks for one in self.stretches)]


def schedule(
    rows: Sequence[ConfigThroughput],
    course: Course,
    cost_of_time: float,
    *,
    pause_s: Pause = no_pause,
) -> Schedule:
    """The run of least price over a known course of the critical batch size, by dynamic programming
    over layouts. Batches change at no cost; it begins in any layout.

    Args:
        rows: configurations of every number of ranks to choose from.
        course: intervals of progress with their critical batch size.
        cost_of_time: in ranks, from 0 to infinity.
        pause_s: seconds of a change between two layouts.
    """
    layouts = sorted({row.layout for row in rows}, key=lambda one: (one.world_size, str(one)))
    speeds = progress_per_s(rows, course.critical_batch_size)
    chosen, fastest = [], []
    for layout in layouts:
        own = [i for i, row in enumerate(rows) if row.layout == layout]
        best = speeds[:, own].argmax(axis=1)
        chosen.append(np.array(own)[best])
        fastest.append(speeds[np.arange(len(speeds)), chosen[-1]])
    seconds = np.asarray(course.progress)[:, None] / np.stack(fastest, axis=1)
    weights = weight(np.array([one.world_size for one in layouts]), cost_of_time)
    pauses = np.array([[pause_s(a, b) for b in layouts] for a in layouts])
    if pauses.any():
        path, _ = switch_rule.best_moves(
            seconds * weights, pauses * np.maximum(weights[:, None], weights)
        )
    else:
        path = (seconds * weights).argmin(axis=1).tolist()
    picked = [int(chosen[at][k]) for k, at in enumerate(path)]
    return _joined(rows, picked, seconds[np.arange(len(path)), path], course, pause_s)


def _joined(
    rows: Sequence[ConfigThroughput],
    picked: Sequence[int],
    seconds: np.ndarray,
    course: Course,
    pause_s: Pause,
) -> Schedule:
    """The stretches of a configuration for every interval."""
    edges = np.concatenate([[0.0], np.cumsum(course.progress)])
    stretches: list[Stretch] = []
    for at, group in itertools.groupby(range(len(picked)), key=lambda k: picked[k]):
        own, row = list(group), rows[at]
        pause = pause_rank_s = 0.0
        if stretches:
            before = stretches[-1].row
            pause = pause_s(before.layout, row.layout)
            pause_rank_s = pause * max(ranks_of(before), ranks_of(row))
        stretches.append(
            Stretch(
                row=row,
                progress=float(edges[own[0]]),
                seconds=float(seconds[own].sum()),
                pause_s=pause,
                pause_rank_s=pause_rank_s,
            )
        )
    return Schedule(stretches=tuple(stretches))


def fixed(
    rows: Sequence[ConfigThroughput], course: Course, ranks: int, *, pause_s: Pause = no_pause
) -> Schedule:
    """The fastest run with a fixed number of ranks, whose batch and layout adapt.

    Raises:
        ValueError: no configuration has so many ranks.
    """
    own = [row for row in rows if ranks_of(row) == ranks]
    if not own:
        raise ValueError(f"no configuration of {ranks} ranks")
    return schedule(own, course, math.inf, pause_s=pause_s)


@dataclass(frozen=True, kw_only=True)
class EqualTime:
    """What a run of a given time costs at least."""

    cost_of_time: float
    """That leads to it, in ranks. Where a range of them leads to a run of exactly that time, it is
    the middle of the range, so that a run that knows the course less well comes near it."""
    schedule: Schedule
    """The cheapest that was found to take no longer."""
    rank_seconds: float
    """Of a run of exactly that time: it follows `schedule` in one part and the next slower one in
    the other."""


def at_equal_time(
    rows: Sequence[ConfigThroughput],
    course: Course,
    seconds: float,
    *,
    pause_s: Pause = no_pause,
) -> EqualTime:
    """The run that takes a given time with the fewest rank-seconds; by bisection, since a larger
    cost of time never makes a run slower.

    Args:
        rows: configurations of every number of ranks to choose from.
        course: of the critical batch size.
        seconds: of the whole run.
        pause_s: seconds of a change between two layouts.

    Raises:
        ValueError: even the fastest run takes longer.
    """

    def at(cost_of_time: float) -> Schedule:
        return schedule(rows, course, cost_of_time, pause_s=pause_s)

    ranks = [ranks_of(row) for row in rows]
    low, high = _CHEAPEST * min(ranks), _FASTEST * max(ranks)
    allowed = seconds * (1.0 + 1e-12)
    slow, fast = at(0.0), at(high)
    if slow.seconds <= allowed:
        return EqualTime(cost_of_time=0.0, schedule=slow, rank_seconds=slow.rank_seconds)
    if fast.seconds > allowed:
        fast = at(math.inf)
        if fast.seconds > allowed:
            raise ValueError(f"the fastest run takes {fast.seconds:.0f} s, not {seconds:.0f}")
        return EqualTime(cost_of_time=math.inf, schedule=fast, rank_seconds=fast.rank_seconds)
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        found = at(middle)
        if found.seconds <= allowed:
            high, fast = middle, found
        else:
            low, slow = middle, found
    share = (seconds - fast.seconds) / (slow.seconds - fast.seconds)
    mixed = fast.rank_seconds + share * (slow.rank_seconds - fast.rank_seconds)
    cost = high
    if fast.seconds >= seconds * (1.0 - _SAME):
        cost = math.sqrt(high * _last_cost(at, high, _FASTEST * max(ranks), fast.seconds))
    return EqualTime(cost_of_time=cost, schedule=fast, rank_seconds=mixed)


def _last_cost(at: Callable[[float], Schedule], low: float, high: float, seconds: float) -> float:
    """The largest cost of time between two at which a run still takes so many seconds."""
    for _ in range(_BISECTIONS // 2):
        middle = math.sqrt(low * high)
        if at(middle).seconds >= seconds * (1.0 - _SAME):
            low = middle
        else:
            high = middle
    return low
