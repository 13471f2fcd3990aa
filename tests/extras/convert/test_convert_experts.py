"""Conversion of mixtures of experts: which tensors they hold, what it keeps and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.trainer.checkpoint.files import OUR_KEY
from megatron.trainer.common.errors import Refused
from megatron.trainer.common.train_state import TrainState
from megatron.trainer.extras.convert import command as convert_checkpoint
from megatron.trainer.extras.convert.convert import convert
from megatron.trainer.extras.convert.target import Changes
from megatron.trainer.extras.inspect_checkpoint.archive import Archive, open_archive
from tests.extras.convert.checkpoints import cut_like_ranks
from tests.helpers.checkpoints import (
    BIASED,
    ITERATION,
    MIXTURE,
    SHARED,
    command,
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
