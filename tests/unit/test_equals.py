"""Equals come simplest first, and what may not fit is shown with what it would gain."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from typing import Any

import numpy as np
import pytest

from copus_ext.commands import plan
from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.models import PRESETS
from copus_ext.cost_model.peak_correction import PeakCorrection, fit_probability
from copus_ext.cost_model.step import step_time
from copus_ext.planner.equals import EQUAL, difference, grouped, in_order, rarities, worth_trying
from copus_ext.planner.profile import Timing
from copus_ext.planner.request import configuration_of
from copus_ext.planner.search import Planner
from copus_ext.planner.space import points_of, to_config_batch

GPT3 = PRESETS["gpt3-175b"]


def test_of_equals_the_simplest_comes_first_and_no_slower_one_before_faster_ones() -> None:
    seconds = np.array([1.0, 1.02, 1.029, 1.05, 1.06, 1.2])
    rare = np.array([3.0, 1.0, 1.0, 2.0, 0.0, 0.0])
    assert in_order(seconds, rare).tolist() == [1, 2, 0, 4, 3, 5]
    assert in_order(seconds, np.zeros(6)).tolist() == [0, 1, 2, 3, 4, 5]
    assert in_order(np.zeros(0), np.zeros(0)).tolist() == []


def test_what_few_people_run_does_not_lead() -> None:
    """GPT-3 on 1,024 A100: chunks of one layer, and two ranks for 2,048 tokens, gain 2 %."""
    planner = Planner(GPT3, preset("a100-80g:1024"))
    ranked = planner.rank([1536], top=64)[0].ranked
    first, fastest = ranked[0], min(ranked, key=lambda r: r.prediction.step_s)
    assert first.configuration.layout.cp == 1 and first.configuration.layout.vpp <= 3
    assert first.configuration.recompute == "none"
    assert fastest.configuration.layout.cp > 1 and fastest.configuration.layout.vpp > 3
    assert first.prediction.step_s <= (1 + EQUAL) * fastest.prediction.step_s
    # The order does not depend on how much of it is asked for.
    assert planner.rank([1536], top=3)[0].ranked == ranked[:3]
    rows = grouped(ranked, 10)
    assert len(rows) == 10 and fastest.configuration in [x.configuration for x in rows[0].equals]
    kinds = [(r.configuration.layout.tp, r.configuration.layout.pp) for r in rows[:3]]
    assert len(set(kinds)) == 3


def test_what_was_timed_is_as_good_as_simple() -> None:
    planner = Planner(GPT3, preset("a100-80g:1024"))
    ranked = planner.rank([1536], top=64)[0].ranked
    fastest = min(ranked, key=lambda r: r.prediction.step_s)
    known = [
        Timing(configuration=r.configuration, step_s=r.prediction.step_s)
        for r in (ranked[0], fastest)
    ]
    planner.retime(known)
    assert planner.rank([1536], top=1)[0].ranked[0].configuration == fastest.configuration


def test_a_row_says_what_its_equals_have() -> None:
    planner = Planner(PRESETS["llama-2-13b"], preset("h100-80g:16"))
    first = planner.rank([64], top=1)[0].ranked[0]
    c = first.configuration
    other = dataclasses.replace(
        c,
        layout=dataclasses.replace(c.layout, cp=2, dp=c.layout.dp // 2),
        cp_comm_type="p2p",
        micro_batch_size=2,
        recompute="selective",
    )
    p = first.prediction
    slower = dataclasses.replace(p, step_s=1.01 * p.step_s, samples_per_s=p.samples_per_s / 1.01)
    found = dataclasses.replace(first, configuration=other, prediction=slower)
    assert difference(first, found) == "cp 2 p2p b 2 recompute selective (+1.0 %)"
    assert difference(first, first) == ""
    rare = rarities(planner.model, points_of([c, other]))
    assert rare.tolist() == [0.0, 4.0]
    assert rarities(planner.model.with_seq_length(32768), points_of([other])).tolist() == [2.0]


def test_gain_times_probability_is_tried_first() -> None:
    seconds, likely = np.array([0.99, 0.88, 0.87, 0.5]), np.array([0.7, 0.7, 0.68, 0.12])
    rare, safe_s = np.array([0.0, 3.0, 0.0, 0.0]), 1.0
    assert worth_trying(seconds, likely, rare, safe_s=safe_s, number=1) == [2]
    assert worth_trying(seconds, likely, rare, safe_s=safe_s, number=3) == [2, 3]
    assert worth_trying(seconds, likely, rare, safe_s=0.5, number=3) == []
    # Where nothing is safe, what is about as likely to fit as the likeliest.
    assert worth_trying(seconds, likely, rare, safe_s=np.inf, number=1) == [2]


def test_a_faster_layout_that_may_not_fit_is_shown() -> None:
    planner = Planner(PRESETS["llama-3-70b"], preset("h100-80g:512"))
    found = planner.rank([512], top=1, tries=1)[0]
    one, safe = found.tries[0], found.ranked[0]
    p = one.prediction
    assert p.step_s < safe.prediction.step_s / (1 + EQUAL) and 0.1 <= p.fit_probability < 0.8
    space = planner._judged([512])
    some = space.points.take(np.flatnonzero(space.likely >= 0.1))
    rows = to_config_batch(planner.model, planner.cluster, some).full()
    seconds = step_time(rows, planner.constants).step_s
    gain = np.log(safe.prediction.step_s / seconds)
    best = int(np.argmax(np.where(gain > 0, gain, 0) * space.likely[space.likely >= 0.1]))
    assert p.step_s == pytest.approx(seconds[best], rel=EQUAL)
    # With a little more memory it is the one that is named.
    more = dataclasses.replace(planner.cluster.gpu, memory_bytes=1.1 * p.peak_bytes / 0.96)
    roomy = Planner(planner.model, dataclasses.replace(planner.cluster, gpu=more))
    assert roomy.rank([512], top=1)[0].ranked[0].prediction.step_s <= (1 + EQUAL) * p.step_s


def test_where_nothing_is_sure_to_fit_the_likeliest_is_shown() -> None:
    planner = Planner(PRESETS["llama-2-7b"].with_seq_length(2048), preset("a100-40g:4"))
    small = planner.rank([16], top=500)[0].ranked
    peak = min(r.prediction.peak_bytes for r in small)
    gpu = dataclasses.replace(planner.cluster.gpu, memory_bytes=peak / 0.96)
    tight = Planner(planner.model, dataclasses.replace(planner.cluster, gpu=gpu))
    found = tight.rank([16], top=1, tries=2)[0]
    first = found.tries[0].prediction
    assert not found.ranked and found.status == "none_fits"
    assert first.fit_probability > 0.45 and first.peak_bytes <= 1.01 * peak


def test_a_probability_is_less_sure_before_any_peak_was_measured() -> None:
    plain, known = PeakCorrection(), PeakCorrection(covariance=(0.01, 0.0, 1.0))
    sure = fit_probability(90.0, 100.0, 0.07)
    assert known.fit_probability(90.0, 100.0, 0.07) == sure
    assert 0.5 < plain.fit_probability(90.0, 100.0, 0.07) < sure
    assert plain.fit_probability(110.0, 100.0, 0.07) > fit_probability(110.0, 100.0, 0.07)


def test_the_answer_says_what_is_tried_assumed_and_doubted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = "--model llama-3-70b --cluster h100-80g:512 --global-batch-size 512 --top 2"
    assert plan.main(shlex.split(asked)) == 0
    out = capsys.readouterr().out
    assert "try 1: " in out and "% faster than row 1, fits with probability 0." in out
    assert "\nassumed: gradients of 4 bytes, layers of Transformer Engine, fused norms" in out
    assert "\nmost doubtful: gradients of 4 bytes; with --gradient-bytes 2 row 1 would " in out
    assert "% longer or shorter together" in out
    assert plan.main(shlex.split(f"{asked} --json")) == 0
    record = json.loads(capsys.readouterr().out)
    (one,) = record["plans"]
    assert one["try_first"][0]["rank"] == 0 and one["common_rel_sd"] > 0.12
    assert record["inputs"]["otherwise"]["flag"] == "--gradient-bytes 2"
    told = "--gradient-bytes 2 --implementation te --norm fused --attention flash --no-overlap"
    told += " --nic 400GB/s"
    assert plan.main(shlex.split(f"{asked} {told}")) == 0
    out = capsys.readouterr().out
    assert "\nassumed: bf16 and no dropout; change it with --from-command\n" in out
    assert "most doubtful" not in out


def test_runs_measured_by_hand_correct_and_tell_the_software(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The memory is that of gradients of 2 bytes, and the time that of a machine half as fast."""
    where = "--cluster a100-80g:8 --global-batch-size 16 --top 1"
    model = PRESETS["llama-2-13b"]
    name = "tp4.pp1.dp2,micro_batch=1,recompute=full,sp=1,zero=0"
    c = configuration_of(name, global_batch_size=16, world_size=8)
    half = Planner(dataclasses.replace(model, gradient_bytes=2), preset("a100-80g:8")).priced(c)
    usual = Planner(model, preset("a100-80g:8"))
    peak = half.prediction.peak_bytes / 2**30
    told = f"--measured '{name}: {2 * half.prediction.step_s} s, {peak:.1f} GiB'"
    assert plan.main(shlex.split(f"--model llama-2-13b {where} {told}")) == 0
    out = capsys.readouterr().out
    assert "times as likely with --gradient-bytes 2 (whose optimizer keeps" in out
    assert plan.main(shlex.split(f"--model llama-2-13b {where} {told} --json")) == 0
    first = json.loads(capsys.readouterr().out)["plans"][0]["ranked"][0]["prediction"]
    before = usual.rank([16], top=1)[0].ranked[0].prediction
    assert first["source"] == "corrected" and first["step_s"] > 1.4 * before.step_s
    lacked = usual.rank([16], top=1)[0].ranked[0].configuration
    oom = f"--measured '{lacked}: oom' --json"
    assert plan.main(shlex.split(f"--model llama-2-13b {where} {oom}")) == 0
    first = json.loads(capsys.readouterr().out)["plans"][0]["ranked"][0]
    assert first["flags"] != lacked.to_flags()
    both = f"--measured '{name}: 20 s' --measured '{name}: oom'"
    assert plan.main(shlex.split(f"--model llama-2-13b {where} {both}")) == 2
    assert "ran out of memory; drop one" in capsys.readouterr().err
    too_much = f"--measured '{name}: 2 s, 300 GiB'"
    assert plan.main(shlex.split(f"--model llama-2-13b {where} {too_much}")) == 2
    assert "a GPU has 80.0 GiB" in capsys.readouterr().err
    soon = (f"{name}: soon", f"{name}: 1 s, much", f"{name}: -1 s")
    for wrong in (*soon, f"{name}: 1 s, 0 GiB", f"{name}: 1 s, 62"):
        assert plan.main(shlex.split(f"--model llama-2-13b {where} --measured '{wrong}'")) == 2
        assert "write CONFIG: 18.2 s" in capsys.readouterr().err


