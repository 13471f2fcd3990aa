"""The planner's command keeps its contract."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from copus_ext import __version__
from copus_ext.commands import plan
from copus_ext.cost_model.cluster_spec import ClusterSpec, Links, NodeSpec, preset
from copus_ext.cost_model.gpus import kind_of
from copus_ext.cost_model.models import PRESETS
from copus_ext.planner import report
from copus_ext.planner.explain import RULES, reason
from copus_ext.planner.profile import ProfileStore, Timing
from copus_ext.planner.request import cluster_of, configuration_of
from copus_ext.planner.search import Planner
from copus_ext.planner.space import REJECTION_CODES
from tests.helpers.launch import ROOT
from tests.helpers.of_extras import of_extra

SEVEN = "--model llama-2-7b --seq-length 2048 --cluster h100-80g:8"
EIGHT = f"{SEVEN} --global-batch-size 8"
CPU = "--model copus-quickstart --cluster cpu:2 --global-batch-size 8"
THIRTEEN = (
    "--model llama-2-13b --seq-length 2048 --global-batch-size 64 --top 2 --fix tp=8,pp=4,vpp=1"
)


def run(capsys: pytest.CaptureFixture[str], text: str) -> tuple[int, str, str]:
    code = plan.main(shlex.split(text))
    out, err = capsys.readouterr()
    return code, out, err


def test_the_schema_knows_every_reason() -> None:
    schema = json.loads((ROOT / "docs" / "plan.schema.json").read_text())
    assert schema["$defs"]["rejection_code"]["enum"] == list(REJECTION_CODES)


CONTEXTS = {
    # max_position_embeddings of the public config.json; of GPT-3 and LLaMA the paper says it.
    "gpt3-175b": 2048,
    **dict.fromkeys(("llama-7b", "llama-13b", "llama-30b", "llama-65b"), 2048),
    **dict.fromkeys(("llama-2-7b", "llama-2-13b", "llama-2-70b"), 4096),
    "llama-3-8b": 8192,
    "llama-3-70b": 8192,
    "llama-3.2-3b": 131072,
    "llama-3.1-405b": 131072,
    "mixtral-8x22b": 65536,
    "qwen2.5-32b": 131072,
    "mixtral-8x7b": 32768,
    "qwen3-30b-a3b": 40960,
    "deepseek-v3-sized": 163840,
    "copus-quickstart": 128,
}


def test_samples_of_a_named_model_are_as_long_as_its_context() -> None:
    assert {name: spec.seq_length for name, spec in PRESETS.items()} == CONTEXTS


def test_an_answer_says_how_long_the_samples_are(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--model llama-2-13b --cluster a100-80g:8 --global-batch-size 32 --top 1"
    code, out, _ = run(capsys, asked)
    head, *table = out.splitlines()
    assert code == 0 and head == "samples of 4096 tokens, the context of llama-2-13b"
    assert table[0] == "on 8 A100-80GB of 80 GiB in one node, 300 GB/s from one to another"
    code, out, _ = run(capsys, f"{asked} --seq-length 4096")
    head, *same = out.splitlines()
    assert head == "samples of 4096 tokens (--seq-length)" and same == table
    longer = "samples of 131072 tokens, the context of llama-3.2-3b; pre-training mostly takes"
    code, out, _ = run(capsys, f"explain tp=8 {asked} --model llama-3.2-3b".replace("--top 1", ""))
    assert out.startswith(f"{longer} shorter ones, for example --seq-length 4096\n")
    small = "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --bf16"
    about = "--cluster a100-80g:8 --global-batch-size 32"
    code, out, _ = run(capsys, f"{about} --megatron-args '{small}'")
    assert out.startswith("samples of 128 tokens (--megatron-args)\n")
    for command, source in (("", "context"), ("explain tp=1", "context")):
        code, out, _ = run(capsys, f"{command} --model copus-quickstart {about} --json")
        inputs = json.loads(out)["inputs"]
        assert (inputs["seq_length_from"], inputs["model"]["seq_length"]) == (source, 128)


def json_of(capsys: pytest.CaptureFixture[str], text: str) -> dict[str, Any]:
    """The first plan of an answer that keeps the schema."""
    code, out, _ = run(capsys, f"{text} --json")
    record = json.loads(out)
    jsonschema.validate(record, json.loads((ROOT / "docs" / "plan.schema.json").read_text()))
    assert code == 0
    return record["plans"][0]


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (f"{SEVEN} --global-batch-size 10 --fix tp=1,cp=1,pp=1", 3, "use --global-batch-size 8 or"),
        (
            "--model gpt3-175b --cluster a100-80g:8 --global-batch-size 64",
            4,
            r"none fits, the smallest: predicted peak .* GiB, safe up to .*needs about \d+ GPUs",
        ),
        (f"{SEVEN} --global-batch-size 64 --fix tp=3", 2, "divisible by 3; legal: 1, 2, 4, 8"),
        (
            f"{SEVEN} --global-batch-size 12 --fix vpp=2,pp=8,micro_batch=2",
            3,
            "vpp=2,pp=8 needs a multiple of 8 micro-batches.*use --global-batch-size 16 or vpp=1",
        ),
        (f"{EIGHT} --fix vpp=2,pp=1", 2, "leave nothing to consider"),
        (f"{SEVEN} --global-batch-size 10000000000000000", 2, "sizes must be from 1 to"),
        (f"{SEVEN} --global-batch-size 0", 2, "sizes must be from 1 to"),
        (f"{SEVEN} --global-batch-size 0:64:x2", 2, "--global-batch-size 0:64:x2: write"),
        (f"{SEVEN} --global-batch-size 4:x", 2, "--global-batch-size 4:x: write"),
        (f"{SEVEN} --global-batch-size 3 --fix dp=8", 3, "batch 3"),
        (f"{EIGHT} --fix tp=\u00b2", 2, "--fix tp=\u00b2"),
        (f"{EIGHT} --fix micro_batch=99999999999999999999", 2, "--fix micro_batch"),
        (f"{EIGHT} --fix colour=1", 2, "--fix colour=1"),
        (f"{EIGHT} --fix tp2.qq2", 2, "--fix tp2.qq2: write NAME=NUMBER"),
        (f"explain recompute=block:32 {EIGHT}", 2, "use 1 to 31"),
        (f"explain pp=2,recompute=block:\u00b2 {EIGHT}", 2, "recompute is one of"),
        (f"explain recompute=some {EIGHT}", 2, "recompute is one of"),
        (f"explain tp=1,sp=1 {EIGHT}", 2, "goes with tp above 1"),
        (f"explain tp=2,zero=no {EIGHT}", 2, "zero is 0 or 1"),
        (f"explain tp=2,overlap=false {EIGHT}", 2, "overlap is 0 or 1"),
        (f"explain dp=4 {EIGHT}", 2, "is not 8 GPUs; leave dp out, or use dp=8"),
        (f"explain tp2.pp1.dp2 {EIGHT}", 2, "is not 8 GPUs; leave dp out, or use dp=4"),
        (
            f"explain tp=3,pp=16 {EIGHT}",
            2,
            "is not 8 GPUs; use tp .--tensor-model-parallel-size. 2 or 4 in place of 3 and pp "
            ".--pipeline-model-parallel-size. 8 in place of 16",
        ),
        (f"explain tp=4,pp=4 {EIGHT}", 2, "tp x cp x pp is 16 and has to divide 8"),
        (f"explain vpp=2 {EIGHT}", 2, "needs a pipeline"),
        (f"{EIGHT} --fix pp=8,tp=1,vpp=4 --recompute block", 2, "needs chunks of two layers"),
        (f"{EIGHT} --recompute some", 2, "--recompute some"),
        (f"{EIGHT} --rejected --format flags", 2, "has no room for --rejected"),
        (f"{SEVEN} --global-batch-size 8,16 --format kubernetes", 2, "give one batch"),
        (f"{CPU} --format slurm", 2, "--format slurm is for GPUs"),
        (f"explain tp=2 {EIGHT} --format flags", 2, "invalid choice: 'flags'"),
        (f"{EIGHT} --seq-length 0", 2, "seq_length 0"),
        (f"{EIGHT} --output /no/where", 2, "--output /no/where"),
        (f"{EIGHT} --top 0", 2, "--top 0"),
        (f"{EIGHT} --train-tokens -1", 2, "--train-tokens -1"),
        (f"{EIGHT} --hostfile x", 2, "--hostfile"),
        (
            "--model llama-2-7b --seq-length 2048 --nodes 1 --gpu H100-80GB --nic 1.2.3GB",
            2,
            "'1.2.3GB' is not a size",
        ),
        (
            "--model llama-2-7b --seq-length 2048 --nodes 1 --gpu H100-80GB --nic 100",
            2,
            "--nic 100 has no unit",
        ),
        (
            "--model llama-2-7b --seq-length 2048 --nodes 1 --gpu H999",
            2,
            "--gpu H999: unknown; known: V100-16GB",
        ),
        ('--megatron-args "--x \'y" --cluster cpu:2', 2, "--megatron-args"),
        ("--megatron-args '--num-layers 4' --cluster cpu:2", 2, "--hidden"),
        ("--model llama2-13b --cluster cpu:2", 2, "did you mean llama-2-13b. Known: gpt3-175b"),
        ("--model bert --cluster cpu:2", 2, "--model bert: unknown; known: gpt3-175b"),
        ("--model llama-2-7b --cluster h10O-80g:8", 2, "did you mean h100-80g. Known: v100-16g"),
        ("--model llama-2-7b --nodes 1 --gpu h1000-80GB", 2, "did you mean H100-80GB. Known"),
        ("--model llama-2-7b --nodes 1 --gpu A100", 2, "write A100-40GB or A100-80GB"),
        ("--model llama-2-7b --seq-length 2048 --cluster h999:8", 2, "h999:8.*h100-80g"),
        ("--model llama-2-7b --seq-length 2048 --cluster no.json", 5, "no.json"),
        ("--model no.json --cluster cpu:2", 5, "no.json"),
        ("--model llama-2-7b --seq-length 2048", 2, "--cluster"),
    ],
)
def test_problems_are_one_line_with_a_way_out(
    capsys: pytest.CaptureFixture[str], text: str, code: int, words: str
) -> None:
    more = "" if "--global-batch-size" in text else " --global-batch-size 8"
    got, _, err = run(capsys, text + more)
    assert got == code
    assert err.startswith("plan.py: error: ") and err.count("\n") == 1
    assert re.search(words, err)


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        ({"model_type": "llama", "num_local_experts": 8}, 5, "num_local_experts=8: experts of"),
        ({"model_type": "mamba"}, 5, "model_type 'mamba' is not known"),
        ([], 5, "config.json"),
        ({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}, 5, "vocab_size is"),
        ({"model_type": "llama", "max_position_embeddings": 131072}, 2, "--seq-length.*131072"),
        ({"model_type": "gpt2", "n_positions": 1024}, 2, "--seq-length.* context is 1024$"),
        ({"model_type": "llama"}, 2, "--seq-length.*config.json, which names no context$"),
    ],
)
def test_a_config_json_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: Any, code: int, words: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(data))
    length = "--seq-length 128" if code == 5 else ""
    flags = f"--model {file} --cluster cpu:2 --global-batch-size 8 {length}"
    got, _, err = run(capsys, flags)
    assert got == code and re.search(words, err) and err.count("\n") == 1


def test_json_keeps_its_contract_and_is_the_same_every_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert all(
        len(r["members"]) == r["count"]
        for r in json_of(capsys, f"{SEVEN} --global-batch-size 16 --rejected")["rejected"]
    )
    file = tmp_path / "plan.json"
    flags = f"{SEVEN} --global-batch-size 16,64 --json --top 2 --output {file}"
    assert run(capsys, flags)[0] == 0
    first = file.read_text()
    assert run(capsys, flags)[0] == 0
    assert file.read_text() == first
    record = json.loads(first)
    assert record["schema"] == "copus.plan/1"
    jsonschema.validate(record, json.loads((ROOT / "docs" / "plan.schema.json").read_text()))
    assert set(record) == {
        "schema",
        "version",
        "inputs",
        "counts",
        "plans",
        "headroom",
        "first_batch",
    }
    assert record["headroom"]["train_tokens"] == 20 * PRESETS["llama-2-7b"].num_parameters
    counts = record["counts"]
    assert counts["enumerated"] == counts["ranked"] + sum(counts["rejected"].values())
    assert [p["global_batch_size"] for p in record["plans"]] == [16, 64]
    best = record["plans"][1]["ranked"][0]
    assert best["rank"] == 1 and best["flags"][0] == "--bf16"
    prediction = best["prediction"]
    assert sum(prediction["time_s"].values()) == pytest.approx(prediction["step_s"])
    stage = prediction["memory"]["stages"][prediction["memory"]["worst_stage"]]
    assert sum(stage.values()) == pytest.approx(prediction["memory"]["peak_bytes"])


def test_a_profile_holds_on_its_machine_and_for_other_models_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "profile.jsonl"
    best = (
        Planner(PRESETS["llama-2-7b"].with_seq_length(2048), preset("h100-80g:8"))
        .rank([64], top=1)[0]
        .ranked[0]
    )
    machine = {
        "model": PRESETS["llama-2-7b"].with_seq_length(2048).to_json(),
        "world_size": 8,
        "gpu": "H100-80GB",
    }
    store = ProfileStore(path, machine)
    store.add(Timing(configuration=best.configuration, step_s=0.9 * best.prediction.step_s))
    flags = f"--cluster h100-80g:8 --global-batch-size 64 --json --profile {path}"
    code, out, _ = run(capsys, f"--model llama-2-7b --seq-length 2048 {flags}")
    first = json.loads(out)["plans"][0]["ranked"][0]["prediction"]
    assert code == 0 and first["source"] == "profiled"
    assert first["step_s"] == pytest.approx(0.9 * best.prediction.step_s, rel=0.01)
    other = f"--model llama-2-13b --seq-length 2048 {flags}"
    plain = json_of(capsys, other.replace("--json", "").replace(f"--profile {path}", ""))
    plain = plain["ranked"][0]["prediction"]
    code, out, err = run(capsys, other)
    told = json.loads(out)["plans"][0]["ranked"][0]["prediction"]
    assert code == 0 and "1 times of llama-2-7b with samples of 2048 tokens correct those of" in err
    assert told["source"] == "corrected" and told["step_rel_sd"] < plain["step_rel_sd"]
    assert 0.88 < told["step_s"] / plain["step_s"] < 0.97
    for cluster in ("h100-80g:16", "a100-80g:8"):
        code, _, err = run(
            capsys, f"--model llama-2-7b --seq-length 2048 {flags.replace('h100-80g:8', cluster)}"
        )
        assert code == 5 and "was measured on 8 x H100-80GB" in err
    code, _, err = run(
        capsys, f"--model llama-2-13b --seq-length 2048 {flags} --profile {tmp_path / 'none'}"
    )
    assert code == 5 and "not a profile" in err


def commands_of(page: str) -> list[str]:
    """Flags of every plan that a page shows."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    own = "copus plan "
    found = [line.removeprefix(own) for line in lines if line.startswith(own)]
    assert found, page
    return found


