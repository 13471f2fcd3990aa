"""What a user knows of runs reaches the planner, and what cannot have run is refused."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest

from copus_ext.commands import plan
from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.models import PRESETS
from copus_ext.planner.attempts import BEGUN, DONE, OUT_OF_MEMORY
from copus_ext.planner.known_runs import measured_of, profiles_of
from copus_ext.planner.profile import ProfileStore, Timing
from copus_ext.planner.request import InputProblem, UsageProblem, configuration_of
from copus_ext.planner.search import Planner
from copus_ext.planner.space import Limits
from copus_ext.planner.timed import Timed
from megatron.trainer.model.flops import training_flops_per_sample

MODEL, CLUSTER = PRESETS["llama-2-13b"], preset("a100-80g:8")
WHERE = "--model llama-2-13b --cluster a100-80g:8 --global-batch-size 16 --top 1"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("tp1.pp3,micro_batch=1", "tp x pp x dp is not 8 GPUs"),
        ("pp=8,vpp=3", "5 layers of a stage are not divisible by vpp=3; legal: 1, 5"),
        (
            "micro_batch=3",
            "micro-batch 3 does not divide global batch 16; use --global-batch-size 24 or more",
        ),
        ("pp=8,recompute=block:5", "a chunk has 5 layers; use 1 to 4"),
        ("ep=2", "llama-2-13b has no experts; drop ep and etp"),
    ],
)
def test_a_time_of_what_cannot_run_is_refused(name: str, problem: str) -> None:
    for told in ("18.2 s", "18.2 s, 62 GiB", "oom"):
        with pytest.raises(UsageProblem, match=problem):
            measured_of([f"{name}: {told}"], 16, MODEL, CLUSTER, Limits())


def test_a_layout_that_is_only_slow_may_have_run() -> None:
    (ran,), lacked = measured_of(["tp=8: 20 s"], 16, MODEL, preset("a100-80g:8"), Limits())
    assert ran.configuration.layout.tp == 8 and not lacked
    two = dataclasses.replace(CLUSTER, num_nodes=2, gpus_per_node=4)
    assert measured_of(["tp=8: 20 s"], 16, MODEL, two, Limits())[0] == [ran]


def test_a_time_is_in_seconds_unless_its_unit_is_ms() -> None:
    for told in ("20 s", "20s", "20", "20000 ms", "20000.0ms", "2e4 ms, 62 GiB"):
        (ran,), _ = measured_of([f"tp=8: {told}"], 16, MODEL, CLUSTER, Limits())
        assert ran.step_s == 20.0
    for told in ("20 m", "20 min", "ms", "20 us", "20 s ms"):
        with pytest.raises(UsageProblem, match=r"write CONFIG: 18\.2 s, or 18200 ms, 310 TFLOP/s"):
            measured_of([f"tp=8: {told}"], 16, MODEL, CLUSTER, Limits())


@pytest.mark.parametrize(
    ("sd", "ratio", "is_far"),
    [(0.1, 1.3, False), (0.1, 1.4, True), (0.1, 0.7, True), (0.3, 1.9, False), (0.3, 2.1, True)],
)
def test_a_time_is_far_off_beyond_three_deviations_or_twice(
    sd: float, ratio: float, is_far: bool
) -> None:
    c = configuration_of("tp=8", global_batch_size=16, world_size=8)
    run = Timed(
        configuration=c,
        predicted_s=3.0,
        predicted_sd=sd,
        measured_s=3.0 * ratio,
        factor=1.0,
        of_parts=1.0,
    )
    assert run.is_far_off == is_far
    assert f"the prediction may be {100 * sd:.0f} % off: is it" in run.warning()


def test_a_time_shorter_than_the_arithmetic_is_refused() -> None:
    with pytest.raises(UsageProblem, match=r"108 % of the arithmetic .* no step of batch 16 is sh"):
        measured_of(["tp=8: 2 s"], 16, MODEL, preset("a100-80g:8"), Limits())


def test_a_time_shorter_than_the_arithmetic_with_full_recompute_is_refused() -> None:
    def refused(told: str) -> bool:
        try:
            measured_of([told], 16, MODEL, preset("a100-80g:8"), Limits())
        except UsageProblem as error:
            assert "no step of batch 16" in str(error)
            return True
        return False

    assert not refused("tp=8,recompute=none: 80 %") and not refused("tp=8,recompute=full: 75 %")
    assert refused("tp=8,recompute=full: 80 %") and not refused("tp=8,recompute=block:10: 80 %")
    with pytest.raises(UsageProblem, match=r"16 with layers computed again is shorter than") as e:
        measured_of(["tp=8,recompute=full: 2.2 s"], 16, MODEL, preset("a100-80g:8"), Limits())
    least = re.search(r"shorter than (\S+) s", str(e.value))
    assert least is not None and not refused(f"tp=8,recompute=full: {least[1]} s")
    assert refused(f"tp=8,recompute=full: {0.99 * float(least[1])} s")


def test_no_row_computes_faster_than_the_gpus_can(capsys: pytest.CaptureFixture[str]) -> None:
    told = "--measured 'tp8.pp1,micro_batch=4,recompute=full: 74 %'"
    assert plan.main(shlex.split(f"{WHERE} --top 50 --json {told}")) == 0
    found = json.loads(capsys.readouterr().out)["plans"][0]
    rows = [x["prediction"] for x in [*found["ranked"], *found.get("try_first", [])]]
    assert max(p["mfu"] for p in rows) <= 1.0 + 1e-9
    flops = training_flops_per_sample(MODEL.shape(), MODEL.seq_length) * 16
    equals = [x["step_s"] for row in found["ranked"] for x in row["equals"]]
    assert equals and flops / (8 * 312e12 * min(equals)) <= 1.0 + 1e-9
    for p in rows:
        assert sum(p["time_s"].values()) == pytest.approx(p["step_s"])


def test_what_the_log_says_of_the_speed_is_a_time() -> None:
    """Megatron-LM's log has TFLOP/s of a GPU, and people write which share of the peak that is."""
    cluster = preset("a100-80g:8")
    flops = training_flops_per_sample(MODEL.shape(), MODEL.seq_length) * 16 / 8
    for told in ("156 TFLOP/s", "156 TFLOP/s/GPU", "156TFLOPs", "50 %", "MFU 50%", "50.0 % MFU"):
        (ran,), _ = measured_of([f"tp=8: {told}"], 16, MODEL, cluster, Limits())
        assert ran.step_s == pytest.approx(flops / 156e12), told
    for told in ("0 %", "0 TFLOP/s", "1.2.3 %", "120 %"):
        with pytest.raises(UsageProblem):
            measured_of([f"tp=8: {told}"], 16, MODEL, cluster, Limits())


