"""The noise callback refuses what makes no sense and stops measuring on a contradiction."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.gns_callback import (
    STATE_KEY,
    Contradiction,
    GradientNoiseCallback,
    noise_fields,
)
from copus_ext.gns.estimators import Weights, choose
from copus_ext.gns.hooks import GROUPS, StepNorms, group_of, unavailable_groups
from copus_ext.gns.observer import NoiseObserver


def norms(*, small: float, big: float, estimator: Any = "micro") -> StepNorms:
    """Four micro-batches of two samples."""
    return StepNorms(
        estimator=estimator,
        small={name: 4 * small / len(GROUPS) for name in GROUPS},
        big={name: big / len(GROUPS) for name in GROUPS},
        small_weights=Weights(signal=4.0, noise=2.0),
        small_expert_weights=Weights(signal=4.0, noise=2.0),
        big_weights=Weights(signal=1.0, noise=1 / 8),
        tokens=256.0,
        tokens_per_sample=32.0,
        are_small_equal=True,
    )


def observed(steps: int, *, small: float = 10.0, start: int = 0, observer: Any = None) -> Any:
    """An observer that has seen so many equal steps of eight samples."""
    observer = observer or NoiseObserver()
    observer.layout_estimator = "micro"
    for step in range(1, steps + 1):
        observer.update(
            {"layers": norms(small=small, big=4.0).estimate(("mlp",))},
            estimator="micro",
            global_batch_size=8,
            consumed_samples=start + 8 * step,
            tokens=256.0,
        )
    return observer


def judge(step: StepNorms | None, grad_norm: float | None) -> dict[str, Any]:
    controller = GradientNoiseCallback(CopusConfig(copus=True))
    controller.sets = {"layers": ("attention", "mlp")}
    info = SimpleNamespace(global_batch_size=8, updated=True)
    context: Any = SimpleNamespace(grad_norm=grad_norm, step=info)
    return controller._estimates(step, context)


def test_what_is_a_contradiction() -> None:
    step = norms(small=10.0, big=4.0)
    assert judge(step, 2.0) and judge(step, 2.0 * 1.0009)
    with pytest.raises(Contradiction, match=r"2\.1"):  # another norm than the optimizer's
        judge(step, 2.1)
    # Small gradients of equal weight have no less norm than their mean.
    less = norms(small=3.0, big=4.0)
    with pytest.raises(Contradiction, match="cannot give"):
        judge(less, 2.0)
    unequal = judge(dataclasses.replace(less, are_small_equal=False), 2.0)
    assert unequal["layers"].grad_variance_trace < 0
    # A step without numbers contradicts nothing.
    none = Weights(signal=0.0, noise=0.0)
    masked = dataclasses.replace(norms(small=0.0, big=4.0), small_weights=none)
    assert judge(step, None) == judge(None, 2.0) == judge(masked, 2.0) == {}


def test_after_a_contradiction_nothing_is_published(caplog: pytest.LogCaptureFixture) -> None:
    controller = GradientNoiseCallback(CopusConfig(copus=True))
    controller.observer = observed(5)
    assert controller.observer.noise().status == "ok"
    with caplog.at_level(logging.ERROR):
        controller._disable("two and two are five")
    noise = controller.observer.noise()
    assert (noise.status, noise.estimator, noise.phi_samples) == ("none", "none", None)
    assert "two are five" in caplog.text and "training goes on" in caplog.text
    assert "no longer measured" in noise_fields(noise, ended=True)[0]
    with pytest.raises(ValueError, match="ended with an error"):
        NoiseObserver.from_json(controller.observer.to_json(), half_life_tokens=None)


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
    if micro_batches == 1 and not fused:  # where one is the other
        assert choose("micro", dp=dp, num_microbatches=1, fused_accumulation=False) == want


def test_the_line_says_what_is_known() -> None:
    observer = NoiseObserver()
    assert "nothing to compare" in noise_fields(observer.noise())[0]
    observer.layout_estimator = "micro"
    assert "not measured yet" in noise_fields(observer.noise())[0]
    observer = observed(30)
    fields = noise_fields(observer.noise())
    assert fields == ["noise scale (samples): 8.0", "95% interval: 8.0 to 8.0"]


def test_a_gap_ages_what_was_known_before_it() -> None:
    """Ten half-lives without a measurement: the next ones decide."""

    def empty() -> NoiseObserver:
        return NoiseObserver(half_life_tokens=4096.0)

    known = observed(50, small=10.0, observer=empty())
    before = known.noise().phi_samples
    gap = 8 * 50 * 20
    known.skip(gap)
    assert known.age_tokens == pytest.approx((gap - 400) * 32)
    assert known.noise().phi_samples == before
    after = observed(3, small=6.0, start=gap, observer=known).noise().phi_samples
    fresh = observed(3, small=6.0, observer=empty()).noise().phi_samples
    assert after == pytest.approx(fresh, rel=0.02) and after < 0.5 * before


def test_a_run_without_the_controller_in_between_is_a_gap() -> None:
    later = NoiseObserver.from_json(observed(50).to_json(), half_life_tokens=None)
    later.skip(10_000)
    assert later.age_tokens == pytest.approx((10_000 - 400) * 32)


def test_only_what_the_layout_measures_is_listed_and_the_last_value_kept() -> None:
    observer = observed(5)
    assert list(observer.ratios(["layers", "embedding"])) == ["layers"]
    observer.layout_estimator = None
    observer.skip(80)
    noise = observer.noise()
    assert noise.estimator == "none" and noise.phi_samples and noise.age_tokens > 0


def test_a_state_of_another_version_is_refused() -> None:
    record = NoiseObserver().to_json()
    assert NoiseObserver.from_json(record, half_life_tokens=None).to_json() == record
    with pytest.raises(ValueError, match="it has version 99, and this copus reads 2"):
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
        "decoder.layers.0.self_attention.linear_kv_up_proj.weight": (matrix, "attention"),
        "decoder.layers.0.self_attention.linear_kv_down_proj.weight": (matrix, "vectors"),
        "mtp.layers.0.eh_proj.weight": (matrix, "mlp"),
        "mtp.layers.0.transformer_layer.mlp.linear_fc1.weight": (matrix, "mlp"),
        "decoder.layers.0.mlp.router.weight": (matrix, "router"),
        "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight": (matrix, "experts"),
        "decoder.layers.0.mlp.experts.linear_fc2.weight3": (matrix, "experts"),
        "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.bias": (vector, "experts"),
        "decoder.layers.0.mlp.shared_experts.linear_fc1.weight": (matrix, "mlp"),
        "decoder.layers.0.mlp.shared_experts.gate_weight": (matrix, "router"),
    }
    assert {name: group_of(name, p) for name, (p, _) in names.items()} == {
        name: group for name, (_, group) in names.items()
    }
    with pytest.raises(ValueError, match="adapter"):
        group_of("decoder.layers.0.adapter.weight", matrix)


def test_groups_in_parts_are_left_out() -> None:
    layout = {"tp": 2, "pp": 2, "sequence_parallel": False, "qk_layernorm": False}
    dense = {"experts", "router"}
    assert unavailable_groups(**layout, shared_embeddings=False) - dense == set()
    assert unavailable_groups(**layout, shared_embeddings=True) - dense == {"embedding"}
    parallel = {**layout, "sequence_parallel": True}
    assert unavailable_groups(**parallel, shared_embeddings=False) == {"vectors", *dense}
    for ranks, left_out in ((1, {"experts", "router"}), (2, {"router"}), (4, {"router"})):
        found = unavailable_groups(**layout, shared_embeddings=False, expert_ranks=ranks)
        assert found == left_out


def test_the_papers_averages_forget_by_step() -> None:
    observer = NoiseObserver(per_step=True)
    observed(10, observer=observer)
    before = observer.noise().grad_norm_sq
    observed(1, small=20.0, start=80, observer=observer)
    after = observer.noise().grad_norm_sq
    ordinary = observed(1, small=20.0, start=80, observer=observed(10)).noise().grad_norm_sq
    assert before is not None and after is not None and ordinary is not None
    g2 = norms(small=20.0, big=4.0).estimate(("mlp",)).grad_norm_sq
    weight = 0.05 / (1 - 0.95**11)
    assert after == pytest.approx((1 - weight) * before + weight * g2)
    assert ordinary != pytest.approx(after)
    again = NoiseObserver.from_json(observer.to_json(), half_life_tokens=None, per_step=True)
    assert again.noise().grad_norm_sq == observer.noise().grad_norm_sq


def test_the_half_life_counts_samples_also_where_nothing_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One replica with one micro-batch a step has nothing to compare, and growth by a schedule
    waits for a half-life."""
    monkeypatch.setattr(GradientNoiseCallback, "_add_hooks", lambda self, context: None)
    context: Any = SimpleNamespace(
        config=SimpleNamespace(batch=SimpleNamespace(seq_length=2048)),
        state=SimpleNamespace(iteration=0, callbacks={}),
    )
    callback = GradientNoiseCallback(CopusConfig(copus=True, copus_policy="doubling"))
    callback.on_setup_start(context)
    for step in range(1, 4):
        callback.observer.skip(8 * step)
    assert callback.observer.half_life_samples == pytest.approx(215, abs=1)
    context.state.callbacks[STATE_KEY] = callback.observer.to_json()
    callback.on_setup_start(context)
    assert callback.observer.num_skipped == 3
    assert callback.observer.half_life_samples == pytest.approx(215, abs=1)
    context.config.batch.seq_length = 4096
    callback.on_segment_start(context)
    assert callback.observer.half_life_samples == pytest.approx(107, abs=1)
    observed(1, observer=callback.observer)
    measured = callback.observer.to_json()["half_life_tokens"] / 32
    assert callback.observer.half_life_samples == measured
