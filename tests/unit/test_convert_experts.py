"""Conversion of mixtures of experts: which tensors they hold, what it keeps and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from copus_ext.commands import convert_checkpoint, inspect_checkpoint
from megatron.trainer.checkpoint.convert import contents
from megatron.trainer.checkpoint.convert.archive import Archive, open_archive
from megatron.trainer.checkpoint.convert.convert import convert
from megatron.trainer.checkpoint.convert.target import Changes
from megatron.trainer.checkpoint.files import OUR_KEY
from megatron.trainer.common.errors import Refused
from megatron.trainer.common.train_state import TrainState
from tests.helpers.checkpoints import (
    BIASED,
    ITERATION,
    MIXTURE,
    SHARED,
    command,
    cut_like_ranks,
    index_of,
    make_checkpoint,
)

MODELS = {"mixture": MIXTURE, "shared": SHARED, "biased": BIASED}
EXPERTS = "mlp.experts.experts."
BIAS = "decoder.layers.mlp.router.expert_bias"


def opened(root: Path) -> Archive:
    return open_archive(root, step=None)


def tensors(root: Path) -> dict[str, torch.Tensor]:
    archive = opened(root)
    return {key: archive.read(key) for key in archive.tensors}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]), key


def parts(flags: dict[str, Any], prefix: str) -> dict[str, tuple[int, ...]]:
    weights = contents.expected_weights(flags)
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def test_experts_stand_in_place_of_the_mlp() -> None:
    found = parts(MIXTURE, contents.LAYERS)
    assert {k: v for k, v in found.items() if "attention" not in k} == {
        "pre_mlp_layernorm.weight": (4, 16),
        "mlp.router.weight": (4, 4, 16),
        f"{EXPERTS}linear_fc1.weight": (4, 4, 24, 16),
        f"{EXPERTS}linear_fc2.weight": (4, 4, 16, 12),
    }
    assert contents.expected_weights(BIASED)[BIAS] == (4, 4)
    biases = parts({**MIXTURE, "add_bias_linear": True}, contents.LAYERS)
    assert biases["mlp.router.bias"] == (4, 4)
    assert biases[f"{EXPERTS}linear_fc1.bias"] == (4, 4, 24)
    assert biases[f"{EXPERTS}linear_fc2.bias"] == (4, 4, 16)


def test_layers_of_two_kinds_have_keys_of_their_own() -> None:
    dense, first = parts(SHARED, f"{contents.LAYERS}0."), parts(SHARED, f"{contents.LAYERS}1.")
    assert dense["mlp.linear_fc1.weight"] == (48, 16) and "mlp.router.weight" not in dense
    assert first["mlp.shared_experts.linear_fc1.weight"] == (16, 16)
    assert first["mlp.shared_experts.linear_fc2.weight"] == (16, 8)
    assert first["mlp.shared_experts.gate_weight"] == (1, 16)
    assert first[f"{EXPERTS}linear_fc1.weight"] == (4, 24, 16)
    # A number, or a list that Megatron-LM has read already.
    for freq in ("2", 2, [1, 0, 1, 0]):
        keys = contents.expected_weights({**MIXTURE, "moe_layer_freq": freq})
        assert f"{contents.LAYERS}1.mlp.linear_fc1.weight" in keys
        assert f"{contents.LAYERS}2.mlp.router.weight" in keys
    with pytest.raises(Refused, match="moe_layer_freq is '0'"):
        contents.expected_weights({**MIXTURE, "moe_layer_freq": "0"})


@pytest.mark.parametrize(
    ("key", "axes"),
    [
        ("embedding.word_embeddings.weight", 0),
        ("decoder.layers.mlp.linear_fc1.weight", 1),
        (f"decoder.layers.{EXPERTS}linear_fc1.weight", 2),
        (f"optimizer.state.exp_avg.decoder.layers.{EXPERTS}linear_fc2.weight", 2),
        ("decoder.layers.12.mlp.linear_fc1.weight", 0),
        (f"decoder.layers.12.{EXPERTS}linear_fc1.weight", 1),
        ("decoder.layers.mlp.shared_experts.linear_fc1.weight", 1),
    ],
)
def test_layers_and_experts_are_leading_axes(key: str, axes: int) -> None:
    assert contents.leading_axes(key) == axes


@pytest.mark.parametrize("model", MODELS)
def test_another_layout_keeps_tensors_and_state_of_the_trainer(tmp_path: Path, model: str) -> None:
    state = TrainState(iteration=ITERATION, consumed_samples=40)
    state.expert_fractions, state.expert_biases = [[0.25] * 4] * 4, [[0.1, -0.1, 0.0, 0.0]] * 4
    how: dict[str, Any] = {**MODELS[model], "change": cut_like_ranks, "ours": True, "state": state}
    source = make_checkpoint(tmp_path / "a", **how)
    outcome = convert(source, tmp_path / "b", Changes(tp=1, pp=2, ep=4, dp=4), verify=True)
    assert (outcome.layout, outcome.num_rewritten) == ("tp1.pp2.ep4.dp4", 0)
    same(tensors(source), tensors(tmp_path / "b"))
    archive = opened(tmp_path / "b")
    assert archive.arguments["expert_model_parallel_size"] == 4
    assert archive.arguments["expert_tensor_parallel_size"] is None
    ours = archive.common[OUR_KEY]
    assert ours["layout"] == {"tp": 1, "pp": 2, "vpp": 1, "dp": 4, "ep": 4}
    assert TrainState.from_json(ours["train_state"]) == state


def test_a_tensor_size_for_experts_follows_the_other_until_it_is_given(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "a", **{**MIXTURE, "sequence_parallel": False})
    assert convert(source, tmp_path / "b", Changes(tp=4, ep=1)).layout == "tp4.pp1.dp2"
    # The trainer turns it on for a mixture by itself.
    assert opened(tmp_path / "b").arguments["sequence_parallel"] is True
    outcome = convert(tmp_path / "b", tmp_path / "c", Changes(etp=1, ep=4))
    assert outcome.layout == "tp4.pp1.ep4.etp1.dp2"
    arguments = opened(tmp_path / "c").arguments
    assert arguments["expert_tensor_parallel_size"] == 1
    assert convert(tmp_path / "c", tmp_path / "d", Changes(etp=4, ep=1)).layout == "tp4.pp1.dp2"


def test_illegal_sizes_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixture = make_checkpoint(tmp_path / "a", **MIXTURE)
    dense = make_checkpoint(tmp_path / "dense")
    for source, flags, code, words in (
        (mixture, ("--ep", 3, "--dp", 3), 3, "--num-experts 4 is not divisible by 3"),
        (mixture, ("--ep", 4, "--dp", 1), 2, "--ep"),
        (mixture, ("--etp", 0), 2, "--etp 0"),
        (mixture, ("--etp", 8, "--dp", 8, "--ep", 1), 3, "--moe-ffn-hidden-size 12"),
        (dense, ("--ep", 2), 3, "the model has none"),
    ):
        got, _, err = command(capsys, convert_checkpoint, source, tmp_path / "made", *flags)
        assert got == code and words in err and not (tmp_path / "made").exists(), err


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("model", MODELS)
def test_plain_to_distributed_and_back_keeps_every_bit(
    tmp_path: Path, model: str, dtype: str
) -> None:
    source = make_checkpoint(tmp_path / "a", dtype=dtype, optimizer="plain", **MODELS[model])
    convert(source, tmp_path / "b", Changes(optimizer="distributed"), verify=True)
    convert(tmp_path / "b", tmp_path / "c", Changes(optimizer="plain"), verify=True)
    same(tensors(source), tensors(tmp_path / "c"))
    a, b, c = (opened(tmp_path / name).common["optimizer"] for name in "abc")
    assert a == c and b.keys() == {0, 1}
    for part in b.values():
        assert part.keys() == {"optimizer", "param_state_sharding_type"}


@pytest.mark.parametrize("model", MODELS)
def test_vocabulary_and_number_format_change_as_in_a_dense_model(
    tmp_path: Path, model: str
) -> None:
    source = make_checkpoint(tmp_path / "a", change=cut_like_ranks, **MODELS[model])
    convert(source, tmp_path / "b", Changes(dtype="fp32", vocab=192), verify=True)
    before, after = tensors(source), tensors(tmp_path / "b")
    key = next(key for key in after if key.endswith(f"{EXPERTS}linear_fc1.weight"))
    assert torch.equal(after[key], before[f"optimizer.state.param.{key}"])
    convert(tmp_path / "b", tmp_path / "c", Changes(dtype="bf16", vocab=128), verify=True)
    same(before, tensors(tmp_path / "c"))
    convert(source, tmp_path / "d", Changes(optimizer="none"), verify=True)
    assert not any(key.startswith("optimizer.") for key in opened(tmp_path / "d").tensors)


def test_biases_of_experts_stay_fp32_and_have_no_moments(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "a", **BIASED)
    before = opened(source).read(BIAS)
    for number, changes in enumerate((Changes(dtype="fp16"), Changes(optimizer="none"))):
        convert(source, tmp_path / str(number), changes, verify=True)
        after = opened(tmp_path / str(number))
        assert after.read(BIAS).dtype == torch.float32 and torch.equal(after.read(BIAS), before)
        assert [key for key in after.tensors if key.endswith("expert_bias")] == [BIAS]


@pytest.mark.parametrize(
    "lost", ["router.weight", "router.expert_bias", "experts.linear_fc2.weight"]
)
def test_a_part_of_a_mixture_that_is_missing_is_named(tmp_path: Path, lost: str) -> None:
    def drop(pieces: list[Any]) -> None:
        del pieces[index_of(pieces, lost)]

    source = make_checkpoint(tmp_path / "a", change=drop, **BIASED)
    with pytest.raises(Refused, match=lost):
        convert(source, tmp_path / "b", Changes())


def test_a_mixture_that_predicts_further_tokens_is_refused() -> None:
    with pytest.raises(Refused, match="num_experts is 4 and mtp_num_layers is 1"):
        contents.expected_weights({**MIXTURE, "mtp_num_layers": 1})


def test_inspection_shows_experts_and_the_sizes_they_load_under(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_checkpoint(tmp_path / "a", **SHARED)
    code, out, _ = command(capsys, inspect_checkpoint, source, "--json", "--verify")
    record = json.loads(out)
    assert code == 0 and record["verified"] and record["layout"] == "tp2.pp1.ep2.dp2"
    assert record["experts"] == {"num_experts": 4, "topk": 2, "layers": 3, "shared": 8}
    loads = record["loads_under"]
    assert loads["tp"] == [1, 2, 4] and loads["ep"] == [1, 2, 4]
    assert loads["etp"] == [1, 2, 3, 4, 6, 12]
    code, out, _ = command(capsys, inspect_checkpoint, source)
    assert code == 0 and "4 experts in 3 layers, 2 of them for each token" in out
    assert "loads under --ep 1, 2, 4" in out
    code, out, _ = command(capsys, inspect_checkpoint, make_checkpoint(tmp_path / "b"), "--json")
    assert json.loads(out)["experts"] is None and "ep" not in json.loads(out)["loads_under"]
