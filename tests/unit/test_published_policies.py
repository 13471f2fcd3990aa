"""Policies of papers follow the papers' formulas, computed here from gradients and not by us."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from copus_ext.gns.estimators import Estimate
from copus_ext.gns.observer import CONTROL, NoiseObserver, NoiseScale
from copus_ext.goodput import constraints
from copus_ext.goodput.decide import critical_batch_size_words, decide
from copus_ext.goodput.inputs import DecisionInputs
from copus_ext.goodput.policies import POLICIES, TARGETS, needs_noise, snap, target_batch
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
        half_life_samples=1000.0,
        elapsed_s=50_000.0,
        switch_cost_s=60.0,
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


def per_sample_gradients(batch: int, *, signal: float, seed: int) -> torch.Tensor:
    """[batch, parameters]: gradients of single samples of a linear model by torch."""
    torch.manual_seed(seed)
    x, noise = torch.randn(batch, 24, dtype=torch.float64), torch.randn(batch, dtype=torch.float64)
    y = signal * x.sum(dim=1) + noise

    def loss(weight: torch.Tensor, one: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        return 0.5 * (one @ weight - goal) ** 2

    zero = torch.zeros(24, dtype=torch.float64)
    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(zero, x, y)


def published_size(gradients: torch.Tensor, eta: float) -> int:
    """The next batch of the norm test (arXiv 2402.11215): max(B, ceil(|Var|_1 / (eta^2 |g|^2)))."""
    variance, mean = gradients.var(dim=0, correction=1).sum(), gradients.mean(dim=0)
    return max(len(gradients), math.ceil(float(variance / (eta**2 * mean.square().sum()))))


def observed(gradients: torch.Tensor, *, steps: int = 100) -> NoiseScale:
    """What the observer makes of steps with these gradients, each sample a micro-batch."""
    batch = len(gradients)
    small = float(gradients.square().sum(dim=1).mean())
    big = float(gradients.mean(dim=0).square().sum())
    estimate = Estimate(
        grad_norm_sq=(batch * big - small) / (batch - 1),
        grad_variance_trace=(small - big) * batch / (batch - 1),
    )
    observer = NoiseObserver(seq_length=128)
    for step in range(1, steps + 1):
        observer.update(
            {CONTROL: estimate},
            estimator="micro",
            global_batch_size=batch,
            consumed_samples=step * batch,
            tokens=batch * 128.0,
        )
    return observer.noise()


@pytest.mark.parametrize("signal", [0.0, 0.05, 0.2, 1.0])
@pytest.mark.parametrize("eta", [0.3, ETA, 0.9])
def test_the_norm_test_asks_for_the_published_batch(signal: float, eta: float) -> None:
    gradients = per_sample_gradients(16, signal=signal, seed=3)
    noise = observed(gradients)
    s = inputs("norm_test", noise, batch=16, copus_norm_test_eta=eta)
    want = published_size(gradients, eta)
    assert target_batch(s) == pytest.approx(want, abs=1e-6)
    to = decide(s).to.global_batch_size
    allowed = next((size for size in GRID if size >= want), GRID[-1])
    assert to == min(allowed, 32), "the grid's size above it, at most twice the batch"


def test_the_norm_test_grows_where_the_gradient_shows_only_noise() -> None:
    seeds = range(40)
    several = (per_sample_gradients(16, signal=0.0, seed=seed) for seed in seeds)
    gradients = next(each for each in several if observed(each).phi_samples is None)
    noise = observed(gradients)
    assert noise.grad_norm_sq is not None and noise.grad_norm_sq <= 0
    assert published_size(gradients, ETA) > 16
    decision = decide(inputs("norm_test", noise, batch=16))
    assert decision.to.global_batch_size == 32
    assert decision.target_batch == published_size(gradients, ETA)
    assert "critical batch size" not in decision.reason, "it goes by none"
    # |G|^2 below -V/B, as an average over batches may be: the test fails at every size.
    beyond = inputs("norm_test", only_noise(g2=-10.0, v=40.0))
    assert target_batch(beyond) == max(beyond.rules.grid)
    assert decide(beyond).to.global_batch_size == 16
    # A gradient that is sharp enough passes the test, and the batch stays.
    sharp = dataclasses.replace(only_noise(g2=100.0, v=4.0), phi_samples=0.04)
    assert decide(inputs("norm_test", sharp)).kind == "stay"
    few = dataclasses.replace(only_noise(), effective_steps=3.0)
    assert "not known yet: 3 of 20" in decide(inputs("norm_test", few)).reason


@pytest.mark.parametrize("policy", ["copus", "cbs", "seesaw"])
def test_published_policies_take_the_estimate_and_no_end_of_an_interval(policy: str) -> None:
    """arXiv 2604.26687 and 1812.06162: B_crit is c tr(Sigma)/|G|^2 of the averages themselves."""
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
            break
    else:
        pytest.fail("no step had an estimate without an upper end")
    phi = variance / signal
    assert noise.phi_samples == pytest.approx(phi)
    assert noise.low_samples is not None and noise.low_samples < phi / 2
    enough = dataclasses.replace(noise, effective_steps=40.0)
    s = inputs(policy, enough)
    assert s.critical_batch_size == pytest.approx(2 * phi)
    assert "at least" not in critical_batch_size_words(s)
    assert inputs("adaptive", enough).is_noise_bound, "ours is careful"
    if policy == "copus":
        # eq. 8 under flat throughput, twice the batch at most, and 10 %.
        values = [math.sqrt(b) / (b + 2 * phi) for b in (8, 16)]
        grows = values[1] / values[0] > 1.1
        assert decide(s).to.global_batch_size == (16 if grows else 8)


@pytest.mark.parametrize("policy", [p for p in POLICIES if needs_noise(p) and p != "adaptive"])
def test_what_is_done_where_there_is_no_estimate(policy: str) -> None:
    """The papers divide by |G|^2 and do not say what follows where it is not positive."""
    decision = decide(inputs(policy, only_noise()))
    if policy == "norm_test":
        assert decision.to.global_batch_size == 16
    else:
        assert decision.kind == "stay" and constraints.ONLY_NOISE in decision.reason


def test_every_target_has_a_size_of_the_grid() -> None:
    for policy in TARGETS:
        assert snap(1e30, GRID, policy=policy) == GRID[-1]