@pytest.mark.parametrize(
    "command", [*commands_of("README.md"), *commands_of("docs/planner.md")], ids=lambda c: c[:40]
)
def test_the_commands_of_the_pages_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
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
    code, out, err = run(capsys, command.replace("config.json", f"{tmp_path}/config.json"))
    assert code == 0 and out, err


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
    assert out.count("configurations ranked for global batch") == 16


def test_explain_prices_one_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    base = f"{SEVEN} --global-batch-size 64"
    code, out, _ = run(capsys, f"explain tp=2,pp=2,micro_batch=2 {base}")
    found = out.splitlines()[4].split()[0][:-1]
    assert code == 0 and run(capsys, f"explain {found} {base}")[1] == out
    assert re.search(r" bubble .* %  waiting in the pipeline\n", out)
    assert "stage 1" in out and "-dataloader --tensor-model-parallel-size 2" in out
    code, out, _ = run(capsys, f"explain pp=8,vpp=3 {base}")
    assert code == 3 and "not legal: 4 layers of a stage are not divisible by vpp=3" in out
    # The replicas follow from the number of GPUs.
    whole, part = (run(capsys, f"explain {c} {base}") for c in ("tp4.pp2.dp1", "tp4.pp2"))
    assert whole == part and whole[0] == 0
    code, _, err = run(capsys, f"explain tp4.pp3,micro_batch=2 {base}")
    assert code == 2 and "tp4.pp3,micro_batch=2: tp x pp x dp is not 8 GPUs" in err
    assert run(capsys, f"explain tp4.tp2 {base}")[0] == 2
    record = json.loads(run(capsys, f"explain tp4.pp2 {base} --json")[1])
    assert (record["schema"], record["version"]) == ("copus.explain/1", __version__)
    assert set(record["inputs"]) == {"model", "seq_length_from", "cluster", "constants"}


