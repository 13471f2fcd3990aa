"""The one solver, filled in three ways, is unbiased and has the spread we predict."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from copus_ext.gns.estimators import (
    NoiseNotIdentifiable,
    Weights,
    estimate_gns,
    group_weights,
)
from tests.helpers.noise_theory import equal_weights, predicted_spread


def test_it_inverts_the_expected_norms_exactly() -> None:
    rng = np.random.default_rng(1)
    for _ in range(1000):
        g2, v = rng.lognormal(0, 2, 2)
        small = Weights(signal=rng.uniform(0.1, 9), noise=rng.uniform(1, 2))
        big = Weights(signal=rng.uniform(0.1, 9), noise=0.0)
        big = Weights(signal=big.signal, noise=rng.uniform(0, 0.5) * small.noise / small.signal)
        big = Weights(signal=big.signal, noise=big.noise * big.signal)
        got = estimate_gns(
            small.signal * g2 + small.noise * v, small, big.signal * g2 + big.noise * v, big
        )
        tolerance = 1e-12 * (g2 + v * small.noise / small.signal)
        assert abs(got.grad_norm_sq - g2) < tolerance * 10
        assert abs(got.grad_variance_trace - v) < 10 * tolerance / (
            small.noise / small.signal - big.noise / big.signal
        )


def test_with_equal_groups_it_is_algorithm_1_of_the_paper_and_one_group_is_refused() -> None:
    q_s, q_b, n, batch = 3.7, 1.9, 8, 32
    got = estimate_gns(n * q_s, equal_weights(batch / n, n), q_b, equal_weights(batch))
    assert got.grad_norm_sq == pytest.approx((n * q_b - q_s) / (n - 1), rel=1e-12)
    assert got.grad_variance_trace == pytest.approx((q_s - q_b) * batch / (n - 1), rel=1e-12)
    with pytest.raises(NoiseNotIdentifiable):
        estimate_gns(1.0, equal_weights(8), 1.0, equal_weights(8))


@pytest.mark.parametrize("kind", ["micro", "rank", "half"])
@pytest.mark.parametrize("per_token", [False, True])
def test_micro_batches_of_different_sizes_stay_unbiased(kind: str, per_token: bool) -> None:
    """Every weight is that of megatron-core's buffers where a replica has 4, 4 and 2 samples."""
    rng = np.random.default_rng(5)
    sizes, dp, dim, draws, tokens = [4, 4, 2], 2, 6, 40_000, 3.0
    g, own = np.full(dim, 0.4), sum(sizes)
    x = g + rng.normal(0, 1, (draws, dp, own, dim))
    ends = np.cumsum([0, *sizes])
    means = np.stack([x[:, :, a:b].mean(axis=2) for a, b in itertools.pairwise(ends)], axis=2)
    shares = [n / own for n in sizes]
    factor = np.array([n * tokens for n in sizes] if per_token else shares)[:, None]
    grads = means * factor
    form: Any = {"divisor": 1 if per_token else 3, "per_token": per_token}
    form |= {"tokens_per_sample": tokens}

    def weights(at: slice) -> Weights:
        counts = [n * tokens for n in sizes[at]]
        return group_weights(counts, shares=None if per_token else shares[at], **form)

    parts = {"micro": [slice(i, i + 1) for i in range(3)], "rank": [slice(3)], "half": [slice(1)]}
    small = Weights(signal=0.0, noise=0.0)
    squares = np.zeros(draws)
    for part in parts[kind]:
        squares += (grads[:, :, part].sum(axis=2) ** 2).sum(axis=(1, 2))
        small = small + weights(part) + weights(part)
    divisor = own * dp * tokens if per_token else dp
    whole = ((grads.sum(axis=(1, 2)) / divisor) ** 2).sum(axis=1)
    found = [estimate_gns(s, small, b, equal_weights(own * dp)) for s, b in zip(squares, whole)]
    for name, truth in (
        ("grad_norm_sq", (g**2).sum()),
        ("grad_variance_trace", float(dim)),
    ):
        values = np.array([getattr(x, name) for x in found])
        error = values.std() / np.sqrt(draws)
        assert abs(values.mean() - truth) < 4 * error, name


def groups_of(kind: str, d: int, m: int, b: int, k: int) -> tuple[int, int]:
    """Samples of a small group, and how many there are."""
    return {"micro": (b, m * d), "rank": (m * b, d), "half": (k * b, d)}[kind]


def small_squares(x: Any, kind: str, m: int, b: int, k: int) -> Any:
    """Sum of squared norms of the small groups; x is [draws, d, m * b, dim]."""
    draws, d, _, dim = x.shape
    if kind == "micro":
        means = x.reshape(draws, d * m, b, dim).mean(axis=2)
    elif kind == "rank":
        means = x.mean(axis=2)
    else:
        means = x[:, :, : k * b].mean(axis=2)
    return (means**2).sum(axis=(1, 2))


