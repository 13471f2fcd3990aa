"""Signal and noise with experts, which average the samples of several replicas."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from copus_ext.gns.estimators import Weights
from copus_ext.gns.hooks import GROUPS, GradientNormHooks, StepNorms

SAMPLES, DP, EXPERT_SHARE = 16, 4, 0.5


def gradients(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """[samples, n] per-sample gradients of attention and of experts."""
    random = np.random.default_rng(seed)
    signal = random.normal(size=(2, 1, 30)) * 0.5
    dense, experts = signal + random.normal(size=(2, SAMPLES, 30))
    return dense, EXPERT_SHARE * experts


def hooks_of(mode: str) -> Any:
    """Without a model."""
    hooks: Any = object.__new__(GradientNormHooks)
    hooks._per_token, hooks._shares, hooks._mode = False, None, mode
    return hooks


def measured(
    dense: np.ndarray, experts: np.ndarray, order: Any, *, mode: str, micro: int, shared: int
) -> StepNorms:
    """What hooks see in one step.

    Args:
        dense: [samples, n] gradients.
        experts: [samples, n] gradients.
        order: of the samples.
        mode: `micro` or `rank`.
        micro: samples of a micro-batch.
        shared: replicas whose samples meet in an expert.
    """
    num_microbatches = SAMPLES // (DP * micro)
    # [dp, m, n] mean gradients of micro-batches, each over their number as a buffer holds them.
    cut = (num_microbatches, DP, micro, -1)
    own, theirs = (
        g[order].reshape(cut).mean(axis=2).swapaxes(0, 1) / num_microbatches
        for g in (dense, experts)
    )
    theirs = theirs.reshape(DP // shared, shared, num_microbatches, -1).sum(axis=1)
    if mode == "rank":
        own, theirs = own.sum(axis=1, keepdims=True), theirs.sum(axis=1, keepdims=True)
    rows = [[float(micro)] * num_microbatches for _ in range(shared)]
    numbers = np.sum([hooks_of(mode)._local_weights(rows) for _ in range(DP)], axis=0)
    small_signal, small_noise, expert_signal, expert_noise, w, a, _ = numbers
    small = {"attention": (own**2).sum(), "experts": (theirs**2).sum()}
    big = {
        "attention": (dense.mean(axis=0) ** 2).sum(),
        "experts": (experts.mean(axis=0) ** 2).sum(),
    }
    return StepNorms(
        estimator="micro",
        small={name: float(small.get(name, 0.0)) for name in GROUPS},
        big={name: float(big.get(name, 0.0)) for name in GROUPS},
        small_weights=Weights(signal=small_signal, noise=small_noise),
        small_expert_weights=Weights(signal=expert_signal, noise=expert_noise),
        big_weights=Weights(signal=(w / DP) ** 2, noise=a / DP**2),
        tokens=float(SAMPLES),
        tokens_per_sample=1.0,
        are_small_equal=True,
    )


def exact(*parts: np.ndarray) -> tuple[float, float]:
    """|G|^2 and tr(Sigma) that single samples give, both unbiased for where they come from."""
    trace = sum(float(g.var(axis=0, ddof=1).sum()) for g in parts)
    return sum(float((g.mean(axis=0) ** 2).sum()) for g in parts) - trace / SAMPLES, trace


@pytest.mark.parametrize(
    ("mode", "micro", "shared"),
    [("micro", 1, 1), ("micro", 1, 2), ("micro", 1, 4), ("micro", 2, 2), ("rank", 1, 2)],
)
def test_the_estimate_is_unbiased_for_any_number_of_replicas_that_share_an_expert(
    mode: str, micro: int, shared: int
) -> None:
    dense, experts = gradients(7)
    random = np.random.default_rng(3)
    names = ("attention", "experts")
    found = [
        measured(
            dense, experts, random.permutation(SAMPLES), mode=mode, micro=micro, shared=shared
        ).estimate(names)
        for _ in range(500)
    ]
    signal, trace = exact(dense, experts)
    assert np.mean([e.grad_variance_trace for e in found]) == pytest.approx(trace, rel=0.02)
    assert np.mean([e.grad_norm_sq for e in found]) == pytest.approx(signal, rel=0.05)


def test_one_unit_for_all_would_be_wrong() -> None:
    dense, experts = gradients(7)
    norms = measured(dense, experts, np.arange(SAMPLES), mode="micro", micro=1, shared=4)
    trace = norms.estimate(("attention", "experts")).grad_variance_trace
    wrong = StepNorms(**{**vars(norms), "small_expert_weights": norms.small_weights})
    assert wrong.estimate(("attention", "experts")).grad_variance_trace > 1.1 * trace


def test_weights_of_one_replica_are_those_of_the_rest() -> None:
    for mode, rows in itertools.product(("micro", "rank", "half"), ([[3.0, 5.0]], [[2.0] * 4])):
        small_signal, small_noise, *experts, _, _, _ = hooks_of(mode)._local_weights(rows)
        assert experts == [small_signal, small_noise]