def test_a_time_without_a_configuration_is_refused_or_that_of_the_command() -> None:
    now = configuration_of("tp=4,micro_batch=2", global_batch_size=16, world_size=8)
    for told in ("20 s", " 20 s, 62 GiB", ": 20 s"):
        with pytest.raises(UsageProblem, match="names no configuration; write 'CONFIG: 20 s"):
            measured_of([told], 16, MODEL, CLUSTER, Limits())
        (ran,), lacked = measured_of([told], 16, MODEL, CLUSTER, Limits(), lambda: now)
        assert (ran.configuration, ran.step_s, lacked) == (now, 20.0, [])
    assert measured_of(["OOM"], 16, MODEL, CLUSTER, Limits(), lambda: now) == ([], [now])
    with pytest.raises(UsageProblem, match="names no configuration"):
        measured_of(["oom"], 16, MODEL, CLUSTER, Limits())


def test_an_unsplit_optimizer_is_named_where_it_would_explain_what_ran_out_of_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = "--model llama-2-13b --cluster a100-80g:32 --global-batch-size 64 --top 1"
    words = "with no distributed optimizer (zero=0 in CONFIG)"
    assert plan.main(shlex.split(f"{where} --measured 'tp2.pp2: oom'")) == 0
    assert words in capsys.readouterr().out
    # It is not in doubt where CONFIG says it, nor where it takes too few bytes.
    for told in ("tp2.pp2,zero=1: oom", "tp8.pp4: oom"):
        plan.main(shlex.split(f"{where} --measured '{told}'"))
        assert "no distributed optimizer" not in capsys.readouterr().out


def test_a_time_is_of_the_kind_of_run_that_is_searched() -> None:
    limits = Limits(overlap=False, sequence_parallel=False)
    (one, other), _ = measured_of(
        ["tp=2: 20 s", "tp=2,overlap=1,sp=1: 20 s"], 16, MODEL, CLUSTER, limits
    )
    assert not (one.configuration.overlap or one.configuration.sequence_parallel)
    assert other.configuration.overlap and other.configuration.sequence_parallel


