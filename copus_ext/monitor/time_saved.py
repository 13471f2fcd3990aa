"""What the changes of a run have saved so far, against staying in its first configuration."""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from copus_ext.goodput.step_records import MIN_TIMED_STEPS, WARM_UP_STEPS
from copus_ext.monitor.journal import Account, DecisionHistory, DecisionRecord, Sizes
from copus_ext.monitor.run_files import END_BYTES, RunHistory, RunReader, Step
from copus_ext.monitor.values import FOREIGN

_DOUBT = (0.5, 1.0, 2.0)
"""The critical batch size over what decisions went by: it is known to a factor of two at best."""

_MIN_COMPARED = 0.9
"""Least share of the time that must be comparable."""
_MAX_SCATTER = 0.3
"""Most relative standard deviation of the speed of a configuration that was not timed itself: a
noisy machine, or links that change, can put what others tell of it wrong by any factor."""
_SD_OF_MEDIAN = 1.4826
"""Standard deviation over the median deviation of a normal distribution."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Steps of a run in one configuration. Samples are of the length that they have there."""

    samples: float
    """That the steps trained."""
    seconds: float
    """That they took, with pauses and decisions."""
    overhead_s: float
    """Of these the pauses and decisions, which no run that stays would have."""
    batch: int
    """Samples of a step."""
    first_batch: int
    """Samples of a step of the first configuration."""
    is_first: bool
    """Whether the run was in its first configuration."""
    critical_batch_size: float | None
    """That decisions went by, samples."""
    is_bound: bool = False
    """Whether that is its bound, which needs no measurement."""
    first_samples_per_s: float | None
    """Throughput of the first configuration."""
    first_sd: float = 0.0
    """Relative standard deviation of that; 0 if it was timed itself."""


@dataclass(frozen=True, kw_only=True)
class TimeSaved:
    """What changes have saved so far; shares are of the time that staying would have taken."""

    taken_s: float
    """Seconds of training, with pauses and decisions."""
    staying_s: float
    """Seconds of the first configuration to the same progress."""
    low: float
    """Least share that was saved over the doubt; negative for a loss."""
    high: float
    """Most of it."""
    by_batch: bool
    """Whether it depends on the critical batch size."""
    by_bound: bool
    """Whether most of that time depends on the bound of the critical batch size alone."""
    by_prediction: bool
    """Whether the speed of the first configuration is in part derived from that of others."""

    @property
    def share(self) -> float:
        """The share that was saved; negative for a loss."""
        return 1.0 - self.taken_s / self.staying_s


def time_saved(segments: Sequence[Segment]) -> TimeSaved | None:
    """The time that a run has saved against staying in its first configuration.

    n samples in batches of B make n / (1 + B/Phi) progress, Phi the critical batch size. The first
    batch B0 needs 1 + B0/Phi samples for each unit of progress, and its configuration trains T0 of
    them in a second. So over all segments in other configurations

        staying_s = sum of n (1 + B0/Phi) / (1 + B/Phi) / T0

    In the first configuration both took the same time, but for pauses and decisions:
    there it is the time taken less these. Then share = 1 - taken_s / staying_s. The range is that
    of half and twice the critical batch size. Where T0 is not timed itself, it is also that of T0
    one standard deviation up and down.

    Left out, as they are alike: evaluations, checkpoints, and the time between launches. What
    measuring the noise scale adds to a step is in T0 too.

    Args:
        segments: of the whole run. One in another configuration cannot be compared without T0, nor
            without Phi if its batch is not the first one.

    Returns:
        The estimate from the segments that can be compared; None for no segment, or where more
        than a tenth of the time cannot.
    """
    all_s = sum(s.seconds for s in segments)
    segments = [s for s in segments if s.is_first or _is_known(s)]
    taken_s = sum(s.seconds for s in segments)
    if not segments or taken_s < _MIN_COMPARED * all_s:
        return None
    likely = sum(_staying_s(s) for s in segments)
    if not 0.0 < likely < math.inf or not 0.0 <= taken_s < math.inf:
        return None
    shares = [
        1.0 - taken_s / sum(_staying_s(s, factor=factor, sds=sds) for s in segments)
        for factor, sds in itertools.product(_DOUBT, (-1.0, 0.0, 1.0))
    ]
    others = [s for s in segments if not s.is_first]
    of_batch = [s for s in others if s.batch != s.first_batch]
    bound_s = sum(_staying_s(s) for s in of_batch if s.is_bound)
    return TimeSaved(
        taken_s=taken_s,
        staying_s=likely,
        low=min(shares),
        high=max(shares),
        by_batch=bool(of_batch),
        by_bound=2.0 * bound_s > sum(_staying_s(s) for s in of_batch),
        by_prediction=any(s.first_sd for s in others),
    )


