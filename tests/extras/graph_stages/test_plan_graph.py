"""`copus plan-graph FILE.json`: what it reads, tells and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from copus_ext.extras.graph_stages.plan import main

COST = {"forward_s": 0.004, "static_bytes": 5e8, "saved_bytes": 2e8, "message_bytes": 8e6}
VIEWS = ("front", "left", "right", "rear")


def graph(layers: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "num_stages": 5,
        "num_microbatches": 8,
        "link_bytes_per_s": 25e9,
        "costs": {"vit": COST},
        # Behind what it needs in the edges, not in the file.
        "nodes": [{"name": "decoder", "cost": "vit", "layers": layers}]
        + [{"name": view, "cost": "vit", "layers": layers} for view in VIEWS],
        "edges": [[view, "decoder"] for view in VIEWS],
        **more,
    }


def run(capsys: Any, folder: Path, raw: Any, *flags: str) -> tuple[int, str, str]:
    file = folder / "graph.json"
    file.write_text(json.dumps(raw))
    code = main([str(file), *flags])
    return code, *capsys.readouterr()


def test_the_table_has_stages_order_and_both_times(capsys: Any, tmp_path: Path) -> None:
    code, out, _ = run(capsys, tmp_path, graph())
    lines = out.splitlines()
    assert code == 0 and len(lines) == 9
    assert lines[1].split()[:3] == ["0", "1", "2"] and "F1 F2 B1 F3 B2" in lines[1]
    assert lines[5].endswith("decoder") and "F1 B1 F2 B2" in lines[5]
    # Nine and thirteen passes there and back of 12 ms each, and messages.
    assert "as a graph: 0.1144 s" in out and "as a plain pipeline: 0.1606 s" in out
    assert "1.40 times as fast" in out and "2 micro-batches instead of 5" in out


def test_json_has_every_pass(capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "answer.json"
    raw = graph(layers=2, memory_gib=60)
    code, out, _ = run(capsys, tmp_path, raw, "--json", "--stages", "2", "--output", str(file))
    assert code == 0 and not out
    answer = json.loads(file.read_text())
    assert answer["schema"] == "copus.graph/1" and answer["times_faster"] >= 1
    nodes = [n for stage in answer["graph"]["stages"] for n in stage["nodes"]]
    assert sorted(nodes) == sorted(f"{n}.{i}" for n in (*VIEWS, "decoder") for i in (0, 1))
    for stage in answer["graph"]["stages"]:
        first = stage["passes"][0]
        assert first["direction"] == "forward" and first["micro_batch"] == 0
        assert stage["in_flight"] == min(stage["passes_ahead"] + 1, 8)
        assert sum(len(p["nodes"]) for p in stage["passes"]) == 16 * len(stage["nodes"])


def test_a_cost_may_be_part_of_a_model(capsys: Any, tmp_path: Path) -> None:
    part = {"model": "llama-3.2-3b", "part": "layer", "cluster": "a100-80g:8"}
    code, out, _ = run(capsys, tmp_path, graph(costs={"vit": part}), "--num-microbatches", "2")
    assert code == 0 and "the graph is 2." in out
    # Its samples are as long as its context, or as the file says.
    lengths = [131072, 4096]
    rows = [graph(costs={"vit": {**part, "seq_length": n}}) for n in lengths]
    same, shorter = (
        run(capsys, tmp_path, row, "--num-microbatches", "2", "--json")[1] for row in rows
    )
    default = run(capsys, tmp_path, graph(costs={"vit": part}), "--num-microbatches", "2", "--json")
    assert default[1] == same != shorter


def test_a_chain_is_as_fast_either_way(capsys: Any, tmp_path: Path) -> None:
    chain = {"nodes": [{"name": "gpt", "cost": "vit", "layers": 12}], "edges": [], "num_stages": 4}
    code, out, _ = run(capsys, tmp_path, graph(**chain))
    assert code == 0 and "1.00 times as fast" in out


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"edges": [["front", "decoder"], ["decoder", "front"]]}, 2, "circle"),
        ({"edges": [["front", "nowhere"]]}, 2, "names of two nodes"),
        (
            {"edges": [[a, b] for a in ("front", "left") for b in ("right", "rear")]},
            2,
            "not series-parallel",
        ),
        ({"nodes": [{"name": "a", "cost": "vut"}], "edges": []}, 2, '"costs" lacks'),
        ({"nodes": [{"name": "a"}], "edges": []}, 2, 'no "forward_s"'),
        ({"nodes": [{"name": "a", "forward_s": -1}], "edges": []}, 2, "at least 0"),
        ({"costs": {"vit": {"model": "none"}}}, 2, "is none of"),
        ({"costs": {"vit": {"model": "gpt3-175b", "seq_length": "x"}}}, 2, "not 'x'"),
        ({"costs": {"vit": {"model": "gpt3-175b", "seq_length": 0}}}, 2, "at least 1"),
        ({"num_stages": 6}, 2, "cannot fill"),
        ({"num_stages": 0}, 2, "at least 1"),
        ({"link_bytes_per_s": None}, 2, "link_bytes_per_s"),
        ({"stages": 3}, 2, "use some of"),
        ({"memory_gib": 0.1}, 4, "use more stages"),
    ],
)
def test_what_is_wrong_is_one_line(
    capsys: Any, tmp_path: Path, change: dict[str, Any], code: int, said: str
) -> None:
    found, out, err = run(capsys, tmp_path, graph(**change))
    assert (found, out) == (code, "") and said in err and err.count("\n") == 1


def test_a_file_that_is_none_is_refused(capsys: Any, tmp_path: Path) -> None:
    assert main([str(tmp_path / "none.json")]) == 5
    assert "none.json: No such file" in capsys.readouterr().err
    code, _, err = run(capsys, tmp_path, graph(), "--output", str(tmp_path / "no" / "x"))
    assert code == 2 and "--output" in err
    (tmp_path / "bad.json").write_text("{")
    assert main([str(tmp_path / "bad.json")]) == 2
    with pytest.raises(SystemExit, match="2"):
        main(["x", "--cluster", "y"])


def test_the_planning_needs_no_torch() -> None:
    program = "import copus_ext.extras.graph_stages.plan, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
