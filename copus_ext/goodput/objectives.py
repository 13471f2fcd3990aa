"""Objectives that a policy maximises: throughput times the progress that a sample makes.

T is the throughput in samples/s, B the global batch size, and Phi the critical batch size (the
multiplier times the noise scale), both in samples. Values compare configurations at one Phi; across
models or units they mean nothing.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, get_args

import numpy as np

Objective = Literal["copus", "goodput", "lr_model"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)


def goodput(
    objective: str,
    samples_per_s: Any,
    batch: Any,
    critical_batch_size: Any,
    *,
    reference_batch: float,
    tuned: float = 1.0,
) -> Any:
    """The goodput under an objective, element by element.

    - `goodput`: T / (B + Phi), eq. 5 of arXiv 2604.26687 without its constants, and the form of
      Pollux (OSDI 2021).
    - `copus`: T sqrt(B) / (B + Phi), eq. 8 of arXiv 2604.26687, for a learning rate in proportion
      to sqrt(B). With flat throughput it is largest at B = Phi.
    - `lr_model`: T (2r - r^2) / (B + Phi), r the learning rate over the best one at that batch. The
      best rate of sign-like updates is in proportion to 1/(sqrt(Phi/B) + sqrt(B/Phi)) (arXiv
      2405.14578); with a rate in proportion to sqrt(B), r = r0 (B + Phi) / (B_ref + Phi).

    Args:
        objective: one of `OBJECTIVES`.
        samples_per_s: T.
        batch: B.
        critical_batch_size: Phi.
        reference_batch: B_ref, the batch for which the learning rate was chosen.
        tuned: r0, the learning rate over the best one at the reference batch.

    Raises:
        ValueError: an unknown objective.
    """
    speed, batch = np.asarray(samples_per_s), np.asarray(batch, dtype=float)
    if objective == "copus":
        speed = speed * np.sqrt(batch)
    elif objective == "lr_model":
        r = tuned * (batch + critical_batch_size) / (reference_batch + critical_batch_size)
        speed = speed * (2.0 * r - r**2)
    elif objective != "goodput":
        raise ValueError(f"objective {objective!r} is unknown; use one of {', '.join(OBJECTIVES)}")
    return speed / (batch + critical_batch_size)


def useful_samples_per_s(
    objective: str,
    samples_per_s: Any,
    batch: Any,
    critical_batch_size: Any,
    *,
    reference_batch: float,
) -> Any:
    """The goodput in a unit that a person can read: samples per second in batches of the reference
    size that make the same progress.

    Raises:
        ValueError: an unknown objective.
    """
    known = {"reference_batch": reference_batch}
    one = goodput(objective, 1.0, reference_batch, critical_batch_size, **known)
    return goodput(objective, samples_per_s, batch, critical_batch_size, **known) / one


@functools.lru_cache(maxsize=1024)
def sensitivity(
    objective: str, batch: float, critical_batch_size: float, *, reference_batch: float
) -> float:
    """d ln(goodput) / d ln(Phi) at a batch by a central difference: how an error of the noise scale
    changes the goodput."""
    step = 1e-4
    up, down = (
        goodput(objective, 1.0, batch, critical_batch_size * k, reference_batch=reference_batch)
        for k in (1.0 + step, 1.0 - step)
    )
    if up <= 0 or down <= 0:
        return 0.0
    return float((np.log(up) - np.log(down)) / (np.log1p(step) - np.log1p(-step)))