def _is_known(s: Segment) -> bool:
    """Whether a segment in another configuration can be compared."""
    needs_phi = s.batch != s.first_batch
    return bool(s.first_samples_per_s) and not (needs_phi and s.critical_batch_size is None)


def _staying_s(s: Segment, *, factor: float = 1.0, sds: float = 0.0) -> float:
    """Seconds of the first configuration to the progress of a segment.

    Args:
        s: that can be compared.
        factor: of the critical batch size.
        sds: standard deviations by which the first configuration is faster.
    """
    if s.is_first or s.first_samples_per_s is None:
        return max(s.seconds - s.overhead_s, 0.0)
    more = 1.0
    if s.critical_batch_size is not None:
        phi = factor * s.critical_batch_size
        more = (1.0 + s.first_batch / phi) / (1.0 + s.batch / phi)
    return s.samples * more / s.first_samples_per_s / (1.0 + sds * s.first_sd)


# From the files of a run.

_Value = TypeVar("_Value")
_Speed = tuple[float, float]
"""Throughput of the first configuration, and its relative standard deviation."""


def segments_of(run: RunHistory) -> list[Segment]:
    """The segments of a run between its decisions, and from the last one to its last step. Without
    those of which the journal does not tell the time, and those that a restart undid."""
    decided = [d for d in run.decisions.standing if _is_complete(d)]
    if not decided:
        return []
    accounts = [d.account for d in decided if d.account is not None]
    speeds = _speeds(accounts, _timed_steps(run))
    # In samples of the run, which mean the same in every phase.
    known = [a.critical_batch_size and a.critical_batch_size * a.length_ratio for a in accounts]
    critical = _filled(known)

    def finished(i: int, at: int, segment: Segment) -> Segment:
        """With what decision i knew of Phi, and that at `at` of the first configuration."""
        phi, (speed, sd) = critical[i], speeds[at] or (None, 0.0)
        return replace(
            segment,
            critical_batch_size=phi and phi / accounts[at].length_ratio,
            is_bound=accounts[i].is_bound,
            first_samples_per_s=speed,
            first_sd=sd,
        )

    found = []
    if run.decisions.begin == (0, 0):
        found += [finished(0, 0, s) for s in _between(None, decided[0])]
    for i, (a, b) in enumerate(itertools.pairwise(decided)):
        if accounts[i].first.layout == accounts[i + 1].first.layout:
            found += [finished(i, i + 1, s) for s in _between(a, b)]
            continue
        whole, parts = _between(a, b), _around_launch(a, b, run)
        if parts is None:
            found += [replace(s, is_first=False) for s in whole]  # which cannot be compared
            continue
        for at, some in zip((i, i + 1), parts):
            found += [finished(i, at, s) for s in some]
    last = len(decided) - 1
    return [*found, *(finished(last, last, s) for s in _since(decided[-1], run))]


def _is_complete(d: DecisionRecord) -> bool:
    """Whether a decision says where the run stood, and when."""
    known = d.account is not None and (d.account.elapsed_s or 0.0) > 0.0
    return known and None not in (d.samples, d.iteration) and (d.now.batch or 0) > 0


def _filled(values: Sequence[_Value | None]) -> list[_Value | None]:
    """With the last known value in place of None, or the next one where none is before."""
    found = list(values)
    for i in range(1, len(found)):
        found[i] = found[i - 1] if found[i] is None else found[i]
    for i in range(len(found) - 2, -1, -1):
        found[i] = found[i + 1] if found[i] is None else found[i]
    return found


def _timed_steps(run: RunHistory) -> dict[tuple[Sizes, float], list[float]]:
    """Samples per second of the steps that tell the speed of their configuration, by that and by
    the samples of the run that a sample is."""
    found: dict[tuple[Sizes, float], list[float]] = {}
    counted, before, num = run.tokens_per_sample, None, 0
    for step in run.steps:
        ratio = step.seq_length / counted if step.seq_length and counted else 1.0
        now = (_sizes(step, run), ratio), step.launch
        num = num + 1 if now == before else 1
        before = now
        if num > WARM_UP_STEPS and step.updated and step.batch and step.seconds:
            found.setdefault(now[0], []).append(step.batch / step.seconds)
    return found


def _local_speed(speeds: Sequence[float]) -> _Speed | None:
    """The speed of a configuration by its own steps, and how far a few of them may be off; None
    without any."""
    if not speeds:
        return None
    is_enough = len(speeds) >= MIN_TIMED_STEPS
    sd = 0.0 if is_enough else _MAX_SCATTER / math.sqrt(len(speeds))
    return statistics.median(speeds), sd


