"""`copus plan order` and `copus plan nodes`: what they tell and refuse."""

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
import pytest

from copus_ext.commands import plan as command
from copus_ext.cost_model.cluster_spec import ClusterSpec, preset
from copus_ext.cost_model.models import PRESETS
from copus_ext.cost_model.spec_file import SpecError
from copus_ext.extras.uneven.node_order import order_for
from copus_ext.extras.uneven.nodes import rank_on_nodes
from copus_ext.planner.search import Planner
from copus_ext.planner.space import Limits
from tests.extras.layer_partition.test_layer_partition_command import profile_of
from tests.helpers.launch import ROOT
from tests.unit.test_plan_command import EIGHT, MIXTRAL, THIRTEEN, run
from tests.unit.test_planner_moe import CLUSTER, MODEL


def added_to(capsys: pytest.CaptureFixture[str], text: str) -> dict[str, Any]:
    """The first plan of an answer that keeps the schema with the fields of this extra."""
    code, out, _ = run(capsys, f"{text} --json")
    assert code == 0
    schema = json.loads((ROOT / "docs" / "plan.schema.json").read_text())
    own = json.loads(Path(__file__).with_name("plan.schema.json").read_text())
    schema["$defs"] |= own["$defs"]
    for name, properties in own["properties"].items():
        schema["$defs"][name]["properties"] |= properties
    record = json.loads(out)
    jsonschema.validate(record, schema)
    return record["plans"][0]


def write_uneven(folder: Path) -> Path:
    """A cluster of four nodes, the second at half speed and with a slow link to the first."""
    speed = [[2e9 if {0, 1} == {i, j} else 4e10 for j in range(4)] for i in range(4)]
    data = {
        **preset("h100-80g:32").to_json(),
        "nodes": [{}, {"speed": 0.5}, {"count": 2}],
        "links": {"bytes_per_s": speed, "latency_s": 2e-5, "hosts": ["a", "b", "c", "d"]},
    }
    (folder / "nameless.json").write_text(
        json.dumps({**data, "links": {"bytes_per_s": speed, "latency_s": 2e-5}})
    )
    path = folder / "cluster.json"
    path.write_text(json.dumps(data))
    return path


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    """See `write_uneven`."""
    return write_uneven(tmp_path)


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
    first, second = added_to(capsys, f"order {THIRTEEN} --cluster {tmp_path}/nameless.json")[
        "ranked"
    ]
    assert first["order"]["after_s"] < first["order"]["before_s"]
    assert first["configuration"]["node_order"] == [str(i) for i in first["order"]["order"]]
    assert "order" not in second and "node_order" not in second["configuration"]


def test_nodes_ranks_uneven_nodes(
    capsys: pytest.CaptureFixture[str], uneven: Path, tmp_path: Path
) -> None:
    few = f"{THIRTEEN} --recompute full --max micro_batch=2,cp=1".replace("2-13b", "3.2-3b")
    hosts, own = tmp_path / "hosts", f"{few} --cluster {uneven}"
    code, text, _ = run(capsys, f"nodes {own} --hostfile {hosts}")
    even = run(capsys, f"{few} --cluster h100-80g:32 --nic 400GB/s")[1]
    head, usual = text.splitlines(), even.splitlines()
    assert code == 0 and (head[0], head[2]) == (usual[0], usual[2])
    assert "% less" in text and "of the usual speed" in text
    lines, order = text.splitlines(), hosts.read_text().split()
    first = lines[lines.index("over these links and nodes:") + 2].split()
    assert first[:6] == ["1", "64", "8", "4", "1", "1"], "rank, batch and layout"
    assert first[7] == "full"
    assert sorted(order) == ["a", "b", "c", "d"] and f"nodes: {','.join(order)}" in text
    first, second = added_to(capsys, f"nodes {own}")["uneven"]
    assert first["step_s"] <= second["step_s"] and first["gain"] > 0.1 and first["order"] == order


