"""The planner's sub-commands for splits of layers, micro-batches, nodes and their order."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from copus_ext.cost_model.cluster_spec import preset
from tests.unit.test_plan_command import SEVEN, THIRTEEN, json_of, run, write_uneven


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    """See `write_uneven`."""
    return write_uneven(tmp_path)


def test_partition_tells_the_fastest_split_of_the_layers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "--model llama-3-70b --cluster a100-80g:64 --global-batch-size 64 --top 3"
    cuts = json_of(capsys, f"partition {text}")["cuts"]
    assert cuts and all(sum(x["cut"]["layers"]) == 80 for x in cuts)
    assert "cuts" not in json_of(capsys, text)
    _, table, _ = run(capsys, f"partition {text}")
    assert "--pipeline-model-parallel-layout" in table and "with even stages" in table
    lines = [x for x in table.splitlines() if " partition " not in x and "even stages" not in x]
    assert run(capsys, text)[1].splitlines() == lines


def test_micro_batches_tells_the_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    command = f"micro-batches {SEVEN} --fix cp=1,pp=1,tp=4 --top 3"
    code, text, _ = run(capsys, f"{command} --global-batch-size 74")
    assert code == 0 and "rank 1 micro-batches 19+18: " in text and "--micro-batch-size 19" in text
    code, text, _ = run(capsys, f"{command} --global-batch-size 26")
    assert code == 0 and "unequal micro-batches make nothing" in text
    splits = json_of(capsys, f"{command} --global-batch-size 74")["micro_splits"]
    assert splits[0]["sizes"] == [19, 18]


def test_order_tells_which_node_goes_where(
    capsys: pytest.CaptureFixture[str], uneven: Path, tmp_path: Path
) -> None:
    hosts, own = tmp_path / "hosts", f"{THIRTEEN} --cluster {uneven}"
    code, text, _ = run(capsys, f"order {own}")
    assert code == 0 and "% less; no order is better" in text
    assert "limit as given: " in text and "GB/s, 20 us)" in text
    told = [line for line in text.splitlines() if line.startswith(("node order", "  "))]
    rest = [line for line in text.splitlines() if line not in told or line.startswith("   ")]
    # The file has what was measured, and a name only what the data sheet says.
    even = tmp_path / "even.json"
    spec = dataclasses.replace(preset("h100-80g:32"), nic_is_measured=True)
    even.write_text(json.dumps(spec.to_json()))
    even = run(capsys, f"{THIRTEEN} --cluster {even}")[1]
    assert rest == run(capsys, own)[1].splitlines() == even.splitlines()
    pipeline = "tp=8,pp=4,micro_batch=1,recompute=full"
    code, text, _ = run(capsys, f"order {pipeline} {own} --hostfile {hosts}")
    order = hosts.read_text().split()
    assert code == 0 and sorted(order) == ["a", "b", "c", "d"] and {"a", "b"} != set(order[:2])
    assert f"node order: {','.join(order)}" in text
    first, second = json_of(capsys, f"order {THIRTEEN} --cluster {tmp_path}/nameless.json")[
        "ranked"
    ]
    assert first["order"]["after_s"] < first["order"]["before_s"]
    assert first["configuration"]["node_order"] == [str(i) for i in first["order"]["order"]]
    assert "order" not in second and second["configuration"]["node_order"] is None


def test_nodes_ranks_uneven_nodes(
    capsys: pytest.CaptureFixture[str], uneven: Path, tmp_path: Path
) -> None:
    few = f"{THIRTEEN} --recompute full --max micro_batch=2,cp=1".replace("2-13b", "3.2-3b")
    hosts, own = tmp_path / "hosts", f"{few} --cluster {uneven}"
    code, text, _ = run(capsys, f"nodes {own} --hostfile {hosts}")
    even = run(capsys, f"{few} --cluster h100-80g:32")[1]
    assert code == 0 and text.startswith(even.splitlines()[0])
    assert "% less" in text and "of the usual speed" in text
    lines, order = text.splitlines(), hosts.read_text().split()
    first = lines[lines.index("over these links and nodes:") + 2].split()
    assert first[:6] == ["1", "64", "8", "4", "1", "1"], "rank, batch and layout"
    assert first[7] == "full"
    assert sorted(order) == ["a", "b", "c", "d"] and f"nodes: {','.join(order)}" in text
    first, second = json_of(capsys, f"nodes {own}")["uneven"]
    assert first["step_s"] <= second["step_s"] and first["gain"] > 0.1 and first["order"] == order


def test_a_small_node_does_not_end_the_search(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "cluster.json"
    base = dataclasses.replace(preset("h100-80g:8"), gpus_per_node=1, num_nodes=4).to_json()
    base["nodes"] = [{"count": 3}, {"memory_bytes": "12GiB"}]
    path.write_text(json.dumps(base))
    words = f"--model llama-3.2-3b --global-batch-size 16 --cluster {path} --recompute none"
    assert run(capsys, words)[0] == 4, "of even stages none fits any node"
    code, text, _ = run(capsys, f"nodes {words} --top 2")
    assert code == 0 and "and do not fit" in text
