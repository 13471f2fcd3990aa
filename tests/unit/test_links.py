"""Links between pairs of nodes in the cluster file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from copus_ext.cost_model.cluster_spec import ClusterSpec, Links, preset
from copus_ext.cost_model.spec_file import SpecError

CLUSTER = preset("h100-80g:24")


def matrix(value: Any, num: int = 3) -> list[list[Any]]:
    return [[value if i != j else 0 for j in range(num)] for i in range(num)]


def read(links: Any) -> ClusterSpec:
    return ClusterSpec.from_json({**CLUSTER.to_json(), "links": links})


def test_links_go_to_json_and_back() -> None:
    speeds = [[0, 5e10, 4e10], [3e10, 0, 2e10], [1e10, 6e10, 0]]
    links = {"bytes_per_s": speeds, "latency_s": matrix(1e-5), "hosts": ["n1", "n2", "n-3.x"]}
    cluster = read(links)
    assert cluster.links is not None and cluster.links.name(2) == "n-3.x"
    again = ClusterSpec.from_json(json.loads(json.dumps(cluster.to_json())))
    assert again == cluster and hash(again.links) == hash(cluster.links)
    assert "links" not in CLUSTER.to_json() and read(None) == CLUSTER
    long = read({"bytes_per_s": matrix(5e10), "latency_s": matrix(2e-5)})
    short = {"bytes_per_s": matrix("400Gb/s"), "latency_s": 2e-5}
    short["bytes_per_s"][1][1] = None
    assert read(short) == long
    assert long.links is not None and long.links.name(2) == "2"
    silent = read({"bytes_per_s": matrix(5e10)}).links
    assert silent is not None and silent.latency_s == tuple(map(tuple, matrix(0.0)))
    with pytest.raises(SpecError, match=r"latency_s\[1\]\[1\] is 1.0; it must be 0"):
        Links(bytes_per_s=((0, 1), (1, 0)), latency_s=((0, 0), (0, 1.0)))


@pytest.mark.parametrize(
    ("links", "said"),
    [
        ([1], "cluster.links must be an object"),
        ("fast", "cluster.links must be an object"),
        ({}, "links lacks bytes_per_s"),
        ({"bytes_per_s": matrix(1e9), "speed": 1}, "unknown links keys: speed; known: bytes"),
        ({"bytes_per_s": 3}, "links.bytes_per_s 3 must be a list of rows"),
        ({"bytes_per_s": [1, 2, 3]}, "must be a list of rows"),
        ({"bytes_per_s": matrix(1e9, 4)}, "is 4x4 but the cluster has 3 nodes"),
        ({"bytes_per_s": []}, "is 0x0 but the cluster has 3 nodes"),
        ({"bytes_per_s": [*matrix(1e9)[:2], [1e9]]}, "bytes_per_s row 2 has 1 values"),
        ({"bytes_per_s": matrix(1e9), "latency_s": matrix(0, 2)}, "latency_s has 2 rows"),
        ({"bytes_per_s": matrix(0)}, r"bytes_per_s\[0\]\[1\] is 0; use 1 to 1e\+18 bytes/s"),
        ({"bytes_per_s": matrix(-1e9)}, r"bytes_per_s\[0\]\[1\] is -1000000000.0; use 1"),
        ({"bytes_per_s": matrix(float("nan"))}, r"bytes_per_s\[0\]\[1\] is nan; use"),
        ({"bytes_per_s": matrix(10**400)}, r"bytes_per_s\[0\]\[1\] is 1000"),
        ({"bytes_per_s": matrix(None)}, r"bytes_per_s\[0\]\[1\] is None"),
        ({"bytes_per_s": matrix(True)}, r"bytes_per_s\[0\]\[1\] is True"),
        ({"bytes_per_s": matrix([1])}, r"bytes_per_s\[0\]\[1\] is \[1\]"),
        ({"bytes_per_s": matrix("quick")}, "'quick' is not a size"),
        ({"bytes_per_s": matrix(1e9), "latency_s": -1e-6}, r"latency_s\[0\]\[1\] is -1e-06"),
        ({"bytes_per_s": matrix(1e9), "latency_s": "1us"}, r"latency_s\[0\]\[1\] is '1us'; use 0"),
        ({"bytes_per_s": matrix(1e9), "hosts": "a,b,c"}, "hosts 'a,b,c' must be a list"),
        ({"bytes_per_s": matrix(1e9), "hosts": ["a", "b"]}, "hosts has 2 names for 3 nodes"),
        ({"bytes_per_s": matrix(1e9), "hosts": ["a", "b", "a"]}, "names a twice"),
        ({"bytes_per_s": matrix(1e9), "hosts": ["a", "b", "c\nd"]}, "is not a host name"),
        ({"bytes_per_s": matrix(1e9), "hosts": ["a", "b", 3]}, "hosts 3 is not a host name"),
    ],
)
def test_bad_links_are_refused_in_one_line(links: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        read(links)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({**CLUSTER.to_json(), "links": links}))
    with pytest.raises(SpecError, match="^cluster.json: .*" + said):
        ClusterSpec.load(path)


def test_links_stay_with_their_nodes_only() -> None:
    cluster = read({"bytes_per_s": matrix(1e9)})
    assert cluster.resize(24) == cluster
    for gpus in (4, 8, 16, 32):
        assert cluster.resize(gpus) == CLUSTER.resize(gpus)
    with pytest.raises(SpecError, match="3x3 but the cluster has 2 nodes"):
        replace(cluster, num_nodes=2)
