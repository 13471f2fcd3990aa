"""Policies of papers follow the papers' formulas, computed here from gradients and not by us."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from copus_ext.controller.flags import CopusConfig
from copus_ext.extras.baselines import published
from copus_ext.gns.estimators import Estimate
from copus_ext.gns.observer import CONTROL, NoiseObserver, NoiseScale
from copus_ext.goodput import policies
from copus_ext.goodput.decide import decide
from copus_ext.goodput.policies import POLICIES
from copus_ext.goodput.policy import ONLY_NOISE
from copus_ext.goodput.targets import TargetPolicy, scheduled_batch
from megatron.trainer.common.extras import extras
from tests.helpers.recorded import row, shipped_rules
from tests.unit.test_decide import GRID, follow, situation
from tests.unit.test_paper_policy import inputs, only_noise, takes_the_estimate

NAMES = ("cbs", "norm_test", "seesaw")


def named(policy: str) -> TargetPolicy:
    found = policies.named(policy)
    assert isinstance(found, TargetPolicy)
    return found


def target_batch(s: Any) -> float | None:
    return named(s.rules.policy).target(s)


def test_the_policies_are_choices() -> None:
    assert set(NAMES) < set(POLICIES)
    (own,) = (extra for extra in extras() if extra.name == "baselines")
    assert tuple(own.policies) == ("copus", *NAMES)
    assert CopusConfig(copus=True, copus_policy="cbs").copus_policy == "cbs"


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
@pytest.mark.parametrize("eta", [0.3, published.ETA, 0.9])
def test_the_norm_test_asks_for_the_published_batch(
    signal: float, eta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "ETA", eta)
    gradients = per_sample_gradients(16, signal=signal, seed=3)
    noise = observed(gradients)
    s = inputs("norm_test", noise, batch=16)
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
    assert published_size(gradients, published.ETA) > 16
    decision = decide(inputs("norm_test", noise, batch=16))
    assert decision.to.global_batch_size == 32
    assert decision.target_batch == published_size(gradients, published.ETA)
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


@pytest.mark.parametrize("policy", ["cbs", "seesaw"])
def test_published_policies_take_the_estimate_and_no_end_of_an_interval(policy: str) -> None:
    takes_the_estimate(policy)


@pytest.mark.parametrize("policy", ["cbs", "norm_test"])
def test_what_is_done_where_there_is_no_estimate(policy: str) -> None:
    """The papers divide by |G|^2 and do not say what follows where it is not positive."""
    decision = decide(inputs(policy, only_noise()))
    if policy == "norm_test":
        assert decision.to.global_batch_size == 16
    else:
        assert decision.kind == "stay" and ONLY_NOISE in decision.reason


def test_every_target_has_a_size_of_the_grid() -> None:
    for policy in NAMES:
        assert named(policy).snap(1e30, GRID) == GRID[-1]


def test_a_published_policy_doubles_the_batch_at_most() -> None:
    late: dict[str, Any] = {"consumed_samples": 5_000_000, "total_samples": 10_000_000}
    s = situation(16, 4000.0, flags={"copus_policy": "cbs"}, **late)
    assert follow(s, 2) == [16, 32, 64]


def test_with_published_policies_only_the_layout_may_change_in_the_warm_up() -> None:
    rows = [row(16, 10.0), row(32, 40.0), row(16, 13.0, dp=1), row(32, 50.0, dp=1)]
    warm = {"in_warmup": True, "iteration": 10, "consumed_samples": 160}
    cbs = {"copus_policy": "cbs"}
    free = situation(
        16, rows=rows, flags={**cbs, "copus_layouts": "all"}, relayout_cost_s=5.0, **warm
    )
    decision = decide(free)
    assert (decision.kind, decision.to) == ("relayout", rows[2]), decision.reason
    there = dataclasses.replace(free, current=2)
    assert decide(there).kind == "stay" and "warming up" in decide(there).reason
    own = situation(16, rows=rows, flags=cbs, **warm)
    assert decide(own).reason == "the learning rate is warming up"
    paper = {"copus_policy": "copus", "copus_layouts": "all"}
    papers = situation(16, rows=rows, flags=paper, **warm)
    assert decide(papers).kind == "stay"


def test_a_published_policy_shrinks_by_one_size() -> None:
    flags = {"copus_allow_shrink": True, "copus_policy": "cbs"}
    assert decide(situation(256, 8.0, flags=flags)).to.global_batch_size == 128


@pytest.mark.parametrize(
    ("policy", "phi", "sizes"),
    [
        ("cbs", 45.0, [8, 16, 32, 64, 64, 64]),
        ("cbs", 45.5, [8, 16, 32, 64, 128, 128]),
        ("norm_test", 40.0, [8, 16, 32, 64, 128, 128]),
    ],
)
def test_baselines(policy: str, phi: float, sizes: list[int]) -> None:
    """cbs goes to twice the noise scale, as published."""
    flat = [row(b, 10.0) for b in GRID]
    assert follow(situation(8, phi, rows=flat, flags={"copus_policy": policy}), 5) == sizes


@pytest.mark.parametrize(("eta", "times"), [(0.5, 3.0), (2**-0.5, 1.0)])
def test_where_the_norm_test_stops(
    eta: float, times: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "ETA", eta)
    batch, phi = 1, 10_000.0
    for _ in range(200):
        flags = {"copus_policy": "norm_test"}
        target = target_batch(situation(batch, phi, flags=flags, rows=[row(batch, 1.0)]))
        assert target is not None
        batch = int(target)
    assert batch == pytest.approx(times * phi, rel=1e-3)


def test_targets_are_snapped_as_published() -> None:
    assert scheduled_batch(shipped_rules(flags={"copus_policy": "cbs"}), 5, 10) is None
    assert named("cbs").snap(90.0, GRID) == 64 and named("cbs").snap(91.0, GRID) == 128
    assert named("norm_test").snap(65.0, GRID) == 128


def test_seesaw_trades_the_decay_for_batch() -> None:
    known: dict[str, Any] = {"flags": {"copus_policy": "seesaw"}, "rules": {"first_batch": 16}}
    s = situation(16, 1000.0, **known, lr_decay_factor=0.5)
    assert decide(s).to.global_batch_size == 32
    capped = situation(16, 10.0, **known, lr_decay_factor=0.25)
    assert decide(capped).to.global_batch_size == 16


@pytest.mark.parametrize("policy", NAMES)
def test_no_policy_with_a_cap_goes_where_the_noise_cannot_be_measured(policy: str) -> None:
    seen = [row(16, 10.0, micro=8, dp=1), row(32, 20.0, micro=16, dp=1)]
    table = [*seen, row(32, 40.0, micro=32, dp=1)]
    rules = {"grid": (16, 32), "first_batch": 16}
    known: dict[str, Any] = {"flags": {"copus_policy": policy}, "rules": rules}
    assert decide(situation(16, 40.0, rows=table, **known, lr_decay_factor=0.5)).to in seen
    blind = [row(16, 30.0, micro=16, dp=1), *table]
    assert decide(situation(16, 40.0, rows=blind, **known, lr_decay_factor=0.5)).to in seen


def test_a_target_is_taken_itself_and_not_a_faster_batch_beside_it() -> None:
    table = [row(16, 10.0), row(16, 14.0, micro=8), row(24, 12.0), row(32, 20.0)]
    known: dict[str, Any] = {"flags": {"copus_policy": "cbs"}, "rules": {"grid": (16, 24, 32)}}
    assert decide(situation(16, 12.0, rows=table, **known)).to == table[2]
    assert decide(situation(16, 12.0, rows=table, **known, in_ramp=True)).kind == "stay"
