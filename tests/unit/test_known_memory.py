"""What an out-of-memory report says against a prediction, and what is offered and said after it."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex

import numpy as np
import pytest

from copus_ext.commands import plan
from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.models import PRESETS
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.equals import FAR_ABOVE, MAY_FIT
from copus_ext.planner.fixed import kept
from copus_ext.planner.plan import Ranked, Rejected
from copus_ext.planner.profile import Timing
from copus_ext.planner.request import configuration_of
from copus_ext.planner.search import Planner
from copus_ext.planner.space import LEGAL, Limits, enumerate_points, to_config_batch

MODEL, GIB = PRESETS["llama-2-13b"], 2.0**30
LARGE = "--model llama-2-13b --cluster h100-80g:64 --global-batch-size 256"
SURE = "tp8.pp2,micro_batch=1,recompute=full"


def run(capsys: pytest.CaptureFixture[str], text: str) -> tuple[int, str, str]:
    code = plan.main(shlex.split(text))
    out, err = capsys.readouterr()
    return code, out, err


def test_an_out_of_memory_of_what_surely_fits_is_doubted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    c = configuration_of(SURE, global_batch_size=256, world_size=64)
    needs = Planner(MODEL, preset("h100-80g:64")).priced(c).prediction
    assert needs.fit_probability > 0.99
    _, out, err = run(capsys, f"{LARGE} --measured '{SURE}: oom'")
    (line,) = [x for x in err.splitlines() if "warning" in x]
    assert f"by a factor of {80 * GIB / needs.peak_bytes:.1f} or more" in line
    assert f"{needs.peak_bytes / GIB:.1f} GiB" in line and "probability 1.00" in line
    for cause in ("another process", "--gpu", "--attention", "longer than 4096 tokens"):
        assert cause in line
    assert "nvidia-smi" in line and "max allocated" in line
    # Tools learn it, too.
    _, out, _ = run(capsys, f"{LARGE} --json --measured '{SURE}: oom'")
    assert any("contradicts" in x for x in json.loads(out)["inputs"]["warnings"])


def test_an_out_of_memory_that_was_to_be_feared_is_believed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for text in (LARGE.replace("h100-80g:64", "a100-80g:8"), LARGE):
        _, _, err = run(capsys, f"{text} --measured 'tp2.pp1,micro_batch=8: oom'")
        assert "warning" not in err


@pytest.mark.parametrize("told", ["", SURE, "tp2.pp2,micro_batch=2", "tp4.pp2,micro_batch=1"])
def test_nothing_is_offered_that_will_hardly_fit(
    capsys: pytest.CaptureFixture[str], told: str
) -> None:
    for where in (LARGE, LARGE.replace("h100-80g:64", "a100-80g:16")):
        measured = f"--measured '{told}: oom'" if told else ""
        _, out, _ = run(capsys, f"{where} --json {measured}")
        for one in json.loads(out)["plans"][0].get("try_first", []):
            memory = one["prediction"]["memory"]
            assert memory["fit_probability"] >= MAY_FIT >= 0.25
            assert memory["peak_bytes"] <= FAR_ABOVE * 80 * GIB


def test_what_may_fit_is_not_said_not_to(capsys: pytest.CaptureFixture[str]) -> None:
    """Likely, but less so than a row has to be: neither "does not fit" nor "more do not help"."""
    where = LARGE.replace("h100-80g:64", "h100-80g:16")
    lacked = "tp8.pp2,micro_batch=1"
    seen = 0
    for text in ("tp8.pp2,recompute=full", "tp8.pp2,recompute=block:10", "tp4.pp4,recompute=full"):
        code, out, _ = run(capsys, f"explain {text} {where} --measured '{lacked}: oom'")
        chance = re.search(r"fits with probability (\d+) %", out)
        if code == 4 and chance is not None and int(chance[1]) >= 100 * MAY_FIT:
            seen += 1
            assert ": may not fit: " in out and "does not fit" not in out
    assert seen


def test_where_a_try_is_likely_more_gpus_are_not_said_to_be_of_no_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = "--model llama-3-70b --seq-length 4096 --cluster a100-80g:16 --global-batch-size 128"
    code, out, err = run(capsys, where)
    line = next(x for x in err.splitlines() if "error" in x)
    assert code == 4 and "try 1" in out
    chance = re.search(r"fits with probability ([\d.]+)", out)
    assert chance is not None and f"none sure to fit, the likeliest with {chance[1]}" in line
    assert "none fits" not in line and "do not help" not in line


def test_an_unsplit_optimizer_stays_in_doubt_beside_a_run_that_says_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = "--model llama-2-13b --cluster a100-80g:32 --global-batch-size 64 --top 1"
    words = "with no distributed optimizer (zero=0 in CONFIG)"
    oom = "--measured 'tp2.pp2: oom'"
    for also in ("", "--measured 'tp4.pp2,micro_batch=1,recompute=full,zero=1: 9.4 s'"):
        assert words in run(capsys, f"{where} {oom} {also}")[1]
    # A report that says it is not in doubt, whatever others leave out.
    said = "--measured 'tp2.pp2,zero=1: oom' --measured 'tp4.pp2,recompute=full: 9.4 s'"
    assert words not in run(capsys, f"{where} {said}")[1]


def test_a_peak_that_is_not_of_a_run_is_not_said_to_be(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run without a peak, whose own is moved by the report of another."""
    text = "tp4.pp2.dp4,micro_batch=1,recompute=full,sp=1,zero=1"
    where = "--model llama-2-13b --cluster a100-80g:32 --global-batch-size 64"
    told = f"--measured 'tp2.pp2: oom' --measured '{text}: 9.4 s'"
    _, out, _ = run(capsys, f"explain {text} {where} {told}")
    assert "it ran, with a peak that is predicted" in out
    _, out, _ = run(capsys, f"{where} {told} --fix {text}")
    assert " ran " not in out.partition("\n rank")[2].partition("\nall times")[0]


