"""Converted checkpoints load under the target and train on as the originals do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing import load_common_state_dict, load_plain_tensors
from megatron.core.safe_globals import register_safe_globals

from megatron.trainer.checkpoint.files import folder_of
from megatron.trainer.extras.inspect_checkpoint.archive import open_archive
from tests.extras.convert.worker import AFTER, BEFORE, CASES
from tests.helpers.on_ranks import on_ranks
from tests.helpers.one_rank import cpu_of_one

pytestmark = pytest.mark.usefixtures("single_process_group")
SAME_LOSS = [name for name in CASES if name not in ("vocab", "vocab_dp", "dtype")]


@pytest.fixture(scope="module")
def single_process_group() -> Iterator[None]:
    """A world of one rank, in which megatron-core loads a checkpoint."""
    with cpu_of_one():
        yield


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("convert")
    on_ranks("tests.extras.convert.worker", folder, 2, timeout_s=600)
    return folder


@pytest.mark.parametrize("name", SAME_LOSS)
def test_the_next_losses_are_those_of_the_original(output: Path, name: str) -> None:
    losses = json.loads((output / "result.json").read_text())[name]
    assert len(losses["direct"]) == AFTER
    assert losses["converted"] == pytest.approx(losses["direct"], rel=1e-5)


@pytest.mark.parametrize("name", ["vocab", "vocab_dp"])
def test_without_padding_a_run_goes_on_with_another_softmax(output: Path, name: str) -> None:
    losses = json.loads((output / "result.json").read_text())[name]
    assert len(losses["converted"]) == AFTER
    assert max(losses["converted"]) < min(losses["direct"]) - 0.5  # 128 instead of 512 choices


def test_rectangles_of_ranks_are_put_together(output: Path) -> None:
    saved, converted = (
        open_archive(output / name, step=None) for name in ("vocab_dp", "converted-vocab_dp")
    )
    states = [t for key, t in saved.tensors.items() if key.startswith("optimizer.state.")]
    assert any(len(t.chunks) > t.shape[0] and t.chunks[0].size[0] == 1 for t in states)
    places: dict[str, set[str]] = {}
    for index, where in saved.storage().items():
        places.setdefault(index.fqn, set()).add(where.relative_path)
    assert any(len(places[t.key]) > 1 for t in states)
    for key, tensor in converted.tensors.items():
        whole = slice(None, 128) if tensor.shape[0] == 128 else slice(None)
        assert torch.equal(converted.read(key), saved.read(key)[whole]), key


def test_in_fp32_a_run_goes_on_from_the_masters(output: Path) -> None:
    losses = json.loads((output / "result.json").read_text())["dtype"]
    assert losses["converted"] == pytest.approx(losses["direct"], rel=1e-2)
    assert losses["converted"] != losses["direct"]


@pytest.mark.parametrize("name", SAME_LOSS)
def test_stock_megatron_core_reads_the_same_bits(output: Path, name: str) -> None:
    register_safe_globals()
    folders = [folder_of(output / part, BEFORE) for part in (name, f"converted-{name}")]
    before, after = (
        {k: v for k, v in load_plain_tensors(str(f)).items() if isinstance(v, torch.Tensor)}
        for f in folders
    )
    shared = before.keys() & after.keys()
    assert {k for k in shared if "exp_avg" in k} == {k for k in before if "exp_avg" in k}
    assert [k for k in sorted(shared) if not torch.equal(before[k], after[k])] == []
    # The masters have other names, or are the weights.
    for key in after.keys() - shared:
        kind, _, weight = key.removeprefix("optimizer.state.").partition(".")
        other = {"param": "fp32_param", "fp32_param": "param"}[kind]
        origin = before.get(f"optimizer.state.{other}.{weight}", before[weight])
        assert torch.equal(origin, after[key])
    arguments = vars(load_common_state_dict(str(folders[1]))["args"])
    assert arguments["tensor_model_parallel_size"] == CASES[name].wish["tp"]