def test_the_head_names_the_machine_and_its_network() -> None:
    def line(cluster: ClusterSpec) -> str:
        return report.machine_line(cluster, cluster.load_constants())

    many = preset("a100-80g:1024")
    head = "on 1,024 A100-80GB of 80 GiB, 8 to a node; 300 GB/s from one to another in a node; "
    usual = f"{head}between nodes 100 GB/s of each node"
    assert line(many) == f"{usual}, of which messages are taken to reach 50 %"
    assert line(replace(many, nic_is_measured=True)) == f"{usual}, as measured"
    two = preset("h100-80g:16")
    slow, fast = (NodeSpec(gpu=preset(f"{kind}:8").gpu) for kind in ("a100-40g", "h100-80g"))
    text = line(replace(two, nodes=(fast, slow)))
    assert text.startswith("on 8 H100-80GB of 80 GiB and 8 A100-40GB of 40 GiB, 8 to a node; ")
    speeds = ((0.0, 1e9), (1e9, 0.0))
    links = Links(bytes_per_s=speeds, latency_s=((0.0, 1e-5), (1e-5, 0.0)), duplex=0.5)
    found = line(replace(two, links=links))
    assert found.endswith("between nodes 200 GB/s of each node, as measured")


def test_reasons_are_words_and_not_the_names_of_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(RULES) == set(REJECTION_CODES)
    _, out, _ = run(capsys, f"{SEVEN} --global-batch-size 10 --top 1")
    told = [x for x in out.splitlines() if re.match(r"\d+ rejected, ", x)]
    counts = json_of(capsys, f"{SEVEN} --global-batch-size 10 --top 1")["rejected"]
    assert len(told) == len(counts) > 2
    for line, one in zip(told, counts):
        assert line.startswith(f"{one['count']} rejected, {RULES[one['code']]}: ")
        assert (": the one that needs least: predicted peak " in line) == (one["code"] == "memory")
    words = "replicas and micro-batch that do not divide the global batch"
    assert any(words in line for line in told)