def test_what_config_leaves_out_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    where = "--model llama-2-13b --cluster a100-80g:32 --global-batch-size 64 --top 1"
    _, _, err = run(capsys, f"{where} --measured 'tp2.pp2: oom'")
    assert "note: --measured takes tp2.pp2 as recompute=none,zero=1; write them in CONFIG" in err
    _, _, err = run(capsys, f"{where} --measured 'tp4.pp2,recompute=full: 9.4 s'")
    assert "tp4.pp2,recompute=full as zero=1" in err
    _, _, err = run(capsys, f"{where} --measured 'tp4.pp2,recompute=full,zero=1: 9.4 s'")
    assert "--measured takes" not in err
    command = (
        "torchrun --nnodes 4 --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --bf16 "
        "--hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --vocab-size 32000 "
        "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 64 "
        "--tensor-model-parallel-size 2 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1"
    )
    asked = f"--gpu A100-80GB --from-command '{command}'"
    for text, is_told in {"tp4": True, "tp4,recompute=none": False, "": False}.items():
        code, _, err = run(capsys, f"explain {text} {asked}")
        assert (
            code in (0, 3) and ("recompute=full is taken, as the command has it" in err) == is_told
        )


def test_nothing_is_concluded_from_a_report_that_contradicts_the_prediction(
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = "--model llama-2-13b --cluster h100-80g:16 --global-batch-size 256 --top 1"
    lacked = "--measured 'tp8.pp2,micro_batch=1,recompute=full,zero=1: oom'"
    ran = "--measured 'tp4.pp4,micro_batch=1,recompute=full,zero=1: 14 s'"
    _, out, _ = run(capsys, f"{where} {lacked} {ran}")
    assert "would help" not in out and "would save is not known: an out-of-memory that " in out
    code, out, err = run(capsys, f"{where} {lacked}")
    assert code == 4 and "do not help" not in out + err and "on more of them none" not in out + err
    for text in (out, err):
        assert "all this follows a report that contradicts its prediction: check that first" in text


LLAMA_70B = (
    "torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --num-layers 80 --hidden-size 8192 "
    "--ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention --num-query-groups 8 "
    "--seq-length 4096 --max-position-embeddings 8192 --position-embedding-type rope --swiglu "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--vocab-size 128256 --bf16 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 "
    "--sequence-parallel --use-distributed-optimizer --micro-batch-size 1 --global-batch-size 16"
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def test_what_needs_no_more_than_a_run_fits_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    command = f"--gpu A100-80GB --from-command '{LLAMA_70B} --recompute-activations'"
    told = f"{command} --measured '10.5 s, 70 GiB'"
    code, out, _ = run(capsys, f"{told} --json")
    assert code == 0
    rows = json.loads(out)["plans"][0]["ranked"]
    found = {
        (x["configuration"]["tp"], *x["configuration"]["recompute"].values()): x["prediction"]
        for x in rows
    }
    full, own = (
        next(p["memory"] for key, p in found.items() if key[0] == 8 and name in key)
        for name in ("full", "selective")
    )
    assert full["fit_probability"] == own["fit_probability"] == 1.0
    assert full["peak_source"] == "no_more" and full["peak_bytes"] < 70 * GIB
    # Whole optimizer state is the same on a single replica.
    for text in ("recompute=full", "recompute=full,zero=0"):
        code, out, _ = run(capsys, f"explain tp8.pp2,micro_batch=1,{text} {told}")
        assert code == 0 and "it needs no more than what ran on these ranks" in out
    # What needs more in one respect is not known to fit, nor is it on other ranks.
    for text in ("tp8.pp2,micro_batch=2,recompute=full", "tp4.pp4,micro_batch=1,recompute=full"):
        _, out, _ = run(capsys, f"explain {text} {told}")
        assert "no more than what ran" not in out


def test_a_run_says_what_fits_unless_what_ran_out_of_memory_says_the_contrary() -> None:
    def at(text: str) -> Configuration:
        return configuration_of(text, global_batch_size=16, world_size=8)

    def source(planner: Planner, text: str) -> str:
        return planner.priced(at(text)).prediction.peak_source

    cluster = preset("a100-80g:8")
    ran = Timing(configuration=at("tp2.pp2,micro_batch=4,recompute=none,zero=0"), step_s=9.0)
    planner = Planner(MODEL, cluster, timings=[ran])
    less = ["micro_batch=2,recompute=none,zero=0", "micro_batch=4,recompute=full,zero=0"]
    less += ["micro_batch=4,recompute=none,zero=1", "micro_batch=1,recompute=block:3,zero=1"]
    for text in less:
        assert source(planner, f"tp2.pp2,{text}") == "no_more", text
        assert isinstance(planner.explain(at(f"tp2.pp2,{text}")), Ranked), text
    for text in ("micro_batch=8,recompute=full,zero=1", "vpp=2,micro_batch=4,recompute=full"):
        assert source(planner, f"tp2.pp2,{text}") == "predicted", text
    lacked = at("tp2.pp2,micro_batch=2,recompute=full,zero=0")
    planner = Planner(MODEL, cluster, timings=[ran], too_large=[lacked])
    assert source(planner, str(lacked)) == "out_of_memory"
    assert source(planner, f"tp2.pp2,{less[1]}") == "no_less"
    assert isinstance(planner.explain(at(f"tp2.pp2,{less[1]}")), Rejected)


@pytest.mark.parametrize(
    ("cluster", "fix", "lacked"),
    [
        ("a100-40g:8", "tp=8,pp=1", "tp8.pp1,micro_batch=4,recompute=none,zero=1"),
        ("a100-40g:8", "tp=8,pp=1", "tp8.pp1,micro_batch=8,recompute=block:20,zero=1"),
        ("a100-40g:8", "tp=4,pp=2", "tp4.pp2,micro_batch=4,recompute=selective,zero=1"),
        ("a100-80g:8", "tp=8,pp=1", "tp8.pp1,micro_batch=1,recompute=full,zero=1"),
    ],
)
@pytest.mark.parametrize("ran", [None, "tp8.pp1,micro_batch=1,recompute=none,zero=1"])
def test_an_out_of_memory_makes_nothing_likelier_to_fit(
    cluster: str, fix: str, lacked: str, ran: str | None
) -> None:
    machine, limits = preset(cluster), kept(fix, Limits())
    some = [] if ran is None else [configuration_of(ran, global_batch_size=64, world_size=8)]
    runs = [Timing(configuration=c, step_s=17.0, peak_bytes=31 * GIB) for c in some]
    points = enumerate_points(MODEL, machine, 64, limits)
    points = points.take(np.flatnonzero(points.code == LEGAL))
    rows = to_config_batch(MODEL, machine, points)
    likely = []
    for too_large in ([], [configuration_of(lacked, global_batch_size=64, world_size=8)]):
        planner = Planner(MODEL, machine, limits=limits, timings=runs, too_large=too_large)
        needs, sd = planner.peaks_of(rows)
        likely.append(planner.peaks.fit_probability(needs, planner.limit_bytes, sd))
    assert (likely[1] <= likely[0] + 1e-6).all()


def test_what_ran_is_offered_however_slow_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    told = f"--gpu A100-80GB --from-command '{LLAMA_70B} {FULL}' --measured '20 TFLOP/s'"
    code, out, err = run(capsys, f"{told} --format flags")
    assert code == 0 and "none sure to fit" not in err
    assert "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 2" in out
    assert FULL in out


def test_a_run_that_is_not_among_the_layouts_of_a_search_is_offered() -> None:
    cluster = preset("a100-80g:16")
    slow, plain = (
        configuration_of(text, global_batch_size=64, world_size=16)
        for text in (
            "tp16.pp1,micro_batch=1,recompute=none",
            "tp8.pp2,micro_batch=1,recompute=full,sp=0",
        )
    )
    model = dataclasses.replace(MODEL, num_attention_heads=64)
    for c in (slow, plain):
        planner = Planner(model, cluster, timings=[Timing(configuration=c, step_s=30.0)])
        rows = planner.every(64)[0]
        assert c in [rows.configuration(i) for i in range(len(rows))]
        # Not where others are asked for.
        rows = planner.on(cluster, kept("tp=4", Limits())).every(64)[0]
        assert c not in [rows.configuration(i) for i in range(len(rows))]
