"""The search equals brute force, explains itself, and its command keeps its contract."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from copus_ext.perf.cluster_spec import preset
from copus_ext.perf.model_spec import PRESETS, ModelSpec
from copus_ext.perf.profile import ProfileStore
from copus_ext.perf.step import step_time
from copus_ext.planner.answers import Ranked
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.request import cluster_of
from copus_ext.planner.search import DOMINATED, Planner
from copus_ext.planner.space import Limits, enumerate_points, to_rows
from tests.helpers.launch import ROOT
from tools import plan

MODEL = PRESETS["llama-2-13b"]


@pytest.mark.parametrize(("gpus", "batch"), [(16, 64), (32, 96), (64, 512)])
def test_the_best_are_those_of_brute_force(gpus: int, batch: int) -> None:
    planner = Planner(MODEL, preset(f"h100-80g:{gpus}"))
    space = planner._judged([batch])
    every = space.candidates
    rows = to_rows(MODEL, planner.cluster, every).full()
    seconds = np.sort(step_time(rows, planner.constants).step_s)
    found = planner.rank([batch], top=12)[0]
    assert found.num_ranked == len(every)
    got = [r.prediction.step_s for r in found.ranked]
    assert got == pytest.approx(list(seconds[:12]), rel=1e-12)
    rest = space.points.take(np.flatnonzero(space.points.code == DOMINATED))
    beaten = step_time(to_rows(MODEL, planner.cluster, rest).full(), planner.constants).step_s
    assert len(rest) > 100 and beaten.min() >= seconds[0]


def test_what_is_dominated_has_a_kin_that_fits_and_is_no_slower() -> None:
    planner = Planner(MODEL, preset("a100-80g:16"))
    space = planner._judged([64])
    names = ("tp", "pp", "vpp", "micro_batch_size", "use_distributed_optimizer")

    def by_kin(points: Any) -> dict[Any, list[tuple[float, int]]]:
        rows = to_rows(MODEL, planner.cluster, points).full()
        seconds = step_time(rows, planner.constants).step_s
        found: dict[Any, list[tuple[float, int]]] = {}
        for i in range(len(points)):
            kin = tuple(int(getattr(points, n)[i]) for n in names)
            found.setdefault(kin, []).append((float(seconds[i]), i))
        return found

    points = space.points
    good = by_kin(points.take(np.flatnonzero(space.fits)))
    for kin, beaten in by_kin(points.take(np.flatnonzero(points.code == DOMINATED))).items():
        assert min(good[kin])[0] <= min(beaten)[0] * (1 + 1e-12), kin


def test_a_measured_configuration_is_kept_though_dominated() -> None:
    cluster = preset("a100-80g:16")
    planner = Planner(MODEL, cluster)
    points = planner._judged([64]).points
    c = points.configuration(int(np.flatnonzero(points.code == DOMINATED)[0]))
    planner.retime([c.timed(1e-3)])
    assert planner.rank([64], top=1)[0].ranked[0].configuration == c


def test_recomputing_more_layers_takes_longer_and_less_memory() -> None:
    planner = Planner(MODEL, preset("h100-80g:32"))
    c = Configuration(
        tp=2, pp=4, dp=4, micro_batch_size=1, global_batch_size=64, sequence_parallel=True
    )
    ways = [{"recompute": "none"}]
    ways += [{"recompute": "block", "recompute_num_layers": k} for k in range(1, 10)]
    ways += [{"recompute": "full"}]
    found = [planner.explain(dataclasses.replace(c, **way)) for way in ways]
    assert all(isinstance(f, Ranked) for f in found)
    seconds = [f.prediction.step_s for f in found if isinstance(f, Ranked)]
    peaks = [f.prediction.peak_bytes for f in found if isinstance(f, Ranked)]
    assert seconds == sorted(seconds)
    assert peaks == sorted(peaks, reverse=True)
    # Evenly, until no layer is left whose place a recomputed one could take.
    assert np.ptp(np.diff(peaks[:-1])) < 1e-6 * peaks[0]


def test_a_batch_may_be_rounded_down() -> None:
    limits = Limits(fixed={"tp": 1, "pp": 1}, round_down=True)
    found = Planner(PRESETS["llama-2-7b"], preset("h100-80g:16"), limits=limits).rank([50], top=3)[
        0
    ]
    assert found.global_batch_size == 50 and found.ranked
    assert {r.configuration.global_batch_size for r in found.ranked} == {48}
    rates = [r.prediction.samples_per_s for r in found.ranked]
    assert rates == sorted(rates, reverse=True)


def test_many_batches_at_once_are_each_alone() -> None:
    planner = Planner(MODEL, preset("h100-80g:16"))
    together = planner.rank([16, 48, 64], top=5)
    for plan_ in together:
        assert plan_ == planner.rank([plan_.global_batch_size], top=5)[0]


def test_every_point_is_ranked_or_carries_a_reason() -> None:
    planner = Planner(MODEL, preset("a100-80g:16"))
    for plan_ in planner.rank([64, 24, 7], top=3):
        total = plan_.num_ranked + sum(r.count for r in plan_.rejected)
        limits = planner.limits
        points = enumerate_points(MODEL, planner.cluster, plan_.global_batch_size, limits)
        assert total == len(points)
        for r in plan_.rejected:
            assert r.detail and r.fix


def test_measured_times_beat_predictions_and_correct_their_kin() -> None:
    cluster = preset("h100-80g:16")
    best, second = Planner(MODEL, cluster).rank([64], top=2)[0].ranked
    c = best.configuration
    slow = 1.5 * best.prediction.step_s
    planner = Planner(MODEL, cluster, timings=[c.timed(slow)])
    again = planner.explain(c)
    assert isinstance(again, Ranked)
    assert again.prediction.source == "profiled"
    assert again.prediction.step_s == pytest.approx(slow, rel=0.01)
    assert sum(again.prediction.time_s.values()) == pytest.approx(again.prediction.step_s)
    assert again.prediction.step_rel_sd < 0.02 < best.prediction.step_rel_sd
    assert planner.rank([64], top=1)[0].ranked[0].configuration != c
    kin = planner.explain(second.configuration)
    assert isinstance(kin, Ranked)
    assert kin.prediction.source == "corrected"
    assert second.prediction.step_s < kin.prediction.step_s < 1.5 * second.prediction.step_s


def test_two_counts_give_every_batch() -> None:
    """A machine with a fixed cost per step that the constants do not know."""
    cluster = preset("h100-80g:16")
    plain = Planner(MODEL, cluster)
    c = plain.rank([64], top=1)[0].ranked[0].configuration
    unit = c.dp * c.micro_batch_size

    def predicted(planner: Planner, count: int) -> float:
        found = planner.explain(dataclasses.replace(c, global_batch_size=count * unit))
        assert isinstance(found, Ranked)
        return found.prediction.step_s

    def truth(count: int) -> float:
        return 1.02 * predicted(plain, count) + 0.1 * predicted(plain, 4)

    measured = [c.timed(truth(n), num_microbatches=n) for n in (4, 16)]
    planner = Planner(MODEL, cluster, timings=measured)
    for count in (4, 6, 8, 12, 16, 32):
        assert predicted(planner, count) == pytest.approx(truth(count), rel=0.02), count


def test_a_configuration_becomes_the_flags_of_the_trainer() -> None:
    from megatron.training.arguments import parse_args

    c = Configuration(
        tp=2,
        pp=4,
        vpp=2,
        dp=2,
        micro_batch_size=1,
        global_batch_size=16,
        recompute="full",
        sequence_parallel=True,
    )
    args = parse_args(c.to_flags())
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 4)
    assert args.num_virtual_stages_per_pipeline_rank == 2
    assert (args.micro_batch_size, args.global_batch_size) == (1, 16)
    assert args.sequence_parallel and args.use_distributed_optimizer
    assert args.recompute_granularity == "full"


def test_impossible_memory_is_never_ranked() -> None:
    for gpus in (8, 16):
        found = Planner(PRESETS["gpt3-175b"], preset(f"a100-80g:{gpus}")).rank([64])[0]
        assert found.status == "none_fits" and not found.ranked


def test_megatron_flags_and_config_json_give_the_same_model(tmp_path: Path) -> None:
    flags = """--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32
    --seq-length 2048 --swiglu --normalization RMSNorm --disable-bias-linear --bf16 --vocab-size
    32000 --untie-embeddings-and-output-weights --position-embedding-type rope --hidden-dropout 0"""
    from_flags = ModelSpec.from_megatron_flags(shlex.split(flags))
    config = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    from_file = ModelSpec.from_hugging_face(file, seq_length=2048)
    assert from_flags.num_parameters == from_file.num_parameters
    known = PRESETS["llama-2-7b"]
    assert from_file.num_parameters == known.num_parameters


def run(capsys: pytest.CaptureFixture[str], text: str) -> tuple[int, str, str]:
    code = plan.main(shlex.split(text))
    out, err = capsys.readouterr()
    return code, out, err


SEVEN = "--model llama-2-7b --cluster h100-80g:8"


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (
            f"{SEVEN} --global-batch-size 10 --fix tp=1,pp=1",
            3,
            ["data-parallel size 8", "does not divide global batch 10", "nearest legal: 8, 16"],
        ),
        (
            "--model gpt3-175b --cluster a100-80g:8 --global-batch-size 64",
            4,
            ["none fits", "smallest peak", "GiB usable", "needs about", "GPUs of this kind"],
        ),
        (
            f"{SEVEN} --global-batch-size 64 --fix tp=3",
            2,
            ["--fix tp=3: 32 attention heads are not divisible by 3; legal: 1, 2, 4, 8"],
        ),
        (
            f"{SEVEN} --global-batch-size 12 --fix vpp=2,pp=8,micro_batch=2",
            3,
            ["vpp=2,pp=8 needs a multiple of 8 micro-batches", "use global batch 16 or vpp=1"],
        ),
        (f"{SEVEN} --global-batch-size 0", 2, ["--global-batch-size 0"]),
        (f"{SEVEN} --global-batch-size 0:64:x2", 2, ["--global-batch-size 0:64:x2"]),
        (f"{SEVEN} --global-batch-size 8 --seq-length 0", 2, ["seq_length 0"]),
        (f"{SEVEN} --global-batch-size 8 --output /no/where", 2, ["--output /no/where"]),
        (f"{SEVEN} --global-batch-size 8 --explain recompute=some", 2, ["recompute is one of"]),
        (f"{SEVEN} --global-batch-size 8 --explain tp=2,sp=0", 2, ["sp goes with tp"]),
        (f"{SEVEN} --global-batch-size 8 --explain dp=4", 2, ["is not 8 GPUs"]),
        (
            "--model llama-2-7b --nodes 1 --gpu H100-80GB --nic 1.2.3GB --global-batch-size 8",
            2,
            ["'1.2.3GB' is no size"],
        ),
        ('--megatron-args "--x \'y" --cluster cpu:2 --global-batch-size 8', 2, ["--megatron-args"]),
        (f"{SEVEN} --global-batch-size 4:x", 2, ["--global-batch-size 4:x"]),
        (f"{SEVEN} --global-batch-size 8 --top 0", 2, ["--top 0"]),
        (f"{SEVEN} --global-batch-size 8 --fix colour=1", 2, ["--fix colour=1"]),
        (f"{SEVEN} --global-batch-size 8 --recompute some", 2, ["--recompute some"]),
        ("--model llama-9 --cluster cpu:2 --global-batch-size 8", 2, ["--model llama-9"]),
        ("--model llama-2-7b --cluster h999:8 --global-batch-size 8", 2, ["h999:8", "h100-80g"]),
        ("--model llama-2-7b --cluster no.json --global-batch-size 8", 5, ["no.json"]),
        ("--model no.json --cluster cpu:2 --global-batch-size 8", 5, ["no.json"]),
        (
            "--model llama-2-7b --nodes 1 --gpu H999 --global-batch-size 8",
            2,
            ["--gpu H999: unknown; known: A100-40GB"],
        ),
        ("--megatron-args '--num-layers 4' --cluster cpu:2 --global-batch-size 8", 2, ["--hidden"]),
        ("--model llama-2-7b --global-batch-size 8", 2, ["--cluster"]),
    ],
)
def test_problems_are_one_line_with_a_way_out(
    capsys: pytest.CaptureFixture[str], text: str, code: int, words: list[str]
) -> None:
    got, _, err = run(capsys, text)
    assert got == code
    assert err.startswith("plan.py: error: ") and err.count("\n") == 1
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"model_type": "llama", "num_local_experts": 8}, "num_local_experts=8: mixture of"),
        ({"model_type": "mamba"}, "model_type 'mamba' is not known"),
        ([], "config.json"),
        (
            {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2},
            "vocab_size is missing",
        ),
    ],
)
def test_a_config_json_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: Any, words: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(data))
    flags = f"--model {file} --cluster cpu:2 --global-batch-size 8 --seq-length 128"
    code, _, err = run(capsys, flags)
    assert code == 5 and words in err and err.count("\n") == 1


def test_a_missing_sample_length_names_the_flag(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 131072}))
    code, _, err = run(capsys, f"--model {file} --cluster cpu:2 --global-batch-size 8")
    assert code == 2
    assert "--seq-length is required with --model config.json" in err and "131072" in err


def test_json_keeps_its_contract_and_is_the_same_every_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    flags = f"{SEVEN} --global-batch-size 16,64 --json --top 2 --output {file}"
    assert run(capsys, flags)[0] == 0
    first = file.read_text()
    assert run(capsys, flags)[0] == 0
    assert file.read_text() == first
    record = json.loads(first)
    assert record["schema"] == "copus.plan/1"
    jsonschema.validate(record, json.loads((ROOT / "docs" / "plan.schema.json").read_text()))
    assert set(record) == {"schema", "version", "inputs", "counts", "plans"}
    counts = record["counts"]
    assert counts["enumerated"] == counts["ranked"] + sum(counts["rejected"].values())
    assert [p["global_batch_size"] for p in record["plans"]] == [16, 64]
    best = record["plans"][1]["ranked"][0]
    assert best["rank"] == 1 and best["flags"][0] == "--tensor-model-parallel-size"
    prediction = best["prediction"]
    assert sum(prediction["time_s"].values()) == pytest.approx(prediction["step_s"])
    stage = prediction["memory"]["stages"][prediction["memory"]["worst_stage"]]
    assert sum(stage.values()) == pytest.approx(prediction["memory"]["peak_bytes"])


def test_a_profile_of_another_model_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "profile.jsonl"
    best = Planner(PRESETS["llama-2-7b"], preset("h100-80g:8")).rank([64], top=1)[0].ranked[0]
    machine = {"model": PRESETS["llama-2-7b"].to_json(), "world_size": 8, "gpu": "H100-80GB"}
    store = ProfileStore(path, machine)
    store.add(best.configuration.timed(0.9 * best.prediction.step_s))
    flags = f"--cluster h100-80g:8 --global-batch-size 64 --json --profile {path}"
    code, out, _ = run(capsys, f"--model llama-2-7b {flags}")
    first = json.loads(out)["plans"][0]["ranked"][0]["prediction"]
    assert code == 0 and first["source"] == "profiled"
    assert first["step_s"] == pytest.approx(0.9 * best.prediction.step_s, rel=0.01)
    code, _, err = run(capsys, f"--model llama-2-13b {flags}")
    assert code == 5 and "another model" in err
    for cluster in ("h100-80g:16", "a100-80g:8"):
        code, _, err = run(capsys, f"--model llama-2-7b {flags.replace('h100-80g:8', cluster)}")
        assert code == 5 and "was measured on 8 x H100-80GB" in err
    code, _, err = run(capsys, f"--model llama-2-13b {flags} --profile {tmp_path / 'none'}")
    assert code == 5 and "no profile" in err


@pytest.mark.parametrize("page", ["README.md", "docs/planner.md"])
def test_the_commands_of_the_pages_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, page: str
) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    commands = [line for line in lines if line.startswith("python tools/plan.py")]
    assert commands
    config = {
        "model_type": "llama",
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for command in commands:
        own = command.removeprefix("python tools/plan.py ")
        code, out, err = run(capsys, own.replace("config.json", f"{tmp_path}/config.json"))
        assert code == 0 and out, (command, err)


def test_the_figure_is_one_page_without_a_network(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "plan.html"
    code, _, _ = run(capsys, f"{SEVEN} --global-batch-size 16:256:x2 --plot {page}")
    text = page.read_text()
    assert code == 0 and "tp1 pp1 dp8" in text and "global batch, samples" in text
    assert not re.search(r"<(script|link)[^>]*(src|href)=", text)


def test_rejected_configurations_are_named_when_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(capsys, f"{SEVEN} --global-batch-size 16 --json --rejected")
    record = json.loads(out)
    jsonschema.validate(record, json.loads((ROOT / "docs" / "plan.schema.json").read_text()))
    rejected = record["plans"][0]["rejected"]
    assert code == 0 and rejected
    assert all(len(r["members"]) == r["count"] for r in rejected)


def test_an_interrupt_keeps_what_was_ranked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    true, calls = Planner.rank, []

    def second_is_cut_short(self: Planner, *args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return true(self, *args, **kwargs)

    monkeypatch.setattr(Planner, "rank", second_is_cut_short)
    code, out, err = run(capsys, f"{SEVEN} --global-batch-size 8:256:+8 --top 1")
    assert code == 130 and "interrupted" in err
    assert out.count("configurations fit global batch") == 16


def test_explain_prices_one_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, f"{SEVEN} --global-batch-size 64 --explain tp=2,pp=2,micro_batch=2")
    assert code == 0
    assert "bubble" in out and "stage 1" in out and "flags: --tensor-model-parallel-size 2" in out
    code, out, _ = run(capsys, f"{SEVEN} --global-batch-size 64 --explain pp=8,vpp=3")
    assert code == 3 and "virtual: 4 layers of a stage are not divisible by vpp=3" in out


def test_a_batch_that_cannot_be_had_does_not_keep_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fixed = "--fix tp=1,pp=1,micro_batch=4"
    code, out, err = run(capsys, f"{SEVEN} {fixed} --global-batch-size 16,64 --recompute full")
    assert code == 3 and "global batch 16" in err
    assert "configurations fit global batch 64" in out


def test_nodes_of_a_gpu_are_its_preset() -> None:
    args = plan.parser().parse_args(["--nodes", "4", "--gpu", "H100-80GB", "--global-batch-size=8"])
    assert cluster_of(args) == preset("h100-80g:32")


def test_the_formats(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, f"{SEVEN} --global-batch-size 16:64:x2 --top 1")
    assert code == 0 and out.count("configurations fit global batch") == 3
    code, out, _ = run(capsys, f"{SEVEN} --global-batch-size 64 --format flags")
    assert code == 0 and out.startswith("--tensor-model-parallel-size")


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys; from tools import plan; import copus_ext.planner.search, copus_ext.perf.fit;"
        "sys.exit('torch' in sys.modules or 'megatron.core' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_limits_limit() -> None:
    limits = Limits(fixed={"tp": 2}, largest={"pp": 2, "micro_batch": 1})
    for r in Planner(MODEL, preset("h100-80g:8"), limits=limits).rank([32], top=50)[0].ranked:
        c = r.configuration
        assert c.tp == 2 and c.pp <= 2 and c.micro_batch_size == 1