def test_the_command_that_prices_what_is_never_faster_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = next(r for r in json_of(capsys, EIGHT)["rejected"] if r["code"] == "dominated")
    (command,) = re.findall(r"`(explain .*)` in front of your flags of model", told["fix"])
    code, out, _ = run(capsys, f"{command} {EIGHT}")
    assert code == 0 and "\nstep " in out


def test_the_doubt_does_not_depend_on_how_many_rows_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = "--model llama-2-13b --cluster a100-80g:64 --global-batch-size 256"
    some = [json_of(capsys, f"{asked} --top {top}") for top in (1, 3, 100)]
    assert len({plan["common_rel_sd"] for plan in some}) == 1
    firsts = [[r["over_first_rel_sd"] for r in plan["ranked"][:3]] for plan in some]
    assert firsts[1] == pytest.approx(firsts[2])


def test_a_peak_just_too_large_is_told_apart_from_what_is_safe() -> None:
    c = configuration_of("tp=2", global_batch_size=16, world_size=8)
    near = (68.734 * 2**30, 68.712 * 2**30, 76.8 * 2**30)
    detail, fix = reason("memory", PRESETS["llama-2-13b"], c, *near)
    assert detail.startswith("predicted peak 68.73 GiB, safe up to 68.71 GiB: 76.8 GiB less the d")
    assert fix.startswith("0.02 GiB more than is safe")
    _, fix = reason("memory", PRESETS["llama-2-13b"], c, 68.734 * 2**30, 68.7339 * 2**30, near[2])
    assert fix.startswith("on the edge")


