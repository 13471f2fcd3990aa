"""Target batches by the formulas of their papers (docs/decisions/069)."""

from __future__ import annotations

import math

from copus_ext.goodput.inputs import DecisionInputs
from copus_ext.goodput.targets import TargetPolicy, first_not_below, last_not_above

ETA = 0.5
"""Of the norm test: the batch grows while the variance of its gradient exceeds eta^2 |g|^2."""


def _norm_test(s: DecisionInputs) -> float | None:
    """Least batch with V/B <= eta^2 |g|^2, never below the present one (Byrd et al. 2012, eq. 3.4;
    arXiv 2402.11215). The largest of the grid where |g|^2 is not positive; None before V is known.

    |g|^2 is the squared norm that the gradient of the present batch has on average, |G|^2 + V/B.
    """
    batch = s.now.global_batch_size
    g2, v = s.noise.grad_norm_sq, s.noise.grad_variance_trace
    if g2 is None or v is None:
        return None
    measured = g2 + v / batch
    if measured <= 0:
        return float(max(batch, *s.rules.grid))
    return float(max(batch, math.ceil(v / (ETA**2 * measured))))


def _seesaw(s: DecisionInputs) -> float:
    """B_0 / f, f the part of the learning rate that the schedule has left (arXiv 2510.14717).

    A cut by f becomes one by sqrt(f), the batch doing the rest; not above the noise scale.
    """
    wanted = s.rules.first_batch / max(s.lr_decay_factor, 1e-9)
    most = wanted if s.critical_batch_size is None else max(s.critical_batch_size, 1.0)
    # What it has taken it keeps: a cap that moves with the noise would swing the batch.
    return max(min(wanted, most), float(s.now.global_batch_size))


CRITICAL_BATCH_SIZE = TargetPolicy(target=lambda s: s.critical_batch_size)
"""The critical batch size itself (arXiv 1812.06162), the baseline of arXiv 2604.26687."""
NORM_TEST = TargetPolicy(target=_norm_test, needs_critical_batch_size=False, snap=first_not_below)
"""It compares the gradient with its variance, and so grows where the gradient shows only noise."""
SEESAW = TargetPolicy(target=_seesaw, needs_critical_batch_size=False, snap=last_not_above)
"""Its cap goes by the noise scale: it goes nowhere where that cannot be measured."""
