"""Signal and noise with experts, which average the samples of several replicas."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from copus_ext.gns.estimators import group_weights
from copus_ext.gns.hooks import GROUPS, GradientNormHooks, StepNorms

SAMPLES, DP, EXPERT_SHARE = 16, 4, 0.5


def gradients(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """[samples, n] per-sample gradients of attention and of experts."""
    random = np.random.default_rng(seed)
    signal = random.normal(size=(2, 1, 30)) * 0.5
    dense, experts = signal + random.normal(size=(2, SAMPLES, 30))
    return dense, EXPERT_SHARE * experts


def group(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def weighed(
    mode: Any, rows: list[list[float]], shared: int, *, per_token: bool = False, shares: Any = None
) -> StepNorms:
    """What hooks without parameters find in a step of replicas with a rank each.

    Args:
        mode: `micro`, `rank` or `half`.
        rows: loss tokens by replica and micro-batch.
        shared: replicas whose samples meet in an expert.
        per_token: `--calculate-per-token-loss`.
        shares: of micro-batches of unequal size.
    """
    sent: list[torch.Tensor] = []
    alone, work = group(0, 1), SimpleNamespace(wait=lambda: None)
    with patch("torch.distributed.all_reduce", lambda numbers, async_op: sent.append(numbers)):
        for replica, row in enumerate(rows):
            dp, ep = group(replica, len(rows)), group(replica % shared, shared)
            groups = SimpleNamespace(tp=alone, cp=alone, dp=dp, ep=ep, expt_tp=alone)
            hooks = GradientNormHooks([], groups, per_token=per_token, device=torch.device("cpu"))
            hooks.begin(mode, len(row), shares)
            hooks.reduce(row)
    sent[-1].copy_(torch.stack(sent).sum(dim=0))
    samples: Any = sum(map(sum, rows))
    found = hooks.finish(work, global_batch_size=samples, loss_scale=torch.ones(1))
    assert found is not None
    return found


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
    rows = [[float(micro)] * num_microbatches for _ in range(DP)]
    known = weighed(mode, rows, shared)
    small = {"attention": (own**2).sum(), "experts": (theirs**2).sum()}
    big = {
        "attention": (dense.mean(axis=0) ** 2).sum(),
        "experts": (experts.mean(axis=0) ** 2).sum(),
    }
    return replace(
        known,
        small={name: float(small.get(name, 0.0)) for name in GROUPS},
        big={name: float(big.get(name, 0.0)) for name in GROUPS},
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
    wrong = replace(norms, small_expert_weights=norms.small_weights)
    assert wrong.estimate(("attention", "experts")).grad_variance_trace > 1.1 * trace


@pytest.mark.parametrize("mode", ["micro", "rank", "half"])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("shares", [None, [0.75, 0.25]])
def test_an_expert_is_weighed_as_one_gradient_of_the_samples_that_meet_in_it(
    mode: str, per_token: bool, shares: Any
) -> None:
    """Also where replicas have unequal numbers of tokens, or a micro-batch has none."""
    rows = [[3.0, 5.0], [2.0, 0.0], [7.0, 1.0], [4.0, 4.0]]
    parts = {"micro": [[0], [1]], "rank": [[0, 1]], "half": [[0]]}[mode]
    each = [
        group_weights(
            [rows[r][i] for r in together for i in part],
            divisor=1 if per_token else 2,
            per_token=per_token,
            tokens_per_sample=1.0,
            shares=shares and [shares[i] for _ in together for i in part],
        )
        for together in ((0, 1), (2, 3))
        for part in parts
    ]
    found = weighed(mode, rows, 2, per_token=per_token, shares=shares).small_expert_weights
    assert found.signal == pytest.approx(sum(one.signal for one in each), rel=1e-12)
    assert found.noise == pytest.approx(sum(one.noise for one in each), rel=1e-12)


@pytest.mark.parametrize("mode", ["micro", "rank", "half"])
def test_weights_of_one_replica_are_those_of_the_rest(mode: str) -> None:
    for rows in ([[3.0, 5.0]], [[2.0] * 4]):
        found = weighed(mode, rows, 1)
        assert found.small_expert_weights == found.small_weights