def test_a_batch_that_cannot_be_had_does_not_keep_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fixed = "--fix tp=1,cp=1,pp=1,micro_batch=4"
    code, out, err = run(capsys, f"{SEVEN} {fixed} --global-batch-size 16,64 --recompute full")
    assert code == 3 and "global batch 16" in err
    # What a better machine would save is told of the batch that can be had.
    alone = run(capsys, f"{SEVEN} {fixed} --global-batch-size 64 --recompute full")[1]
    assert out.splitlines()[-1] == alone.splitlines()[-1]
    assert "configurations ranked for global batch 64" in out


def test_the_formats(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, f"{SEVEN} --global-batch-size 16:64:x2 --top 1")
    assert code == 0 and out.count("configurations ranked for global batch") == 3
    assert out.splitlines()[-1].startswith("over 1.35e+11 tokens: keep one batch")
    # Over a slow network a step's fixed cost is worth as many samples as the critical batch size.
    slow = (
        "--model llama-2-7b --seq-length 2048 --nodes 4 --gpu H100-80GB --nic 2GB/s --fix pp=1,tp=1"
    )
    _, out, _ = run(capsys, f"{slow} --global-batch-size 32:8192:x2 --train-tokens 3e9 --top 1")
    assert re.match(
        r"over 3e\+09 tokens: .* can save |over 3e\+09 tokens: keep one batch", out.splitlines()[-1]
    )
    assert "headroom" not in json.loads(run(capsys, f"{EIGHT} --json")[1])
    args = plan.parse(["--nodes", "4", "--gpu", "H100-80GB", "--global-batch-size=8"])
    assert cluster_of(args) == preset("h100-80g:32")
    code, out, _ = run(capsys, f"{SEVEN} --global-batch-size 64 --format flags")
    assert code == 0 and "-dataloader --tensor-model-parallel-size" in out


def test_the_first_row_as_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--model llama-2-7b --seq-length 2048 --cluster h100-80g:32 --global-batch-size 64"
    flags, slurm, kubernetes, submitit = (
        run(capsys, f"{asked} --format {form}")[1]
        for form in ("flags", "slurm", "kubernetes", "submitit")
    )
    mine = "FLAGS: those of your run, before the layout's\n"
    first, trainer, *remarks, last = slurm.splitlines(keepends=True)
    assert all(line.startswith("# ") for line in remarks)
    assert "starts COPUS's own trainer" in trainer and "to start Megatron-LM" in trainer
    assert kubernetes.splitlines(keepends=True)[1] == trainer
    assert first == f"# put your own in place of runs/x (a folder that all nodes see); {mine}"
    assert last == (
        "COPUS_RUN=runs/x sbatch --nodes=4 --gpus-per-node=8 scripts/slurm/pretrain.sbatch "
        f"FLAGS {flags}"
    )
    top = kubernetes.splitlines(keepends=True)[0]
    assert top.startswith("# put your own in place of copus:latest (the") and top.endswith(mine)
    for place in ("copus:latest", "copus-runs", "/runs/x", "FLAGS"):
        assert place in top and place in kubernetes.removeprefix(top)
    found = json.loads(submitit)
    assert found.pop("flags") == flags.split()
    reader, *others = found.pop("remarks")
    assert "AutoExecutor takes nodes, " in reader and "reads neither flags nor remarks" in reader
    assert others == [line[2:-1] for line in remarks]
    assert found == {"nodes": 4, "gpus_per_node": 8, "tasks_per_node": 8}
    # All else is as in the manifest.
    service, job = yaml.safe_load_all(kubernetes)
    spec = job["spec"]
    assert spec.pop("completions") == 4 == spec.pop("parallelism")
    (node,) = spec["template"]["spec"]["containers"]
    assert node["resources"]["limits"].pop("nvidia.com/gpu") == 8
    words = node["args"]
    assert words.pop(0) == "--nnodes=4"
    at = words.index("FLAGS") + 1
    assert words[at : at + len(flags.split())] == flags.split()
    del words[at : at + len(flags.split())]
    their_service, theirs = yaml.safe_load_all((ROOT / "scripts/kubernetes/job.yaml").read_text())
    (node,) = theirs["spec"]["template"]["spec"]["containers"]
    del theirs["spec"]["completions"], theirs["spec"]["parallelism"]
    del node["resources"]["limits"]["nvidia.com/gpu"], node["args"][0]
    assert [service, job] == [their_service, theirs]


