"""What the changes of a run have saved so far, against staying in its first configuration."""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from copus_ext.goodput.step_records import MIN_TIMED_STEPS, WARM_UP_STEPS
from copus_ext.monitor.journal import Account, DecisionRecord, Sizes
from copus_ext.monitor.run_files import END_BYTES, RunHistory, RunReader, Step
from copus_ext.monitor.values import FOREIGN, whole

_DOUBT = (0.5, 1.0, 2.0)
"""The critical batch size over what decisions went by: it is known to a factor of two at best."""

_MIN_COMPARED = 0.9
"""Least share of the time that must be comparable."""
_MANY_SAMPLES = 1.1
"""Times the samples from which a line names them."""
_MAX_SCATTER = 0.3
"""Most relative standard deviation of the speed of a configuration that was not timed itself: a
noisy machine, or links that change, can put what others tell of it wrong by any factor."""
_SD_OF_MEDIAN = 1.4826
"""Standard deviation over the median deviation of a normal distribution."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Steps of a run in one configuration. Samples are of the length that they have there."""

    samples: float
    seconds: float
    """With pauses and decisions."""
    overhead_s: float
    """Of these the pauses and decisions, which no run that stays would have."""
    batch: int
    first_batch: int
    """Batch of the first configuration."""
    is_first: bool
    """Whether the run was in its first configuration."""
    critical_batch_size: float | None
    """That decisions went by, samples."""
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
    by_prediction: bool
    """Whether the speed of the first configuration is in part derived from that of others."""
    samples: float
    """Samples trained."""
    staying_samples: float
    """Samples of the first configuration to the same progress."""

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
    return TimeSaved(
        taken_s=taken_s,
        staying_s=likely,
        low=min(shares),
        high=max(shares),
        by_batch=bool(of_batch),
        by_prediction=any(s.first_sd for s in others),
        samples=sum(s.samples for s in segments),
        staying_samples=sum(s.samples * _more_samples(s) for s in segments),
    )


def _is_known(s: Segment) -> bool:
    needs_phi = s.batch != s.first_batch
    return bool(s.first_samples_per_s) and not (needs_phi and s.critical_batch_size is None)


def _staying_s(s: Segment, *, factor: float = 1.0, sds: float = 0.0) -> float:
    """Seconds of the first configuration to the progress of a segment, with the critical batch size
    times a factor, and so many standard deviations faster."""
    if s.is_first or s.first_samples_per_s is None:
        return max(s.seconds - s.overhead_s, 0.0)
    samples = s.samples * _more_samples(s, factor=factor)
    return samples / s.first_samples_per_s / (1.0 + sds * s.first_sd)


def _more_samples(s: Segment, *, factor: float = 1.0) -> float:
    """Samples of the first batch that bring as far as one of a segment."""
    if s.critical_batch_size is None:
        return 1.0
    phi = factor * s.critical_batch_size
    return (1.0 + s.first_batch / phi) / (1.0 + s.batch / phi)


# From the files of a run.

_Speed = tuple[float, float]
"""Throughput of the first configuration, and its relative standard deviation."""


def segments_of(run: RunHistory) -> list[Segment]:
    """The recorded steps of a run, in one configuration and under one decision each. Without those
    of which nothing tells how long they took, and those that a restart undid."""
    decided = [d for d in run.decisions.standing if d.account and d.iteration is not None]
    accounts = [d.account for d in decided if d.account is not None]
    ends = [d.iteration or 0 for d in decided]
    # In samples of the run, which mean the same whatever the length of those of a step.
    known = [a.critical_batch_size and a.critical_batch_size * a.length_ratio for a in accounts]
    critical, lost = _filled(known), _lost_s(run, decided)
    groups = _groups(run, ends)
    speeds = _speeds(accounts, groups)
    found = []
    for before, group in zip([None, *groups], groups, strict=False):
        after = (s for s in group.steps if s.iteration > run.decisions.begin)
        steps, at = [s for s in after if s.seconds is not None], max(group.decided - 1, 0)
        first, batch = group.first, group.sizes.batch
        if not (accounts and steps and batch and first and first.batch):
            continue
        overhead_s = 0.0
        while lost and lost[0][0] < steps[-1].iteration:
            overhead_s += lost.pop(0)[1]
        phi, (speed, sd) = critical[at], speeds.get((first, group.ratio)) or (None, 0.0)
        found.append(
            Segment(
                samples=float(len(steps) * batch),
                seconds=sum(step.seconds or 0.0 for step in steps) + overhead_s,
                overhead_s=overhead_s,
                batch=batch,
                first_batch=first.batch,
                is_first=_chosen(run, before, group) == first,
                critical_batch_size=phi and phi / group.ratio,
                first_samples_per_s=speed,
                first_sd=sd,
            )
        )
    return found


