"""The policy of the paper goes by its own estimate, and not by the interval of ours."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from copus_ext.gns.estimators import Estimate
from copus_ext.gns.observer import CONTROL, NoiseObserver, NoiseScale
from copus_ext.goodput.decide import decide
from copus_ext.goodput.inputs import DecisionInputs
from copus_ext.goodput.policy import ONLY_NOISE
from tests.helpers.recorded import row, shipped_rules

GRID = (8, 16, 32, 64, 128, 256, 512)
ETA = 0.5


def inputs(policy: str, noise: NoiseScale, *, batch: int = 8, **flags: Any) -> DecisionInputs:
    """Late in a run of flat throughput, on a grid of doublings."""
    rows = tuple(row(size, 10.0) for size in GRID)
    return DecisionInputs(
        rules=shipped_rules(flags={"copus_policy": policy, **flags}),
        noise=noise,
        rows=rows,
        current=GRID.index(batch),
        iteration=1000,
        consumed_samples=500_000,
        total_samples=1_000_000,
        elapsed_s=50_000.0,
        relayout_cost_s=60.0,
    )


def only_noise(*, g2: float = -0.5, v: float = 40.0) -> NoiseScale:
    """What the observer publishes once the average of |G|^2 is not positive."""
    return NoiseScale(
        status="lower_bound_only",
        phi_samples=None,
        low_samples=0.0,
        high_samples=None,
        grad_norm_sq=g2,
        grad_variance_trace=v,
        smoothed_tokens_per_sample=128.0,
        step_tokens_per_sample=128.0,
        effective_steps=100.0,
        estimator="micro",
        age_tokens=0.0,
    )


def without_an_upper_end() -> tuple[NoiseScale, float]:
    """Averages whose noise scale is an estimate without an upper end, and this estimate."""
    rng = np.random.default_rng(5)
    observer = NoiseObserver(per_step=True, seq_length=128)
    signal = variance = 0.0
    for step in range(1, 61):
        one = float(rng.normal(0.1, 0.5)), float(rng.normal(1.0, 0.1))
        signal, variance = 0.95 * signal + 0.05 * one[0], 0.95 * variance + 0.05 * one[1]
        observer.update(
            {CONTROL: Estimate(grad_norm_sq=one[0], grad_variance_trace=one[1])},
            estimator="micro",
            global_batch_size=8,
            consumed_samples=8 * step,
            tokens=8 * 128.0,
        )
        noise = observer.noise()
        if step >= 45 and noise.status == "lower_bound_only" and signal > 0:
            return dataclasses.replace(noise, effective_steps=40.0), variance / signal
    raise AssertionError("no step had an estimate without an upper end")


def takes_the_estimate(policy: str) -> DecisionInputs:
    """Checks that a policy goes by the estimate, and returns its inputs (arXiv 2604.26687 and
    1812.06162: B_crit is c tr(Sigma)/|G|^2 of the averages themselves)."""
    noise, phi = without_an_upper_end()
    assert noise.phi_samples == pytest.approx(phi)
    assert noise.low_samples is not None and noise.low_samples < phi / 2
    s = inputs(policy, noise)
    assert s.critical_batch_size == pytest.approx(2 * phi)
    return s


def test_the_papers_policy_takes_the_estimate_and_no_end_of_an_interval() -> None:
    s, (_, phi) = takes_the_estimate("copus"), without_an_upper_end()
    # eq. 8 under flat throughput, twice the batch at most, and 10 %.
    values = [math.sqrt(b) / (b + 2 * phi) for b in (8, 16)]
    assert decide(s).to.global_batch_size == (16 if values[1] / values[0] > 1.1 else 8)


def test_the_papers_policy_stays_where_there_is_no_estimate() -> None:
    """The paper divides by |G|^2 and does not say what follows where it is not positive."""
    decision = decide(inputs("copus", only_noise()))
    assert decision.kind == "stay" and ONLY_NOISE in decision.reason