def _speeds(
    accounts: Sequence[Account], timed_steps: Mapping[tuple[Sizes, float], Sequence[float]]
) -> list[_Speed | None]:
    """The speed of the first configuration at each decision: as it was last timed itself; else by
    its own steps in the record; else the middle of what other configurations tell, with its
    scatter, if they agree."""
    found: list[_Speed | None] = [None] * len(accounts)
    for key in {(a.first, a.length_ratio) for a in accounts}:
        is_own = [(a.first, a.length_ratio) == key for a in accounts]
        known = [_speed(a) if mine else None for a, mine in zip(accounts, is_own)]
        timed = [None if speed is None or speed[1] else speed for speed in known]
        own = _local_speed(timed_steps.get(key, ())) or _middle(known)
        best = _filled(timed) if any(timed) else [own] * len(known)
        found = [speed if mine else old for speed, mine, old in zip(best, is_own, found)]
    return found


def _middle(speeds: Sequence[_Speed | None]) -> _Speed | None:
    """The median of some speeds, and the larger of their own error and their scatter; None without
    any, or if they scatter too much to claim anything."""
    known = [speed for speed in speeds if speed is not None]
    if not known:
        return None
    middle = statistics.median(speed for speed, _ in known)
    scatter = statistics.median(abs(math.log(speed / middle)) for speed, _ in known)
    sd = max(_SD_OF_MEDIAN * scatter, statistics.median(sd for _, sd in known))
    return None if sd > _MAX_SCATTER else (middle, sd)


def _speed(account: Account) -> _Speed | None:
    speed = account.first_samples_per_s
    return None if speed is None or speed <= 0.0 else (speed, account.first_sd)


def _between(a: DecisionRecord | None, b: DecisionRecord) -> list[Segment]:
    """The segment from a decision, or from the start of the run, to the next one; none without
    steps or time."""
    start, end = 0, b.samples or 0
    elapsed_s = paused_s = 0.0
    account = b.account
    assert account is not None
    if a is not None and a.account is not None:
        start, elapsed_s, paused_s = a.samples or 0, a.account.elapsed_s or 0.0, a.account.paused_s
    seconds = (account.elapsed_s or 0.0) - elapsed_s
    if end <= start or seconds <= 0.0:
        return []
    overhead_s = min(max(account.paused_s - paused_s, 0.0), seconds) + account.deciding_s
    return [
        _segment(
            b.now,
            account,
            samples=(end - start) / account.length_ratio,
            seconds=seconds + account.deciding_s,
            overhead_s=overhead_s,
        )
    ]


def _around_launch(
    a: DecisionRecord, b: DecisionRecord, run: RunHistory
) -> tuple[list[Segment], list[Segment]] | None:
    """The segments between two decisions, before and after a launch that took the run to another
    layout. By the steps, which share the time without pauses by their own; None where steps are
    missing."""
    assert a.account is not None and b.account is not None
    layout = b.account.first.layout
    done, end = a.iteration or 0, b.iteration or 0
    begins = [at for at, name in run.decisions.layouts if name == layout and done <= at <= end]
    steps = [s for s in run.steps if done < s.iteration <= end]
    is_whole = [s.iteration for s in steps] == list(range(done + 1, end + 1))
    known_s = sum(s.seconds or 0.0 for s in steps)
    whole = _between(a, b)
    if not (begins and is_whole and known_s > 0.0 and whole):
        return None
    scale = (whole[0].seconds - whole[0].overhead_s) / known_s
    found: tuple[list[Segment], list[Segment]] = [], []
    lost_s = whole[0].overhead_s
    for (is_after, sizes), group in itertools.groupby(
        steps, key=lambda s: (s.iteration > begins[-1], _sizes(s, run))
    ):
        own = list(group)
        seconds = scale * sum(s.seconds or 0.0 for s in own) + lost_s
        samples = float(len(own) * (sizes.batch or 0))
        account = b.account if is_after else a.account
        more = {"samples": samples, "seconds": seconds, "overhead_s": lost_s}
        found[is_after].append(_segment(sizes, account, **more))
        lost_s = 0.0
    return found


def _segment(
    now: Sizes, account: Account, *, samples: float, seconds: float, overhead_s: float
) -> Segment:
    return Segment(
        samples=samples,
        seconds=seconds,
        overhead_s=overhead_s,
        batch=now.batch or 1,
        first_batch=account.first.batch or 1,
        is_first=now == account.first,
        critical_batch_size=None,
        first_samples_per_s=None,
    )