class _Group(NamedTuple):
    """Steps that follow each other in one configuration, under one decision and in one launch."""

    decided: int
    """Decisions before them."""
    sizes: Sizes
    first: Sizes | None
    """The first configuration, in samples of their length."""
    ratio: float
    """Samples in which the run counts that one of theirs is."""
    steps: list[Step]


def _groups(run: RunHistory, ends: Sequence[int]) -> list[_Group]:
    """The steps of a run whose decisions came after so many steps."""
    starts, counted = [at for at, _ in run.layouts], run.tokens_per_sample

    def key(s: Step) -> tuple[Any, ...]:
        places = bisect_left(ends, s.iteration), bisect_left(starts, s.iteration)
        return *places, s.batch, s.micro, s.seq_length, s.launch

    found = []
    for (decided, _, batch, micro, length, _), steps in itertools.groupby(run.steps, key=key):
        own = list(steps)
        done = own[0].iteration - 1
        layout = run.layout_at(done) or run.decisions.layout
        ratio = length / counted if length and counted else 1.0
        first = run.decisions.first_at(done, ratio)
        sizes = Sizes(batch=batch, micro=micro, layout=layout)
        found.append(_Group(decided, sizes, first, ratio, own))
    return found


def _chosen(run: RunHistory, before: _Group | None, group: _Group) -> Sizes:
    """The configuration of some steps; of a last one, with the samples that were left over, that of
    the steps before it."""
    end, last = whole(run.config.get("train_samples")), group.steps[-1]
    is_rest = end is not None and last.samples >= end and len(group.steps) == 1
    if before is None or not is_rest or (group.sizes.batch or 0) >= (before.sizes.batch or 0):
        return group.sizes
    return before.sizes


def _lost_s(run: RunHistory, decided: Sequence[DecisionRecord]) -> list[tuple[int, float]]:
    """After which step decisions and changes of layout took time, and how many seconds."""
    undone = {id(d.relayout) for d in run.decisions.decided if d.undone}
    moves = [r for r in run.decisions.relayouts if id(r) not in undone and r.pause_s]
    lost = [(r.iteration or 0, r.pause_s or 0.0) for r in moves]
    return sorted(
        [*lost, *((d.iteration or 0, d.account.deciding_s) for d in decided if d.account)]
    )


def _filled(values: Sequence[float | None]) -> list[float | None]:
    """With the last known value in place of None, or the next one where none is before."""
    found = list(values)
    for i in range(1, len(found)):
        found[i] = found[i - 1] if found[i] is None else found[i]
    for i in range(len(found) - 2, -1, -1):
        found[i] = found[i + 1] if found[i] is None else found[i]
    return found


def _speeds(
    accounts: Sequence[Account], groups: Sequence[_Group]
) -> dict[tuple[Sizes, float], _Speed | None]:
    """The speed of the first configuration, by that and by the length of its samples: as decisions
    timed it; else by its own steps in the record; else the middle of what other configurations
    tell, with its scatter, if they agree."""
    own = _timed_steps(groups)
    found: dict[tuple[Sizes, float], _Speed | None] = {}
    for key in {(a.first, float(a.length_ratio)) for a in accounts} | own.keys():
        told = [_speed(a) for a in accounts if (a.first, float(a.length_ratio)) == key]
        known = [speed for speed in told if speed is not None]
        timed = [speed for speed, sd in known if not sd]
        best = (statistics.median(timed), 0.0) if timed else None
        found[key] = best or _local_speed(own.get(key, ())) or _middle(known)
    return found


def _timed_steps(groups: Sequence[_Group]) -> dict[tuple[Sizes, float], list[float]]:
    """Samples per second of the steps that tell the speed of their configuration, by that and by
    the samples of the run that a sample is."""
    found: dict[tuple[Sizes, float], list[float]] = {}
    before, num = None, 0
    for group in groups:
        now = group.sizes, group.ratio, group.steps[0].launch
        num = num if now == before else 0
        before = now
        warm = group.steps[max(WARM_UP_STEPS - num, 0) :]
        num += len(group.steps)
        timed = [s.batch / s.seconds for s in warm if s.updated and s.batch and s.seconds]
        if timed:
            found.setdefault((group.sizes, group.ratio), []).extend(timed)
    return found


