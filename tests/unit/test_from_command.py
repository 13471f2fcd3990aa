"""A command of Megatron-LM tells model, batch, ranks and the layout that it has now."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from copus_ext.commands import plan
from copus_ext.planner.run_flags import parsed_flags
from copus_ext.planner.shell_script import outcomes_of
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


def words_of(script: str) -> list[str]:
    (one,) = outcomes_of(script, {})
    return one.commands[-1]


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
    assert f" %), {100 * slower:.0f} % longer than row 1" in text and "the search finds" not in err
    assert "\nyour command: tp4.pp2.vpp2.dp2,micro_batch=1" in text.partition("\n 1")[0]
    peak = record["present"]["prediction"]["memory"]["peak_bytes"] / 2**30
    assert f"longer than row 1; its {peak:.1f} GiB fit with probability 1.00\n" in text


def test_fp32_says_its_kernel_and_the_peak_of_its_mfu(capsys: pytest.CaptureFixture[str]) -> None:
    whole = SHAPE.replace(" --bf16", "")
    for shape, gpu, told in (
        (whole, "A100-80GB", "156 TFLOP/s of a GPU, in TF32; torch computes"),
        (whole, "MI210-64GB", "22.6 TFLOP/s of a GPU\n"),
        (SHAPE, "A100-80GB", ""),
    ):
        _, text, _ = run(capsys, f"{TORCHRUN} {shape} {NOW}", f"--gpu {gpu} --top 1")
        assert ("assumed: fp32 with flash attention" in text) == bool(told)
        assert (f"\nfp32: MFU is a share of {told}" in text) == bool(told)
    asked = ["explain", "tp4.pp2", "--from-command", f"{TORCHRUN} {whole} {NOW}"]
    assert plan.main([*asked, "--gpu", "A100-80GB"]) == 0
    assert "\nfp32: MFU is a share of 156 TFLOP/s" in capsys.readouterr().out


def test_a_command_in_fp32_is_told_what_bf16_would_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = SHAPE.replace(" --bf16", "")
    said = json_of(capsys, f"{TORCHRUN} {whole} {NOW}", "--gpu A100-80GB --top 1")
    half = json_of(capsys, f"{TORCHRUN} {SHAPE} {NOW}", "--gpu A100-80GB --top 1")
    now, then = (x["present"]["prediction"]["step_s"] for x in (said, half))
    assert now > 1.4 * then
    _, text, _ = run(capsys, f"{TORCHRUN} {whole} {NOW}", "--gpu A100-80GB --top 1")
    told = f"your command takes {now:.4g} s a step, and with --bf16 {then:.4g} s"
    assert f"\nwithout --bf16 the run computes in fp32: {told}\n" in text
    assert "without --bf16" not in run(capsys, f"{TORCHRUN} {SHAPE} {NOW}", "--gpu H100-80GB")[1]


def test_commands_to_time_have_the_flags_of_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, text, _ = run(capsys, f"{TORCHRUN} {SHAPE} {NOW}", "--gpu A100-80GB --top 5")
    (line, *_) = [x for x in text.splitlines() if " profile-layouts --store" in x]
    assert "FLAGS OF YOUR RUN" not in line
    yours = shlex.split(line.partition(" -- ")[2])
    assert yours == shlex.split(SHAPE)
    (now,) = [x for x in text.splitlines() if x.startswith("your command: ")]
    assert re.search(r" s \(\d+ tokens/s/GPU, MFU \d+\.\d %\), ", now)


def test_the_command_itself_is_named_among_what_may_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    large = SHAPE.replace("--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008", "")
    large = f"--num-layers 80 --hidden-size 8192 --ffn-hidden-size 24576 {large}"
    now = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --sequence-parallel"
    now += " --use-distributed-optimizer --overlap-grad-reduce --micro-batch-size 1"
    now += " --overlap-param-gather --global-batch-size 64 --recompute-granularity full"
    now += " --recompute-method uniform --recompute-num-layers 1"
    more = "--gpu A100-80GB --fix micro_batch=1 --recompute full"
    code, text, err = run(capsys, f"{TORCHRUN} {large} {now}", more)
    first = next(x for x in text.splitlines() if x.startswith("try 1: "))
    assert first.endswith("recompute=full,sp=1,zero=1 (your command)")
    assert code == 4 and (text + err).count("none sure to fit") == 1


def test_a_vocabulary_that_nobody_gave_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    plain = SHAPE.replace("--vocab-size 32000", "").replace("NullTokenizer", "HuggingFaceTokenizer")
    for more, is_told in (("", True), ("--padded-vocab-size 32768", False)):
        command = f"{TORCHRUN} {plain} --tokenizer-model x {more} {NOW}"
        _, text, _ = run(capsys, command, "--gpu A100-80GB --top 1")
        assert ("assumed: a vocabulary of 51,200 tokens" in text) == is_told
        assert ("; with --vocab-size 102400 row 1 would " in text) == is_told


def test_flash_attention_that_was_asked_for_is_not_assumed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for more, is_told in (("", True), ("--use-flash-attn", False)):
        command = f"{TORCHRUN} {SHAPE} {NOW} {more}"
        _, text, _ = run(capsys, command, "--cluster a100-80g --top 1")
        told = "assumed: flash attention, a network of 100 GB/s for each node; change it with "
        told += "--attention-backend in --from-command, --nic\n"
        assert (told in text) == is_told


def test_what_rows_have_and_the_command_lacks_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    lacks = "rows have --overlap-grad-reduce, which your command, priced without it, lacks"
    for more, is_told in (("", True), (" --overlap-grad-reduce", False)):
        _, _, err = run(capsys, f"{TORCHRUN} {SHAPE} {NOW}{more}", "--gpu A100-80GB --top 1")
        assert (lacks in err) == is_told and "priced with --overlap" not in err


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
    _, text, _ = run(capsys, large, "--gpu H100-80GB --top 3 --measured oom")
    assert "GiB, it ran out of memory\n" in text


@pytest.mark.parametrize(
    ("command", "more", "words"),
    [
        (f"torchrun {SHAPE}", "--gpu A100-80GB", "names no script"),
        (
            f"{TORCHRUN} {SHAPE} --data-path '",
            "--gpu A100-80GB",
            "a quotation or a bracket does not close",
        ),
        (
            "torchrun --nnodes $NODES pretrain_gpt.py",
            "--gpu A100-80GB",
            "NODES, which only a shell",
        ),
        (
            f"torchrun --nnodes $A --node_rank=$B --master_addr $C $D pretrain_gpt.py {SHAPE} "
            "--save $E --train-iters $F $G --micro-batch-size=${H}",
            "--gpu A100-80GB",
            "has $A, $D, $F, $G, ${H}, which only a shell",
        ),
        (f"{TORCHRUN} {SHAPE} {NOW}", "", "does not say which GPUs"),
        (f"{TORCHRUN} {SHAPE}", "--gpu A100-80GB", "give --global-batch-size"),
        (f"{TORCHRUN} {SHAPE} --RMSNorm", "--gpu A100-80GB", "write --normalization RMSNorm"),
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
        ("--decoder-first-pipeline-num-layers 4", "stages of unequal length"),
    ):
        command = f"{TORCHRUN} {SHAPE} --global-batch-size 64 {wrong}"
        code, text, _ = run(capsys, command, "--gpu A100-80GB --top 1")
        assert code == 0 and "\nyour command: not priced: " in text and why in text


@pytest.mark.parametrize(
    ("layers", "flags", "own", "sizes"),
    [
        (30, "--account-for-embedding-in-pipeline-split", "--account-for-embedding", "4, 8, 16"),
        (32, "--decoder-first-pipeline-num-layers 4", "--decoder-first-pipeline-num-layers", ""),
        (30, "", "30 layers in 4 stages", "4, 8, 16"),
    ],
)
def test_pipelines_that_are_not_compared_are_named_beside_row_1(
    capsys: pytest.CaptureFixture[str], layers: int, flags: str, own: str, sizes: str
) -> None:
    shape = SHAPE.replace("--num-layers 32", f"--num-layers {layers}")
    command = f"{TORCHRUN} {shape} --global-batch-size 64 --pipeline-model-parallel-size 4 {flags}"
    _, text, _ = run(capsys, command, "--gpu A100-80GB --top 1")
    (line,) = [x for x in text.splitlines() if x.startswith("warning: stages of unequal length")]
    assert f"({own}" in line and "may be faster than row 1" in line
    assert (f" pipeline sizes {sizes}, which do not divide" in line) == bool(sizes)
    assert "drop it" not in text
    assert line in run(capsys, command, "--gpu A100-80GB --format flags")[2]
    (told,) = json_of(capsys, command, "--gpu A100-80GB --top 1")["inputs"]["warnings"]
    assert f"warning: {told}" == line
    _, text, _ = run(capsys, command, "--gpu A100-80GB --top 1 --fix pp=2")
    assert "which do not divide" not in text
    # What a CONFIG says of stages holds.
    assert plan.main(["explain", "pp=2", "--from-command", command, "--gpu", "A100-80GB"]) == 0
    assert "\ntp1.pp2.dp8," in capsys.readouterr().out


@pytest.mark.parametrize(
    ("launcher", "nodes", "per_node"),
    [
        ("torchrun", 1, 1),
        ("python -m torch.distributed.run --nproc-per-node 4", 1, 4),
        ("/usr/bin/torchrun --nproc-per-node gpu --nnodes 2", 2, None),
        ("deepspeed --num_nodes 2 --num_gpus=8", 2, 8),
        ("deepspeed --hostfile hosts", None, None),
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
    now = json_of(capsys, command, f"{gpu} --measured '3.5 s'")["present"]["prediction"]
    assert (before["source"], now["source"]) == ("predicted", "profiled")
    assert before["step_s"] < now["step_s"] == pytest.approx(3.5, rel=0.1)
    code, text, err = run(capsys, command, f"{gpu} --measured '3.5 s, 14 GiB'")
    name = "tp4.pp2.vpp2.dp2,micro_batch=1,recompute=selective,sp=1,zero=1,overlap=0"
    line = next(x for x in text.splitlines() if x.startswith(f"{name}: predicted"))
    # Both factors make up what the row is multiplied by.
    shape = r".*: predicted (\S+) s, measured 3.5 s .*; counted as (.*): (.*) by .*, (.*) by .*"
    found = re.fullmatch(shape.replace("(.*)", r"x (\S+)"), line)
    assert found is not None
    predicted, of_row, of_parts, other = found.groups()
    assert code == 0 and "warning" not in err
    assert float(predicted) == pytest.approx(before["step_s"], rel=0.01)
    assert float(of_row) == pytest.approx(now["step_s"] / before["step_s"], abs=0.02)
    assert float(of_parts) * float(other) == pytest.approx(float(of_row), rel=0.02)
    code, _, err = run(capsys, command, f"{gpu} --measured '45 s'")
    assert code == 0 and "measured 45 s" in err and err.count("warning:") == 1
    assert "a whole step of batch 64, on such GPUs and links, in this layout?" in err
    code, _, err = run(capsys, command, f"{gpu} --measured '0.01 s'")
    assert code == 2 and "% of the arithmetic that the GPUs can do" in err
    code, _, err = run(
        capsys, command.replace("parallel-size 4", "parallel-size 3"), f"{gpu} --measured oom"
    )
    assert code == 2 and "is not 16 GPUs" in err


MIXTURE = """--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall
    --expert-model-parallel-size=8 --expert-tensor-parallel-size 1 --context-parallel-size 2
    --overlap-grad-reduce --save $SAVED/x"""


def test_a_row_as_a_job_replaces_the_layout_of_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = f"{TORCHRUN} {SHAPE} {NOW} {MIXTURE}"
    more = "--gpu H100-80GB --fix ep=1,etp=1,cp=1,vpp=1,tp=1 --recompute full"
    code, flags, err = run(capsys, command, f"{more} --format flags")
    assert code == 0, err
    words = shlex.split(flags)
    read = parsed_flags(shlex.join(words))
    kept = parsed_flags(shlex.join(shlex.split(f"{SHAPE} {MIXTURE}")))
    for name in ("num_layers", "swiglu", "num_experts", "moe_router_topk", "save", "bf16"):
        assert getattr(read, name) == getattr(kept, name)
    assert read.expert_model_parallel_size == read.expert_tensor_parallel_size == 1
    assert read.context_parallel_size == read.tensor_model_parallel_size == 1
    assert read.num_layers_per_virtual_pipeline_stage is None and not read.sequence_parallel
    assert read.recompute_granularity == "full" and not read.recompute_activations
    assert len({w for w in words if w.startswith("--")}) == sum(w.startswith("--") for w in words)
    assert '"$SAVED/x"' in flags
    for form in ("slurm", "kubernetes", "submitit"):
        code, text, _ = run(capsys, command, f"{more} --format {form}")
        assert code == 0 and "FLAGS" not in text
        assert text.startswith("# put your own in place of ") == (form != "submitit")
        if form == "slurm":
            assert text.endswith(f"pretrain.sbatch {flags}")
        else:
            assert all(word in text for word in words)
    record = json_of(capsys, command, more)
    assert "--expert-model-parallel-size 1" in " ".join(record["plans"][0]["ranked"][0]["flags"])
    # Flags that may not be the whole of the run's are not repeated, but what contradicts is named.
    asked = ["--megatron-args", f"{SHAPE} {NOW} {MIXTURE}", *shlex.split(more)]
    code = plan.main([*asked, "--nodes", "2", "--format", "flags"])
    out, err = capsys.readouterr()
    assert code == 0 and out.split()[1:3] == ["--tensor-model-parallel-size", "1"]
    for size in ("expert-model", "expert-tensor", "context"):
        assert f"--{size}-parallel-size 1" in out
    assert "remove --num-layers-per-virtual-pipeline-stage, --sequence-parallel, " in err


@pytest.mark.parametrize("program", ["pretrain_gpt.py", "-m copus_ext.megatron_lm pretrain_gpt.py"])
def test_flags_of_the_controller_do_not_change_a_plan(
    capsys: pytest.CaptureFixture[str], program: str
) -> None:
    launch, more = "torchrun --nnodes 2 --nproc-per-node 8", "--gpu A100-80GB --top 1"
    flags = f"--copus {SHAPE} {NOW} --copus-layouts all"
    rows = json_of(capsys, f"{launch} {program} {flags}", more)["plans"]
    assert rows == json_of(capsys, f"{TORCHRUN} {SHAPE} {NOW}", more)["plans"]


@pytest.mark.parametrize("end", ["\\", "\\ ", "\\\n", "\\\r\n"])
def test_a_backslash_at_an_end_joins_lines_and_is_nothing_more(end: str) -> None:
    whole = plan.parse(["--from-command", f"{TORCHRUN} {SHAPE} {NOW}"])
    lines = f"{SHAPE} {NOW}".replace("\n", " \\  \n") + f" {end}"
    pasted = plan.parse(["--from-command", f"{TORCHRUN} {lines}"])
    assert pasted.launched == whole.launched
    assert parsed_flags(lines).explicit_flags == parsed_flags(whole.megatron_args).explicit_flags


@pytest.mark.parametrize(
    ("written", "batch"),
    [
        ("$((NODES * GPUS * 4))", 64),
        ("$(( ($NODES*${GPUS}+2)/4 * 8 ))", 32),
        ("$(((NODES+2)*(GPUS+0)))", 32),
        ("$((-7 / 2 + 8 % 9 - -7 % 4 + 56))", 64),
    ],
)
def test_a_pasted_script_computes_whole_numbers_as_bash_does(written: str, batch: int) -> None:
    script = f"NODES=2\nGPUS=8\nBATCH={written}\n"
    bash = subprocess.run(["bash", "-c", f"{script} echo $BATCH"], capture_output=True, text=True)
    assert int(bash.stdout) == batch
    for text in (f"{script}X --batch $BATCH", f"NODES=2\nGPUS=8\nX --batch {written}"):
        assert words_of(text) == ["X", "--batch", str(batch)]


@pytest.mark.parametrize("written", ["$((N * 2))", "$((1 / 0))", "$((1 << 2))", "$((9**9**9))"])
def test_what_only_a_shell_computes_stays_one_word(written: str) -> None:
    assert words_of(f"X --batch {written} --b") == ["X", "--batch", written, "--b"]


def test_a_pasted_script_has_the_values_that_it_assigns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = f"""#!/bin/bash
#SBATCH --exclusive
# it isn't easy
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8   # of a node
NUM_NODES=${{SLURM_NNODES:-2}}
MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
CHECKPOINT_PATH=$1
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE   # (8 of a node's)
    --nnodes $NUM_NODES --master_addr $MASTER_ADDR --node_rank $(hostname -i)
)
export BATCH='64'
SIZES="
    --global-batch-size ${{BATCH}} \\
    --micro-batch-size 1
