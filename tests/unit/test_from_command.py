"""A command of Megatron-LM tells model, batch, ranks and the layout that it has now."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from copus_ext.commands import plan
from tests.helpers.launch import ROOT

SHAPE = """--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32
    --seq-length 2048 --max-position-embeddings 2048 --swiglu --normalization RMSNorm
    --disable-bias-linear --bf16 --vocab-size 32000 --untie-embeddings-and-output-weights
    --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0
    --tokenizer-type NullTokenizer"""
NOW = """--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2
    --num-layers-per-virtual-pipeline-stage 8 --sequence-parallel --use-distributed-optimizer
    --micro-batch-size 1 --global-batch-size 64 --recompute-activations"""
TORCHRUN = "torchrun --nproc_per_node=8 --nnodes 2 --master-port 6000 pretrain_gpt.py"


def run(capsys: pytest.CaptureFixture[str], command: str, more: str) -> tuple[int, str, str]:
    code = plan.main(["--from-command", command, *shlex.split(more)])
    out, err = capsys.readouterr()
    return code, out, err


def json_of(capsys: pytest.CaptureFixture[str], command: str, more: str) -> dict[str, Any]:
    code, out, err = run(capsys, command, f"{more} --json")
    assert code == 0, err
    record = json.loads(out)
    jsonschema.validate(record, json.loads((ROOT / "docs" / "plan.schema.json").read_text()))
    return record


def test_a_command_says_model_ranks_batch_and_layout(capsys: pytest.CaptureFixture[str]) -> None:
    command = f"{TORCHRUN} \\\n {SHAPE} \\\n {NOW}"
    record = json_of(capsys, command, "--gpu A100-80GB --top 3")
    assert record["inputs"]["model"]["num_layers"] == 32
    assert record["inputs"]["cluster"]["num_nodes"] == 2
    (found,) = record["plans"]
    assert found["global_batch_size"] == 64
    now = record["present"]["configuration"]
    assert [now[name] for name in ("tp", "pp", "vpp", "dp")] == [4, 2, 2, 2]
    assert now["recompute"] == {"mode": "selective"} and not now["overlap"]
    best = found["ranked"][0]["prediction"]["step_s"]
    slower = record["present"]["prediction"]["step_s"] / best - 1
    assert slower > 0 and record["present"]["longer_than_first"] == pytest.approx(slower)
    _, text, err = run(capsys, command, "--cluster a100-80g --top 3")
    assert f"s, {100 * slower:.0f} % longer than row 1" in text and "the search finds" not in err
    assert "\nyour command: tp4.pp2.vpp2.dp2,micro_batch=1" in text.partition("\n 1")[0]


def test_the_best_command_is_told_so_and_one_that_should_not_fit_is_priced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = f"srun --nodes=1 --ntasks-per-node=8 python -u pretrain_gpt.py {SHAPE}"
    best = f"{command} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    best += " --micro-batch-size 2 --global-batch-size 64"
    _, text, _ = run(capsys, best, "--gpu H100-80GB --top 3")
    assert "tp1.pp1.dp8" in text and ", which is row 1" in text
    _, text, _ = run(capsys, best.replace("size 2", "size 1"), "--gpu H100-80GB --top 3")
    assert "2 % longer than row 1, too little to tell" in text
    large = f"{command} --micro-batch-size 8 --global-batch-size 64"
    record = json_of(capsys, large, "--gpu H100-80GB --top 3")
    assert record["present"]["prediction"]["memory"]["fit_probability"] < 0.1
    _, text, _ = run(capsys, large, "--gpu H100-80GB --top 3")
    assert "fit with probability 0.00; if it runs, everything needs less memory" in text


@pytest.mark.parametrize(
    ("command", "more", "words"),
    [
        (f"torchrun {SHAPE}", "--gpu A100-80GB", "names no script"),
        (f"{TORCHRUN} {SHAPE} --data-path '", "--gpu A100-80GB", "No closing quotation"),
        (
            "torchrun --nnodes $NODES pretrain_gpt.py",
            "--gpu A100-80GB",
            "NODES, which only a shell",
        ),
        (f"{TORCHRUN} {SHAPE} {NOW}", "", "does not say which GPUs"),
        (f"{TORCHRUN} {SHAPE}", "--gpu A100-80GB", "--global-batch-size is required"),
        (
            f"{TORCHRUN} {SHAPE} {NOW}",
            "--gpu A100-80GB --model llama-2-7b",
            "give one of --model and --from-command",
        ),
        (
            f"{TORCHRUN} {SHAPE} {NOW}",
            "--megatron-args=--bf16 --global-batch-size 64 --gpu A100-80GB",
            "--megatron-args say the same",
        ),
        (f"{TORCHRUN} {SHAPE} {NOW}", f"--from-command '{TORCHRUN} {SHAPE}'", "once"),
        (f"python pretrain_gpt.py {SHAPE} {NOW}", "--gpu A100-80GB", "how many ranks there are"),
        (f"srun --nodes 2 python a.py {SHAPE} {NOW}", "--gpu A100-80GB", "how many ranks there"),
    ],
)
def test_a_command_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str], command: str, more: str, words: str
) -> None:
    code, _, err = run(capsys, command, more)
    assert code == 2 and words in err and err.count("\n") == 1


def test_a_layout_that_cannot_be_priced_does_not_keep_the_answer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for wrong, why in (
        ("--pipeline-model-parallel-size 3", "is not 16 GPUs"),
        ("--pipeline-model-parallel-size 2 --micro-batch-size 3", "does not divide global batch"),
        ("--decoder-first-pipeline-num-layers 4", "stages of unlike length"),
    ):
        command = f"{TORCHRUN} {SHAPE} --global-batch-size 64 {wrong}"
        code, text, _ = run(capsys, command, "--gpu A100-80GB --top 1")
        assert code == 0 and "\nyour command: not priced: " in text and why in text


@pytest.mark.parametrize(
    ("launcher", "nodes", "per_node"),
    [
        ("torchrun", 1, 1),
        ("python -m torch.distributed.run --nproc-per-node 4", 1, 4),
        ("/usr/bin/torchrun --nproc-per-node gpu --nnodes 2", 2, None),
        ("srun -N 4 --ntasks-per-node=8 python -u", 4, 8),
        ("srun -N 4 -n 32 python", 4, 8),
        ("srun -N 4 --ntasks-per-node 1 torchrun --nnodes=4 --nproc-per-node=8", 4, 8),
        ("srun --nodes 4 torchrun --nproc-per-node=8", 4, 8),
        ("srun -n 32 python", None, None),
        ("python", None, None),
    ],
)
def test_ranks_of_a_launcher(launcher: str, nodes: int | None, per_node: int | None) -> None:
    command = f"{launcher} pretrain_gpt.py -n 3 --nodes 7"
    found = plan.parse(["--from-command", command, "--global-batch-size", "4"])
    assert found.launched == (nodes, per_node, "-n 3 --nodes 7")


def test_a_cluster_of_another_size_than_the_command_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = f"{TORCHRUN} {SHAPE} {NOW}"
    _, text, err = run(capsys, command, "--cluster a100-80g:32 --top 1")
    assert "the command has 16 ranks; it is priced on the 32 GPUs given" in err
    assert text.startswith("samples of 2048 tokens (--from-command)")
    _, _, err = run(capsys, command, "--cluster a100-80g --top 1")
    assert "16 ranks" not in err


def test_a_time_without_a_configuration_is_that_of_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command, gpu = f"{TORCHRUN} {SHAPE} {NOW}", "--gpu A100-80GB --top 1"
    before = json_of(capsys, command, gpu)["present"]["prediction"]
    now = json_of(capsys, command, f"{gpu} --measured '4.5 s'")["present"]["prediction"]
    assert (before["source"], now["source"]) == ("predicted", "profiled")
    assert before["step_s"] < now["step_s"] == pytest.approx(4.5, rel=0.1)
    code, text, err = run(capsys, command, f"{gpu} --measured '4.5 s, 60 GiB'")
    name = "tp4.pp2.vpp2.dp2,micro_batch=1,recompute=selective,sp=1,zero=1,overlap=0"
    line = next(x for x in text.splitlines() if x.startswith(f"{name}: predicted"))
    # Both factors make up what the row is multiplied by.
    shape = r".*: predicted (\S+) s, measured 4.5 s .*; counted as (.*): (.*) by .*, (.*) by .*"
    found = re.fullmatch(shape.replace("(.*)", r"x (\S+)"), line)
    assert found is not None
    predicted, of_row, of_parts, other = found.groups()
    assert code == 0 and "warning" not in err
    assert float(predicted) == pytest.approx(before["step_s"], rel=0.01)
    assert float(of_row) == pytest.approx(now["step_s"] / before["step_s"], abs=0.02)
    assert float(of_parts) * float(other) == pytest.approx(float(of_row), rel=0.02)
    code, _, err = run(capsys, command, f"{gpu} --measured '45 s'")
    assert code == 0 and "measured 45 s" in err and err.count("warning:") == 1
    code, _, err = run(capsys, command, f"{gpu} --measured '0.01 s'")
    assert code == 2 and "% of the arithmetic that the GPUs can do" in err
    code, _, err = run(
        capsys, command.replace("parallel-size 4", "parallel-size 3"), f"{gpu} --measured oom"
    )
    assert code == 2 and "is not 16 GPUs" in err