def profile_with(path: Path, *ends: str, text: str) -> Path:
    """A profile whose only attempt ended so."""
    machine = {"model": MODEL.to_json(), "world_size": 8, "gpu": CLUSTER.gpu.name}
    store = ProfileStore(path, machine)
    c = configuration_of(text, global_batch_size=16, world_size=8)
    for end in ends:
        alone = str(dataclasses.replace(c, micro_batch_size=1))
        store.add_attempt(end, configuration=alone, micro_batch_size=c.micro_batch_size)
    return path


def test_what_ran_out_of_memory_in_a_profile_counts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first = Planner(MODEL, CLUSTER).rank([16], top=1)[0].ranked[0].configuration
    path = profile_with(tmp_path / "p.jsonl", BEGUN, OUT_OF_MEMORY, text=str(first))
    own, (lacked,), others = profiles_of([path], MODEL, CLUSTER)
    assert not own and not others and lacked.line == first.line
    assert lacked.num_microbatches >= 2 * first.layout.pp
    assert plan.main(shlex.split(f"{WHERE} --json --profile {path}")) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)["plans"][0]["ranked"][0]
    assert found["flags"] != first.to_flags() and "1 configuration ran out of memory" in err
    # It says of the memory what it says when it is given by hand.
    assert plan.main(shlex.split(f"{WHERE} --json --measured '{lacked}: oom'")) == 0
    same = json.loads(capsys.readouterr().out)["plans"][0]["ranked"][0]
    assert same["prediction"]["memory"]["peak_bytes"] == pytest.approx(
        found["prediction"]["memory"]["peak_bytes"], rel=0.02
    )


def test_what_ran_after_all_or_is_of_another_model_does_not_count(tmp_path: Path) -> None:
    text = "tp=8,micro_batch=2"
    path = profile_with(tmp_path / "a.jsonl", BEGUN, OUT_OF_MEMORY, BEGUN, DONE, text=text)
    assert profiles_of([path], MODEL, CLUSTER) == ([], [], [])
    path = profile_with(tmp_path / "b.jsonl", BEGUN, OUT_OF_MEMORY, text=text)
    other = profiles_of([path], PRESETS["llama-2-7b"], CLUSTER)
    assert not other[1] and other[2] == [(MODEL, [])]
    c = configuration_of(text, global_batch_size=32, world_size=8)
    machine = {"model": MODEL.to_json(), "world_size": 8, "gpu": CLUSTER.gpu.name}
    store = ProfileStore(path, machine)
    store.add(Timing(configuration=c, step_s=2.0))
    assert not profiles_of([path], MODEL, CLUSTER)[1], "a time of it was measured"
    attempt = {"configuration": "tp16.pp1.dp1", "micro_batch_size": 1}
    store.add_attempt(OUT_OF_MEMORY, **attempt)
    with pytest.raises(InputProblem, match=r"b\.jsonl: tp16\.pp1\.dp1: tp x pp x dp is"):
        profiles_of([path], MODEL, CLUSTER)


SEVENTY = "--model llama-3-70b --cluster a100-80g:16 --global-batch-size 128 --seq-length 4096"


def test_what_ran_out_of_memory_does_not_fit_nor_does_what_needs_more_on_its_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lacked = "tp8.pp2.dp1,micro_batch=1,recompute=full,sp=1,zero=1"
    flags = f"{SEVENTY} --measured '{lacked}: oom'"
    plan.main(shlex.split(f"{flags} --json"))
    found = json.loads(capsys.readouterr().out)["plans"][0]
    tried = [*found["ranked"], *found.get("try_first", [])]
    assert not any((r["configuration"]["tp"], r["configuration"]["pp"]) == (8, 2) for r in tried)
    assert plan.main(shlex.split(f"explain {lacked} {flags}")) == 4
    assert "it ran out of memory" in (out := capsys.readouterr().out)
    assert "fits with probability" not in out
    more = lacked.replace("full", "block:33")
    assert plan.main(shlex.split(f"explain {more} {flags}")) == 4
    assert "needs no less than what ran out of memory" in capsys.readouterr().out


def test_what_needs_less_than_what_ran_out_of_memory_keeps_its_chance() -> None:
    lacked = configuration_of("tp=2,pp=2,micro_batch=4", global_batch_size=16, world_size=8)
    planner = Planner(MODEL, CLUSTER, too_large=[lacked])
    for change, may in ({"micro_batch_size": 1}, True), ({}, False), ({"micro_batch_size": 8}, 0):
        c = dataclasses.replace(lacked, **change)
        assert (planner.priced(c).prediction.fit_probability > 0) == may
    # A run that ran says more than one that needs less and did not.
    ran = dataclasses.replace(lacked, micro_batch_size=8)
    planner = Planner(
        MODEL, CLUSTER, too_large=[lacked], timings=[Timing(configuration=ran, step_s=9.0)]
    )
    assert planner.priced(ran).prediction.fit_probability == 1.0


