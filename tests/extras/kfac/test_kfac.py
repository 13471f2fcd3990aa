"""K-FAC of one layer, and the flags."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from copus_ext.commands import plan
from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.rules import check_run
from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.draft import Draft, Environment
from megatron.trainer.config.layout import Layout
from megatron.trainer.extras.kfac import precondition
from megatron.trainer.extras.kfac.flags import check_kfac
from megatron.trainer.extras.kfac.precondition import Factors, Kfac
from megatron.trainer.model.gpt import build_model
from megatron.trainer.train.build import groups_of
from megatron.trainer.train.step_feature import build_features
from tests.helpers.examples import SMALL, config_of, names_a_way_on
from tests.helpers.jobs import TINY
from tests.helpers.of_extras import of_extra
from tests.helpers.one_rank import cpu_of_one

DAMPING = 0.01
BASE = f"{SMALL} --global-batch-size 16"


def config(flags: str) -> Any:
    return config_of(f"--global-batch-size 16 {flags}", 2)


class Tupled(nn.Module):
    """A linear layer that gives its bias beside its output, as megatron-core's do."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / math.sqrt(inputs))

    def forward(self, x: Any) -> Any:
        return x @ self.weight.T, None


def after_pass(
    layer: Any, factors: Factors, x: torch.Tensor, *, again: bool = False
) -> torch.Tensor:
    """The gradient of a loss of the layer's outputs, the covariances renewed."""

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        found = layer(x)
        return (found[0] if isinstance(found, tuple) else found).tanh().square().sum()

    layer.weight.grad = None
    factors.begin()
    x = x.clone().requires_grad_()
    loss: Any = checkpoint(loss_of, x, use_reentrant=True) if again else loss_of(x)
    loss.backward()
    factors.refresh()
    grad: Any = layer.weight.grad
    return grad


