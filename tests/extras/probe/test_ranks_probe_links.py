"""`copus probe-links` on real links: ranks of this machine, and emulated nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from copus_ext.cost_model.cluster_spec import ClusterSpec
from tests.helpers.launch import ROOT, RanksResult, run_ranks
from tests.helpers.network_namespaces import DEVICE, address, star, why_not

TOOL = (ROOT / "copus_ext/commands/main.py", "probe-links")
WORKER = Path(__file__).with_name("worker.py")
QUICK = ("--sizes", "8,4096,1MiB", "--repeats", "3")


def probe(output: Path, *flags: str, worker: tuple[str, ...] = (), n: int = 4) -> RanksResult:
    """Every rank counts as a node."""
    program = [WORKER, *worker] if worker else [*TOOL]
    flags = ("--output", str(output), "--every-rank", *QUICK, *flags)
    return run_ranks([*program, *flags], n, timeout_s=120, ends_all=False)


def record_of(output: Path) -> dict[str, Any]:
    return json.loads(output.with_name(f"{output.name}.rounds.json").read_text())


def ways(output: Path) -> set[tuple[str, str]]:
    return {(link["from"], link["to"]) for link in record_of(output)["links"]}


def test_four_ranks_are_probed_and_the_planner_takes_the_file(tmp_path: Path) -> None:
    output = tmp_path / "new" / "cluster.json"
    result = probe(output, "--cluster", "cpu:2").check()
    assert result.codes == (0, 0, 0, 0) and not result.orphans
    spec = ClusterSpec.load(output)
    assert spec.num_nodes == 4 and spec.links is not None and len(spec.links.hosts) == 4
    assert "round 3 of 3: 2 pairs" in result.stderr and "s left" in result.stderr
    assert all(host in result.stdout for host in spec.links.hosts)
    assert len(ways(output)) == 12 and record_of(output)["done"]
    assert all(link["both_ways"][1] > 0 for link in record_of(output)["links"])
    assert 0 < spec.links.duplex <= 1
    assert {path.name for path in output.parent.iterdir()} == {
        "cluster.json",
        "cluster.json.rounds.json",
    }
    plan = [sys.executable, "tools/plan.py", "--megatron-args", "--num-layers 4 --hidden-size 64"]
    plan[-1] += " --num-attention-heads 4 --vocab-size 512 --max-position-embeddings 64"
    plan[-1] += " --seq-length 64"
    plan += ["--cluster", str(output), "--global-batch-size", "8"]
    done = subprocess.run(plan, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_of_several_processes_of_a_node_the_first_probes(tmp_path: Path) -> None:
    """All ranks of this machine are one node, which has no link."""
    program = [*TOOL, "--output", tmp_path / "c.json"]
    result = run_ranks(program, 2, timeout_s=60, ends_all=False)
    assert result.codes == (2, 0) and "--every-rank" in result.stderr
    assert not list(tmp_path.iterdir())


def test_under_torchrun(tmp_path: Path) -> None:
    output = tmp_path / "cluster.json"
    program = [*TOOL, "--output", output, "--every-rank", *QUICK]
    run_ranks(program, 2, timeout_s=120, launcher="torchrun").check()
    assert ClusterSpec.load(output).num_nodes == 2


def test_a_link_that_hangs_is_named_and_the_rest_is_taken_up(tmp_path: Path) -> None:
    output = tmp_path / "cluster.json"
    quick = ("--timeout", "4", "--pair-seconds", "1")
    result = probe(output, *quick, worker=("hang", "1", "3"))
    assert result.returncode == 3 and not result.orphans and not output.exists()
    hosts = record_of(output)["hosts"]
    assert f"no answer between {hosts[1]} and {hosts[3]}: " in result.stderr
    assert "--resume" in result.stderr
    found = ways(output)
    assert found and (hosts[1], hosts[3]) not in found
    refused = probe(output, *quick)
    assert refused.returncode == 2 and "--resume or delete" in refused.stderr
    again = probe(output, "--resume").check()
    left = (12 - len(found)) // 2
    # Links of a busy machine may look slow, and are timed once more.
    first = again.stderr.split("to run once more")[0]
    told = [line for line in first.splitlines() if ": round " in line]
    assert sum(int(line.split(": ")[2].split()[0]) for line in told) == left
    assert len(ways(output)) == 12 and ClusterSpec.load(output).num_nodes == 4


def test_ctrl_c_shows_and_keeps_what_is_known_and_leaves_nothing(tmp_path: Path) -> None:
    output = tmp_path / "cluster.json"
    result = probe(output, "--timeout", "10", worker=("interrupt",))
    assert result.returncode == 128 + signal.SIGINT and not result.orphans
    assert "go on with --resume" in result.stderr and " as a rule, " in result.stdout
    assert len(ways(output)) == 4 and not output.exists()


def test_a_node_that_dies_is_named(tmp_path: Path) -> None:
    output = tmp_path / "cluster.json"
    quick = ("--timeout", "3", "--pair-seconds", "1")
    result = probe(output, *quick, worker=("die",))
    assert result.codes[0] == 3 and result.codes[1] == -signal.SIGKILL and not result.orphans
    name = record_of(output)["hosts"][1]
    assert f"error: {name} has gone or hangs" in result.stderr
    assert len(ways(output)) >= 4


def on_nodes(names: list[str], output: Path, *flags: str) -> tuple[int, str]:
    """Exit code of the first node and what it printed."""
    world = {"WORLD_SIZE": str(len(names)), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    world |= {"MASTER_ADDR": address(0), "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": DEVICE}
    tool = [sys.executable, *map(str, TOOL), "--output", str(output), *flags]
    ranks = []
    for rank, name in enumerate(names):
        own = {"RANK": str(rank), "GROUP_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        ranks.append(
            subprocess.Popen(
                ["ip", "netns", "exec", name, *tool],
                cwd=ROOT,
                env={**os.environ, **world, **own, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said, _ = ranks[0].communicate(timeout=150)
    deadline = time.monotonic() + 30
    for rank in ranks[1:]:
        rank.communicate(timeout=max(deadline - time.monotonic(), 1))
    return ranks[0].returncode, said


def test_a_link_with_offload_takes_its_packets_whole() -> None:
    if problem := why_not():
        pytest.skip(problem)
    with star(2, usual_mbit=200.0, offload=True) as names:

        def about(*words: str) -> Any:
            command = ["ip", "netns", "exec", names[0], *words, DEVICE]
            return json.loads(subprocess.check_output(command))[0]

        burst = about("tc", "-j", "qdisc", "show", "dev")["options"]["burst"]
        largest = about("ip", "-d", "-j", "link", "show")["gso_max_size"]
        assert largest == pytest.approx(burst / 2, rel=0.01)  # tc rounds a burst


@pytest.mark.alone
@pytest.mark.parametrize(
    ("slow", "line"),
    [
        ({"slow_pairs": [(1, 3)]}, "warning: slow link: between {1} and {3}: "),
        ({"slow_senders": [2]}, "warning: slow node: {2}: all it sends, "),
        ({}, ""),
    ],
)
def test_a_planted_slow_link_is_named(tmp_path: Path, slow: dict[str, Any], line: str) -> None:
    if problem := why_not():
        pytest.skip(problem)
    output = tmp_path / "cluster.json"
    with star(4, **slow) as names:
        code, said = on_nodes(names, output, "--sizes", "8,64KiB,1MiB,4MiB", "--strict")
    spec = ClusterSpec.load(output)
    assert spec.links is not None
    warned = [one for one in said.splitlines() if one.startswith("warning: slow")]
    assert code == ("\nwarning: " in said), said
    is_named = "".join(warned).startswith(line.format(*spec.links.hosts))
    assert len(warned) == bool(line) and is_named, said
    assert spec.nic_bytes_per_s == pytest.approx(100e6, rel=0.3)
    if "slow_pairs" in slow:
        assert spec.links.bytes_per_s[1][3] == pytest.approx(12.5e6, rel=0.3)