def test_a_timed_run_has_the_batch_that_the_trainer_rounds_down_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Batch 66 on two replicas with micro-batches of 4 trains as 64."""
    about = "--model llama-2-7b --cluster a100-80g:8 --global-batch-size 66 --top 1 --json"
    timed = "--measured 'tp4.pp1.dp2,micro_batch=4,recompute=full: 30 s'"
    assert plan.main(shlex.split(f"{about} {timed}")) == 2
    assert "66" in capsys.readouterr().err
    assert plan.main(shlex.split(f"{about} {timed} --decrease-batch-size-if-needed")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plans"][0]["ranked"][0]["prediction"]["source"] == "corrected"


def test_rows_of_other_batches_are_compared_by_their_samples_a_second(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of 511 samples one layout trains 384 a step and another one 480."""
    shape = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --bf16 "
    shape += "--max-position-embeddings 2048 --vocab-size 32000 --global-batch-size 511 "
    shape += "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    ranks = "torchrun --nnodes 8 --nproc-per-node 8 pretrain_gpt.py"
    now = "--tensor-model-parallel-size 8 --micro-batch-size 9"
    about = (
        f"--from-command '{ranks} {shape} {now}' --gpu A100-40GB --decrease-batch-size-if-needed"
    )
    assert plan.main(shlex.split(f"{about} --json")) == 0
    record = json.loads(capsys.readouterr().out)
    (found,) = record["plans"]
    first, (trial, *_) = found["ranked"][0], found["try_first"]

    def speed(row: dict[str, Any]) -> float:
        return row["prediction"]["tokens_per_s"]

    sizes = [row["configuration"]["global_batch_size"] for row in (first, trial, record["present"])]
    assert len(set(sizes)) == 3
    faster = f"{100 * (speed(trial) / speed(first) - 1):.0f} % faster than row 1"
    more = speed(first) / speed(record["present"]) - 1
    assert record["present"]["longer_than_first"] == pytest.approx(more)
    assert plan.main(shlex.split(about)) == 0
    out = capsys.readouterr().out
    assert (
        f"try 1: {faster}" in out and f" {100 * more:.0f} % longer for a sample than row 1" in out
    )
    assert out.count("compare tokens/s/GPU") == 1
    for line in (x for x in out.splitlines() if x.startswith("as fast as row ")):
        assert all(float(x) <= 3.0 for x in re.findall(r"\(([+-][\d.]+) %\)", line))