def _local_speed(speeds: Sequence[float]) -> _Speed | None:
    """The speed of a configuration by its own steps, and how far a few of them may be off; None
    without any."""
    if not speeds:
        return None
    is_enough = len(speeds) >= MIN_TIMED_STEPS
    sd = 0.0 if is_enough else _MAX_SCATTER / math.sqrt(len(speeds))
    return statistics.median(speeds), sd


def _middle(known: Sequence[_Speed]) -> _Speed | None:
    """The median of some speeds, and the larger of their own error and their scatter; None without
    any, or if they scatter too much to claim anything."""
    if not known:
        return None
    middle = statistics.median(speed for speed, _ in known)
    scatter = statistics.median(abs(math.log(speed / middle)) for speed, _ in known)
    sd = max(_SD_OF_MEDIAN * scatter, statistics.median(sd for _, sd in known))
    return None if sd > _MAX_SCATTER else (middle, sd)


def _speed(account: Account) -> _Speed | None:
    speed = account.first_samples_per_s
    return None if speed is None or speed <= 0.0 else (speed, account.first_sd)


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
    if not (run.has_whole_journal and run.is_whole):
        return "not known: the record is too long to read here; the report reads all of it", None
    if decisions.decided and not run.steps:
        return "not known: no step is recorded", None
    try:
        segments = segments_of(run)
        found = time_saved(segments)
    except FOREIGN:
        return "not known: a record of the journal is damaged", None
    first = decisions.first
    if all(s.is_first for s in segments):
        return _nothing(run, has_begun=bool(segments)), None
    assert first is not None
    if decisions.has_ramp:
        return "not known: without the controller --rampup-batch-size would change the batch", None
    if found is None:
        others = [s for s in segments if not s.is_first and s.batch != s.first_batch]
        is_known = all(s.critical_batch_size for s in others)
        why = f"{first} was not timed, and what others tell of its speed is not sure enough"
        return f"not known: {why if is_known else 'no decision knew a critical batch size'}", None
    share = _percent(found.share)
    side = f"{share} % {'less' if found.share > 0.0 else 'more'} time than"
    side = "as much time as" if share == "0.0" else side
    words = f"{side} staying at {first}{_doubt(found)}{_lost_steps(found)}{_lacking(run)}"
    return words, found


def line_at_end(run_dir: Path) -> str:
    """The line for the end of a launch; empty where nothing was changed.

    Raises:
        OSError: a file of the run cannot be read.
    """
    reader = RunReader(run_dir, max_bytes=END_BYTES)
    reader.refresh()
    run = reader.history()
    return f"copus: so far: {so_far(run)[0]}" if run.decisions.made else ""


def _nothing(run: RunHistory, *, has_begun: bool) -> str:
    """Why nothing can have been gained, if the controller has moved no step. Flags may have: steps
    of several configurations are not those of one, and an earlier record may know changes."""
    if run.decisions.mode == "observe":
        return "nothing: the controller only observes"
    if not has_begun:
        return "nothing yet: the controller has only begun"
    last = run.decisions.first_at(run.steps[-1].iteration - 1, 1.0) or run.decisions.first
    nothing = "nothing yet: no step follows a change that is recorded here"
    return f"{nothing}; the last was made at {last}"


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
    reasons = ["the critical batch size"] * found.by_batch
    reasons += ["the predicted speed"] * found.by_prediction
    return f" ({span}, depending on {' and '.join(reasons)})"


def _lost_steps(found: TimeSaved) -> str:
    """How many times the samples staying would need, where it has so many too few steps that at
    equal samples it is far behind, however fast it is."""
    ratio = found.staying_samples / found.samples
    return f"; staying would need {ratio:.1f} times the samples" if ratio >= _MANY_SAMPLES else ""


def _lacking(run: RunHistory) -> str:
    """How many steps the account is of, if the record lacks some."""
    num = sum(s.seconds is not None and s.iteration > run.decisions.begin for s in run.steps)
    whole = run.steps[-1].iteration - run.decisions.begin if run.steps else 0
    return f"; of {num:,} of {whole:,} steps" if num < whole else ""
