"""Does a live job leave data parallelism when the link between its two nodes is slow?

    sudo python -m bench.slow_link --data-path runs/quickstart/data/stdlib_text_document

Two network namespaces on this machine are the nodes, with a rate-limited link and one rank and core
in each. The quickstart's model starts as dp=2, whose gradients cross the link every step. Four runs
over the same samples are compared: all layouts allowed, the same with the link given in
`--copus-cluster`, the layout kept, and started as pp=2 and kept. Writes
docs/results/slow_link.json and the journal of the first. It needs root, iproute2, two cores
and nothing else running, and takes about 10 minutes.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench import nodes
from bench.support import QUICKSTART_MODEL, TRAINER, arguments, origin, read_run
from copus_ext.commands.replay import replayed
from copus_ext.controller.decision_log import NAME
from copus_ext.cost_model.cluster_spec import of_gpu
from megatron.training.config.layout import Layout

TRAINING = """--micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --min-lr 1e-4
--lr-decay-style cosine --lr-warmup-fraction 0.03 --adam-beta2 0.95 --split 95,4,1
--eval-interval 100000 --log-interval 20 --copus --copus-mode act"""
"""The rest of the flags of scripts/quickstart.sh."""
KINDS = {
    "all": ["--copus-layouts", "all"],
    "told": ["--copus-layouts", "all", "--copus-cluster", "CLUSTER"],
    "current": ["--copus-layouts", "current"],
    "pp2": ["--copus-layouts", "current", "--pipeline-model-parallel-size", "2"],
}
"""Runs, and the flags in which they differ."""


def account(folder: Path, kind: str) -> dict[str, Any]:
    """What a run did, from its own records."""
    run = read_run(folder)
    moves, decisions, groups = run.of("switch"), run.of("decision"), {}
    for r in run.steps:
        name = f"{r['layout']} batch {r['global_batch_size']}"
        groups.setdefault(name, []).append(r["seconds"])
    paused = sum(r["outcome"]["pause_s"] for r in moves)
    return {
        "kind": kind,
        "total_s": sum(r["seconds"] for r in run.steps) + paused,
        "paused_s": paused,
        "steps": len(run.steps),
        "moves": [{k: r[k] for k in ("iteration", "start", "to", "outcome")} for r in moves],
        "median_step_s": {
            name: {"steps": len(some), "median_s": statistics.median(some)}
            for name, some in groups.items()
        },
        "last_losses": statistics.fmean(r["losses"]["lm loss"] for r in run.steps[-20:]),
        "decisions": [_brief(r) for r in decisions],
        "decided_again_the_same": sum(replayed(r, {})[0] for r in decisions),
        "curves": {
            "samples": [r["consumed_samples"] for r in run.steps],
            "seconds": [r["seconds"] for r in run.steps],
            "layout": [r["layout"] for r in run.steps],
            "batch": [r["global_batch_size"] for r in run.steps],
            "loss": [r["losses"]["lm loss"] for r in run.steps],
        },
    }


def _brief(record: dict[str, Any]) -> dict[str, Any]:
    """A decision without the situation, but for the speeds that it saw."""
    situation, decision = record["situation"], record["decision"]
    best: dict[str, dict[str, Any]] = {}
    now = situation["rows"][situation["current"]]
    for row in situation["rows"]:
        if row["global_batch_size"] != now["global_batch_size"]:
            continue
        name = str(Layout(**{size: row[size] for size in ("tp", "pp", "vpp", "dp")}))
        if name not in best or row["samples_per_s"] > best[name]["samples_per_s"]:
            best[name] = {
                k: row[k] for k in ("micro_batch_size", "samples_per_s", "relative_sd", "source")
            }
    return {
        "iteration": record["iteration"],
        "kind": decision["kind"],
        "reason": decision["reason"],
        "switch_cost_s": situation["switch_cost_s"],
        "now": now,
        "speeds": best,
    }


def cluster_file(rate_mbit: float, path: Path) -> None:
    """What a user writes who knows the link."""
    spec = of_gpu("CPU-rank", nodes=2, gpus_per_node=1).to_json()
    path.write_text(
        json.dumps({**spec, "nic_bytes_per_s": rate_mbit * 1e6 / 8, "nic_is_measured": True})
    )


def table(runs: list[dict[str, Any]]) -> str:
    """One line a run."""
    lines = [f"{'run':<10}{'seconds':>9}{'pauses':>8}{'steps':>7}{'loss':>8}  layouts"]
    for run in runs:
        layouts = run["curves"]["layout"]
        path = [layouts[0], *(b for a, b in itertools.pairwise(layouts) if a != b)]
        lines.append(
            f"{run['kind']:<10}{run['total_s']:>9.1f}{run['paused_s']:>8.1f}{run['steps']:>7}"
            f"{run['last_losses']:>8.3f}  {' -> '.join(path)}"
        )
    return "\n".join(lines)


def main() -> None:
    """Trains each way, prints and writes."""
    parser = arguments(__doc__, "slow_link.json", data=True)
    parser.add_argument("--rate", type=float, default=200.0, help="Mbit/s of the link")
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--runs", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    nodes.require()
    before, runs = origin(), []
    with tempfile.TemporaryDirectory() as temporary, nodes.two_nodes(args.rate) as pair:
        folder = Path(temporary)
        cluster_file(args.rate, folder / "cluster.json")
        shared = [TRAINER, *QUICKSTART_MODEL.split(), *TRAINING.split()]
        shared += ["--train-samples", str(args.samples), "--data-path", args.data_path]
        shared += ["--data-cache-path", str(folder / "cache")]
        for kind in args.runs:
            own = [word.replace("CLUSTER", str(folder / "cluster.json")) for word in KINDS[kind]]
            at = folder / kind
            pair.run([*shared, *own, "--run-dir", str(at)], at)
            runs.append(account(at, kind))
            if kind == "all":
                shutil.copy(at / NAME, args.output.with_suffix(".journal.jsonl"))
            print(table(runs), flush=True)
    result = {
        "what": "a live job over a slow link, its layout chosen by the controller or kept",
        "rate_mbit_per_s": args.rate,
        "samples": args.samples,
        **before,
        "runs": runs,
    }
    args.output.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
