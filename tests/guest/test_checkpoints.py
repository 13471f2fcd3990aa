"""Our trainer goes on from checkpoints of mixtures and of latent attention that Megatron-LM's own
program has written with `--transformer-impl local`, and converts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.guest.program import HAS_PROGRAM, MODEL, evaluations, start_from, steps, tensors, train
from tests.helpers.checkpoints import command
from tests.helpers.launch import ROOT, run_ranks
from tests.helpers.of_extras import of_extra
from tests.helpers.text import text_prefix

convert_checkpoint = of_extra("megatron.trainer.extras.convert.command")
inspect_checkpoint = of_extra("megatron.trainer.extras.inspect_checkpoint.command")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.distributed,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not HAS_PROGRAM, reason="PYTHONPATH lacks Megatron-LM's own program"),
]
STEPS, START = 6, 3
EXPERTS = """--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss
--moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 64"""
LATENT = """--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 12 --qk-head-dim 8
--qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm"""
SHARDED = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
MODELS = {
    "mixture": f"{EXPERTS} --expert-model-parallel-size 2 {SHARDED}",
    # One optimizer for all, where ours has one for experts.
    "one_optimizer": f"{EXPERTS} {SHARDED}",
    # A dense layer first; the norms of all its layers are named otherwise.
    "latent": f"{EXPERTS} {LATENT} --moe-layer-freq [0]+[1]*3",
}
OWN = {
    "mixture": "--pipeline-model-parallel-size 2",
    "one_optimizer": "--expert-model-parallel-size 2",
    "latent": "--tensor-model-parallel-size 2",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Output of both trainers, and the folder with their checkpoints."""
    folder = tmp_path_factory.mktemp("checkpoints")
    found: dict[str, Any] = {"folder": folder}
    for name, flags in MODELS.items():
        sizes = f"--save-interval {START} --train-iters {STEPS}"
        found[name] = train(folder, name, "plain", f"{sizes} {flags}", ranks=2).stdout
        start = start_from(folder, name, START)
        converted = folder / f"{name}_converted"
        assert convert_checkpoint.main([str(start), str(converted)]) == 0
        for kind in ("start", "converted"):
            found[f"{name}_{kind}"] = _go_on(folder / f"{name}_{kind}", name)
    return found


def _go_on(start: Path, name: str) -> str:
    """Output of our trainer, under a layout of its own."""
    flags = MODELS[name].replace("--expert-model-parallel-size 2", "")
    places = f"--data-path {text_prefix()} --load {start} --save {start}_own --log-interval 1"
    words = f"{MODEL} {places} {flags} {OWN[name]} --train-iters {STEPS}".split()
    return run_ranks([ROOT / "pretrain_gpt.py", *words], 2, timeout_s=240).check().stdout


@pytest.mark.parametrize("kind", ["start", "converted"])
@pytest.mark.parametrize("name", MODELS)
def test_our_trainer_has_the_losses_of_theirs(runs: dict[str, Any], name: str, kind: str) -> None:
    own, theirs = steps(runs[f"{name}_{kind}"]), steps(runs[name])[START:]
    assert [row[:4] for row in own] == [row[:4] for row in theirs] and len(own) == STEPS - START
    for a, b in zip(own, theirs, strict=True):
        assert a[4:] == pytest.approx(b[4:], rel=1e-6)
    ends = zip(evaluations(runs[f"{name}_{kind}"]), evaluations(runs[name]), strict=True)
    for (_, a), (_, b) in ends:
        assert a == pytest.approx(b, rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_checkpoint_has_our_names(
    runs: dict[str, Any], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"iter_{START:07d}"
    theirs, own = (tensors(runs["folder"] / f"{name}_{k}" / place) for k in ("start", "converted"))
    assert any(".mlp.linear_fc1.layer_norm_weight" in key for key in theirs) == (name != "latent")
    assert any(".pre_mlp_layernorm.weight" in key for key in own)
    code, out, err = command(capsys, inspect_checkpoint, runs["folder"] / f"{name}_start")
    assert code == 0, err
    assert "complete: every tensor is there" in out