def test_a_measured_configuration_shows_its_own_peak(capsys: pytest.CaptureFixture[str]) -> None:
    where = "--model llama-2-13b --cluster a100-80g:8 --global-batch-size 32"
    text = "tp1.pp1.dp8,micro_batch=1"
    plan.main(shlex.split(f"{where} --json --measured '{text}: 8 s, 60 GiB'"))
    out, err = capsys.readouterr()
    assert "weights, gradients and optimizer alone are" in err and "above the 60.0 GiB" in err
    for row in json.loads(out)["plans"][0]["ranked"]:
        memory = row["prediction"]["memory"]
        assert memory["peak_bytes"] <= 80 * 2**30
        if row["configuration"]["dp"] == 8 and row["configuration"]["micro_batch_size"] == 1:
            assert (memory["peak_bytes"], memory["peak_source"]) == (60 * 2**30, "measured")
    # Without a peak it had what a GPU has.
    plan.main(shlex.split(f"explain {text} {where} --measured '{text}: 8 s'"))
    out, err = capsys.readouterr()
    assert (
        "peak 80.0 of 76.8 GiB on stage 0, it ran, with a peak that is predicted" in out
        and "above the 80.0 GiB" in err
    )


def test_a_peak_that_is_far_off_is_doubted(capsys: pytest.CaptureFixture[str]) -> None:
    told = {peak: f"--measured 'tp4.pp2,micro_batch=1: 6 s, {peak} GiB'" for peak in (75, 36)}
    said = {}
    for peak, flag in told.items():
        assert plan.main(shlex.split(f"{WHERE} {flag}")) == 0
        said[peak] = "The memory of all rows follows it" in capsys.readouterr().err
    assert said == {75: True, 36: False}


def test_the_parts_of_a_corrected_step_have_their_own_factors() -> None:
    """A time that collectives explain makes them longer, not all parts alike."""
    c = configuration_of("tp=8,micro_batch=1", global_batch_size=16, world_size=8)
    plain = Planner(MODEL, CLUSTER).priced(c).prediction
    corrected = (
        Planner(MODEL, CLUSTER, timings=[Timing(configuration=c, step_s=1.3 * plain.step_s)])
        .priced(c)
        .prediction
    )
    assert sum(corrected.time_s.values()) == pytest.approx(corrected.step_s)
    ratio = {n: corrected.time_s[n] / x for n, x in plain.time_s.items() if x > 0.01}
    assert ratio["tp"] > 1.03 * ratio["compute"], ratio
    found = Planner(MODEL, CLUSTER).priced(c).prediction.time_s
    assert found == pytest.approx(plain.time_s) and sum(found.values()) == pytest.approx(
        plain.step_s
    )


def test_what_a_time_makes_of_the_parts_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    plan.main(shlex.split(f"{WHERE} --measured 'tp=8,micro_batch=1: 6 s'"))
    out, _ = capsys.readouterr()
    line = next(x for x in out.splitlines() if "counted as" in x)
    predicted = re.search(r"predicted (\S+) s.* x (\S+) by the parts", line)
    assert predicted is not None
    before, after = predicted.groups()
    told = re.findall(r"(\w+) (\S+) to (\S+) s", line)
    assert {"tp"} <= {name for name, _, _ in told}
    more = sum(float(now) - float(then) for _, then, now in told)
    assert more == pytest.approx(float(before) * (float(after) - 1), abs=0.05 * float(before))
    assert "across" not in out


def test_the_memory_names_one_cause_first_and_none_that_is_only_less_sure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = "--model llama-2-7b --cluster a100-80g:8 --global-batch-size 64 --seq-length 4096"
    plan.main(shlex.split(f"{where} --measured 'tp2.pp1,micro_batch=4: oom'"))
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "the memory measured" in x]
    counts = [float(x) for x in re.findall(r"(\d+) times", line)]
    assert len(counts) > 1 and counts == sorted(counts, reverse=True)
    assert line.endswith("; if your run had one of them, give it")
    # Unfused attention needs more than the prediction, which is too much already.
    plan.main(shlex.split(f"{WHERE} --measured 'tp1.pp1.dp8,micro_batch=1: 4.5 s, 60 GiB'"))
    assert (
        "--attention unfused"
        not in capsys.readouterr().out.partition("\nrank")[0].partition("the memory measured")[2]
    )
