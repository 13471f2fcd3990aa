"""What a policy is: it orders the configurations. What blocks a change is the same for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from copus_ext.goodput.inputs import Candidate, DecisionInputs

WARMING_UP = "the learning rate is warming up"
ONLY_NOISE = "the noise scale is not known: the gradient shows only noise"


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """What a policy makes of the inputs of a decision, before what blocks a change."""

    candidates: list[Candidate]
    """The one to take first, the present one among them."""
    target_batch: float | None = None
    """The batch that it wants in the end, samples."""
    goes_by: str = ""
    """What it goes by, in a few words."""
    unknown: str = ""
    """Why it cannot compare batches; empty if it can."""


class Policy(Protocol):
    @property
    def needs_noise(self) -> bool:
        """Whether it cannot go where the noise scale cannot be measured."""
        ...

    @property
    def is_schedule(self) -> bool:
        """Whether it goes by the position in the run alone, and waits for nothing."""
        ...

    def weigh(self, s: DecisionInputs) -> Weighed: ...


def unknown_noise(s: DecisionInputs, *, positive: bool = True) -> str:
    """Why a published policy cannot go by the noise scale yet; empty if it can.

    Args:
        s: the inputs of the decision.
        positive: whether it needs a noise scale, and not only what that is made of.
    """
    steps, least = s.noise.effective_steps, s.rules.min_effective_steps
    if steps < least:
        return f"the noise scale is not known yet: {steps:.0f} of {least:.0f} measurements"
    return ONLY_NOISE if positive and not s.noise.phi_samples else ""
