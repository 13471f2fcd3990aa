"""Save under A, load under B: nothing changes, for all pairs of layouts on four ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing import load_common_state_dict, load_plain_tensors
from megatron.core.safe_globals import register_safe_globals

from megatron.trainer.checkpoint.files import folder_of
from tests.distributed.worker_checkpoints import AFTER, BEFORE, DAILY, PAIRS
from tests.helpers.nightly import case, words_of
from tests.helpers.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures("single_process_group")
CASES = [
    case("_".join("-".join(map(str, layout)) for layout in pair), daily=pair in DAILY)
    for pair in PAIRS
]


@pytest.fixture(scope="module")
def output(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    on_ranks("worker_checkpoints", folder, 4, *words_of(request), timeout_s=1600)
    return folder


@pytest.mark.timeout(1680)
@pytest.mark.parametrize("pair", CASES)
def test_every_stored_tensor_comes_through_bit_for_bit(output: Path, pair: str) -> None:
    register_safe_globals()
    source = folder_of(output / pair.split("_")[0], BEFORE)
    target = folder_of(output / f"again-{pair}", BEFORE)
    before, after = load_plain_tensors(str(source)), load_plain_tensors(str(target))
    stored = {key for key, value in before.items() if isinstance(value, torch.Tensor)}
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        assert sum(key.startswith(f"optimizer.state.{kind}.") for key in stored) >= 9
    assert before.keys() == after.keys()
    different = [key for key in sorted(stored) if not torch.equal(before[key], after[key])]
    assert different == []
    states = [load_common_state_dict(str(folder)) for folder in (source, target)]
    counts = [state["copus"]["train_state"]["lr_samples"] for state in states]
    assert counts[0] == counts[1] == 4 * BEFORE
    steps = [state["optimizer"]["optimizer"]["param_groups"][0]["step"] for state in states]
    assert steps == [BEFORE, BEFORE]


@pytest.mark.parametrize("pair", CASES)
def test_the_next_losses_equal_the_uninterrupted_run(output: Path, pair: str) -> None:
    result = json.loads((output / "result.json").read_text())
    assert len(result["whole"]) == AFTER
    assert result[pair] == pytest.approx(result["whole"], rel=1e-5)