@pytest.mark.parametrize("flag", ["--nodes 2", "--gpu H100-80GB", "--gpus-per-node 4"])
def test_a_machine_is_named_once(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    code, _, err = run(capsys, f"{SEVEN} --global-batch-size 64 {flag}")
    assert code == 2 and f"drop {flag.split()[0]}" in err and err.count("\n") == 1


def test_given_links_win_over_those_of_a_named_machine(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (
        "--model llama-2-7b --seq-length 2048 "
        "--cluster h100-80g:16 --global-batch-size 64 --fix tp=2,pp=1"
    )
    usual, slow, apart = (
        json_of(capsys, f"{asked} --top 1 {more}")["ranked"][0]["prediction"]["step_s"]
        for more in ("", "--nic 1GB/s", "--intra 1GB/s")
    )
    assert slow > usual and apart > usual


def test_what_the_answer_does_not_depend_on_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    shape = "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --bf16"
    shape += " --max-position-embeddings 128 --vocab-size 1000 --overlap-grad-reduce"
    told = "--no-overlap-p2p-communication --cross-entropy-loss-fusion"
    where = "--cluster a100-80g:8 --global-batch-size 64 --top 1"
    code, out, err = run(capsys, f"{where} --megatron-args '{shape} {told}'")
    assert code == 0 and err.count("\n") == 1 and all(flag in err for flag in told.split())
    for flag in ("--no-rope-fusion", "--no-bias-gelu-fusion", "--optimizer sgd"):
        _, _, err = run(capsys, f"{where} --megatron-args '{shape} {flag}'")
        assert f"the cost model does not know {flag}: priced as if not given" in err
    _, _, err = run(capsys, f"{where} --megatron-args '{shape} --tp-comm-overlap'")
    assert "--tp-comm-overlap" in err
    for flag in ("--micro-batch-size 4", "--recompute-activations"):
        _, _, err = run(capsys, f"{where} --megatron-args '{shape} {flag}'")
        assert f"the search finds what {flag.split()[0]} would say" in err
    code, again, err = run(capsys, f"{where} --megatron-args '{shape}'")
    assert code == 0 and not err and out == again


def test_flags_of_a_run_tell_its_length_and_its_weight_decay(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shape = "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 128"
    shape += " --max-position-embeddings 128 --vocab-size 1000 --overlap-grad-reduce"
    where = "--cluster a100-80g:8 --global-batch-size 64 --top 1"
    rates = "--lr 1e-3 --weight-decay 0.1"
    for length in ("--train-samples 1000000", "--train-iters 15625 --global-batch-size 64"):
        flags = f"--megatron-args '{shape} {rates} {length}'"
        _, out, _ = run(capsys, f"{where} {flags}")
        assert "\nover 1.28e+08 tokens (1e+06 samples, by --train-" in out
        assert (
            "\nweight decay: the weights average the updates of the last 64 % of the run (tau = "
            "B / (lr x weight decay x D)) at batch 64\n" in out
        )
        told = json.loads(run(capsys, f"{where} {flags} --json")[1])["weight_decay"]
        assert told == {"global_batch_size": 64, "timescale": pytest.approx(0.64)}
    # The rates are those of the batch of the flags, whatever batches are asked for.
    flags = f"--megatron-args '{shape} {rates} --train-samples 1000000 --global-batch-size 128'"
    assert (
        "decay would take 1.3 times as long as the run to forget one "
        "(tau = B / (lr x weight decay x D)) at batch 128\n" in run(capsys, f"{where} {flags}")[1]
    )
    for other in ("--lr 1e-3", rates + " --optimizer sgd"):
        assert "tau" not in run(capsys, f"{where} --megatron-args '{shape} {other}'")[1]


def test_auto_ranks_the_layouts_of_the_first_batch(capsys: pytest.CaptureFixture[str]) -> None:
    first = json_of(capsys, f"{SEVEN} --global-batch-size auto --top 2")
    named = json.loads(run(capsys, f"{SEVEN} --global-batch-size 64 --json")[1])["first_batch"]
    assert first["global_batch_size"] == named["global_batch_size"]
    best = first["ranked"][0]["configuration"]
    assert all(f"{name}{best[name]}" in named["layout"].split(".") for name in ("tp", "pp", "dp"))
    code, _, err = run(capsys, "--model gpt3-175b --cluster a100-80g:8 --global-batch-size auto")
    assert code == 2 and "no batch fits; give one to see why" in err


MIXTRAL = "--model mixtral-8x7b --seq-length 4096 --cluster h100-80g:32 --global-batch-size 128"


def test_a_mixture_is_planned_with_the_sizes_of_its_experts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(capsys, f"{MIXTRAL} --fix tp=2,cp=1,ep=4,etp=1,micro_batch=1 --max pp=4")
    header, first = out[out.index("rank ") :].splitlines()[:2]
    names = header.split()
    at = [names.index(name) for name in ("vpp", "ep", "etp", "dp")]
    assert code == 0 and at == list(range(at[0], at[0] + 4))
    assert re.search(r"--fix tp=2,.*,ep=4,etp=1 ", out), "what to time"
    assert " 4   1 " in first
    never = "\nno GPU has timed a mixture of experts for this table: routing"
    assert never in out
    _, dense, _ = run(capsys, f"{SEVEN} --global-batch-size 16")
    assert never not in dense
    assert not {"ep", "etp"} & set(dense[dense.index("rank ") :].splitlines()[0].split())
    record = json.loads(run(capsys, f"{MIXTRAL},256 --json --top 2")[1])
    jsonschema.validate(record, json.loads((ROOT / "docs" / "plan.schema.json").read_text()))
    active = PRESETS["mixtral-8x7b"].num_active_parameters
    assert record["headroom"]["train_tokens"] == 20 * active
    assert record["inputs"]["model"]["num_experts"] == 8
    one = record["plans"][0]["ranked"][0]
    again = run(capsys, f"explain tp2.pp4.ep4.etp1.dp4 {MIXTRAL}")[1]
    assert "tp2.pp4.ep4.etp1.dp4,micro_batch=1" in again and "  ep " in again
    assert one["prediction"]["mfu"] < 0.7


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (f"explain tp2.up4 {MIXTRAL}", 2, "write NAME=NUMBER"),
        (f"explain ep=3 {MIXTRAL}", 2, "do not divide by ep x etp"),
        (f"{MIXTRAL} --fix ep=16", 3, "--num-experts 8 is not divisible by 16; choose another"),
        (f"{SEVEN} --global-batch-size 16 --fix ep=2", 2, "leave nothing to consider"),
        (f"{SEVEN} --global-batch-size 16 --fix ep=2", 2, "the model has no experts"),
        (f"{MIXTRAL} --fix ep=3", 2, "the 32 ranks of a stage; choose ep from 1, 2, 4, 8, 16, 32"),
    ],
)
def test_problems_of_a_mixture_are_one_line(
    capsys: pytest.CaptureFixture[str], text: str, code: int, words: str
) -> None:
    got, _, err = run(capsys, text)
    assert got == code and re.search(words, err) and err.count("\n") == 1


def test_a_stand_in_says_what_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--model deepseek-v3-sized --seq-length 4096 "
        "--cluster h200-141g:256 --global-batch-size 512"
    )
    code, _, err = run(capsys, f"{flags} --fix tp=1,pp=4,micro_batch=1,ep=32")
    assert code == 0 and "deepseek-v3-sized has plain attention" in err


