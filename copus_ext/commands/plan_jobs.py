"""The first row of a plan as what starts it: its flags, a command for SLURM, a Job of Kubernetes,
or parameters of submitit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from copus_ext.cost_model.cluster_spec import ClusterSpec
from copus_ext.planner.request import UsageProblem
from megatron.trainer.common.outside import parse_yaml

FIRST_ROW = ("flags", "slurm", "kubernetes", "submitit")
_JOB = Path(__file__).parent / "data" / "job.yaml"
"""The manifest of docs/clusters.md, for two nodes; also scripts/kubernetes/job.yaml."""
_YOURS = "FLAGS"
"""Stands for flags that a plan does not know."""


def first_rows(form: str, rows: Sequence[list[str]], cluster: ClusterSpec) -> str:
    """The text of an answer.

    Args:
        form: of `FIRST_ROW`.
        rows: the flags of layout and batch, for each batch that has a layout.

    Raises:
        UsageProblem: this form has one batch, or is for GPUs.
    """
    if form == "flags":
        return "\n".join(" ".join(flags) for flags in rows)
    if cluster.is_gloo:
        raise UsageProblem(f"--format {form} is for GPUs; use --format flags")
    if len(rows) > 1:
        raise UsageProblem(f"--format {form} is one run; give one batch")
    render = {"slurm": _sbatch, "kubernetes": _manifest, "submitit": _parameters}[form]
    return "".join(render(flags, cluster) for flags in rows)


def _sbatch(flags: list[str], cluster: ClusterSpec) -> str:
    where = f"--nodes={cluster.num_nodes} --gpus-per-node={cluster.gpus_per_node}"
    script = f"scripts/slurm/pretrain.sbatch {_YOURS} {' '.join(flags)}"
    return f"COPUS_RUN=runs/x sbatch {where} {script}"


def _parameters(flags: list[str], cluster: ClusterSpec) -> str:
    """Of `AutoExecutor.update_parameters`, and the flags; each task is a rank."""
    found = {"nodes": cluster.num_nodes, "gpus_per_node": cluster.gpus_per_node}
    found["tasks_per_node"] = cluster.gpus_per_node
    return json.dumps({**found, "flags": flags}, indent=1)


def _manifest(flags: list[str], cluster: ClusterSpec) -> str:
    import yaml

    service, job = map(parse_yaml, _JOB.read_text().split("\n---\n"))
    spec: dict[str, Any] = job["spec"]
    spec["completions"] = spec["parallelism"] = cluster.num_nodes
    (node,) = spec["template"]["spec"]["containers"]
    node["resources"]["limits"]["nvidia.com/gpu"] = cluster.gpus_per_node
    words: list[str] = node["args"]
    words[words.index("--nnodes=2")] = f"--nnodes={cluster.num_nodes}"
    at = words.index(_YOURS) + 1
    words[at:at] = flags
    return yaml.safe_dump_all([service, job], sort_keys=False).rstrip("\n")
