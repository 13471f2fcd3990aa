"""The router of a mixture of experts: its balance loss against the formula, and what it carries
from step to step."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.trainer.common.device import use_device, use_plain_router
from megatron.trainer.common.train_state import TrainState

EXPERTS, TOPK, HIDDEN, TOKENS = 8, 2, 16, 12
WEIGHT = 0.5


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    with use_device("cpu"):
        use_plain_router()
        yield
    # A backward pass outside a schedule leaves a scale of another shape in the class.
    MoEAuxLossAutoScaler.main_loss_backward_scale = None


def router_of(*, seed: int = 1, ranks: int = 1, **more: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.trainer.model.moe import BalancedRouter

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_ffn_hidden_size=8,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=WEIGHT,
        moe_router_dtype="fp32",
        add_bias_linear=False,
        use_cpu_initialization=True,
        **more,
    )
    group = SimpleNamespace(size=lambda: ranks)
    groups: Any = SimpleNamespace(tp=group, cp=group, tp_cp=group, tp_dp_cp=group)
    router = BalancedRouter(config, groups)
    router.weight.data.normal_(generator=torch.Generator().manual_seed(seed))
    router.mean_tokens = float(TOKENS * ranks)
    return router.train()


def tokens(number: int, count: int = TOKENS) -> torch.Tensor:
    """[count, 1, h] of one of four kinds, so that one sequence loads few experts."""
    generator = torch.Generator().manual_seed(number)
    kind = torch.eye(HIDDEN)[number % 4] * 2
    return (torch.randn(count, 1, HIDDEN, generator=generator) + kind) / 2


def balance_gradient(router: Any, rows: torch.Tensor) -> torch.Tensor:
    """Of the balance loss alone in the router's weight."""
    router.weight.grad = None
    probs, _ = router(rows)
    (probs.sum() * 0.0).backward()
    grad: Any = router.weight.grad
    return grad.clone()


def by_formula(router: Any, rows: torch.Tensor, fractions: torch.Tensor) -> torch.Tensor:
    """Gradient of coefficient * E * sum_i f_i P_i."""
    weight = router.weight.detach().clone().requires_grad_()
    scores = torch.softmax(rows.reshape(-1, HIDDEN) @ weight.T, dim=-1)
    loss = WEIGHT * EXPERTS * (fractions.float() * scores.sum(dim=0) / TOKENS).sum()
    loss.backward()
    assert weight.grad is not None
    return weight.grad


def choices(router: Any, rows: torch.Tensor) -> torch.Tensor:
    """[E] tokens of each expert."""
    logits = rows.reshape(-1, HIDDEN) @ router.weight.detach().T
    return torch.bincount(logits.topk(TOPK, dim=-1).indices.flatten(), minlength=EXPERTS).double()


def test_the_loss_is_that_of_the_formula_with_fractions_from_outside() -> None:
    router, rows = router_of(), tokens(3)
    fractions = torch.rand(EXPERTS, generator=torch.Generator().manual_seed(5)).double()
    router.fractions = fractions / fractions.sum()
    got = balance_gradient(router, rows)
    assert torch.allclose(got, by_formula(router, rows, router.fractions), rtol=1e-5, atol=1e-7)


def test_even_fractions_have_no_gradient() -> None:
    router = router_of()
    router.fractions = torch.full((EXPERTS,), 1 / EXPERTS, dtype=torch.float64)
    assert balance_gradient(router, tokens(3)).abs().max() < 1e-7


def test_there_is_no_balance_loss_before_fractions_are_known() -> None:
    router = router_of()
    router.set_layer_number(1)
    balance = balance_of(layers=(0,), num_experts=EXPERTS)
    balance.prepare([router], TrainState(), mean_tokens=float(TOKENS))
    assert not balance_gradient(router, tokens(3)).any(), "not even rounding"
    state = TrainState(expert_fractions=[[1.0, *[0.0] * (EXPERTS - 1)]])
    balance.prepare([router], state, mean_tokens=float(TOKENS))
    assert balance_gradient(router, tokens(3)).any()


