"""Any release reads and converts a checkpoint that Megatron-LM's own program has written.

It is that of 0.19.2 after two steps, by `tests/guest/rank.py plain`: a model of two layers.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.trainer.checkpoint.safe_index import read_common
from megatron.trainer.common.errors import Refused
from tests.guest.program import tensors
from tests.helpers.checkpoints import command
from tests.helpers.launch import run_in_fork
from tests.helpers.of_extras import needs_extra, of_extra
from tests.newest_core.write_checkpoint import PROMPT, scores

pytestmark = pytest.mark.unit

STORED = Path(__file__).parent / "data" / "megatron_lm_0.19.2"
ITERATION = "iter_0000002"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    shutil.copytree(STORED, tmp_path / "c")
    return tmp_path / "c"


def test_its_arguments_are_read_whatever_this_release_knows(checkpoint: Path) -> None:
    common = read_common(checkpoint / ITERATION)
    assert common["iteration"] == 2
    assert common["args"].consumed_train_samples == 8
    # A member of an enumeration that 0.16 does not have.
    assert not callable(common["args"].inference_cuda_graph_scope)


def test_what_else_it_names_is_still_refused(checkpoint: Path) -> None:
    folder = checkpoint / ITERATION
    for path in folder.glob("*.distcp"):
        path.unlink()
    (folder / ".metadata").unlink()
    torch.save({"iteration": 2, "args": os.path.join}, folder / "common.pt")
    with pytest.raises(Refused, match=r"common\.pt cannot be read"):
        read_common(folder)


def test_inspection_finds_it_complete(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect_checkpoint = of_extra("megatron.trainer.extras.inspect_checkpoint.command")
    code, out, err = command(capsys, inspect_checkpoint, checkpoint, "--verify")
    assert code == 0, err
    assert "complete: every tensor is there" in out


@needs_extra("generate", "huggingface")
def test_its_model_is_that_of_transformers(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert_checkpoint = of_extra("megatron.trainer.extras.convert.command")
    target = tmp_path / "hf"
    code, _, err = command(capsys, convert_checkpoint, checkpoint, target, "--format", "hf")
    assert code == 0, err
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(target).eval()
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0, -1].tolist()
    own = run_in_fork(scores, checkpoint)
    assert own[: len(expected)] == pytest.approx(expected, abs=1e-5)
    stored = tensors(checkpoint / ITERATION)["embedding.word_embeddings.weight"]
    config = json.loads((target / "config.json").read_text())
    assert torch.equal(model.get_input_embeddings().weight, stored[: config["vocab_size"]])
