"""The controller refuses what makes no sense and stops measuring when numbers contradict."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from copus_ext.config import CopusConfig
from copus_ext.controller import Controller, noise_line
from copus_ext.noise.estimators import Weights
from copus_ext.noise.observer import NoiseObserver
from copus_ext.noise.parameters import GROUPS, group_of, unavailable_groups
from copus_ext.noise.tap import StepNorms, choose
from megatron.training.errors import UsageError


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"copus_mode": "act"}, "--copus-mode act"),
        ({"copus_gns_interval": 0}, "--copus-gns-interval 0"),
        ({"copus_gns_half_life_tokens": 0.0}, "--copus-gns-half-life-tokens 0"),
    ],
)
def test_flags_are_checked(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Controller(CopusConfig(copus=True, **flags))


def norms(*, small: float, big: float, estimator: Any = "micro") -> StepNorms:
    """Four micro-batches of two samples."""
    return StepNorms(
        estimator=estimator,
        small={name: 4 * small / len(GROUPS) for name in GROUPS},
        big={name: big / len(GROUPS) for name in GROUPS},
        small_weights=Weights(signal=4.0, noise=2.0),
        big_weights=Weights(signal=1.0, noise=1 / 8),
        tokens=256.0,
        tokens_per_sample=32.0,
    )


def is_sound(step: StepNorms, grad_norm: float | None) -> tuple[bool, Controller]:
    controller = Controller(CopusConfig(copus=True))
    context: Any = SimpleNamespace(grad_norm=grad_norm, step=SimpleNamespace(global_batch_size=8))
    return controller._is_sound(step, context), controller


def test_a_norm_that_is_not_the_optimizers_ends_the_measurement(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert is_sound(norms(small=10.0, big=4.0), 2.0)[0]
    assert is_sound(norms(small=10.0, big=4.0), 2.0 * 1.0009)[0]
    with caplog.at_level(logging.ERROR):
        sound, controller = is_sound(norms(small=10.0, big=4.0), 2.1)
    assert not sound and controller._broken
    assert "2.1" in caplog.text and "training goes on" in caplog.text


def test_micro_batches_with_less_norm_than_the_batch_end_the_measurement() -> None:
    sound, controller = is_sound(norms(small=3.0, big=4.0), 2.0)
    assert not sound and controller._broken
    assert is_sound(norms(small=3.0, big=4.0, estimator="half"), 2.0)[0]


def test_a_skipped_step_is_no_contradiction() -> None:
    sound, controller = is_sound(norms(small=10.0, big=4.0), None)
    assert not sound and not controller._broken


@pytest.mark.parametrize(
    ("dp", "micro_batches", "fused", "want"),
    [
        (1, 2, False, "micro"),
        (4, 2, False, "micro"),
        (4, 1, False, "rank"),
        (4, 8, True, "rank"),
        (1, 8, True, "half"),
        (1, 1, False, None),
        (1, 1, True, None),
    ],
)
def test_auto(dp: int, micro_batches: int, fused: bool, want: str | None) -> None:
    got = choose("auto", dp=dp, num_microbatches=micro_batches, fused_accumulation=fused)
    assert got == want


def test_the_line_says_what_is_known() -> None:
    observer = NoiseObserver()
    assert "one micro-batch on one replica" in noise_line(observer.noise())
    observer.layout_estimator = "micro"
    assert "not measured yet" in noise_line(observer.noise())
    step = norms(small=10.0, big=4.0)
    for _ in range(30):
        observer.take(
            {"layers": step.estimate(("mlp",))},
            estimator="micro",
            global_batch_size=8,
            consumed_samples=8,
            tokens=256.0,
        )
    line = noise_line(observer.noise())
    assert "noise scale (samples): 8.0 | 95% interval: 8.0 to 8.0" in line
    assert "estimator: micro | age (tokens): 0 |" in line


def test_a_state_of_another_version_is_refused() -> None:
    record = NoiseObserver().to_json()
    assert NoiseObserver.from_json(record, half_life_tokens=None).to_json() == record
    with pytest.raises(ValueError, match="version"):
        NoiseObserver.from_json({**record, "version": 99}, half_life_tokens=None)


def test_every_parameter_has_its_group() -> None:
    import torch

    matrix, vector = torch.zeros(2, 2), torch.zeros(2)
    names = {
        "embedding.word_embeddings.weight": (matrix, "embedding"),
        "embedding.position_embeddings.weight": (matrix, "embedding"),
        "decoder.layers.0.self_attention.linear_qkv.weight": (matrix, "attention"),
        "decoder.layers.0.self_attention.linear_qkv.bias": (vector, "vectors"),
        "decoder.layers.0.mlp.linear_fc1.weight": (matrix, "mlp"),
        "decoder.layers.0.input_layernorm.weight": (vector, "vectors"),
        "decoder.final_layernorm.weight": (vector, "vectors"),
        "output_layer.weight": (matrix, "head"),
    }
    assert {name: group_of(name, p) for name, (p, _) in names.items()} == {
        name: group for name, (_, group) in names.items()
    }
    with pytest.raises(ValueError, match="router"):
        group_of("decoder.layers.0.router.weight", matrix)


def test_groups_in_parts_are_left_out() -> None:
    layout = {"tp": 2, "pp": 2, "sequence_parallel": False, "qk_layernorm": False}
    assert unavailable_groups(**layout, tied_embeddings=False) == set()
    assert unavailable_groups(**layout, tied_embeddings=True) == {"embedding"}
    parallel = {**layout, "sequence_parallel": True}
    assert unavailable_groups(**parallel, tied_embeddings=False) == {"vectors"}