def simulate(
    kind: str, d: int, m: int, b: int, k: int, *, draws: int, dim: int, sizes: float = 0.0
) -> tuple[Any, Any, dict[str, float]]:
    """One-step estimates on synthetic gradients, and the truth."""
    rng = np.random.default_rng([d, m, b, k, draws])
    scale = np.exp(-np.arange(dim) / dim * 2.0)
    sigma2 = scale**2
    mean = rng.normal(size=dim) * 0.15
    group, num = groups_of(kind, d, m, b, k)
    small, big = equal_weights(group, num), equal_weights(d * m * b)
    g2s, vs = [], []
    for _ in range(draws // 500):
        noise = rng.normal(size=(500, d, m * b, dim)) * scale
        if sizes:
            noise *= np.exp(rng.normal(size=(500, d, m * b, 1)) * sizes - sizes**2)
        x = mean + noise
        q_small, q_big = small_squares(x, kind, m, b, k), (x.mean(axis=(1, 2)) ** 2).sum(axis=1)
        for s, g in zip(q_small, q_big):
            estimate = estimate_gns(s, small, g, big)
            g2s.append(estimate.grad_norm_sq)
            vs.append(estimate.grad_variance_trace)
    truth = {
        "g2": float(mean @ mean),
        "v": float(sigma2.sum()),
        "along_gradient": float((mean**2 * sigma2).sum()),
        "effective_dimension": float(sigma2.sum() ** 2 / (sigma2**2).sum()),
    }
    return np.array(g2s), np.array(vs), truth


CASES = [
    *(("micro", 1, m, 1, 0) for m in (2, 4, 16)),
    ("micro", 2, 4, 2, 0),
    *(("rank", d, 1, 2, 0) for d in (2, 8)),
    ("rank", 4, 3, 1, 0),
    ("half", 1, 2, 2, 1),
    ("half", 1, 8, 1, 3),
    ("half", 4, 4, 1, 2),
    ("micro", 2, 8, 2, 0),
    ("half", 1, 16, 1, 1),
]


@pytest.mark.parametrize(("kind", "d", "m", "b", "k"), CASES)
def test_every_way_is_unbiased_and_scatters_as_predicted(
    kind: str, d: int, m: int, b: int, k: int
) -> None:
    g2, v, truth = simulate(kind, d, m, b, k, draws=4000, dim=64)
    for values, name in ((g2, "g2"), (v, "v")):
        error = values.std() / math.sqrt(len(values))
        assert abs(values.mean() - truth[name]) < 3 * error, name
    group, num = groups_of(kind, d, m, b, k)
    truth.pop("g2")
    want = predicted_spread(**truth, batch=d * m * b, group=group, num_groups=num)
    assert g2.std() == pytest.approx(math.sqrt(want.grad_norm_sq), rel=0.06)
    assert v.std() == pytest.approx(math.sqrt(want.grad_variance_trace), rel=0.06)
    scale = math.sqrt(want.grad_norm_sq * want.grad_variance_trace)
    covariance = float(np.cov(g2, v)[0, 1])
    assert covariance == pytest.approx(want.covariance, abs=0.15 * scale)


def test_heavy_tailed_samples_hurt_only_the_half_estimate() -> None:
    spread = {}
    for kind in ("micro", "half"):
        for sizes in (0.0, 0.4):
            g2, _, _ = simulate(kind, 1, 16, 1, 8, draws=4000, dim=128, sizes=sizes)
            spread[kind, sizes] = g2.std()
    assert spread["micro", 0.4] == pytest.approx(spread["micro", 0.0], rel=0.1)
    assert spread["half", 0.4] > 1.3 * spread["half", 0.0]


@pytest.mark.parametrize("per_token", [False, True])
def test_unequal_token_counts_stay_unbiased(per_token: bool) -> None:
    rng = np.random.default_rng(3)
    dim, num, draws = 16, 6, 20_000
    mean = rng.normal(size=dim) * 0.3
    tokens = rng.integers(10, 400, size=num).astype(float)
    tokens[2] = 0
    divisor = 1.0 if per_token else num
    # The mean of n tokens has 1/n of a token's variance: draw it directly.
    safe = np.maximum(tokens, 1)
    means = mean + rng.normal(size=(draws, num, dim)) / np.sqrt(safe)[:, None]
    held = means * (tokens if per_token else (tokens > 0) / num)[None, :, None]
    small = Weights(signal=0, noise=0)
    for n in tokens:
        small += group_weights([n], divisor=divisor, per_token=per_token, tokens_per_sample=50.0)
    big = group_weights(list(tokens), divisor=divisor, per_token=per_token, tokens_per_sample=50.0)
    q_small, q_big = (held**2).sum(axis=(1, 2)), (held.sum(axis=1) ** 2).sum(axis=1)
    got = [estimate_gns(s, small, g, big) for s, g in zip(q_small, q_big)]
    for values, truth in (
        (np.array([e.grad_norm_sq for e in got]), float(mean @ mean)),
        (np.array([e.grad_variance_trace for e in got]), dim / 50.0),
    ):
        assert abs(values.mean() - truth) < 3 * values.std() / math.sqrt(draws)


@pytest.mark.parametrize("per_token", [False, True])
def test_equal_token_counts_are_the_sample_form(per_token: bool) -> None:
    seq, num, per_group = 32.0, 4, 2
    tokens = [seq * per_group] * num
    divisor = sum(tokens) if per_token else num
    one = group_weights(
        tokens[:1],
        divisor=tokens[0] if per_token else 1,
        per_token=per_token,
        tokens_per_sample=seq,
    )
    assert one.signal == pytest.approx(1, rel=1e-12)
    assert one.noise == pytest.approx(1 / per_group, rel=1e-12)
    whole = group_weights(tokens, divisor=divisor, per_token=per_token, tokens_per_sample=seq)
    assert whole.signal == pytest.approx(1, rel=1e-12)
    assert whole.noise == pytest.approx(1 / (num * per_group), rel=1e-12)
