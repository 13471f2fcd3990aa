"""When a fork test is worth its time, what it tries, and what it says of the critical batch size.

A test trains the same n samples with the batch B of the run and with w B. Where a sample of a batch
B makes 1 / (1 + B / Phi) progress, the losses of the two fall in the ratio

    R = (1 + B / Phi) / (1 + w B / Phi)

which gives Phi, the critical batch size. All tests together say which multiple c of the measured
noise scale it is. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from copus_ext.goodput import headroom
from copus_ext.goodput.inputs import ConfigThroughput, DecisionInputs

SHARES = (0.01, 0.03)
"""Shares of the run after which a test is due."""
BUDGET = 0.004
"""Most that all tests of a run may take of its time."""
WIDTHS = (4, 2)
"""Times the present batch that the other branch may have, the clearest first."""
MODEL_SD = 0.03
"""Error of R where the loss bends and the critical batch size grows within a test."""
MOST_SHARE = 0.5
"""Most samples of a test over those before it: a longer one sees too much of that."""
MIN_STEPS = 30
"""Least steps of the wide branch: a change of batch has an after-effect of 10 to 30 steps."""
EVAL_SAMPLES = 512
"""Held-out samples of each loss."""
_EVALUATIONS, _EVAL_COST = 3, 1 / 3
"""Losses that a test pays for, and what a sample costs without its backward pass."""
LOSS_SD = 0.003
"""Error of one averaged loss, paired on the same held-out samples, nats a token."""
PRIOR_SD = math.log(2.5)
"""Of ln c around the rule's."""
AGE_SD = 0.3
"""By which c drifts while the samples of the run grow e-fold, standard deviation of ln c."""
_GRID = np.linspace(-5.0, 5.0, 401) * PRIOR_SD
_WINDOW = 2.5
"""A test is made at most this times as many samples after it was due."""


@dataclass(frozen=True, kw_only=True)
class ForkEvidence:
    """What one test found."""

    consumed_samples: int
    """Samples of the run at the fork."""
    seconds: float
    """That the run lost to it."""
    batch: int
    """B, samples."""
    width: int
    """w."""
    ratio: float
    """R, as if the loss fell in a line."""
    ratio_sd: float
    """Its standard deviation."""
    noise_scale: float
    """Measured at the fork, samples."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A test that is due."""

    batch: int
    """B, of the run; its branch is kept."""
    wide: ConfigThroughput
    """The other branch's configuration, on the present layout."""
    samples: int
    """n, a multiple of both batches."""
    seconds: float
    """That it is predicted to cost: of the wide branch and of the losses."""

    @property
    def width(self) -> int:
        """w."""
        return self.wide.global_batch_size // self.batch


def critical_batch_size(ratio: float, *, batch: float, width: float) -> float:
    """Phi of a ratio R, samples; infinite from 1 on, 0 up to 1 / w."""
    if ratio >= 1.0:
        return math.inf
    return max(batch * (width * ratio - 1.0) / (1.0 - ratio), 0.0)


def ratio_of(phi: Any, *, batch: float, width: float) -> Any:
    """R of a critical batch size; the inverse of `critical_batch_size`."""
    return (phi + batch) / (phi + width * batch)


def evidence(
    trial: Trial,
    *,
    losses: tuple[float, float, float],
    loss_sd: float = LOSS_SD,
    noise_scale: float,
    consumed_samples: int,
    seconds: float,
) -> ForkEvidence | None:
    """What a test says; None if the loss of the run's own batch did not fall by more than its
    error, so that no ratio means anything.

    Args:
        trial: that was made.
        losses: at the fork, of B and of w B, nats a token.
        loss_sd: error of each branch's loss.
        noise_scale: measured at the fork, samples.
        consumed_samples: of the run at the fork.
        seconds: that it cost.
    """
    start, narrow, wide = losses
    fall = start - narrow
    if not fall > 2.0 * loss_sd or not math.isfinite(wide):
        return None
    ratio = (start - wide) / fall
    sd = loss_sd * math.sqrt(1.0 + ratio**2) / fall
    # The loss falls with the logarithm of the samples, so that the slower branch seems too fast.
    grown = trial.samples / consumed_samples
    bent = math.expm1(ratio * math.log1p(grown)) / grown
    return ForkEvidence(
        consumed_samples=consumed_samples,
        seconds=seconds,
        batch=trial.batch,
        width=trial.width,
        ratio=bent,
        ratio_sd=math.hypot(sd, MODEL_SD),
        noise_scale=noise_scale,
    )