def test_the_fastest_is_named_where_row_1_is_only_the_most_common(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """So that the times of two machines are compared by their fastest."""
    model, cluster = PRESETS["llama-2-7b"].with_seq_length(2048), preset("a100-80g:16")
    (found,) = Planner(model, cluster).rank([512], top=1)
    fastest = Planner(model, cluster).fastest(512)
    assert fastest is not None and found.fastest is not None
    assert found.fastest[0] == fastest.configuration
    assert found.fastest[1] == pytest.approx(fastest.prediction.step_s)
    asked = "--model llama-2-7b --seq-length 2048 --cluster a100-80g:16 --top 1 --global-batch-size"
    for batch in (7, 64, 511):
        assert plan.main(shlex.split(f"{asked} {batch} --json")) == 0
        (one,) = json.loads(capsys.readouterr().out)["plans"]
        first, best = one["ranked"][0]["prediction"]["step_s"], one["fastest"]
        assert best["step_s"] <= first <= 1.03 * best["step_s"]
        assert plan.main(shlex.split(f"{asked} {batch}")) == 0
        out, _, table = capsys.readouterr().out.partition("\nrank ")
        told = f"{first:.4g} s; the fastest is {best['configuration']}, {best['step_s']:.4g} s\n"
        words = f"row 1 is the most common layout within 3 % of the fastest time: {told}"
        assert table and (words in f"{out}\n") == (best["step_s"] < first)