def by_hand(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """B^-1 G A^-1 in 64 bits, from each token by itself, with the norm of G."""
    weight, rows = layer.weight.detach().double(), x.double().reshape(-1, x.shape[-1])
    backs = []
    for row in rows:
        out = (weight @ row).requires_grad_()
        out.tanh().square().sum().backward()
        backs.append(out.grad)
    back: Any = torch.stack(backs)  # pyright: ignore[reportArgumentType]
    grad = back.T @ rows
    sides = []
    for values in (back, rows):
        total = values.T @ values
        total *= len(total) / total.trace()
        sides.append(torch.linalg.inv(total + math.sqrt(DAMPING) * torch.eye(len(total))))
    new = sides[0] @ grad @ sides[1]
    return new * grad.norm() / new.norm()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", [nn.Linear, Tupled])
def test_the_product_is_that_of_every_token_by_itself(kind: Any, again: bool) -> None:
    torch.manual_seed(1)
    layer = kind(6, 5, bias=False) if kind is nn.Linear else kind(6, 5)
    factors = Factors(layer, damping=DAMPING)
    x = torch.randn(3, 4, 6)
    grad = after_pass(layer, factors, x, again=again)
    torch.testing.assert_close(factors.product(grad).double(), by_hand(layer, x), rtol=1e-4, atol=0)


def test_passes_that_do_not_train_do_not_count() -> None:
    torch.manual_seed(1)
    layer, x = nn.Linear(6, 5, bias=False), torch.randn(12, 6)
    factors = Factors(layer, damping=DAMPING)
    layer(torch.randn(9, 6)).sum().backward()
    factors.begin()
    with torch.no_grad():
        layer(torch.randn(9, 6))
    assert not factors.sums["inputs"].any()
    grad = after_pass(layer, factors, x)
    torch.testing.assert_close(factors.product(grad).double(), by_hand(layer, x), rtol=1e-4, atol=0)


def test_a_change_of_basis_of_the_inputs_changes_no_update() -> None:
    torch.manual_seed(2)
    basis = torch.randn(6, 6) + 3 * torch.eye(6)
    layer, other = nn.Linear(6, 5, bias=False), nn.Linear(6, 5, bias=False)
    other.weight.data = layer.weight.data @ torch.linalg.inv(basis)
    x = torch.randn(64, 6)
    updates, plain = [], []
    for one, inputs, back in ((layer, x, torch.eye(6)), (other, x @ basis.T, basis)):
        factors = Factors(one, damping=1e-12)
        grad = after_pass(one, factors, inputs)
        updates.append((factors.product(grad) @ back).flatten())
        plain.append((grad @ back).flatten())
    assert torch.cosine_similarity(updates[0], updates[1], dim=0) > 1 - 1e-4
    assert torch.cosine_similarity(plain[0], plain[1], dim=0) < 0.99


def test_bad_numbers_leave_the_inverses_alone() -> None:
    torch.manual_seed(3)
    layer = nn.Linear(6, 5, bias=False)
    factors = Factors(layer, damping=DAMPING)
    grad = torch.randn(5, 6)
    after_pass(layer, factors, torch.full((4, 6), math.nan))
    assert torch.equal(factors.product(grad), grad)
    after_pass(layer, factors, torch.randn(12, 6))
    good = factors.product(grad)
    assert not torch.allclose(good, grad)
    after_pass(layer, factors, torch.full((4, 6), math.inf))
    assert torch.equal(factors.product(grad), good)
    assert not factors.product(torch.zeros(5, 6)).any()
    assert factors.product(torch.full((5, 6), math.nan)).isnan().all()


def test_the_norm_stays() -> None:
    torch.manual_seed(4)
    layer = nn.Linear(6, 5, bias=False)
    factors = Factors(layer, damping=DAMPING)
    grad = after_pass(layer, factors, torch.randn(12, 6))
    torch.testing.assert_close(factors.product(grad).norm(), grad.norm())


def test_wide_sides_have_no_covariance() -> None:
    torch.manual_seed(5)
    layer = nn.Linear(9, 5, bias=False)
    factors = Factors(layer, damping=DAMPING, max_wide=8)
    assert factors.kinds == ["outputs"]
    grad = after_pass(layer, factors, torch.randn(12, 9))
    whole = Factors(layer, damping=DAMPING)
    whole.inverses["outputs"] = factors.inverses["outputs"]
    torch.testing.assert_close(factors.product(grad), whole.product(grad))
    assert not torch.allclose(factors.product(grad), grad)


def test_only_its_own_products_on_a_gpu_are_rounded() -> None:
    before = torch.get_float32_matmul_precision()
    assert before != "high"
    with precondition.tensor_float32(torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == before
    with pytest.raises(ZeroDivisionError), precondition.tensor_float32(torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == "high"
        _ = 1 / 0
    assert torch.get_float32_matmul_precision() == before


def test_all_products_may_be_rounded_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.device] = []

    @contextlib.contextmanager
    def note(device: torch.device) -> Iterator[None]:
        used.append(device)
        yield

    monkeypatch.setattr(precondition, "tensor_float32", note)
    layer = nn.Linear(6, 5, bias=False)
    factors = Factors(layer, damping=DAMPING)
    grad = after_pass(layer, factors, torch.randn(4, 6))
    assert len(used) == 2, "both covariances"
    factors.product(grad)
    assert len(used) == 3


@pytest.mark.parametrize("width", [1, 63, 64, 65, 300])
def test_what_travels_holds_the_lower_half_and_little_more(width: int) -> None:
    total = torch.zeros(width, width)
    pieces = precondition._lower_half(total)
    for piece in pieces:
        piece += 1
    assert total.tril().sum() == width * (width + 1) / 2, "every element once"
    assert total.max() == 1
    assert sum(piece.numel() for piece in pieces) <= width * (width + 64) / 2 + 64 * 64


def test_a_layer_forgets_what_was_hooked() -> None:
    layer = nn.Linear(6, 5, bias=False)
    factors = Factors(layer, damping=DAMPING)
    factors.remove_hook()
    factors.begin()
    layer(torch.randn(3, 6)).sum().backward()
    assert not any(total.any() for total in factors.sums.values())


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--kfac --tensor-model-parallel-size 2", "--tensor-model-parallel-size 1"),
        ("--kfac --layout-schedule 800:tp2.pp1.dp1", "--layout-schedule"),
        ("--kfac --fp16", "--fp16"),
        ("--kfac --num-experts 4", "--num-experts"),
        ("--kfac --grad-compression-rank 2", "--grad-compression-rank"),
        ("--kfac --clip-group-size 4 --clip-group-norm 1", "--clip-group-size"),
        ("--kfac --kfac-damping inf", "--kfac-damping"),
        ("--kfac --kfac-damping 0", "--kfac-damping"),
        ("--kfac --kfac-interval 0", "--kfac-interval"),
    ],
)
def test_what_it_does_not_go_with(flags: str, named: str) -> None:
    with pytest.raises(UsageError, match="--kfac") as error:
        config(flags)
    assert named in str(error.value) and names_a_way_on(str(error.value))


