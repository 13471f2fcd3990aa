"""When messages of 8 bits between stages are tried in a run, and whether they pay. Needs no torch.

A trial trains the same samples twice from one state, with whole and with short messages. Short ones
pay if a lower bound of the progress that they make, times the speed that they gain, is more than
whole ones give. The run goes on from the end of the better branch, so that a trial costs the other
one and the losses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from copus_ext.goodput import fork_rule
from copus_ext.goodput.fork_result import Branch, ForkPlan, ForkResult

LEAST_SAVING = 0.05
"""Share of the time of steps that short messages must be predicted to save."""
NEEDED_GAIN = 1.02
"""Lower bound of the progress per second of short messages over that of whole ones from which they
are taken."""
LEAST_PROGRESS = 0.95
"""Progress of short messages over that of whole ones from which they are taken, whatever the speed:
later decisions take them to cost nothing."""
MIN_STEPS = 20
"""Least steps of a branch."""
EVAL_SAMPLES = 256
"""Held-out samples of each loss, where there are so many."""
MOST_TRIALS, WAIT = 3, 3.0
"""Trials of a run at most, and the growth of the consumed samples between two of them."""
MOST_SHARE = 0.5
"""Most samples of a branch over those before it."""
_LOSS_SD = 2.0 * fork_rule.LOSS_SD
"""Error of a loss of last weights in the comparison of two branches, nats a token: their steps
scatter more than averages of weights do. Three pairs of runs of 300 steps ended .011 apart
(standard deviation, docs/results/stage_messages.json); two losses with this error on 256 samples
are .012 apart."""
_COST_SHARE = 0.25
"""Most of what a trial is predicted to gain in the rest of the run that it may cost."""
_CONFIDENCE = 1.645
"""Standard errors below the estimate, of a bound that holds in 95 of 100 cases."""
_LOSSES, _EVAL_COST = 5, 1 / 3
"""Losses of a trial: one at its start and two of each branch; and what a sample of them costs in
samples that are trained."""


@dataclass(frozen=True, kw_only=True)
class MessageTrial:
    """A trial that is due."""

    global_batch_size: int
    """Of the run, samples."""
    micro_batch_size: int
    """Of the run, samples."""
    samples: int
    """That each branch trains, a multiple of the batch."""
    eval_samples: int
    """Held-out samples of each loss."""
    step_s: float
    """Usual seconds of a step with whole messages."""
    predicted_saving: float
    """Share of the time of steps that short messages are predicted to save."""
    exact_share: float
    """Share of steps that measure the noise scale, in which messages stay whole."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    def plan(self) -> ForkPlan:
        """The fork test: whole messages first, and the better branch is kept."""
        sizes: dict[str, int] = {
            "global_batch_size": self.global_batch_size,
            "micro_batch_size": self.micro_batch_size,
        }
        return ForkPlan(
            branches=(Branch(**sizes), Branch(**sizes, pipeline_message_bits=8)),
            samples=self.samples,
            eval_samples=self.eval_samples,
            keep=lambda result: int(verdict(result, self).pays),
        )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a trial says."""

    pays: bool
    """Whether the run goes on with short messages."""
    speed: float | None
    """Seconds with whole messages over those with short ones, measuring steps included."""
    progress: float | None
    """Fall of the held-out loss with short messages over that with whole ones."""
    progress_low: float | None
    """A lower bound of that: 1.645 standard errors less."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    def __str__(self) -> str:
        if self.speed is None or self.progress is None or self.progress_low is None:
            return "the loss did not fall by enough to compare; messages between stages stay whole"
        known = (
            f"messages of 8 bits between stages run {self.speed:.2f} times as fast; a sample makes "
            f"{self.progress:.3f} of the progress, at least {self.progress_low:.3f}"
        )
        return f"{known}; {'they are taken' if self.pays else 'messages stay whole'}"


def trial(
    *,
    global_batch_size: int,
    micro_batch_size: int,
    step_s: float,
    saved_s: float,
    exact_share: float,
    loss_slope: float | None,
    held_out_samples: int,
    consumed_samples: int,
    samples_left: int,
    trials_at: Sequence[int],
) -> MessageTrial | None:
    """The trial to make now; None if none is due or it would not pay.

    Args:
        global_batch_size: of the run, samples.
        micro_batch_size: of the run, samples.
        step_s: seconds of a step with whole messages.
        saved_s: seconds of these that short messages are predicted to save.
        exact_share: share of steps whose messages stay whole, because they measure.
        loss_slope: of the training loss now, nats for each sample; None if it cannot be told.
        held_out_samples: of the validation set.
        consumed_samples: of the run.
        samples_left: of the run.
        trials_at: samples consumed at earlier trials of this run.
    """
    if len(trials_at) >= MOST_TRIALS or (trials_at and consumed_samples < WAIT * trials_at[-1]):
        return None
    saving = min(saved_s / step_s, 1.0) * (1.0 - exact_share)
    if saving < LEAST_SAVING or loss_slope is None or loss_slope >= 0 or held_out_samples < 1:
        return None
    eval_samples = min(EVAL_SAMPLES, held_out_samples)
    # So that the bound of the progress gives away at most half of the time that is saved.
    fall = _CONFIDENCE * math.sqrt(2.0) * _loss_sd(eval_samples) / (saving / 2.0)
    steps = max(math.ceil(fall / -loss_slope / global_batch_size), MIN_STEPS)
    if steps * global_batch_size > MOST_SHARE * consumed_samples:
        return None
    cost = steps * global_batch_size + _LOSSES * _EVAL_COST * eval_samples
    if cost > _COST_SHARE * saving * samples_left:
        return None
    return MessageTrial(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        samples=steps * global_batch_size,
        eval_samples=eval_samples,
        step_s=step_s,
        predicted_saving=saving,
        exact_share=exact_share,
    )


def verdict(result: ForkResult, made: MessageTrial) -> Verdict:
    """What the result of a trial says.

    The losses are those of the last weights. Both branches read the same samples in the same order,
    and averages would hide some of what rounding adds. Whole messages count as no slower than they
    usually are: something else may have slowed down the links during one branch.

    Args:
        result: of a test that is done.
        made: the trial.
    """
    whole, short = result.branches
    unknown = Verdict(pays=False, speed=None, progress=None, progress_low=None)
    start, after, after_short = result.loss_start, whole.loss_last, short.loss_last
    if start is None or after is None or after_short is None:
        return unknown
    sd, fall = _loss_sd(made.eval_samples), start - after
    if not fall > 2.0 * sd:
        return unknown
    progress = (start - after_short) / fall
    low = progress - _CONFIDENCE * sd * math.sqrt(1.0 + progress**2) / fall
    exact = made.exact_share
    whole_s = min(whole.seconds, whole.steps * made.step_s)
    speed = whole_s / (exact * whole_s + (1.0 - exact) * short.seconds)
    pays = low * speed > NEEDED_GAIN and progress >= LEAST_PROGRESS
    return Verdict(pays=pays, speed=speed, progress=progress, progress_low=low)


def _loss_sd(eval_samples: int) -> float:
    """Error of a loss on so many samples in the comparison of two branches, nats a token."""
    return _LOSS_SD * math.sqrt(max(fork_rule.EVAL_SAMPLES / eval_samples, 1.0))
