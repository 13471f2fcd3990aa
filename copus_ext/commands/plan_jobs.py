"""The first row of a plan as what starts it: its flags, a command for SLURM, a Job of Kubernetes,
or parameters of submitit."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from copus_ext.commands.plan_answer import write_output
from copus_ext.cost_model.cluster_spec import ClusterSpec
from copus_ext.planner.beside_megatron import flags_before, uneven_line
from copus_ext.planner.fixed import is_whole
from copus_ext.planner.given_flags import flags_of_row, given_of, line_of, merged, to_remove
from copus_ext.planner.request import UsageProblem, length_line
from copus_ext.planner.sharing import runs_in
from megatron.trainer.common.outside import parse_yaml
from megatron.trainer.common.program import tell

FIRST_ROW = ("flags", "slurm", "kubernetes", "submitit")
_JOB = Path(__file__).parent / "data" / "job.yaml"
"""The manifest of docs/clusters.md, for two nodes; also scripts/kubernetes/job.yaml."""
_YOURS = "FLAGS"
"""Stands for flags that a plan does not know."""
_PLACES = {
    "slurm": "runs/x (a folder that all nodes see)",
    "kubernetes": (
        "copus:latest (the image), copus-runs (the claim of a volume that all pods can write) and "
        "/runs/x (the folder of the run)"
    ),
}
"""Of a form, what a user replaces."""
_TRAINER = (
    "this starts COPUS's own trainer; to start Megatron-LM, give what --format flags prints to its "
    "pretrain_gpt.py, with torchrun on every node"
)
_READER = (
    "update_parameters of submitit's AutoExecutor takes nodes, gpus_per_node and tasks_per_node; "
    "submitit reads neither flags nor remarks: the function that you submit starts its trainer "
    "with these flags, COPUS's or Megatron-LM's pretrain_gpt.py"
)


def first_rows(
    form: str,
    rows: Sequence[list[str]],
    cluster: ClusterSpec,
    yours: Sequence[str] | None = None,
    remarks: Sequence[str] = (),
) -> str:
    """The text of an answer.

    Args:
        form: of `FIRST_ROW`.
        rows: the flags of layout and batch, for each batch that has a layout.
        cluster: the machine.
        yours: the flags of the run, of which those of layout and batch are replaced; None where
            they are not known.
        remarks: what the text says besides, but for plain flags.

    Raises:
        UsageProblem: this form has one batch, or is for GPUs.
    """
    if form == "flags":
        return "\n".join(line_of(merged(yours or (), flags)) for flags in rows)
    if cluster.is_gloo:
        raise UsageProblem(f"--format {form} is for GPUs; use --format flags")
    if len(rows) > 1:
        raise UsageProblem(f"--format {form} is one run; give one batch")
    is_json = form == "submitit"
    own = yours if yours is not None else [] if is_json else [_YOURS]
    if not rows:
        return ""
    whole = merged(own, rows[0])
    if is_json:
        return _parameters(whole, cluster, [_READER, *remarks])
    text = {"slurm": _sbatch, "kubernetes": _manifest}[form](whole, cluster)
    told = "".join(f"# {line}\n" for line in (_TRAINER, *remarks))
    mine = "" if yours is not None else f"; {_YOURS}: those of your run, before the layout's"
    return f"# put your own in place of {_PLACES[form]}{mine}\n{told}{text}"


def remarks_on(args: argparse.Namespace, planner: Any, plans: Sequence[Any]) -> list[str]:
    """What first rows rest on, and how sure they are, as a table says it."""
    from copus_ext.planner.report import (
        chunks_line,
        fastest_lines,
        machine_line,
        peak_line,
        row_line,
    )
    from copus_ext.planner.software import (
        assumed_lines,
        assumptions,
        fits_better,
        half_precision_line,
        otherwise,
        untimed,
    )

    model, cluster, plan = planner.model, planner.cluster, plans[0]
    assumed = assumptions(args, planner)
    # A layout that was named would not become another one.
    other = None if is_whole(args.fix) else otherwise(planner, plan, assumed)
    firsts = [one.ranked[0] for one in plans]
    shares = any(one.configuration.layout.cp > 1 for one in firsts)
    lines = [
        length_line(args, model),
        machine_line(cluster, planner.constants),
        half_precision_line(args, planner, plan),
        peak_line(cluster, model.precision),
        *assumed_lines(assumed, other),
        *fits_better(args, planner, assumed),
        *(line for one in plans for line in fastest_lines(one)),
        *map(row_line, firsts),
        chunks_line(firsts),
        *(x.better_batch.line(x.global_batch_size) for x in plans if x.better_batch),
        runs_in(model, cluster) if shares else "",
        *untimed(args, planner),
        f"warning: {uneven}" if (uneven := uneven_line(args, planner)) else "",
    ]
    return [line for line in lines if line]


def rows_of(args: argparse.Namespace, planner: Any, plans: Sequence[Any]) -> str:
    """The same of the first rows of plans that have some, with the flags of `--from-command`."""
    firsts = [plan.ranked[0] for plan in plans]
    given = given_of(args)
    software = flags_before(args, planner.model, planner.cluster)
    rows = [flags_of_row(one.configuration, planner.model, given, software) for one in firsts]
    yours = None if args.launched is None else shlex.split(args.megatron_args)
    if yours is None and (left := {flag: None for row in rows for flag in to_remove(row, given)}):
        tell("plan.py", f"note: remove {', '.join(left)} from your flags: no flag unsets them")
    if yours is None and rows and args.format == "submitit":
        tell("plan.py", "note: flags are those of the layout; put those of your run before them")
    remarks = remarks_on(args, planner, plans)
    for line in remarks if args.format == "flags" else ():
        tell("plan.py", f"note: {line}")
    return first_rows(args.format, rows, planner.cluster, yours, remarks)


def tell_rows(args: argparse.Namespace, planner: Any, plans: list[Any]) -> None:
    """Prints the first rows as what starts them, and says what `--fix` would print else."""
    for plan in plans:
        for one in plan.ranked[:1] if args.fix else ():
            tell("plan.py", f"note: what --fix leaves open is as in {one.configuration}")
        for one in plan.tries[:1]:
            likely = f"fits with probability {one.prediction.fit_probability:.2f}"
            fix = f"--fix {one.configuration} prints it"
            tell("plan.py", f"note: what to try first is not sure to fit ({likely}); {fix}")
    if found := [plan for plan in plans if plan.ranked]:
        write_output(rows_of(args, planner, found), args.output)


def _sbatch(flags: list[str], cluster: ClusterSpec) -> str:
    where = f"--nodes={cluster.num_nodes} --gpus-per-node={cluster.gpus_per_node}"
    return f"COPUS_RUN=runs/x sbatch {where} scripts/slurm/pretrain.sbatch {line_of(flags)}"


def _parameters(flags: list[str], cluster: ClusterSpec, remarks: Sequence[str]) -> str:
    """Of `AutoExecutor.update_parameters`, and the flags and remarks; each task is a rank."""
    found = {"nodes": cluster.num_nodes, "gpus_per_node": cluster.gpus_per_node}
    found["tasks_per_node"] = cluster.gpus_per_node
    return json.dumps({**found, "flags": flags, "remarks": [*remarks]}, indent=1)


def _manifest(flags: list[str], cluster: ClusterSpec) -> str:
    import yaml

    service, job = map(parse_yaml, _JOB.read_text().split("\n---\n"))
    spec: dict[str, Any] = job["spec"]
    spec["completions"] = spec["parallelism"] = cluster.num_nodes
    (node,) = spec["template"]["spec"]["containers"]
    node["resources"]["limits"]["nvidia.com/gpu"] = cluster.gpus_per_node
    words: list[str] = node["args"]
    words[words.index("--nnodes=2")] = f"--nnodes={cluster.num_nodes}"
    at = words.index(_YOURS)
    words[at : at + 1] = flags
    return yaml.safe_dump_all([service, job], sort_keys=False).rstrip("\n")
