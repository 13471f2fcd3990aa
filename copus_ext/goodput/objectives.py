"""Worth of a configuration: throughput times what a sample of its batch is worth.

T samples/s, B global batch, Phi = c phi the calibrated noise scale, both in samples. Only ratios
mean anything: a worth is compared at one Phi, never across models or units.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, get_args

import numpy as np

Objective = Literal["copus", "goodput", "lr_model"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)


def goodput(samples_per_s: Any, batch: Any, noise: Any) -> Any:
    """T / (B + Phi): eq. 5 of arXiv 2604.26687 without its constants, the form of Pollux (OSDI
    2021)."""
    return np.asarray(samples_per_s) / (np.asarray(batch) + noise)


def copus(samples_per_s: Any, batch: Any, noise: Any) -> Any:
    """T sqrt(B) / (B + Phi): eq. 8 of arXiv 2604.26687, learning rate in proportion to sqrt(B).

    With flat throughput it is largest at B = Phi.
    """
    batch = np.asarray(batch, dtype=float)
    return np.asarray(samples_per_s) * np.sqrt(batch) / (batch + noise)


def lr_model(
    samples_per_s: Any, batch: Any, noise: Any, *, reference_batch: float, tuned: float = 1.0
) -> Any:
    """T (2r - r^2) / (B + Phi), r the learning rate over the best one at that batch.

    The best rate of sign-like updates is in proportion to 1/(sqrt(Phi/B) + sqrt(B/Phi)) (arXiv
    2405.14578); with a rate in proportion to sqrt(B), r = r0 (B + Phi) / (B_ref + Phi).

    Args:
        samples_per_s: T.
        batch: B.
        noise: Phi.
        reference_batch: B_ref, the batch for which the learning rate was chosen.
        tuned: r0, the learning rate over the best one there.
    """
    batch = np.asarray(batch, dtype=float)
    r = tuned * (batch + noise) / (reference_batch + noise)
    return np.asarray(samples_per_s) * (2.0 * r - r**2) / (batch + noise)


def worth(
    objective: str, samples_per_s: Any, batch: Any, noise: Any, *, reference_batch: float
) -> Any:
    """The worth under the named objective.

    Raises:
        ValueError: an unknown name.
    """
    if objective == "copus":
        return copus(samples_per_s, batch, noise)
    if objective == "goodput":
        return goodput(samples_per_s, batch, noise)
    if objective == "lr_model":
        return lr_model(samples_per_s, batch, noise, reference_batch=reference_batch)
    raise ValueError(f"objective {objective!r} is unknown; use one of {', '.join(OBJECTIVES)}")


def useful_samples_per_s(
    objective: str, samples_per_s: Any, batch: Any, noise: Any, *, reference_batch: float
) -> Any:
    """The worth in a unit that a person can read: samples per second that would be worth as much in
    batches of the reference size.

    Raises:
        ValueError: an unknown name.
    """
    one = worth(objective, 1.0, reference_batch, noise, reference_batch=reference_batch)
    return worth(objective, samples_per_s, batch, noise, reference_batch=reference_batch) / one


@functools.lru_cache(maxsize=1024)
def sensitivity(objective: str, batch: float, noise: float, *, reference_batch: float) -> float:
    """d ln(worth) / d ln(Phi) at a batch, by a central difference: how an error of the noise scale
    moves the worth."""
    step = 1e-4
    up, down = (
        worth(objective, 1.0, batch, noise * factor, reference_batch=reference_batch)
        for factor in (1.0 + step, 1.0 - step)
    )
    if up <= 0 or down <= 0:
        return 0.0
    return float((np.log(up) - np.log(down)) / (np.log1p(step) - np.log1p(-step)))
