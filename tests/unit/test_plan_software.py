"""The software that a plan is made for: what its GPU can run, and the flags that say it."""

from __future__ import annotations

import json
import re
import shlex
from argparse import Namespace
from typing import Any

import pytest
import yaml
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from copus_ext.commands import plan
from copus_ext.controller.flags import CopusConfig
from copus_ext.megatron_lm.checkout import check
from copus_ext.planner.request import configuration_of
from copus_ext.planner.run_flags import parsed_flags
from megatron.trainer.common.errors import UsageError

WHERE = "--model llama-2-7b --seq-length 2048 --global-batch-size 64 --top 1"
NO_MASK = "--no-create-attention-mask-in-dataloader"
OLD = f"{WHERE} --cluster v100-32g:16"
NEW = f"{WHERE} --cluster a100-80g:16"
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
OF_OLD = "--transformer-impl local --attention-backend unfused"
COMMAND = (
    "torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 "
    "--num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 "
    "--vocab-size 32000 --micro-batch-size 1 --global-batch-size 64 --swiglu "
    "--attention-dropout 0 --hidden-dropout 0"
)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = plan.main([x for word in words for x in shlex.split(word)])
    out, err = capsys.readouterr()
    return code, out, err


def json_of(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    return json.loads(run(capsys, *words, "--json")[1])


def assumed(out: str) -> str:
    (line,) = [x for x in out.splitlines() if x.startswith("assumed: ")]
    return line


def test_a_gpu_without_flash_attention_is_planned_without_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = json_of(capsys, OLD)["inputs"]["model"]
    assert (model["precision"], model["implementation"]) == ("fp16", "local")
    assert not model["fused_attention"] and model["gradient_bytes"] == 2
    line = assumed(run(capsys, OLD)[1])
    for part in (
        "local layers (V100-32GB has no Transformer Engine)",
        "torch's norms, unfused attention (V100-32GB has no flash attention)",
        "fp16 (V100-32GB has no bf16) and no dropout",
        "gradients of 2 bytes",
    ):
        assert part in line, part
    code, out, _ = run(capsys, OLD, "--format flags")
    assert code == 0 and f"--fp16 {NO_DROPOUT} {OF_OLD} " in out and "--bf16" not in out
    given = parsed_flags(f"--num-layers 2 {out}")
    assert given.fp16 and given.transformer_impl == "local"


def test_what_a_gpu_cannot_run_is_priced_if_asked_for_and_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = run(capsys, OLD, "--attention flash --implementation te")
    told = "V100-32GB has no Transformer Engine or flash attention: this will not run there "
    told += "as priced; give --implementation local --attention unfused"
    assert code == 0 and f"\n{told}\n" in out and not err
    assert "will not run" not in run(capsys, OLD)[1]
    asked = "--attention flash --implementation te --format flags"
    _, out, err = run(capsys, OLD, asked)
    assert f"note: {told}" in err
    assert "--transformer-impl transformer_engine --attention-backend flash " in out


def test_a_command_for_such_a_gpu_gets_the_flags_that_it_lacks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = "--gpu V100-32GB --top 1"
    found = json_of(capsys, "--from-command", shlex.quote(f"{COMMAND} --fp16"), where)
    model = found["inputs"]["model"]
    assert model["implementation"] == "local" and not model["fused_attention"]
    assert any("local layers" in x for x in found["inputs"]["assumed"])
    asked = "--from-command", shlex.quote(f"{COMMAND} --fp16"), "--gpu V100-32GB --format flags"
    assert f" {OF_OLD} " in run(capsys, *asked)[1]
    whole = shlex.quote(f"{COMMAND} --bf16 --use-flash-attn --transformer-impl transformer_engine")
    _, out, _ = run(capsys, "--from-command", whole, where)
    told = "V100-32GB has no bf16, Transformer Engine or flash attention: this will not run there "
    told += "as priced; give --fp16 --transformer-impl local --attention-backend unfused"
    assert f"\n{told}\n" in out
    line = run(capsys, "--from-command", shlex.quote(COMMAND), where)[1]
    assert "\nwithout --fp16 the run computes in fp32: " in line


@pytest.mark.parametrize(
    ("asked", "flags"),
    [
        ("", f"--bf16 {NO_DROPOUT}"),
        ("--attention unfused", f"--bf16 {NO_DROPOUT} --attention-backend unfused"),
        (
            "--attention torch --implementation local",
            f"--bf16 {NO_DROPOUT} {OF_OLD} --attention-softmax-in-fp32 --no-masked-softmax-fusion",
        ),
        ("--gradient-bytes 2", f"--bf16 --grad-reduce-in-bf16 {NO_DROPOUT}"),
    ],
)
def test_flags_that_are_printed_say_the_software(
    asked: str, flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json_of(capsys, NEW, asked)["plans"][0]["ranked"][0]
    text = json_of(capsys, "explain tp2.pp2,micro_batch=1", NEW.replace("--top 1", ""), asked)
    (one,) = text["explained"]
    for flags_found in (
        shlex.split(run(capsys, NEW, asked, "--format flags")[1]),
        found["flags"],
        one["flags"],
    ):
        assert " ".join(flags_found).startswith(f"{flags} {NO_MASK} --tensor-model-parallel-size ")
    _, out, _ = run(capsys, NEW, asked, "--format slurm")
    assert f" FLAGS {flags} {NO_MASK} --tensor-model-parallel-size " in out
    _, out, _ = run(capsys, NEW, asked, "--top 5")
    assert f" -- FLAGS OF YOUR RUN {flags}\n" in out


def test_flags_of_a_command_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    whole = shlex.quote(f"{COMMAND.replace('dropout 0', 'dropout 0.1')} --bf16")
    _, out, _ = run(capsys, "--from-command", whole, "--gpu A100-80GB --format flags")
    assert out.count("dropout") == 2 and "dropout 0 " not in out and out.count("--bf16") == 1
    found = json_of(capsys, "--from-command", whole, "--gpu A100-80GB --top 1")
    assert not any("dropout" in text for text in found["inputs"]["assumed"])


def test_masks_of_megatron_lms_data_loader_are_told_where_they_matter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By default it makes one of s x s bytes for each sample of a micro-batch, which no row has."""
    long = f"{COMMAND.replace('2048', '131072')} --bf16 --context-parallel-size 8"
    long = long.replace("--micro-batch-size 1", "--micro-batch-size 2")
    where = "--gpu H100-80GB --top 1"
    _, out, _ = run(capsys, "--from-command", shlex.quote(long), where)
    told = "an attention mask of 32 GiB on the GPU for each micro-batch (2 x 131072 x 131072 bytes"
    (line,) = [line for line in out.splitlines() if told in line]
    assert line.startswith("warning: ") and f"; add {NO_MASK}" in line
    assert line in run(capsys, "explain", "--from-command", shlex.quote(long), where[:-8])[1]
    # Flags that are printed have it.
    _, out, err = run(capsys, "--from-command", shlex.quote(long), where, "--format flags")
    assert told not in err and out.count(NO_MASK) == 1
    found = json_of(capsys, "--from-command", shlex.quote(long), where)
    assert [told in text for text in found["inputs"]["warnings"]] == [True]
    assert NO_MASK in found["plans"][0]["ranked"][0]["flags"]
    for other in (f"{long} {NO_MASK}", f"{COMMAND} --bf16"):
        _, out, err = run(capsys, "--from-command", shlex.quote(other), where, "--format flags")
        assert "attention mask" not in err and out.count(NO_MASK) == 1


@pytest.mark.parametrize(
    ("length", "source", "words"),
    [
        (
            "",
            "20 tokens a parameter",
            "6.41e+07 samples, 20 tokens a parameter, as no length was given",
        ),
        ("--train-iters 50", "--train-iters", "3,200 samples, by --train-iters in --from-command"),
        (
            "--train-samples 999",
            "--train-samples",
            "999 samples, by --train-samples in --from-command",
        ),
    ],
)
def test_advice_on_the_batch_says_for_which_length_and_whence(
    length: str, source: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "--from-command", shlex.quote(f"{COMMAND} --bf16 {length}"), "--gpu A100-80GB --top 1"
    _, out, _ = run(capsys, *asked)
    short = f"{'; shorter than a training, as of a benchmark' if length else ''}"
    told = f" ({words}{short}; --train-tokens gives another): a first batch of "
    (line,) = [x for x in out.splitlines() if x.startswith("over ")]
    assert told in line, line
    assert re.search(r"; your 64 is (this one|one of those|(above|below) what) ?", line)
    assert json_of(capsys, *asked)["first_batch"]["length_from"] == source
    _, out, _ = run(capsys, *asked, "--train-tokens 2048e6")
    assert "\nover 2.05e+09 tokens (1e+06 samples, by --train-tokens): a first batch of " in out


def test_that_a_named_model_has_no_dropout_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, NEW)
    assert ", bf16 and no dropout, a network of 100 GB/s for each node; change it" in out
    assert assumed(out).endswith(", --from-command, --nic")
    cpu = "--model copus-quickstart --cluster cpu:2 --global-batch-size 8"
    _, out, _ = run(capsys, cpu, "--format flags")
    c = configuration_of("tp1.pp1,micro_batch=4", global_batch_size=8, world_size=2)
    assert "dropout" not in out and "bf16" not in out and c.layout.dp == 2


def test_where_rows_with_cp_run_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    te = "cp above 1 runs in Megatron-LM, too, but not with --copus there, which takes no context "
    te += "parallelism; --max cp=1 leaves such rows out"
    own = "cp above 1 runs in `copus pretrain` alone: Megatron-LM shares samples only with "
    own += "Transformer Engine; --max cp=1 leaves such rows out"
    explain = "explain tp1.cp2.pp2,micro_batch=1"
    for asked, line, other in ((NEW, te, own), (OLD, own, te)):
        for text in (f"{asked} --fix cp=2", f"{explain} {asked.replace('--top 1', '')}"):
            _, out, _ = run(capsys, text)
            assert f"\n{line}" in out and other not in out
        _, out, _ = run(capsys, f"{asked} --max cp=1")
        assert "cp above 1" not in out
    assert "cp above 1" not in run(capsys, "explain tp2.pp2", NEW.replace("--top 1", ""))[1]


def test_what_is_said_of_cp_is_so() -> None:
    """Neither Megatron-LM's own attention nor --copus in a checkout takes any."""
    args = Namespace(context_parallel_size=2, num_layers=2)
    with pytest.raises(UsageError, match="use --context-parallel-size 1"):
        check(args, CopusConfig(copus=True, copus_mode="observe"))
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, context_parallel_size=2
    )
    with pytest.raises(AssertionError, match="only supported by TEDotProductAttention"):
        DotProductAttention(config, 1, AttnMaskType.causal, "self")


def test_no_row_shares_samples_where_transformer_engine_has_no_kernel_for_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As a launch says: --attention-backend unfused, and fp32, exclude it."""
    asked = f"{NEW.replace('--global-batch-size 64', '--global-batch-size 7')} --top 50"
    assert any(row["configuration"]["cp"] > 1 for row in rows(capsys, asked))
    assert not any(
        row["configuration"]["cp"] > 1 for row in rows(capsys, asked, "--attention unfused")
    )
    local = "--attention unfused --implementation local"
    assert any(row["configuration"]["cp"] > 1 for row in rows(capsys, asked, local))


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> list[Any]:
    return json_of(capsys, *words)["plans"][0]["ranked"]


@pytest.mark.parametrize("form", ["slurm", "kubernetes", "submitit"])
def test_a_job_says_what_its_plan_rests_on(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is assumed and doubted, as a table says it, and what is predicted of the row."""
    for asked in (OLD, f"{OLD} --fix tp8.pp1.dp2,micro_batch=1,recompute=full,sp=1,zero=1"):
        table, (_, out, _) = run(capsys, asked)[1], run(capsys, f"{asked} --format {form}")
        assert out.splitlines()[0].startswith("# put your own") == (form != "submitit")
        told = [x[2:] for x in out.splitlines() if x.startswith("# ")]
        if form == "submitit":
            told = json.loads(out)["remarks"]
        for beginning in ("samples of ", "on 16 V100", "assumed: ", "constants of V100"):
            (line,) = [x for x in table.splitlines() if x.startswith(beginning)]
            assert line in told, beginning
        is_named = "--fix" in asked
        assert any(x.startswith("most doubtful: ") for x in told) != is_named
        (row,) = [x for x in told if x.startswith("the layout: tp")]
        assert " s a step +- " in row and " GiB, fits with probability " in row
        assert ("zero=1: " in row) and (",recompute=full," in row or not is_named)
    if form == "kubernetes":
        assert len(list(yaml.safe_load_all(out))) == 2


def test_printed_flags_that_megatron_lm_lacks_come_with_a_way_without(
    capsys: pytest.CaptureFixture[str],
) -> None:
    c = "tp2.pp1.dp8,micro_batch=1,recompute=full,sp=1,zero=1"
    words = "which Megatron-LM does not have: for Megatron-LM plan with --logits-chunks 1"
    for chunks, count in ((4, 1), (1, 0)):
        whole = f"{c},logits_chunks={chunks}"
        _, out, err = run(capsys, NEW, "--format flags --fix", whole)
        assert out.count("--logits-chunks") == count == err.count(words)
        assert run(capsys, NEW, "--format slurm --fix", whole)[1].count(words) == count
        assert run(capsys, "explain", whole, NEW.replace("--top 1", ""))[1].count(words) == count


def test_flags_alone_come_with_the_same_remarks(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, NEW, "--format flags")
    assert code == 0 and len(out.splitlines()) == 1
    assert "note: assumed: gradients of 4 bytes, " in err and "note: the layout: tp" in err
    named = "--fix tp1.cp2.pp1.dp8,micro_batch=1,cp_comm_type=p2p,recompute=full,sp=0,zero=1"
    assert "note: cp above 1 runs in " in run(capsys, NEW, named, "--format flags")[2]


def test_one_layout_is_explained_with_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    where = OLD.replace("--top 1", "")
    _, table, _ = run(capsys, OLD)
    _, out, _ = run(capsys, "explain tp4.pp2,micro_batch=1", where)
    assert f"\n{assumed(table)}\n" in out
    assert "\nconstants of V100-32GB: those of a100-80g" in out.partition("\nstep ")[0]
    _, out, _ = run(capsys, "explain tp4.pp2,micro_batch=1", where, "--implementation te")
    assert "\nV100-32GB has no Transformer Engine: this will not run" in out.partition("\nstep ")[0]
