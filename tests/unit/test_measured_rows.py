"""What an answer says after a time: of the row that was timed, and of one that is far off."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from copus_ext.commands import plan

WHERE = "--model llama-2-13b --cluster a100-80g:16 --global-batch-size 64"
TEXT = "tp4.pp2.dp2,micro_batch=2,recompute=none,sp=1,zero=0"
MIXTURE = "--model mixtral-8x7b --seq-length 4096 --cluster h100-80g:32 --global-batch-size 128"


def run(capsys: pytest.CaptureFixture[str], text: str) -> tuple[int, str, str]:
    code = plan.main(shlex.split(text))
    out, err = capsys.readouterr()
    return code, out, err


def predicted_s(capsys: pytest.CaptureFixture[str], where: str, text: str) -> float:
    _, out, _ = run(capsys, f"explain {text} {where} --json")
    return json.loads(out)["explained"][0]["prediction"]["step_s"]


def test_a_row_that_was_timed_shows_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    took = round(0.85 * predicted_s(capsys, WHERE, TEXT), 3)
    told = f"--measured '{TEXT}: {took} s' --recompute none"
    told += " --fix tp=4,pp=2,vpp=1,cp=1,micro_batch=2"
    _, out, _ = run(capsys, f"{WHERE} {told} --json")
    rows = json.loads(out)["plans"][0]["ranked"]
    (row,) = [r["prediction"] for r in rows if r["prediction"]["source"] == "profiled"]
    assert row["step_s"] == took
    assert row["tokens_per_s"] == pytest.approx(64 * 4096 / took)
    assert sum(row["time_s"].values()) == pytest.approx(took)
    # One that another row stands for, too.
    slow = told.replace(f"{took} s", f"{1.4 * took} s")
    _, out, _ = run(capsys, f"{WHERE} {slow} --json")
    (row,) = json.loads(out)["plans"][0]["ranked"]
    assert 1.4 * took in [x["step_s"] for x in row["equals"]]
    _, out, _ = run(capsys, f"explain {TEXT} {WHERE} {told.partition(' --fix')[0]}")
    assert f"step {took:.4g} s " in out
    # Another batch has the same layout, and was not timed.
    other = WHERE.replace("size 64", "size 64,128")
    _, out, _ = run(capsys, f"{other} {told} --json")
    for one in json.loads(out)["plans"]:
        assert one["ranked"][0]["prediction"]["source"] == "profiled"
        times = [r["prediction"] for r in one["ranked"]]
        times = [p["step_s"] for p in times if p["source"] == "profiled"]
        assert all((t == took) == (one["global_batch_size"] == 64) for t in times)


def test_a_time_of_a_profile_is_shown_as_the_mean_of_its_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    took = predicted_s(capsys, WHERE, TEXT)
    told = " ".join(f"--measured '{TEXT}: {x * took:.3f} s'" for x in (1.1, 1.2))
    _, out, _ = run(capsys, f"explain {TEXT} {WHERE} {told} --json")
    assert json.loads(out)["explained"][0]["prediction"]["step_s"] == pytest.approx(
        1.15 * took, rel=1e-3
    )


def test_the_time_of_the_command_is_that_of_its_run(capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --bf16 "
        "--hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --vocab-size 32000 "
        "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 64 "
        "--tensor-model-parallel-size 2 --use-distributed-optimizer --sequence-parallel"
    )
    asked = f"--gpu A100-80GB --top 3 --from-command '{command}'"
    _, out, _ = run(capsys, f"{asked} --measured '3.217 s'")
    (line,) = [x for x in out.splitlines() if x.startswith("your command: ")]
    assert ": 3.217 s (" in line


def test_a_time_far_off_is_not_followed_by_what_would_not_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    took = 8 * predicted_s(capsys, WHERE, TEXT)
    _, out, err = run(capsys, f"{WHERE} --top 3 --measured '{TEXT}: {took:.4g} s'")
    assert "would help" not in out and re.search(r"would save \d", out) is None
    (line,) = [x for x in out.splitlines() if "is not known: a time measured at x 8.0" in x]
    assert line.endswith("says that the software or the network is not as described")
    assert "token dispatcher) or the network (--nic) is not as described" in err
    _, out, err = run(capsys, f"{WHERE} --top 3 --measured '{TEXT}: {took / 7.5:.4g} s'")
    assert "warning" not in err and re.search(r"would save \d|would help", out)


def test_what_a_mixture_rests_on_comes_before_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, f"{MIXTURE} --top 1 --max cp=1")
    head = out.partition("\n rank")[0]
    assert "no GPU has timed a mixture of experts for this table" in head
    assert "the exchanges of the alltoall token dispatcher" in head
    (line,) = [x for x in head.splitlines() if x.startswith("assumed: ")]
    assert "the alltoall token dispatcher" in line
    _, out, _ = run(capsys, f"explain tp2.pp2.ep8 {MIXTURE}")
    assert "token dispatcher" in out.partition("global batch 128")[0]


def test_a_network_that_nobody_gave_is_assumed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def assumed(where: str) -> str:
        _, out, _ = run(capsys, f"explain tp4.pp2 {where}")
        (line,) = [x for x in out.splitlines() if x.startswith("assumed: ")]
        return line

    line = assumed(WHERE)
    assert "a network of 100 GB/s for each node" in line and re.search(r"change .*--nic$", line)
    nodes = "--model llama-2-13b --gpu A100-80GB --nodes 2 --global-batch-size 64"
    assert "a network of " in assumed(nodes)
    assert "a network of " not in assumed(f"{nodes} --nic 100GB/s")
    assert "a network of " not in assumed(WHERE.replace("a100-80g:16", "a100-80g:8"))
