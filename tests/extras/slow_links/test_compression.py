"""Gradients in fewer numbers: factors, what is left of them, and the flags."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.rules import check_run
from megatron.trainer.common.errors import UsageError
from megatron.trainer.extras.slow_links.low_rank import LowRankMessages
from megatron.trainer.extras.slow_links.powersgd import CompressedMatrix, is_compressed
from tests.helpers.examples import config_of, names_a_way_on

config = partial(config_of, world=2)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--grad-compression-rank -1", ["--grad-compression-rank -1", "negative"]),
        ("--grad-compression-rank 4 --grad-compression-stages 0", ["--grad-compression-stages 0"]),
        ("--grad-compression-stages 1", ["needs --grad-compression-rank"]),
        ("--grad-compression-rank 4 --overlap-grad-reduce", ["excludes --overlap-grad-reduce"]),
        ("--grad-compression-rank 4 --fp16", ["excludes --fp16", "--bf16"]),
        (
            "--grad-compression-rank 4 --calculate-per-token-loss",
            ["excludes --calculate-per-token-loss"],
        ),
        ("--pipeline-message-rank 0", ["--pipeline-message-rank 0", "drop it"]),
        ("--pipeline-message-rank 4 --fp16", ["excludes --fp16", "--bf16"]),
        (
            "--pipeline-message-rank 4 --pipeline-message-bits 8",
            ["excludes --pipeline-message-bits 8"],
        ),
        (
            "--pipeline-message-rank 4 --pipeline-model-parallel-size 2 --global-batch-size 4 "
            "--num-virtual-stages-per-pipeline-rank 2",
            ["plain pipeline"],
        ),
    ],
)
def test_flags_that_do_not_go_together(flags: str, parts: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        config(flags)
    text = str(error.value)
    assert all(part in text for part in parts), text
    assert all(names_a_way_on(line) for line in text.splitlines()), text


def test_a_run_is_told_what_compression_does() -> None:
    def notes(flags: str, world: int) -> str:
        return " ".join(config(flags, world=world).runtime.notes)

    assert "unknown amount" in notes("--grad-compression-rank 4", 2)
    assert "without effect" not in notes("--grad-compression-rank 4", 2)
    assert "without effect" in notes("--grad-compression-rank 4", 1)
    assert "without effect" not in notes("--grad-compression-rank 4 --context-parallel-size 2", 2)
    assert "unknown amount" in notes("--pipeline-message-rank 4", 2)
    assert "unknown amount" not in notes("--pipeline-message-bits 8", 2)
    assert "without effect" in notes("--pipeline-message-rank 4", 2)
    piped = "--pipeline-model-parallel-size 2"
    assert "without effect" not in notes(f"--pipeline-message-rank 4 {piped}", 2)
    batch = "--global-batch-size 4"
    later = f"--pipeline-message-rank 4 {batch} --layout-schedule 50%:tp1.pp2.dp1"
    assert "without effect" not in notes(later, 2)
    stages = "--grad-compression-rank 4 --grad-compression-stages"
    assert "all stages compress" in notes(f"{stages} 3 {piped}", 4)
    assert "all stages compress" not in notes(f"{stages} 2 {piped}", 4)
    assert "all stages compress" not in notes(f"{stages} 1", 2)


@pytest.mark.parametrize("flag", ["--grad-compression-rank", "--pipeline-message-rank"])
def test_the_controller_does_not_weigh_layouts_whose_loss_it_does_not_know(flag: str) -> None:
    run = config(f"{flag} 4")
    free = CopusConfig(copus=True, copus_layouts="all")
    with pytest.raises(UsageError, match=rf"{flag}.*--copus-layouts current"):
        check_run(free, run)
    check_run(free, config(""))
    check_run(CopusConfig(copus=True, copus_layouts="current"), run)
    check_run(CopusConfig(copus=True, copus_layouts="all", copus_mode="observe"), run)


@pytest.mark.parametrize(
    ("name", "shape", "is_short"),
    [
        ("decoder.layers.0.self_attention.linear_qkv.weight", (96, 32), True),
        ("decoder.layers.0.mlp.linear_fc1.weight", (128, 32), True),
        ("decoder.layers.0.mlp.shared_experts.linear_fc2.weight", (32, 128), True),
        # 4 (4 + 128) numbers in place of 4 x 128.
        ("decoder.layers.0.mlp.linear_fc1.weight", (4, 128), False),
        ("decoder.layers.0.mlp.linear_fc1.bias", (128,), False),
        ("decoder.layers.0.mlp.router.weight", (64, 512), False),
        ("decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight", (96, 32), False),
        ("embedding.word_embeddings.weight", (512, 32), False),
        ("output_layer.weight", (512, 32), False),
    ],
)
def test_what_goes_as_factors(name: str, shape: tuple[int, ...], is_short: bool) -> None:
    assert is_compressed(name, shape, 4) is is_short


def finished(gradient: torch.Tensor, residual: torch.Tensor) -> tuple[CompressedMatrix, Any]:
    """A matrix of one replica after a step with that gradient."""
    param = SimpleNamespace(shape=gradient.shape, main_grad=gradient.clone())
    matrix = CompressedMatrix(param, 2)
    before = matrix.right.clone()
    matrix.residual.copy_(residual + gradient)
    left = torch.linalg.qr(matrix.residual.nan_to_num(0, 0, 0) @ matrix.right).Q
    matrix.finish(left, matrix.residual.T @ left, 1)
    return matrix, before


def test_the_rest_of_a_gradient_waits() -> None:
    torch.manual_seed(0)
    gradient, residual = torch.randn(6, 5), torch.randn(6, 5)
    matrix, _ = finished(gradient, residual)
    sent = matrix.param.main_grad
    assert torch.linalg.matrix_rank(sent) == 2
    torch.testing.assert_close(sent + matrix.residual, gradient + residual)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_leaves_no_trace(value: float) -> None:
    gradient = torch.randn(6, 5)
    gradient[2, 3] = value
    matrix, before = finished(gradient, torch.randn(6, 5))
    assert matrix.param.main_grad.isnan().all(), "every rank skips the step"
    assert not matrix.residual.any() and torch.equal(matrix.right, before)


def test_messages_of_low_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    torch.manual_seed(0)
    shape = torch.Size((4, 2, 6))
    codec = LowRankMessages(2)
    assert codec.is_shorter((4, 2, 6)) and not codec.is_shorter((1, 2, 6))
    one = (torch.randn(8, 2) @ torch.randn(2, 6)).view(shape)
    message = codec.encode(one)
    assert message.shape == codec.room(shape, one.dtype).shape == (2 * (8 + 6),)
    torch.testing.assert_close(codec.decode(message, shape, one.dtype), one)
    many = torch.randn(shape)
    bad = many.clone()
    bad[0, 0, 0] = torch.inf
    assert not codec.decode(codec.encode(bad), shape, one.dtype).isfinite().all()
    off = (codec.decode(codec.encode(many), shape, one.dtype) - many).norm() / many.norm()
    for _ in range(20):
        message = codec.encode(many)
    # The second factor of one message begins the next: the same matrix is met better each time.
    singular = torch.linalg.svdvals(many.view(8, 6))
    best = singular[2:].norm() / many.norm()
    last = (codec.decode(message, shape, one.dtype) - many).norm() / many.norm()
    assert best * 0.999 < last < off and last == pytest.approx(best.item(), rel=1e-3)