def test_what_it_means_is_told() -> None:
    assert "--kfac changes the training" in " ".join(config("--kfac").runtime.notes)
    idle = " ".join(config("--kfac-damping 1").runtime.notes)
    assert "no effect of --kfac-damping" in idle


@pytest.mark.parametrize("layouts", ["current", "all"])
def test_the_controller_may_move_it(layouts: Any) -> None:
    check_run(CopusConfig(copus=True, copus_layouts=layouts), config("--kfac"))


def test_layers_of_transformer_engine_are_refused() -> None:
    found = parse_args(f"{BASE} --kfac --transformer-impl transformer_engine".split())
    draft = Draft(values=dict(vars(found)), explicit=frozenset())
    check_kfac(draft, Environment(world_size=1, cuda=True, transformer_engine=True, apex=False))
    assert any("--transformer-impl local" in problem for problem in draft.problems)


def test_a_stored_run_can_be_converted_to_any_layout() -> None:
    stored = {**config("--kfac --swiglu").flat(), "num_query_groups": 4}
    layouts = of_extra("megatron.trainer.extras.inspect_checkpoint.layouts")
    assert layouts.problems_of(stored, Layout(tp=2), 128) == []


def test_the_plan_prices_it_without_tensor_parallelism(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--cluster", "cpu:4", "--global-batch-size", "16", "--json"]
    flags += ["--allow-cross-node-tp", "--megatron-args"]
    steps, ranked = [], []
    for more, own in (("--kfac", []), ("", ["--max", "tp=1"])):
        assert plan.main([*own, *flags, f"{BASE} --vocab-size 128 {more}"]) == 0
        told = capsys.readouterr()
        found = json.loads(told.out)
        ranked.append(found["counts"]["ranked"])
        steps.append(found["plans"][0]["ranked"][0]["prediction"]["step_s"])
        refused = [r["detail"] for r in found["plans"][0]["rejected"]]
        assert any("--kfac needs whole layers" in detail for detail in refused) == bool(more)
        assert "does not know" not in told.err
    assert ranked[0] == ranked[1] and steps[0] > steps[1]


@pytest.fixture
def built() -> Iterator[Any]:
    """A model of one CPU rank, and its K-FAC."""
    with cpu_of_one() as device:
        own = resolve(parse_args([*TINY.split(), "--kfac", "--train-iters", "1"]), 1)
        own = own.replace(padded_vocab_size=128)
        groups = groups_of(own)
        model = build_model(own, groups, device)
        (kfac,) = build_features(own, model, groups)
        yield model, kfac


def test_a_restart_forgets(built: Any) -> None:
    torch.manual_seed(6)
    kfac: Kfac = built[1]
    factors = kfac.factors[0]
    grad = torch.randn(factors.weight.shape)

    def refresh(value: float) -> torch.Tensor:
        kfac.begin()
        for total in factors.sums.values():
            total.copy_(torch.randn(len(total), len(total)).mul(value))
            total.copy_(total @ total.T)
        factors.refresh()
        return factors.product(grad)

    good = refresh(1.0)
    kfac.begin()
    assert not factors.is_on, "its steps are counted on"
    for _ in range(9):
        kfac.begin()
    assert factors.is_on and not torch.equal(refresh(1.0), good)
    kfac.restart()
    assert torch.equal(refresh(math.nan), grad), "nothing of before is left"
    kfac.restart()
    kfac.begin(may_refresh=False)
    assert not factors.is_on
    kfac.begin()
    assert factors.is_on


def test_a_change_of_layout_finds_room_for_its_covariances(built: Any) -> None:
    model, kfac = built
    weights = sum(p.numel() for chunk in model.chunks for p in chunk.parameters())
    needed, released = kfac.relayout_bytes(None, weights // 2)
    assert released == 0 and needed == pytest.approx(kfac.covariance_bytes, rel=1e-3)
    for factors in kfac.factors:
        factors.begin()
        for total in factors.sums.values():
            total += torch.eye(len(total))
        factors.refresh()
    assert kfac.relayout_bytes(None, weights)[1] == kfac.covariance_bytes > 0


def test_the_model_goes_with_its_last_user(built: Any) -> None:
    model, kfac = built
    layer = model.unwrapped[0].decoder.layers[0].mlp.linear_fc1
    gone = weakref.ref(kfac.factors[0])
    assert len(kfac.factors) == 4 * 4 and layer._forward_hooks
    kfac.remove_hooks()
    gc.collect()
    assert not layer._forward_hooks
    # Whoever still has the object holds no layer by it.
    assert kfac.factors == kfac.own == [] and gone() is None