"
cd $HOME/megatron
torchrun ${{DISTRIBUTED_ARGS[@]}} pretrain_gpt.py {" ".join(SHAPE.split())} \\
    $SIZES --wandb-exp-name "run # 2" --tensor-model-parallel-size 4 --save "$CHECKPOINT_PATH" \\
    --data-path 1 $DATA/a 2 $DATA/b 2>&1 | tee $LOG
"""
    record = json_of(capsys, script.replace("\\\\", "\\"), "--gpu A100-80GB --top 1")
    assert record["inputs"]["cluster"]["num_nodes"] == 2
    assert record["inputs"]["cluster"]["gpus_per_node"] == 8
    now = record["present"]["configuration"]
    assert [now[n] for n in ("tp", "dp", "global_batch_size")] == [4, 4, 64]
    whole = script.replace("${DISTRIBUTED_ARGS[@]}", '"${DISTRIBUTED_ARGS[@]}"')
    args = plan.parse(["--from-command", whole])
    assert args.launched[:2] == (2, 8) and args.megatron_args.endswith("1 '$DATA/a' 2 '$DATA/b'")
    assert "--wandb-exp-name 'run # 2' " in args.megatron_args
    _, _, err = run(capsys, script.replace("NUM_NODES=", "N="), "--gpu A100-80GB")
    assert "has $NUM_NODES, which only a shell knows" in err


def test_explain_takes_what_a_configuration_leaves_out_from_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["--from-command", f"{TORCHRUN} {SHAPE} {NOW}", "--gpu", "A100-80GB", "--json"]
    for config, sizes, how in (
        ([], (4, 2, 2, 2, 1), "selective"),
        (["tp2.pp2,vpp=1"], (2, 2, 1, 4, 1), "selective"),
        (["tp1.pp1,micro_batch=2,recompute=full"], (1, 1, 1, 16, 2), "full"),
    ):
        assert plan.main(["explain", *config, *command]) in (0, 4)
        found = json.loads(capsys.readouterr().out)["explained"][0]
        c = found.get("configuration") or found["example"]
        assert tuple(c[n] for n in ("tp", "pp", "vpp", "dp", "micro_batch_size")) == sizes
        assert c["recompute"]["mode"] == how and not c["overlap"]
        assert c["sequence_parallel"] == (sizes[0] > 1)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["explain"], "CONFIG is missing; write it, for example tp2.pp4, or --from-command"),
        (["explain", ""], "CONFIG is missing; write it, for example tp2.pp4\n"),
        (["explain", "tp8.pp2.ep8", "--cluster", "a100-80g:128"], "has no experts; drop ep"),
        (["explain", "tp8.pp2.ep8", "--cluster", "a100-80g:16"], "has no experts; drop ep"),
    ],
)
def test_a_configuration_that_cannot_be_explained(
    asked: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", "llama-2-7b", "--global-batch-size", "64"]
    assert plan.main([*asked, *model]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_state_of_the_optimizer_in_few_bytes_is_priced(capsys: pytest.CaptureFixture[str]) -> None:
    command = f"{TORCHRUN} {SHAPE} {NOW} --use-precision-aware-optimizer"
    states: dict[str, dict[str, Any]] = {}
    for more in ("", "--main-grads-dtype bf16", "--exp-avg-dtype=bf16 --exp-avg-sq-dtype fp8"):
        record = json_of(capsys, f"{command} {more}", "--gpu A100-80GB --top 1")
        states[more] = record["inputs"]["model"]
    none, gradients, moments = states.values()
    assert (none["gradient_bytes"], gradients["gradient_bytes"]) == (4, 2)
    assert gradients["optimizer_bytes"] == none["optimizer_bytes"]
    assert moments["optimizer_bytes"] == 4 + 2 + 1 and moments["gradient_bytes"] == 4
    _, _, err = run(capsys, f"{command} --main-grads-dtype bf16", "--gpu A100-80GB --top 1")
    assert "note: --main-grads-dtype: priced; copus pretrain refuses it\n" in err
    assert "keeps gradients, master weights" not in err
    code, _, err = run(capsys, f"{command} --main-grads-dtype int8", "--gpu A100-80GB")
    assert code == 2 and "--main-grads-dtype" in err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--fp16", "--bf16 excludes --fp16; drop one"),
        ("@ --global-batch-size 64:32:x2", "64:32:x2: 32 is below 64; write 32:64:x2"),
        ("@ --train-tokens 15T", "--train-tokens 15T: write a number such as 0.5 or 15e12"),
        ("@ --top few", "--top few: write a whole number"),
        ("@ --constants none.json", "--constants none.json: No such file or directory"),
    ],
)
def test_what_is_wrong_is_told_in_plain_words(
    more: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    of_command, _, own = more.partition("@")
    command = f"{TORCHRUN} {SHAPE} {NOW} {of_command}"
    code, _, err = run(capsys, command, f"--gpu A100-80GB {own}")
    assert code in (2, 5) and words in err and "Errno" not in err


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("--cluster a100-80g:16", "give one of --model, --megatron-args and --from-command"),
        ("--model none.json --cluster a100-80g:16", "--model none.json: No such file"),
        ("--model llama-2-7b --cluster none.json", "--cluster none.json: No such file"),
        (
            "--model llama-2-7b --cluster a100-80g:12",
            "use a multiple, or write --gpu A100-80GB --nodes 3 --gpus-per-node 4",
        ),
        (
            "--model llama-2-7b --cluster a100-80g:12 --gpus-per-node 6",
            "drop --gpus-per-node, or write --gpu A100-80GB --nodes 2 --gpus-per-node 6",
        ),
    ],
)
def test_a_machine_or_model_that_is_not_said_rightly(
    asked: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main([*shlex.split(asked), "--global-batch-size", "60"]) in (2, 5)
    err = capsys.readouterr().err
    assert words in err and "Errno" not in err and err.count("\n") == 1