def test_a_small_node_does_not_end_the_search(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "cluster.json"
    base = dataclasses.replace(preset("h100-80g:8"), gpus_per_node=1, num_nodes=4).to_json()
    base["nodes"] = [{"count": 3}, {"memory_bytes": "12GiB"}]
    path.write_text(json.dumps(base))
    words = (
        "--model llama-3.2-3b --seq-length 2048 "
        f"--global-batch-size 16 --cluster {path} --recompute none"
    )
    assert run(capsys, words)[0] == 4, "of even stages none fits any node"
    code, text, _ = run(capsys, f"nodes {words} --top 2")
    assert code == 0 and "and do not fit" in text


def test_a_profile_holds_for_orders_as_for_the_table(
    capsys: pytest.CaptureFixture[str], uneven: Path, tmp_path: Path
) -> None:
    cluster = ClusterSpec.load(uneven)
    limits = Limits(fixed={"tp": 8, "pp": 4, "vpp": 1})
    planner = Planner(PRESETS["llama-2-13b"].with_seq_length(2048), cluster, limits=limits)
    first = planner.rank([64], top=1)[0].ranked[0]
    path = profile_of(tmp_path / "profile.jsonl", planner, first, 2.0)
    text = f"order {first.configuration} {THIRTEEN} --cluster {uneven}"
    plain, measured = (
        json.loads(run(capsys, f"{text} {more} --json")[1])["explained"][0]
        for more in ("", f"--profile {path}")
    )
    assert measured["prediction"]["source"] == "profiled"
    # What was measured is what the given order takes.
    step_s = measured["prediction"]["step_s"]
    assert measured["order"]["before_s"] == pytest.approx(step_s, rel=0.02)
    gains = [1 - x["order"]["after_s"] / x["order"]["before_s"] for x in (plain, measured)]
    assert gains[0] == pytest.approx(gains[1]) and gains[0] > 0.01


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"order {EIGHT}", 'needs measured "links"'),
        (f"nodes {EIGHT}", '"links" or "nodes"'),
        (f"order {THIRTEEN} --cluster NAMELESS --hostfile x", 'needs "hosts"'),
        (f"order {THIRTEEN} --cluster FILE --hostfile /no/where/x", "--hostfile /no/where/x"),
        (f"order {MIXTRAL}", "`order` does not know mixtures"),
        (f"nodes {MIXTRAL}", "`nodes` does not know mixtures"),
        (f"nodes {THIRTEEN} --cluster FILE --use-tp-pp-dp-mapping", "drop --use-tp-pp-dp-mapping"),
    ],
)
def test_problems_are_one_line_with_a_way_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: str
) -> None:
    uneven = write_uneven(tmp_path)
    text = text.replace("FILE", str(uneven)).replace("NAMELESS", f"{uneven.parent}/nameless.json")
    more = "" if "--global-batch-size" in text else " --global-batch-size 8"
    got, _, err = run(capsys, text + more)
    assert got == 2 and err.startswith("plan.py: error: ") and err.count("\n") == 1
    assert re.search(words, err)


def test_mixtures_are_refused() -> None:
    planner = Planner(MODEL, CLUSTER)
    plan = planner.rank([256], top=1)[0]
    for refuse in (
        lambda: order_for(MODEL, CLUSTER, plan.ranked[0].configuration),
        lambda: rank_on_nodes(planner, 256),
    ):
        with pytest.raises(SpecError, match="does not know mixtures of experts"):
            refuse()


def test_the_help_of_the_planner_lists_both(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    out = capsys.readouterr().out
    assert "which node goes where" in out and "unequal links" in out
    with pytest.raises(SystemExit):
        command.main(shlex.split("order --help"))
    assert "order [CONFIG]" in capsys.readouterr().out


def test_it_needs_no_torch() -> None:
    program = "import copus_ext.extras.uneven.commands, copus_ext.extras.uneven.nodes, sys; "
    subprocess.run([sys.executable, "-c", f"{program}sys.exit('torch' in sys.modules)"], check=True)
