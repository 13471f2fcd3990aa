"""When a fork test asks whether the learning rate is plainly too low or too high, and what it says.
Needs no torch.

In the middle of the warm-up three branches train the same samples: with the rate, half of it, and
twice. The held-out loss of their averaged weights judges them. At that place it was right in small
runs; right after the warm-up it always prefers the lower rate (docs/results/rate_forks.json,
docs/decisions/052-fork-tests-of-the-learning-rate.md).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from copus_ext.goodput import fork_rule
from copus_ext.goodput.fork_result import Branch, ForkPlan, ForkResult

FACTORS = (1.0, 0.5, 2.0)
"""Of the branches, over the run's rate. The run goes on from the end of the first."""
PLACE = (0.45, 0.65)
"""Parts of the warm-up between which the test begins."""
MIN_STEPS, MOST_STEPS = 50, 500
"""Of a branch."""
SHARE = 1 / 6
"""Of the warm-up that a branch takes, between those."""
LEAST_WARM_UP_STEPS = 150
"""So that a decision falls between those places, and the least steps of a branch end before it."""
EVAL_SAMPLES = 512
"""Held-out samples of each loss, where there are so many."""
NEEDED = 0.015
"""By which another rate must be better to be plainly so, nats a token."""


@dataclass(frozen=True, kw_only=True)
class RateTest:
    """A test that is due."""

    global_batch_size: int
    """Of the run, samples."""
    micro_batch_size: int
    """Of the run, samples."""
    samples: int
    """That each branch trains, a multiple of the batch."""
    eval_samples: int
    """Held-out samples of each loss."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    def plan(self) -> ForkPlan:
        """The fork test. Weight decay stays, as a user who changes `--lr` leaves it."""
        branches = (
            Branch(
                global_batch_size=self.global_batch_size,
                micro_batch_size=self.micro_batch_size,
                lr_factor=factor,
            )
            for factor in FACTORS
        )
        return ForkPlan(
            branches=tuple(branches), samples=self.samples, eval_samples=self.eval_samples, keep=0
        )


@dataclass(frozen=True, kw_only=True)
class RateVerdict:
    """What a test says."""

    factor: float
    """The better one over the present rate; 1 where nothing speaks against it."""
    losses: tuple[float | None, ...]
    """Held-out losses of the averaged weights, in the order of `FACTORS`; None: not finite."""
    error: float
    """Standard error of the difference of two of them."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    def __str__(self) -> str:
        words = ", ".join(
            f"{'diverged' if loss is None else f'{loss:.4f}'} with {name}"
            for loss, name in zip(self.losses, ("the rate of the run", "half of it", "twice"))
        )
        end = "nothing speaks against --lr"
        if self.losses[0] is None and self.factor == 1.0:
            end = "the run itself diverged in it; lower --lr or look for another cause"
        elif self.factor != 1.0:
            side = "low" if self.factor > 1 else "high"
            end = f"--lr seems too {side}; try {self.factor:g} times as much"
        return (
            f"fork test of the learning rate: loss {words} (differences +- {self.error:.4f}): {end}"
        )


def due(
    *,
    global_batch_size: int,
    micro_batch_size: int,
    warmup_samples: int,
    warmed_samples: int,
    held_out_samples: int,
) -> RateTest | None:
    """The test to make now; None if it is not its turn, or a branch would leave the warm-up.

    Args:
        global_batch_size: of the run, samples.
        micro_batch_size: of the run, samples.
        warmup_samples: of the learning rate.
        warmed_samples: of these, trained.
        held_out_samples: of the validation set.
    """
    if not PLACE[0] * warmup_samples <= warmed_samples <= PLACE[1] * warmup_samples:
        return None
    steps = math.ceil(SHARE * warmup_samples / global_batch_size)
    samples = min(max(steps, MIN_STEPS), MOST_STEPS) * global_batch_size
    if warmed_samples + samples > warmup_samples or held_out_samples < 1:
        return None
    return RateTest(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        samples=samples,
        eval_samples=min(EVAL_SAMPLES, held_out_samples),
    )


def verdict(result: ForkResult) -> RateVerdict:
    """What the result of a test says. The smallest loss wins, if it is plainly below the run's.

    Args:
        result: of a test that is done.
    """
    losses = tuple(branch.loss_averaged for branch in result.branches)
    scale = math.sqrt(max(fork_rule.EVAL_SAMPLES / result.eval_samples, 1.0))
    error = math.sqrt(2.0) * fork_rule.LOSS_SD * scale
    needed = max(NEEDED, 2.0 * error)
    known = {f: loss for f, loss in zip(FACTORS, losses) if loss is not None}
    best = min(known, key=known.__getitem__, default=1.0)
    own = known.get(1.0, math.inf)
    plain = best != 1.0 and own - known[best] > needed
    return RateVerdict(factor=best if plain else 1.0, losses=losses, error=error)