def _since(last: DecisionRecord, run: RunHistory) -> list[Segment]:
    """The segments since the last decision, by its steps; none where steps are missing."""
    account, steps = last.account, _steps_after(last, run)
    assert account is not None
    lost_s = 0.0
    if last.relayout is not None:
        lost_s = last.relayout.pause_s or 0.0
    found = []
    for sizes, group in itertools.groupby(steps, key=lambda step: _sizes(step, run)):
        own = list(group)
        seconds = sum(step.seconds or 0.0 for step in own)
        samples = float(len(own) * (sizes.batch or 0))
        more = {"samples": samples, "seconds": seconds + lost_s, "overhead_s": lost_s}
        found += [_segment(sizes, account, **more)] if samples > 0 else []
        lost_s = 0.0
    return found


def _sizes(step: Step, run: RunHistory) -> Sizes:
    layout = run.layout_at(step.iteration - 1) or run.decisions.layout
    return Sizes(batch=step.batch, micro=step.micro, layout=layout)


def _steps_after(last: DecisionRecord, run: RunHistory) -> list[Step]:
    """The steps of one length after a decision, as far as none is missing."""
    done = last.iteration or 0
    at = bisect_right(run.steps, done, key=lambda step: step.iteration)
    steps = run.steps[at:]
    length = steps[0].seq_length if steps else None
    is_next = (s.iteration == done + 1 + i for i, s in enumerate(steps))
    kept = itertools.takewhile(lambda pair: pair[0], zip(is_next, steps))
    return [s for _, s in kept if s.seq_length == length and s.seconds is not None]


# In words.


def so_far(run: RunHistory) -> tuple[str, TimeSaved | None]:
    """What was gained so far against staying at the start: in words and as a number.

    Returns:
        The line, which says why nothing is known where that is so; empty for a run without a
        controller. And the estimate; None where nothing was changed or nothing is known.
    """
    decisions = run.decisions
    if decisions.is_empty:
        return "", None
    if not run.has_whole_journal:
        return "not known: the journal is too long to read here; the report reads all of it", None
    try:
        segments = segments_of(run)
        found = time_saved(segments)
    except FOREIGN:
        return "not known: a record of the journal is damaged", None
    first = decisions.first
    if all(s.is_first for s in segments):
        return _nothing(decisions, first if segments else None), None
    assert first is not None
    if decisions.has_ramp:
        return "not known: without the controller --rampup-batch-size would change the batch", None
    if found is None:
        others = [s for s in segments if not s.is_first and s.batch != s.first_batch]
        is_known = all(s.critical_batch_size for s in others)
        begin = (decisions.begin[0] or 0) + 1
        if is_known and run.steps and run.steps[0].iteration > begin:
            return "not known: the record is too long for this; the report reads all of it", None
        why = f"{first} was not timed, and what others tell of its speed is not sure enough"
        return f"not known: {why if is_known else 'no decision knew a critical batch size'}", None
    share = _percent(found.share)
    side = f"{share} % {'less' if found.share > 0.0 else 'more'} time than"
    side = "as much time as" if share == "0.0" else side
    return f"{side} staying at {first}{_doubt(found)}{_until(run)}", found


def line_at_end(run_dir: Path) -> str:
    """The line for the end of a launch; empty where nothing was changed.

    Raises:
        OSError: a file of the run cannot be read.
    """
    reader = RunReader(run_dir, max_bytes=END_BYTES)
    reader.refresh()
    run = reader.history()
    return f"copus: so far: {so_far(run)[0]}" if run.decisions.made else ""


def _nothing(decisions: DecisionHistory, first: Sizes | None) -> str:
    """Why nothing can have been gained.

    Args:
        decisions: of the run.
        first: the configuration that all its steps were made in; None without any.
    """
    if decisions.mode == "observe":
        return "nothing: the controller only observes"
    if first is None:
        return "nothing yet: the controller has only begun"
    return f"nothing yet: every step was made in the first configuration, {first}"


def _percent(share: float) -> str:
    value = 100.0 * abs(share)
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"


def _doubt(found: TimeSaved) -> str:
    """The range and what it is due to; empty where nothing is in doubt."""
    low, high = found.low, found.high
    ends = [_percent(low), _percent(high)]
    if low < 0.0 < high and ends != ["0.0", "0.0"]:
        span = f"{ends[0]} % more to {ends[1]} % less"
    elif ends[0] != ends[1]:
        span = " to ".join(ends if low >= 0.0 else ends[::-1]) + " %"
    else:
        return ""
    size = "the bound of the critical batch size" if found.by_bound else "the critical batch size"
    reasons = [size] * found.by_batch + ["the predicted speed"] * found.by_prediction
    return f" ({span}, by {' and '.join(reasons)})"


def _until(run: RunHistory) -> str:
    """Where the account ends, if that is not the last step."""
    last = run.decisions.standing[-1]
    end = (last.iteration or 0) + len(_steps_after(last, run))
    return f"; until step {end:,}" if run.steps and run.steps[-1].iteration > end else ""