def test_both_orders_of_ranks_are_priced(capsys: pytest.CaptureFixture[str]) -> None:
    """Two nodes of 8 with tp2, pp2, dp4: each pipeline in a node, or all replicas of a stage."""
    shape = (
        "--model llama-2-7b --seq-length 2048 "
        "--cluster a100-80g:16 --global-batch-size 64 --nic 5GB/s"
    )
    asked = f"{shape} --fix tp=2,cp=1,pp=2,vpp=1,micro_batch=1 --recompute none --top 1"
    usual, other = (
        json_of(capsys, f"{asked} {more}")["ranked"][0]["prediction"]["time_s"]
        for more in ("", "--use-tp-pp-dp-mapping")
    )
    assert other["pp"] < usual["pp"] and other["dp"] > usual["dp"]
    best = json_of(capsys, f"{asked} --use-tp-pp-dp-mapping")["ranked"][0]
    assert best["configuration"]["rank_order"] == "tp-cp-ep-pp-dp"
    assert "--use-tp-pp-dp-mapping" in best["flags"]
    _, flags, _ = run(capsys, f"{asked} --use-tp-pp-dp-mapping --format flags")
    assert "--use-tp-pp-dp-mapping" in flags
    megatron = "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --bf16"
    megatron += " --max-position-embeddings 128 --vocab-size 1000 --use-tp-pp-dp-mapping"
    where = f"--cluster a100-80g:16 --global-batch-size 64 --megatron-args '{megatron}'"
    code, flags, _ = run(capsys, f"{where} --format flags")
    assert code == 0 and "--use-tp-pp-dp-mapping" in flags
    # Where the links between nodes are slow the table says what the other order would save.
    many = shape.replace("64", "4096").replace("5GB/s", "500MB/s")
    _, text, _ = run(capsys, f"{many} --fix tp=4,pp=2,vpp=1 --top 3")
    assert "the other order of ranks (--use-tp-pp-dp-mapping) would save" in text


def test_the_table_groups_equals_and_says_what_to_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = "--model llama-2-13b --seq-length 2048 --cluster a100-80g:32 --global-batch-size 256"
    _, text, _ = run(capsys, asked)
    plan = json_of(capsys, asked)
    rows = [line.split() for line in text.splitlines() if re.match(r" *\d+ +256 ", line)]
    assert [row[0] for row in rows] == [str(r["rank"]) for r in plan["ranked"]]
    row = next(i for i, r in enumerate(plan["ranked"]) if len(r["equals"]) > 3)
    first = plan["ranked"][row]
    near = [other["step_s"] / first["prediction"]["step_s"] for other in first["equals"]]
    assert min(near) > 1 / 1.03 - 1e-9 and max(near) < 1.03 + 1e-9
    below = next(x for x in text.splitlines() if x.startswith(f"as fast as row {row + 1}, "))
    assert below.endswith(f"; {len(near) - 3} more")
    assert (
        max(len(line.rstrip()) for line in text.splitlines() if re.match(r" *\d+ +256 ", line))
        < 120
    )
    first, second = plan["worth_timing"]
    assert f"to be surer of the other times, time {first} and {second}" in text
    told = [line for line in text.splitlines() if " profile-layouts " in line]
    profile_layouts = of_extra("copus_ext.extras.profile_layouts.command")
    for name, line in zip((first, second), told, strict=True):
        words = line.split(" -- ")[0].split()
        args, _ = profile_layouts.parse([*words[words.index("--store") :], "--", "--bf16"])
        timed = profile_layouts.lines(PRESETS["llama-2-13b"].with_seq_length(2048), args, 32)
        assert [str(c) for c in timed] == [name] and profile_layouts.counts(timed[0], args)
        # Every node has so many ranks of its own.
        assert line.startswith("torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d ")