def test_per_token_losses_count_whole_micro_batches() -> None:
    plain, per_token = router_of(), router_of(calculate_per_token_loss=True)
    for router in (plain, per_token):
        router.fractions = torch.arange(EXPERTS).double() / 28
    one, other = (balance_gradient(router, tokens(3)) for router in (plain, per_token))
    assert torch.allclose(other, TOKENS * one, rtol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_z_loss_per_token_is_not_divided_by_tensor_ranks(ranks: int) -> None:
    """megatron-core 0.16.1 gives every rank the loss over its own tokens, which are fewer."""
    found = []
    for per_token in (False, True):
        router = router_of(ranks=ranks, moe_z_loss_coeff=0.1, calculate_per_token_loss=per_token)
        router.fractions = torch.full((EXPERTS,), 1 / EXPERTS, dtype=torch.float64)
        found.append(balance_gradient(router, tokens(3)))
    assert torch.allclose(found[1], found[0] * TOKENS * ranks, rtol=1e-4, atol=1e-6)


def test_what_is_chosen_is_counted_in_training_only() -> None:
    from megatron.trainer.model.moe import CHOICES, ROUTED, SCORES

    router, rows = router_of(), tokens(3)
    router.fractions = torch.full((EXPERTS,), 1 / EXPERTS, dtype=torch.float64)
    router.eval()
    router(rows)
    router.train()
    with torch.no_grad():
        router(rows)  # the first pass of a layer that is computed again
    assert not router.sums.any()
    router(rows)
    assert torch.equal(router.sums[CHOICES], choices(router, rows))
    assert torch.equal(router.sums[ROUTED], router.sums[CHOICES])
    assert router.sums[SCORES].sum().item() == pytest.approx(TOKENS)


def test_half_precision_of_the_model_leaves_the_sums_alone() -> None:
    router = router_of().bfloat16()
    router.fractions = torch.full((EXPERTS,), 1 / EXPERTS, dtype=torch.float64)
    router(tokens(3).bfloat16())
    assert router.sums.dtype == torch.float64


def test_the_load_is_counted_without_a_balance_loss() -> None:
    from megatron.trainer.model.moe import CHOICES

    router, rows = router_of(), tokens(3)
    router.config.moe_aux_loss_coeff = 0.0
    router(rows)
    assert torch.equal(router.sums[CHOICES], choices(router, rows))


def test_biases_stay_in_full_precision_in_a_half_precision_model() -> None:
    more = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    router = router_of(**more).bfloat16()
    bias = [0.1234567 * (i + 1) for i in range(EXPERTS)]
    state = TrainState(expert_biases=[bias])
    router.set_layer_number(1)
    balance_of(has_bias=True, layers=(0,), num_experts=EXPERTS).give_biases([router], state)
    assert router.expert_bias.tolist() == torch.tensor(bias).tolist()


def batch_of(numbers: torch.Tensor) -> torch.Tensor:
    return torch.cat([tokens(int(n)) for n in numbers])


@pytest.mark.parametrize("batch", [1, 4])
def test_fractions_of_another_batch_leave_the_gradient_unbiased(batch: int) -> None:
    """With fractions of the same batch it is pulled away, the more the smaller the batch."""
    router, generator = router_of(), torch.Generator().manual_seed(2)
    population = torch.arange(64)
    whole = batch_of(population)
    router.mean_tokens = float(len(whole))
    counts = choices(router, whole)
    router.fractions = counts / counts.sum()
    want = balance_gradient(router, whole)
    router.mean_tokens = float(batch * TOKENS)
    errors: dict[str, list[torch.Tensor]] = {"lagged": [], "exact": []}
    before = None
    for _ in range(1000):
        rows = batch_of(population[torch.randint(64, (batch,), generator=generator)])
        counts = choices(router, rows)
        own = counts / counts.sum()
        for name, fractions in (("lagged", before), ("exact", own)):
            if fractions is not None:
                router.fractions = fractions
                errors[name].append(balance_gradient(router, rows) - want)
        before = own
    for name, found in errors.items():
        all_ = torch.stack(found).flatten(1)
        bias = all_.mean(dim=0).norm()
        error = (all_.var(dim=0).sum() / len(all_)).sqrt()
        assert bool(bias < 3 * error) is (name == "lagged"), (name, bias / want.norm(), error)


def balance_of(mode: str = "lagged", **more: Any) -> Any:
    from megatron.trainer.model.moe import Balance

    plain = {"has_bias": False, "bias_update_rate": 0.1, "samples": 64, "num_experts": 4}
    return Balance(mode=mode, **{"layers": (0, 2), **plain, **more})


def sums_of(*rows: list[float]) -> torch.Tensor:
    """The same counts of choices and of tokens, in both layers."""
    counts = torch.tensor(rows, dtype=torch.float64)
    return torch.stack([counts, counts, counts], dim=1)


def test_lagged_fractions_forget_by_samples() -> None:
    state, balance = TrainState(), balance_of()
    first, second = sums_of([4, 4, 0, 0], [8, 0, 0, 0]), sums_of([0, 0, 4, 4], [0, 8, 0, 0])
    balance.advance(state, first, global_batch_size=8)
    assert state.expert_fractions == [[0.5, 0.5, 0, 0], [1, 0, 0, 0]], "all that is known"
    balance.advance(state, second, global_batch_size=32)
    assert state.expert_fractions == [[0.25] * 4, [0.5, 0.5, 0, 0]], "half of 64 samples"
    many, once = TrainState(), TrainState()
    for one, steps in ((many, 4), (once, 1)):
        balance.advance(one, first, global_batch_size=8)
        for _ in range(steps):
            balance.advance(one, second, global_batch_size=32 // steps)
    assert many.expert_fractions[0] == pytest.approx(once.expert_fractions[0])


def test_the_expert_bias_moves_as_megatron_core_moves_it() -> None:
    state, balance = TrainState(), balance_of(has_bias=True)
    balance.advance(state, sums_of([4, 2, 1, 1], [2, 2, 2, 2]), global_batch_size=8)
    up = float(torch.tensor(0.1))
    assert state.expert_biases == [[-up, 0.0, up, up], [0.0] * 4]


def test_the_load_is_told() -> None:
    load = balance_of().load(sums_of([4, 2, 1, 1], [2, 2, 2, 2]))
    assert load.max_over_mean == [2.0, 1.0]
    assert load.balance_losses == [4 * (16 + 4 + 1 + 1) / 64, 1.0]


def test_state_survives_json() -> None:
    state = TrainState(expert_fractions=[[0.1, 0.9]], expert_biases=[[1e-3, -1e-3]])
    assert TrainState.from_json(state.to_json()) == state
