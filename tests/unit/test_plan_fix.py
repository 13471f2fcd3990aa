"""A configuration as an answer prints it can be kept, priced and started."""

from __future__ import annotations

import json
import shlex

import pytest

from copus_ext.commands import plan
from copus_ext.cost_model.models import PRESETS
from copus_ext.planner.explain import reason
from copus_ext.planner.request import configuration_of

GPUS = "--cluster a800-80g:256 --global-batch-size 256 --model llama-3-70b"
SOFTWARE = ["--bf16", "--attention-dropout", "0", "--hidden-dropout", "0"]
SOFTWARE += ["--no-create-attention-mask-in-dataloader"]
EIGHT = "--model llama-2-13b --cluster a100-80g:8 --global-batch-size 16"


def run(capsys: pytest.CaptureFixture[str], text: str) -> tuple[int, str, str]:
    code = plan.main(shlex.split(text))
    out, err = capsys.readouterr()
    return code, out, err


def test_fixed_replicas_do_not_hide_that_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "tp=2,cp=2,pp=4,vpp=10,dp=16,micro_batch=1"
    code, out, err = run(capsys, f"{GPUS} --fix {sizes} --recompute none --format flags")
    assert code == 4 and out == "" and "512 GPUs" not in err.replace("about 512", "")
    assert "legal configuration" in err and "none fits" in err


def test_every_printed_configuration_can_be_fixed(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, f"{EIGHT} --json")
    found = json.loads(out)["plans"][0]
    texts = [x["configuration"] for row in found["ranked"] for x in row.get("equals", [])]
    words = "cp_comm_type", "=block", "zero=0"
    some = [[x for x in texts if word in x][:3] for word in words]
    assert all(some)
    for text in [x for found in some for x in found]:
        c = configuration_of(text, global_batch_size=16, world_size=8)
        code, out, err = run(capsys, f"{EIGHT} --fix {text} --format flags")
        assert code == 0 and shlex.split(out) == [*SOFTWARE, *c.to_flags()], err
        code, out, _ = run(capsys, f"{EIGHT} --fix {text} --json")
        (row,) = json.loads(out)["plans"][0]["ranked"]
        assert code == 0 and row["flags"] == [*SOFTWARE, *c.to_flags()]
        assert run(capsys, f"explain {text} {EIGHT}")[0] == 0


def test_what_may_not_fit_is_started_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    text = "tp1.pp1.dp8,micro_batch=16,recompute=none,sp=0,zero=1"
    batch = EIGHT.replace("size 16", "size 128")
    c = configuration_of(text, global_batch_size=128, world_size=8)
    code, out, err = run(capsys, f"{batch} --fix {text} --format flags")
    assert code == 0 and shlex.split(out) == [*SOFTWARE, *c.to_flags()]
    assert "may not fit: it fits with probability 0.00" in err
    code, out, _ = run(capsys, f"{batch} --fix {text} --format slurm")
    assert code == 0 and "--micro-batch-size 16" in out
    code, out, err = run(
        capsys, f"{batch} --fix {text.replace('micro_batch=16', 'micro_batch=3')} --format flags"
    )
    assert code == 2 and "does not divide global batch 128" in err and out == ""


def test_one_that_does_not_fit_is_explained_whole(capsys: pytest.CaptureFixture[str]) -> None:
    text = "tp1.pp1.dp8,micro_batch=16"
    code, out, _ = run(capsys, f"explain {text} {EIGHT.replace('size 16', 'size 128')}")
    assert code == 4 and "does not fit: predicted peak" in out
    assert "TFLOP/s/GPU" in out and "  compute " in out and "\nflags: --bf16 --att" in out


def test_where_nothing_fits_there_is_a_reason_and_no_empty_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = "--model llama-3-70b --seq-length 4096 --cluster a100-80g:16 --global-batch-size 128"
    code, out, err = run(capsys, f"{where} --format slurm")
    assert code == 4 and out == "" and "none sure to fit" in err
    text = err.partition("--fix ")[2].split()[0]
    code, out, err = run(capsys, f"{where} --format slurm --fix {text}")
    assert code == 0 and "sbatch" in out and "may not fit" in err
    assert run(capsys, f"{where} --measured '{text}: oom'")[0] == 4


def test_the_doubt_of_one_is_split_as_that_of_a_ranking(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, EIGHT)
    line = next(x for x in out.splitlines() if x.startswith("all times may be "))
    common = line.split()[4]
    _, out, _ = run(capsys, f"explain tp2.pp2 {EIGHT}")
    step = next(x for x in out.splitlines() if x.startswith("step "))
    assert f" %, {common} of all layouts together and " in step and "(predicted)" in step


def test_what_is_too_much_is_the_difference_that_is_shown() -> None:
    c = configuration_of("tp=8", global_batch_size=16, world_size=8)
    detail, fix = reason("memory", PRESETS["llama-2-13b"], c, 89.66 * 2**30, 72.74 * 2**30, 9e10)
    assert "predicted peak 89.7 GiB, safe up to 72.7 GiB" in detail
    assert fix.startswith("17.0 GiB too much")