def test_overlap_is_priced_as_the_flags_have_it(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (
        "--model llama-2-7b --seq-length 2048 "
        "--cluster h100-80g:16 --global-batch-size 64 --fix tp=2,pp=1"
    )
    usual, without = (
        json_of(capsys, f"{asked} --top 1 {more}")["ranked"][0] for more in ("", "--no-overlap")
    )
    assert without["prediction"]["step_s"] > usual["prediction"]["step_s"]
    assert "--overlap-grad-reduce" in usual["flags"]
    assert not any("overlap" in flag for flag in without["flags"])
    text = "tp2.pp1.dp8,micro_batch=1,overlap=0"
    fixed = (
        f"{text} --model llama-2-7b --seq-length 2048 "
        f"--cluster h100-80g:16 --global-batch-size 64 --json"
    )
    one, same, other = (
        json.loads(run(capsys, f"explain {more}")[1])["explained"][0]["prediction"]["step_s"]
        for more in (
            fixed,
            fixed.replace(",overlap=0", "") + " --no-overlap",
            fixed.replace(",overlap=0", ""),
        )
    )
    assert one == same > other
    shape = "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 128"
    shape += " --max-position-embeddings 128 --vocab-size 1000"
    where = f"--cluster a100-80g:8 --global-batch-size 64 --megatron-args '{shape}'"
    assert "--no-overlap" in run(capsys, where)[2]
    assert not run(capsys, f"{where} --no-overlap")[2]


@pytest.mark.parametrize(
    ("cluster", "whose"),
    [
        ("h200-141g:8", "no rows of its own: those of h100-80g"),
        ("mi250-64g:8", "no rows of its own: the A100 fit"),
        ("b200-180g:8", "those of h100-80g"),
        ("gh200-96g:8", "those of h100-80g"),
        ("a100-40g:8", ""),
    ],
)
def test_a_device_that_was_never_timed_says_whose_constants_it_has(
    capsys: pytest.CaptureFixture[str], cluster: str, whose: str
) -> None:
    asked = (
        f"--model llama-2-7b --seq-length 2048 --cluster {cluster} --global-batch-size 64 --top 1"
    )
    _, out, _ = run(capsys, asked)
    assert (f"{whose}" in out and "constants of" in out) == bool(whose)
    warnings = json.loads(run(capsys, f"{asked} --json")[1])["inputs"]["warnings"]
    assert len(warnings) == bool(whose) and all(whose in text for text in warnings)


def test_what_a_better_machine_would_save_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    slow = (
        "--model llama-2-7b --seq-length 2048 "
        "--cluster a100-80g:16 --nic 2GB/s --global-batch-size 64 --top 1"
    )
    last = run(capsys, slow)[1].splitlines()[-1]
    assert re.search(r"^twice the network would save \d+ % \(tp\d+\.", last)
    tight = (
        "--model llama-2-13b --seq-length 2048 --cluster a100-40g:8 --global-batch-size 64 --top 1"
    )
    assert "twice the memory would save" in run(capsys, tight)[1].splitlines()[-1]
    small = "--model copus-quickstart --cluster a100-80g:1 --global-batch-size 64 --top 1"
    last = run(capsys, small)[1].splitlines()[-1]
    assert last.startswith("neither twice the network, twice the memory nor another order of")


def test_a_card_of_two_devices_has_two_ranks() -> None:
    gpu = preset("mi250-64g:16").gpu
    assert preset("mi250-64g:16").num_nodes == 2 and gpu.memory_bytes == 64 * 2**30
    assert kind_of("AMD Instinct MI250", 65520.0) == "mi250-64g"


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys; from copus_ext.commands import plan; "
        f"assert not plan.main({shlex.split(EIGHT)!r}); "
        "sys.exit('torch' in sys.modules or 'megatron.core' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
    assert done.returncode == 0 and b"tokens/s/GPU" in done.stdout


def test_a_table_is_whole_in_a_narrow_terminal_and_plain_in_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    best = Planner(PRESETS["llama-2-7b"].with_seq_length(2048), preset("h100-80g:8")).rank(
        [64], top=2
    )
    shown, file = Terminal(), io.StringIO()
    report.table(report.Answer(plans=best), report.console_for(shown))
    lines = shown.getvalue().splitlines()
    step = f"{best[0].ranked[0].prediction.step_s:.4g}"
    assert step in lines[1] and "tokens/s/GPU" in lines[0] and "\u2026" not in shown.getvalue()
    monkeypatch.setenv("FORCE_COLOR", "1")
    report.table(report.Answer(plans=best), report.console_for(file))
    assert "\x1b" not in file.getvalue()


def test_a_reader_who_leaves_is_no_error() -> None:
    command = f"{sys.executable} tools/plan.py {SEVEN} --global-batch-size 64 --rejected"
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -1; exit ${{PIPESTATUS[0]}}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and not done.stderr


def test_a_file_without_constants_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for text in ("[]", "{}", '{"constants": []}'):
        (tmp_path / "c.json").write_text(text)
        code, _, err = run(capsys, f"{EIGHT} --constants {tmp_path}/c.json")
        assert code == 5 and "constants" in err.partition("c.json: ")[2], err
