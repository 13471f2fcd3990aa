"""`copus probe-links` under srun."""

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
    program = [sys.executable, ROOT / "copus_ext/commands/main.py", "probe-links"]
    program += ["--output", output, "--sizes", "8,4096,1MiB", "--cluster", "cpu:2"]
    srun = ["srun", "--nodes=3", f"--ntasks-per-node={tasks}"]
    said = cluster.run(*srun, *program, timeout_s=150)
    links = ClusterSpec.load(output).links
    assert links is not None and len(set(links.hosts)) == 3
    assert not any(":" in host for host in links.hosts), "SLURM's names, which differ"
    assert all(host in said for host in links.hosts)