def multiplier(
    tests: Sequence[ForkEvidence], *, prior: float, consumed_samples: float
) -> tuple[float, float] | None:
    """c from all tests: the mean and the standard deviation of ln c, as exp(mean) and deviation;
    None without a test. The prior keeps c finite where R is at one of its ends.

    Args:
        tests: so far.
        prior: c without any.
        consumed_samples: of the run now; older tests count for less.
    """
    if not tests:
        return None
    log_weight = -((_GRID / PRIOR_SD) ** 2) / 2.0
    for test in tests:
        phi = prior * np.exp(_GRID) * test.noise_scale
        expected = ratio_of(phi, batch=test.batch, width=test.width)
        age = math.log(max(consumed_samples / max(test.consumed_samples, 1), 1.0))
        slope = np.gradient(expected, _GRID)
        sd = np.hypot(test.ratio_sd, slope * AGE_SD * age)
        ratio = min(max(test.ratio, 1.0 / test.width), 1.0)  # No other can be.
        log_weight = log_weight - ((ratio - expected) / sd) ** 2 / 2.0 - np.log(sd)
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    mean = float(weight @ _GRID)
    return prior * math.exp(mean), math.sqrt(float(weight @ (_GRID - mean) ** 2))


def due_share(tests_at: Sequence[float], share: float) -> bool:
    """Whether a test is due at a share of the run, after tests at some shares."""
    passed = [at for at in SHARES if at <= share]
    return (
        bool(passed)
        and share <= _WINDOW * passed[-1]
        and not any(at >= passed[-1] for at in tests_at)
    )


def trial(s: DecisionInputs, *, spent_s: float, tests_at: Sequence[float]) -> Trial | None:
    """The test to make now; None if none is due, may run or pays.

    Args:
        s: the inputs of the decision.
        spent_s: on tests so far.
        tests_at: shares of the run at which tests were made.
    """
    if not due_share(tests_at, s.consumed_samples / s.total_samples):
        return None
    if s.in_warmup or s.in_ramp or s.paused or not s.is_noise_known or s.noise.status != "ok":
        return None
    left = s.total_samples - s.consumed_samples
    # The run may still become as fast as its fastest configuration.
    fastest = max(row.samples_per_s for row in s.rows)
    allowed_s = BUDGET * (s.elapsed_s + left / fastest) - spent_s
    later = sum(at > s.consumed_samples / s.total_samples for at in SHARES)
    found = [_of_width(s, width, allowed_s / (1 + later)) for width in WIDTHS]
    known = [one for one in found if one is not None]
    if not known:
        return None
    best = known[0]
    gain = headroom.of_inputs(s)
    return best if gain is not None and gain.batch_is_worth_it else None


def _of_width(s: DecisionInputs, width: int, seconds: float) -> Trial | None:
    """The longest test that fits into some seconds; None if the shortest does not."""
    batch = width * s.now.global_batch_size
    rows = [r for r in s.rows if r.layout == s.now.layout and r.global_batch_size == batch]
    if not rows:
        return None
    wide = max(rows, key=lambda row: row.samples_per_s)
    losses = _EVALUATIONS * _EVAL_COST * EVAL_SAMPLES
    steps = int((seconds * wide.samples_per_s - losses) // batch)
    steps = min(steps, int(MOST_SHARE * s.consumed_samples // batch))
    if steps < MIN_STEPS or (steps + 1) * batch > s.total_samples - s.consumed_samples:
        return None
    return Trial(
        batch=s.now.global_batch_size,
        wide=wide,
        samples=steps * batch,
        seconds=(steps * batch + losses) / wide.samples_per_s,
    )


def with_multiplier(s: DecisionInputs, tests: Sequence[ForkEvidence]) -> DecisionInputs:
    """The inputs with what the tests found."""
    found = multiplier(
        tests, prior=s.rules.noise_scale_multiplier, consumed_samples=s.consumed_samples
    )
    return s if found is None else replace(s, measured_multiplier=found[0])
