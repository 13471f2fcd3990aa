"""`copus plan-serving` with given losses: prices, answers, refusals."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from copus_ext.cost_model.cluster_spec import ClusterSpec, preset
from copus_ext.cost_model.models import PRESETS
from copus_ext.extras.serving import command
from copus_ext.extras.serving.costs import ServingCosts, Workload, micro_batches
from copus_ext.extras.serving.sensitivity import SCHEMA, Sensitivity
from megatron.trainer.common.errors import UsageError
from tests.helpers.launch import ROOT

BITS = (3, 4, 8, 16)
MODEL = PRESETS["llama-2-7b"]
WORK = Workload(prompts=8, prompt=256, generate=64)
MIXED: dict[str, Any] = {
    "gpu": "A100-40GB",
    "num_nodes": 2,
    "gpus_per_node": 1,
    "intra_bytes_per_s": "300GB/s",
    "nic_bytes_per_s": "25GB/s",
    "constants": "a100-80g",
    "nodes": [{}, {"memory_bytes": "12GiB", "speed": 0.5}],
}
SHORT = ["--prompts", "8", "--prompt", "256", "--generate", "64"]


def costs(cluster: ClusterSpec | None = None, **how: Any) -> ServingCosts:
    cluster = cluster or ClusterSpec.from_json(MIXED)
    return ServingCosts(MODEL, cluster, WORK, **{"bits": BITS, "group_size": 128, **how})


def measured(path: Path, **changes: Any) -> Path:
    """A file of losses of 32 layers, later ones worth more."""
    each = [{"3": 0.004 * (i + 1), "4": 0.001 * (i + 1), "8": 1e-5} for i in range(32)]
    record = {
        "schema": SCHEMA,
        "settings": {},
        "group_size": 128,
        "loss": 2.0,
        "loss_16": 2.0,
        "loss_increase": each,
        "standard_error": [dict.fromkeys(x, 0.0) for x in each],
    }
    path.write_text(json.dumps({**record, **changes}))
    return path


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """Flags of model, losses and cluster."""
    (tmp_path / "cluster.json").write_text(json.dumps(MIXED))
    return [
        *("--model", "llama-2-7b", "--cluster", str(tmp_path / "cluster.json"), *SHORT),
        *("--sensitivity", str(measured(tmp_path / "losses.json"))),
    ]


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert command.main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = command.main(list(words))
    (line,) = capsys.readouterr().err.strip().splitlines()
    return f"{code} {line}"


def test_weights_take_their_bits_and_their_scales() -> None:
    layer = costs().layer_bytes()
    matrices = 4 * 4096**2 + 3 * 4096 * 11008
    assert layer[3] - layer[1] == pytest.approx(matrices * (2 - 0.5 - 2 / 128))
    cache = 8 * (256 + 64) * 2 * 4096 * 2
    assert layer[3] == pytest.approx(matrices * 2 + 2 * 4096 * 2 + cache)


def test_fewer_bits_save_time_where_weights_are_read_and_a_slow_node_takes_longer() -> None:
    one = costs().problem(
        np.zeros((32, 4)),
        prefill=8,
        decode=1,
        theta=0.0,
        max_loss_increase=None,
    )
    decode, prefill = one.decode.layer_s, one.prefill.layer_s
    assert (np.diff(decode, axis=1) > 0).all() and decode[0, 3] > 2.5 * decode[0, 1]
    assert np.ptp(prefill[0]) < 1e-3 * prefill[0, 0]
    assert decode[1] == pytest.approx(2 * decode[0])
    assert one.capacity_bytes[1] < one.capacity_bytes[0] < 40 * 2**30
    assert one.decode.p2p_time_s[0] > 0 == one.decode.p2p_time_s[1]


def test_all_weights_are_read_once_for_a_token() -> None:
    """The sum over layers is the bytes of the model over the bandwidth, and kernels a little."""
    one = costs(preset("a100-80g:1")).problem(
        np.zeros((32, 4)),
        prefill=1,
        decode=1,
        theta=0.0,
        max_loss_increase=None,
    )
    whole = 32 * one.decode.layer_s[0, 3]
    least = 2 * 32 * (4 * 4096**2 + 3 * 4096 * 11008) / 2.039e12
    assert 1.0 < whole / least < 1.6


def test_micro_batches_are_powers_of_two_and_all() -> None:
    assert micro_batches(1) == [1]
    assert micro_batches(24) == [1, 2, 4, 8, 16, 24]


def test_the_answer_is_within_its_limits(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = answer(capsys, *given, "--max-loss-increase", "0.1")
    assert sum(s["num_layers"] for s in plan["stages"]) == 32
    assert all(s["bytes"] <= s["capacity_bytes"] for s in plan["stages"])
    assert 0 < plan["loss_increase"] <= 0.1
    bits = [b for s in plan["stages"] for b in s["bits"]]
    assert len(bits) == 32 and set(bits) <= set(BITS) and len(set(bits)) > 1
    assert plan["predicted_s"] <= min(x["predicted_s"] for x in plan["uniform"].values())
    assert "no serving latency was measured" in plan["note"]
    loose = answer(capsys, *given, "--max-loss-increase", "10")
    assert loose["predicted_s"] < plan["predicted_s"]
    assert set(loose["uniform"]) == {"3", "4", "8", "16"}


def test_a_price_of_loss_takes_the_place_of_a_limit(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    free, dear = (answer(capsys, *given, "--theta", t) for t in ("0", "1000"))
    assert free["max_loss_increase"] is None
    assert free["loss_increase"] > dear["loss_increase"]
    assert free["predicted_s"] < dear["predicted_s"]
    assert dear["objective"] == pytest.approx(dear["predicted_s"] + 1000 * dear["loss_increase"])


def test_the_table_says_what_is_known(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(given) == 0
    text = capsys.readouterr().out
    for words in ("A100-40GB of node 0", "limit 0.02", "best with equal bits: 8 bits", "predicted"):
        assert words in text
    assert "no serving latency was measured" in text


def test_rounding_to_16_bits_counts(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(measured(tmp_path / "losses.json", loss_16=2.015))
    plan = answer(capsys, *given[:-1], path, "--max-loss-increase", "0.02")
    assert 0.015 <= plan["loss_increase"] <= 0.02
    line = refusal(capsys, *given[:-1], path, "--max-loss-increase", "0.01")
    assert line.startswith("3") and "rounding to 16 bits alone costs 0.01500" in line


def test_a_gain_by_chance_is_no_gain() -> None:
    found = Sensitivity(
        settings={}, group_size=8, loss=1, loss_16=1, loss_increase=[{"4": -0.1, "8": 0.2}]
    )
    assert found.table((4, 8, 16)) == [[0.0, 0.2, 0.0]]
    with pytest.raises(UsageError, match="no loss with 3 bits"):
        found.table((3, 4))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "llama-2-7b"], "--sensitivity FILE or CHECKPOINT"),
        ([], "CHECKPOINT, or --model"),
        (["x", "--model", "llama-2-7b"], "either CHECKPOINT"),
        (["x", "--prompts", "0"], "--prompts 0"),
        (["x", "--theta", "-1"], "--theta -1"),
        (["x", "--max-loss-increase", "nan"], "--max-loss-increase nan"),
        (["x", "--bits", "4,9"], "--bits 4,9"),
        (["x", "--bits", "3,4", "--apply", "new"], "pack 3 bits in different ways"),
        (["x", "--apply", "."], "--apply . exists"),
        (["x", "--memory-margin", "1"], "--memory-margin"),
        (["x", "--promt=3"], "did you mean --prompt?"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, *words, "--cluster", "a100-80g:2")
    assert line.startswith("2 ") and said in line


def test_a_plan_needs_no_torch() -> None:
    code = "import sys; from copus_ext.extras.serving import command, plan, sensitivity; "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_scipy_is_asked_for_before_anything_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    line = refusal(capsys, "nowhere", "--cluster", "h100-80g:2")
    assert line.startswith("2 ") and line.endswith('needs scipy; run: pip install -e ".[fit]"')


def test_files_that_do_not_fit_are_refused(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = str(measured(tmp_path / "short.json", loss_increase=[{"4": 0.1}]))
    for path, said in ((short, "has 1 layers"), (str(tmp_path / "no"), "holds no measured")):
        assert said in refusal(capsys, *given[:-1], path)
    broken = str(measured(tmp_path / "broken.json", loss=None))
    assert "holds no measured" in refusal(capsys, *given[:-1], broken)
    assert "--group-size 128" in refusal(capsys, *given, "--group-size", "64")
    mixture = refusal(capsys, *["mixtral-8x7b" if w == "llama-2-7b" else w for w in given])
    assert mixture.startswith("2 ") and "mixtures" in mixture


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schema": "x"}, "schema is 'x' and must be 'copus-serving-sensitivity/1'"),
        ({"loss_16": None}, "loss_16 is None and must be a finite number"),
        ({"loss": True}, "loss is True and must be a finite number"),
        ({"group_size": 12.5}, "group_size is 12.5"),
        ({"loss_increase": {}}, "loss_increase must be a list"),
        ({"loss_increase": []}, "loss_increase must have an object for each layer"),
        ({"loss_increase": [3]}, "loss_increase[0] must be an object"),
        ({"loss_increase": [{"4": "x"}]}, "loss_increase[0]['4'] is 'x'"),
        ({"loss_increase": [{}, {"9": 0.1}]}, "loss_increase[1] has '9' bits"),
        ({"standard_error": 3}, "standard_error must be a list"),
        ({"los": 2.0}, "los is not a field of it"),
    ],
)
def test_a_file_of_losses_is_refused_by_field_and_name(
    changes: dict[str, Any],
    said: str,
    given: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = measured(tmp_path / "own.json", **changes)
    line = refusal(capsys, *given[:-1], str(path))
    assert line.startswith(f"2 copus plan-serving: error: --sensitivity {path} holds no measured")
    assert said in line and "docs/serving.md" in line


@pytest.mark.parametrize("name", ["loss", "loss_16", "group_size", "loss_increase"])
def test_a_field_that_is_missing_is_named(
    name: str, given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads(measured(tmp_path / "own.json").read_text())
    del record[name]
    (tmp_path / "own.json").write_text(json.dumps(record))
    assert f"{name} is missing" in refusal(capsys, *given[:-1], str(tmp_path / "own.json"))


def test_the_file_of_losses_of_the_page_is_read(tmp_path: Path) -> None:
    (text,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs/serving.md").read_text(), re.DOTALL)
    path = tmp_path / "own.json"
    path.write_text(text)
    assert Sensitivity.read(path).table((4, 8, 16)) == [[0.0041, 0.0001, 0.0], [0.0025, 0.0, 0.0]]


def test_a_config_of_hugging_face_is_planned_like_the_model_of_its_name(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        vocab_size=32000,
        max_position_embeddings=4096,
    )
    config.save_pretrained(tmp_path)
    words = [str(tmp_path / "config.json") if w == "llama-2-7b" else w for w in given]
    own, named = (answer(capsys, *each) for each in (words, given))
    assert own["stages"] == named["stages"] and own["predicted_s"] == named["predicted_s"]


def test_nothing_fits_is_said(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {**MIXED, "nodes": [{"memory_bytes": "4GiB"}, {"memory_bytes": "2GiB"}]}
    (tmp_path / "cluster.json").write_text(json.dumps(small))
    line = refusal(capsys, *given)
    assert line.startswith("3 ") and "no plan of 2 devices fits" in line


def test_one_device_and_a_node_of_several_are_planned(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for cluster, most in (("a100-80g:1", 1), ("h100-80g:3", 3)):
        words = [cluster if w.endswith("cluster.json") else w for w in given]
        plan = answer(capsys, *words, "--bits", "4,16")
        assert 1 <= len(plan["stages"]) <= most


def test_the_costs_do_not_depend_on_the_format_of_training() -> None:
    wide = dataclasses.replace(MODEL, precision="fp32")
    how: dict[str, Any] = {"bits": BITS, "group_size": 128}
    cluster = ClusterSpec.from_json(MIXED)
    a, b = (ServingCosts(m, cluster, WORK, **how).layer_bytes() for m in (MODEL, wide))
    assert (a == b).all()
