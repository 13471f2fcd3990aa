"""tools/probe_links.py under srun."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from copus_ext.cost_model.cluster_spec import ClusterSpec
from tests.helpers.launch import ROOT
from tests.slurm.cluster import Cluster


@pytest.mark.parametrize("tasks", [1, 2])
def test_srun_starts_it_on_every_node(cluster: Cluster, tmp_path: Path, tasks: int) -> None:
    output = tmp_path / "cluster.json"
    program = [sys.executable, ROOT / "tools" / "probe_links.py", "--output", output]
    program += ["--sizes", "8,4096,1MiB", "--cluster", "cpu:2"]
    srun = ["srun", "--nodes=3", f"--ntasks-per-node={tasks}"]
    said = cluster.run(*srun, *program, timeout_s=150)
    links = ClusterSpec.load(output).links
    assert links is not None and len(set(links.hosts)) == 3
    assert not any(":" in host for host in links.hosts), "SLURM's names, which differ"
    assert all(host in said for host in links.hosts)


def test_ranks_follow_the_order_of_the_hostfile(cluster: Cluster, tmp_path: Path) -> None:
    """Nodes in the order of `tools/plan.py --hostfile`, over a real srun."""
    show = "import os; from copus_ext.launch.slurm import read_step; s = read_step(); "
    show += "print('rank', s.rank, os.environ['SLURMD_NODENAME'], s.head)"
    srun = ["srun", "--nodes=3", "--ntasks-per-node=2", "--cpu-bind=none"]
    said = cluster.run(*srun, sys.executable, "-c", show)
    named = sorted(line.split() for line in said.splitlines())
    usual = [words[2] for words in named[::2]]
    hosts = tmp_path / "hosts"
    hosts.write_text("\n".join(usual[::-1]))
    words = [*srun, f"--export=ALL,COPUS_HOSTFILE={hosts}", sys.executable, "-c", show]
    moved = sorted(line.split() for line in cluster.run(*words).splitlines())
    assert [w[2] for w in moved[::2]] == usual[::-1] == [w[2] for w in moved[1::2]]
    assert {w[3] for w in moved} == {usual[-1]}
