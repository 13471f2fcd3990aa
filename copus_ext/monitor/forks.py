"""Fork tests of a journal as values and in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from copus_ext.goodput import fork_rule
from copus_ext.monitor.values import number, seconds_of, table, text, whole

_MOST_BRANCHES = 8
_LAST_OVER_AVERAGED = 2.0
"""Error of a loss of last weights over that of averaged ones."""


@dataclass(frozen=True, kw_only=True)
class ForkBranch:
    """One branch of a fork test; None where the journal does not say."""

    batch: int | None
    """Samples of a step."""
    lr_factor: float
    """Its learning rate over that of the run."""
    loss_last: float | None
    """Held-out loss of its last weights, nats a token."""
    loss_averaged: float | None
    """The same of the average of its weights."""
    seconds: float
    """Of its steps."""

    def __str__(self) -> str:
        rate = "" if self.lr_factor == 1.0 else f" at {self.lr_factor:g} times the rate"
        return f"batch {self.batch}{rate}"


@dataclass(frozen=True, kw_only=True)
class ForkRecord:
    """A fork test, or why there was none."""

    iteration: int | None
    """Steps of the run at the fork."""
    consumed_samples: int | None
    """Samples of the run at the fork."""
    t: float | None
    """When it ended, seconds since the epoch."""
    kind: str
    """`done`, `refused`, `stopped` or `failed`."""
    reason: str
    """Why it is not done."""
    samples: int | None
    """That each branch trained."""
    eval_samples: int | None
    """Held-out samples of each loss."""
    loss_start: float | None
    """Held-out loss at the fork, nats a token."""
    branches: tuple[ForkBranch, ...]
    kept: int | None
    """Number of the branch that the run went on from; None for the fork."""
    seconds: float
    """Of the whole test."""

    @property
    def sd_averaged(self) -> float:
        """Error of a loss of averaged weights in the comparison of two branches, nats a token."""
        wanted = fork_rule.EVAL_SAMPLES
        return fork_rule.LOSS_SD * math.sqrt(max(wanted / max(self.eval_samples or wanted, 1), 1.0))

    @property
    def sd_last(self) -> float:
        """The same of last weights."""
        return _LAST_OVER_AVERAGED * self.sd_averaged

    @property
    def lost_s(self) -> float:
        """Seconds that the run lost to it: all but the steps of the branch that was kept."""
        kept = self.branches[self.kept].seconds if self._has_kept and self.kept is not None else 0.0
        return max(self.seconds - kept, 0.0)

    @property
    def _has_kept(self) -> bool:
        return self.kept is not None and 0 <= self.kept < len(self.branches)

    @property
    def verdict(self) -> str:
        """What it says and what became of it, in words."""
        end = "the run went on from the fork"
        if self._has_kept and self.kept is not None:
            end = f"the run went on from {self.branches[self.kept]}"
        return f"{self._compared()}; {end}"

    def _compared(self) -> str:
        """How the branches compare by the loss that judges them."""
        known = [(loss, b) for b in self.branches if (loss := b.loss_averaged) is not None]
        if len(known) < 2:
            return "nothing to compare"
        sd = self.sd_averaged
        if len(known) == len(self.branches) == 2 and self._differ_in_batch_alone:
            return self._of_batches(sd)
        (best, branch), (second, _) = sorted(known, key=lambda pair: pair[0])[:2]
        apart, error = second - best, math.sqrt(2.0) * sd
        if apart < 2.0 * error:
            return f"no branch is clearly better: {apart:.4f} +- {error:.4f} between the best two"
        return f"{branch} is better by {apart:.4f} +- {error:.4f}"

    @property
    def _differ_in_batch_alone(self) -> bool:
        batches = {branch.batch for branch in self.branches}
        others = {branch.lr_factor for branch in self.branches}
        return len(batches) == 2 and None not in batches and len(others) == 1

    def _of_batches(self, sd: float) -> str:
        """What two batches say of the critical batch size."""
        narrow, wide = sorted(self.branches, key=lambda branch: branch.batch or 0)
        small, large = narrow.batch or 1, wide.batch or 1
        losses = self.loss_start, narrow.loss_averaged, wide.loss_averaged
        start, first, second = losses
        if start is None or first is None or second is None or not start - first > 2.0 * sd:
            return "the loss fell by too little to compare"
        fall = start - first
        ratio = (start - second) / fall
        error = sd * math.sqrt(1.0 + ratio**2) / fall
        ends = [
            fork_rule.critical_batch_size(r, batch=small, width=large / small)
            for r in (ratio - error, ratio, ratio + error)
        ]
        low, middle, high = ("unbounded" if math.isinf(x) else f"{x:.3g}" for x in ends)
        return (
            f"a sample in batches of {large} makes {ratio:.2f} +- {error:.2f} of the progress of "
            f"one in batches of {small}: critical batch size {middle} ({low} to {high})"
        )

    def __str__(self) -> str:
        """The test in one line: its branches with their losses, or why it was not made."""
        if self.kind != "done":
            return f"fork test {self.kind}" + (f": {self.reason}" if self.reason else "")
        told = []
        for branch in self.branches:
            loss = branch.loss_averaged
            told.append(f"{branch} loss {'unknown' if loss is None else f'{loss:.4f}'}")
        end = "discarded" if self.kept is None else f"branch {self.kept} kept"
        return f"fork test over {self.samples} samples: {', '.join(told)}; {end}"


def fork_record(record: dict[str, Any]) -> ForkRecord:
    """A line of kind `fork`."""
    outcome = table(record.get("outcome"))
    found = outcome.get("branches")
    branches = found[:_MOST_BRANCHES] if isinstance(found, list) else []
    return ForkRecord(
        iteration=whole(record.get("iteration")),
        consumed_samples=whole(record.get("consumed_samples")),
        t=seconds_of(record.get("time")),
        kind=text(outcome.get("kind"), 20),
        reason=text(outcome.get("reason")),
        samples=whole(outcome.get("samples")),
        eval_samples=whole(outcome.get("eval_samples")),
        loss_start=number(outcome.get("loss_start")),
        branches=tuple(_branch(table(result)) for result in branches),
        kept=whole(outcome.get("kept")),
        seconds=number(outcome.get("seconds")) or 0.0,
    )


def _branch(result: dict[str, Any]) -> ForkBranch:
    about = table(result.get("branch"))
    factor = number(about.get("lr_factor"))
    return ForkBranch(
        batch=whole(about.get("global_batch_size")),
        lr_factor=1.0 if factor is None else factor,
        loss_last=number(result.get("loss_last")),
        loss_averaged=number(result.get("loss_averaged")),
        seconds=number(result.get("seconds")) or 0.0,
    )
