"""Checkpoints that ranks of several layouts wrote give the text of the one that a rank alone
wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron.core.inference.sampling_params import SamplingParams

from megatron.trainer.extras.generate.model import GREEDY, Generated, open_generator
from tests.helpers.jobs import layout_flags, train

PROMPTS = ("1 2 3 4 5", "99", " ".join(map(str, range(20))))
LAYOUTS = {
    "tp2.pp2, uneven": (4, [*layout_flags(2, 2, 1), "--decoder-first-pipeline-num-layers", "1"]),
    "pp2.vpp2": (2, layout_flags(1, 2, 2)),
}
STEPS = 12


def texts_of(load: Path) -> list[Generated]:
    ways = (
        SamplingParams(num_tokens_to_generate=12, top_k=GREEDY),
        SamplingParams(num_tokens_to_generate=30, top_p=0.9),
    )
    with open_generator(load) as model:
        return [model.generate(prompt, way, seed=5) for prompt in PROMPTS for way in ways]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = tmp_path_factory.mktemp("generate") / "alone"
    flags = ["--train-iters", str(STEPS), "--save", str(save), "--init-method-std", "0.2"]
    train(flags, 1, save).check()
    return save


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layout_that_wrote_a_checkpoint_changes_no_token(
    name: str, alone: Path, tmp_path: Path
) -> None:
    ranks, layout = LAYOUTS[name]
    flags = ["--load", str(alone), "--save", str(tmp_path), "--finetune", *layout]
    # A rate of 0 leaves the weights as they are, and these ranks save them.
    still = ["--train-iters", "1", "--lr", "0", "--min-lr", "0"]
    result = train([*flags, *still], ranks, tmp_path).check()
    assert "layout tp" in result.stdout
    texts = texts_of(tmp_path)
    assert texts == texts_of(alone)
    assert len({one.generated_text for one in texts}) == len(texts)
