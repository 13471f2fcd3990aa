"""What the planner's command says about the order of nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from copus_ext.cost_model.cluster_spec import preset
from tests.helpers.launch import ROOT
from tests.unit.test_plan_command import run


def linked(folder: Path, hosts: list[str] | None = None) -> Path:
    """A cluster of four nodes, the second with slow links."""
    speed = [[2e9 if 1 in (i, j) else 40e9 for j in range(4)] for i in range(4)]
    links: dict[str, Any] = {"bytes_per_s": speed, "latency_s": 2e-5}
    links |= {"hosts": hosts} if hosts else {}
    path = folder / "cluster.json"
    path.write_text(json.dumps({**preset("h100-80g:32").to_json(), "links": links}))
    return path


ORDERED = "--model llama-2-13b --global-batch-size 64 --top 2 --fix pp=4,vpp=1 --order"
PIPELINE = "--explain tp=8,pp=4,micro_batch=1,recompute=full"


def test_the_order_of_nodes_is_told_only_when_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cluster = linked(tmp_path, ["a", "b", "c", "d"])
    code, text, _ = run(capsys, f"{ORDERED} --cluster {cluster}")
    silent = run(capsys, f"{ORDERED[:-8]} --cluster {cluster}")[1]
    even = run(capsys, f"{ORDERED[:-8]} --cluster h100-80g:32")[1]
    assert code == 0 and "% less; no order is better" in text
    assert "limit as given: " in text and "GB/s, 20 us)" in text
    told = [line for line in text.splitlines() if line.startswith(("node order", "  "))]
    rest = [line for line in text.splitlines() if line not in told or line.startswith("   ")]
    assert rest == silent.splitlines() == even.splitlines()


def test_hosts_go_to_a_file_in_order(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cluster, hosts = linked(tmp_path, ["a", "b", "c", "d"]), tmp_path / "hosts"
    code, text, _ = run(capsys, f"{ORDERED} {PIPELINE} --cluster {cluster} --hostfile {hosts}")
    order = hosts.read_text().split()
    assert code == 0 and sorted(order) == ["a", "b", "c", "d"]
    assert order[0] == "b" or order[-1] == "b"
    assert f"node order: {','.join(order)}" in text


def test_the_order_is_in_the_json_as_the_schema_has_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, text, _ = run(capsys, f"{ORDERED} --json --cluster {linked(tmp_path)}")
    record = json.loads(text)
    jsonschema.validate(record, json.loads((ROOT / "docs" / "plan.schema.json").read_text()))
    first, second = record["plans"][0]["ranked"]
    assert code == 0 and first["order"]["after_s"] < first["order"]["before_s"]
    assert first["configuration"]["node_order"] == [str(i) for i in first["order"]["order"]]
    assert "order" not in second and second["configuration"]["node_order"] is None


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (f"{ORDERED} --cluster h100-80g:32", 2, '--order needs measured "links" in --cluster'),
        (f"{ORDERED} --format flags --cluster FILE", 2, "drop --format flags"),
        (f"{ORDERED[:-8]} --hostfile x --cluster FILE", 2, "--hostfile goes with --order"),
        (f"{ORDERED} --hostfile x --cluster FILE", 2, '--hostfile needs "hosts"'),
    ],
)
def test_wrong_wishes_about_the_order_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, code: int, said: str
) -> None:
    found, _, err = run(capsys, text.replace("FILE", str(linked(tmp_path))))
    assert found == code and said in err and err.count("\n") == 1


def test_a_hostfile_that_cannot_be_written_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cluster = linked(tmp_path, ["a", "b", "c", "d"])
    code, _, err = run(capsys, f"{ORDERED} --cluster {cluster} --hostfile /no/where/hosts")
    assert code == 2 and "--hostfile /no/where/hosts" in err
