"""What a fork test tries, and what it found. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from megatron.training.common.step_settings import StepSettings
from megatron.training.config.layout_rules import batch_problems

if TYPE_CHECKING:
    from megatron.training.config import Config


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One way to train the samples of a fork test."""

    global_batch_size: int
    """Samples of a step."""
    micro_batch_size: int
    """Samples of a micro-batch."""
    lr_factor: float = 1.0
    """Multiplies the learning rate that the run has at the fork."""
    weight_decay_factor: float = 1.0
    """Multiplies the weight decay that the run has at the fork."""
    beta2: float | None = None
    """Adam's second decay rate; None as at the fork."""

    def __post_init__(self) -> None:
        self.settings(StepSettings())  # refuses values that no step can have

    def settings(self, now: StepSettings) -> StepSettings:
        """How its steps are taken.

        Args:
            now: how the run takes its steps at the fork.
        """
        return replace(
            now,
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            lr_factor=now.lr_factor * self.lr_factor,
            weight_decay_factor=now.weight_decay_factor * self.weight_decay_factor,
            beta2=now.beta2 if self.beta2 is None else self.beta2,
        )

    def num_steps(self, samples: int) -> int:
        """Steps over so many samples.

        Raises:
            ValueError: they are not a whole number of steps.
        """
        steps, rest = divmod(samples, self.global_batch_size)
        if rest or not steps:
            raise ValueError(f"{samples} samples are no multiple of a batch of {self}")
        return steps

    def __str__(self) -> str:
        more = "" if self.lr_factor == 1.0 else f" at {self.lr_factor:g} times the rate"
        return f"{self.global_batch_size}{more}"


@dataclass(frozen=True, kw_only=True)
class BranchResult:
    """What one branch came to; the same on every rank."""

    branch: Branch
    """What was tried."""
    samples: int
    """Samples that it trained."""
    steps: int
    """Steps that it took."""
    skipped_steps: int
    """Steps among them without an update."""
    loss_last: float | None
    """Held-out loss of the last weights, in nats a token; None if it is not finite."""
    loss_averaged: float | None
    """The same of the average of its weights after each step of its second half, by samples."""
    averaged_steps: int
    """Steps in that average."""
    seconds: float
    """Of its training steps, on the slowest rank of each."""


@dataclass(frozen=True, kw_only=True)
class ForkResult:
    """What a fork test came to; the same on every rank."""

    kind: Literal["done", "refused", "stopped", "failed"]
    """All branches were trained; none was begun; the run was asked to stop; an error. Only a test
    that is done can keep a branch."""
    reason: str = ""
    """Why it is not done, in one line."""
    iteration: int
    """Steps of the run at the fork."""
    consumed_samples: int
    """Samples of the run at the fork."""
    samples: int
    """Samples that each branch trains."""
    eval_samples: int
    """Held-out samples of each loss."""
    loss_start: float | None = None
    """Held-out loss at the fork."""
    branches: tuple[BranchResult, ...] = ()
    """Those that were trained, in the order given."""
    kept: int | None = None
    """Number of the branch that the run went on from; None if it went on from the fork."""
    seconds: float = 0.0
    """Of the whole test, on rank 0."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "branches": [asdict(result) for result in self.branches]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ForkResult:
        """Inverse of `to_json`.

        Raises:
            TypeError: for a field this version does not know.
        """
        branches = (
            BranchResult(**{**result, "branch": Branch(**result["branch"])})
            for result in data["branches"]
        )
        return cls(**{**data, "branches": tuple(branches)})


@dataclass(frozen=True, kw_only=True)
class ForkPlan:
    """A fork test that is asked for; the same on every rank."""

    branches: tuple[Branch, ...]
    """In the order in which they are trained."""
    samples: int
    """Samples that each trains; a multiple of every batch."""
    eval_samples: int
    """Samples of the validation set, from its start, for each loss."""
    keep: Callable[[ForkResult], int | None] | int | None = None
    """Which branch to go on from: its number; None for the fork; or a function of the result that
    says so, called on rank 0 alone. A function costs memory for the end of every branch."""

    @property
    def num_ends(self) -> int:
        """Ends of branches that must be kept until it is known which one the run goes on from."""
        if callable(self.keep):
            return len(self.branches)
        return 0 if self.keep is None else 1

    def may_keep(self, number: int) -> bool:
        """Whether the run may go on from a branch."""
        return callable(self.keep) or self.keep == number

    def problem(
        self, config: Config, *, iteration: int, samples_left: int, held_out_samples: int
    ) -> str | None:
        """Why a run cannot make the test, in one line; None if it can.

        Args:
            config: of the run.
            iteration: steps done.
            samples_left: training samples that no step has read.
            held_out_samples: of the validation set; 0 without one.
        """
        if not self.branches:
            return "there is no branch"
        if not callable(self.keep) and self.keep not in (None, *range(len(self.branches))):
            return f"there is no branch {self.keep} to keep"
        if not held_out_samples:
            return "there are no validation samples (--eval-iters, --split)"
        if not 1 <= self.eval_samples <= held_out_samples:
            return f"{self.eval_samples} of {held_out_samples} validation samples are asked for"
        if config.parallel.grad_compression_rank or config.parallel.pipeline_message_rank:
            return (
                "--grad-compression-rank and --pipeline-message-rank keep state that it would mix"
            )
        for number, branch in enumerate(self.branches):
            batch, micro = branch.global_batch_size, branch.micro_batch_size
            if found := batch_problems(config.layout, micro, batch, **config.batch_rules):
                return found[0]
            try:
                steps = branch.num_steps(self.samples)
            except ValueError as error:
                return str(error)
            # So that the run still makes a step of its own, at which it may save and leave.
            if self.samples + batch > samples_left:
                return f"{samples_left} training samples are left, too few"
            if self.may_keep(number) and (problem := _passes_over(config, iteration, steps)):
                return problem
        return None


def _passes_over(config: Config, now: int, steps: int) -> str | None:
    """Why so many steps at once would not be what a run does; None if they are."""
    batch = config.batch
    if batch.exit_interval and (now + steps) // batch.exit_interval > now // batch.exit_interval:
        return "the run leaves before the end of a branch (--exit-interval)"
    if any(now < iteration <= now + steps for iteration in batch.iterations_to_skip):
        return "steps of a branch are left out (--iterations-to-skip)"
    return None
