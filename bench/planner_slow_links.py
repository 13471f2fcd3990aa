"""Does the planner order layouts rightly where the links between ranks are slow?

    sudo python -m bench.planner_slow_links

Network namespaces on this machine are nodes with one rank each, 2 and 4 of them, and 2, 1 and .2
Gbit/s between any two. Links take packets of 16 to 64 KB whole, as where a network card cuts them.
Every rank has a quota of processor time (cgroup), so that none slows down another: most of a core
where there are two. With less a rank stands still within every period, and so do its messages.
`tools/profile_layouts.py` times the quickstart's model in every layout and two micro-batches. A
layout counts with the median of its rounds, and beside it with the least: the machine has slow and
fast stretches of minutes, which differ by more than layouts do. The planner predicts all layouts
from the constants that ship and the rate of the links alone; then from two measured times of each
group, which it has proposed. `among others` is the choice among the layouts whose times were not
known. Each round is also judged alone. Writes docs/results/planner_slow_links.json, with some 20
minutes a round. `--again` of results takes their rounds, too, and with `--rounds 0` predicts them
anew. `--only 2` measures one number of nodes, beside `--again` or into another file.
`--draw` prints the table of the file. To measure, it needs root, iproute2, two cores and nothing
else running.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench import nodes
from bench.heterogeneity import QUOTA, quotas
from bench.nodes import Nodes
from bench.rounds import Times, of_rounds
from bench.support import QUICKSTART_MODEL, ROOT, arguments, make_dataset, origin
from copus_ext.cost_model.cluster_spec import ClusterSpec, preset
from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.planner.profile import Timing, read_profile
from copus_ext.planner.validation import MeasuredRun, Predictions, judge, predict
from tests.helpers.network_namespaces import DEVICE, address, star

GROUPS = ((2, 2000.0), (2, 1000.0), (2, 200.0), (4, 1000.0), (4, 200.0))
"""Ranks, and Mbit/s between any two."""
GROUP = "{} nodes, {:g} Mbit/s"
BATCH, STEPS, WARM_UP = 16, 5, 1
MODEL = f"""{QUICKSTART_MODEL} --lr 1e-3 --split 98,1,1 --train-iters 100000 --micro-batch-size 1
--global-batch-size {BATCH}"""


def share_of(world: int) -> float:
    """Cores of a rank: two nodes share two cores, four too."""
    return 4.0 * QUOTA / world


def cluster_of(world: int, rate_mbit: float) -> ClusterSpec:
    """Nodes of one rank, which has its quota of a core."""
    spec, share = preset("cpu:1"), share_of(world)
    gpu = dataclasses.replace(
        spec.gpu,
        peak_flops=share * spec.gpu.peak_flops,
        fp32_peak_flops=share * spec.gpu.peak("fp32"),
        hbm_bytes_per_s=share * spec.gpu.hbm_bytes_per_s,
    )
    network = {"nic_bytes_per_s": rate_mbit * 1e6 / 8, "nic_is_measured": True}
    return dataclasses.replace(spec, gpu=gpu, num_nodes=world, gpus_per_node=1, **network)


def constants(world: int) -> Constants:
    """Those of CPU ranks. What a core computes to start something takes longer on a part of it."""
    own, share = preset("cpu:1").load_constants(), share_of(world)
    names = ("launch_s", "exchange_s", "step_s", "tp_latency_s")
    return dataclasses.replace(own, **{name: getattr(own, name) / share for name in names})


def predicted(runs: list[MeasuredRun], num_known: int = 0) -> Predictions:
    """Of every run, with the constants of its number of nodes, which come one after the other."""
    found = []
    for world, some in itertools.groupby(runs, key=lambda run: run.cluster.num_nodes):
        found.append(predict(list(some), num_known=num_known, constants=constants(world)))
    names = [field.name for field in dataclasses.fields(Predictions)]
    return Predictions(**{n: np.concatenate([getattr(f, n) for f in found]) for n in names})


def measure(world: int, rate_mbit: float, data: str, work: Path) -> dict[str, Any]:
    """Model and times of every layout of so many nodes."""
    store = work / f"{world}_{rate_mbit:g}.jsonl"
    tool = [str(ROOT / "tools" / "profile_layouts.py"), "--store", str(store)]
    tool += ["--largest", "vpp=2", "--max-micro-batch", "2", "--batches", str(BATCH)]
    tool += ["--steps", str(STEPS), "--warm-up", str(WARM_UP), "--", *MODEL.split()]
    tool += ["--data-path", data, "--data-cache-path", str(work / "cache")]
    with (
        quotas([share_of(world)] * world) as groups,
        star(world, rate_mbit=rate_mbit, usual_mbit=rate_mbit, offload=True) as names,
    ):
        addresses = [address(node) for node in range(world)]
        site = Nodes(names=names, addresses=addresses, device=DEVICE, groups=groups)
        seconds = site.run(tool, work / store.stem)
    machine, timings = read_profile(store)
    store.unlink()
    print(f"{world} nodes, {rate_mbit:g} Mbit/s: {len(timings)} layouts in {seconds:.0f} s")
    return {"model": machine["model"], "times": [t.to_json() for t in timings]}


def runs_of(found: Times) -> list[MeasuredRun]:
    """The times as a table, groups with as many nodes one after the other."""
    groups = [(GROUP.format(*group), *group) for group in GROUPS]
    return [
        MeasuredRun(
            group=name,
            model=ModelSpec.from_json(found[name]["model"]),
            cluster=cluster_of(world, rate_mbit),
            configuration=t.configuration,
            step_s=t.step_s,
            out_of_memory=False,
            peak_bytes=None,
        )
        for name, world, rate_mbit in groups
        if name in found
        for t in map(Timing.from_json, found[name]["times"])
    ]


def rows_of(
    runs: list[MeasuredRun], alone: Predictions, known: Predictions
) -> list[dict[str, Any]]:
    """Every run with what was predicted of it, from constants alone and with two times known."""
    return [
        {
            "group": run.group,
            "configuration": str(run.configuration),
            "measured_s": run.step_s,
            "predicted_s": float(alone.step_s[i]),
            "two_known_s": float(known.step_s[i]),
            "was_known": bool(known.known[i]),
        }
        for i, run in enumerate(runs)
    ]


def chunks(runs: list[MeasuredRun], seconds: Any) -> list[dict[str, Any]]:
    """Where a pipeline has one or two chunks a stage: seconds of two over those of one."""
    found, at = [], {(run.group, str(run.configuration)): i for i, run in enumerate(runs)}
    for i, run in enumerate(runs):
        c = run.configuration
        if c.layout.vpp != 2:
            continue
        one = dataclasses.replace(c, layout=dataclasses.replace(c.layout, vpp=1))
        if (other := at.get((run.group, str(one)))) is None:
            continue
        measured = float(run.step_s or 0.0) / float(runs[other].step_s or 1.0)
        found.append(
            {
                "group": run.group,
                "configuration": str(c),
                "measured": measured,
                "predicted": float(seconds[i] / seconds[other]),
            }
        )
    return found


def order(rows: list[dict[str, Any]], column: str, apart: float) -> float:
    """Kendall's tau over all pairs of a group whose measured times differ by more than `apart`."""
    agree, pairs = 0.0, 0
    for group in {row["group"] for row in rows}:
        mine = [row for row in rows if row["group"] == group]
        if column == "two_known_s":
            mine = [row for row in mine if not row["was_known"]]
        measured, predicted = (np.array([r[name] for r in mine]) for name in ("measured_s", column))
        i, j = np.triu_indices(len(mine), 1)
        far = np.abs(np.log(measured[i] / measured[j])) > apart
        signs = np.sign(measured[i] - measured[j]) * np.sign(predicted[i] - predicted[j])
        agree, pairs = agree + float(signs[far].sum()), pairs + int(far.sum())
    return agree / pairs


def lost_among_others(rows: list[dict[str, Any]], group: str) -> float:
    """What the best predicted of a group costs over its fastest, among those whose times were not
    known."""
    mine = [row for row in rows if row["group"] == group and not row["was_known"]]
    choice = min(mine, key=lambda row: row["two_known_s"])
    return choice["measured_s"] / min(row["measured_s"] for row in mine) - 1


def table(result: dict[str, Any]) -> str:
    """The figures as Markdown: constants alone, then with two times known."""
    lines = [
        "| nodes and links | layouts | error | order (tau) | lost by the choice | among others |",
        "|" + "---|" * 6,
    ]
    for name, plain in result["alone"]["groups"].items():
        known = result["two_known"]["groups"][name]
        cells = [name, str(plain["runs"])]
        for key, factor, form in (
            ("mean", 100, "{:.0f}"),
            ("kendall_tau", 1, "{:.2f}"),
            ("regret", 100, "{:.1f}"),
        ):
            cells.append(", ".join(form.format(factor * x[key]) for x in (plain, known)))
        cells.append(f"{100 * lost_among_others(result['rows'], name):.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    for words, apart in (("all pairs", 0.0), ("pairs more than 3 % apart", 0.03)):
        taus = [order(result["rows"], column, apart) for column in ("predicted_s", "two_known_s")]
        lines.append(f"| {words} | {len(result['rows'])} | | {taus[0]:.2f}, {taus[1]:.2f} | | |")
    return "\n".join(lines)


def main() -> None:
    """Measures, predicts, prints and writes."""
    parser = arguments(__doc__, "planner_slow_links.json")
    parser.add_argument("--data-path", help="prefix of an indexed data set (default: made)")
    parser.add_argument("--only", type=int, choices=(2, 4), help="nodes")
    parser.add_argument("--rounds", type=int, default=3, help="how often to time all")
    words = "take the rounds of these results, too"
    parser.add_argument("--again", type=Path, nargs="+", default=[], help=words)
    parser.add_argument("--draw", action="store_true", help="print the table of --output, no more")
    args = parser.parse_args()
    if args.draw:
        print(table(json.loads(args.output.read_text())))
        return
    if not (args.rounds or args.again):
        parser.error("--rounds 0 measures nothing; add --again with the results to predict anew")
    if args.only and not args.again and args.output.exists():
        parser.error(f"--only would drop other groups of {args.output}; add --again {args.output}")
    before = [json.loads(path.read_text()) for path in args.again]
    rounds: list[Times] = [one for record in before for one in record["measured"]]
    machines = [machine for record in before for machine in record["machines"]]
    if args.rounds:
        nodes.require()
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(args.data_path).resolve()) if args.data_path else ""
        if args.rounds and not data:
            data = make_dataset(Path(folder) / "stdlib")
        for _ in range(args.rounds):
            machines.append({**origin(), "steps": STEPS})
            rounds.append(
                {
                    GROUP.format(world, rate_mbit): measure(world, rate_mbit, data, Path(folder))
                    for world, rate_mbit in GROUPS
                    if args.only in (None, world)
                }
            )
            # What is measured is kept, should a later round fail.
            args.output.write_text(json.dumps({"measured": rounds, "machines": machines}) + "\n")
    result = judged(rounds, machines)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


def judged(rounds: list[Times], machines: list[dict[str, Any]]) -> dict[str, Any]:
    """Predictions of the median times, and what the least times and every round say of them."""
    usual = of_rounds(rounds, statistics.median)
    runs = runs_of(usual)
    alone, known = predicted(runs), predicted(runs, 2)
    return {
        "what": "step times over slow links; first from constants alone, then from two times",
        "alone": judge(runs, alone),
        "two_known": judge(runs, known),
        "two_chunks_over_one": chunks(runs, alone.step_s),
        "rows": rows_of(runs, alone, known),
        "spread": {name: spread(rounds, name) for name in usual},
        "least_times": judged_alone(runs_of(of_rounds(rounds, min))),
        "each_round": [judged_alone(runs_of(one)) for one in rounds],
        "machines": machines,
        "measured": rounds,
    }


def spread(rounds: list[Times], group: str) -> dict[str, float]:
    """The longest time of the rounds over the least, less 1: median and worst of a group."""
    most, least = (
        np.array([t["step_s"] for t in of_rounds(rounds, ends)[group]["times"]])
        for ends in (max, min)
    )
    found = most / least - 1
    return {"median": float(np.median(found)), "worst": float(found.max())}


def judged_alone(runs: list[MeasuredRun]) -> dict[str, Any]:
    """Order and choice by some times, and their pairs of one and two chunks."""
    alone = predicted(runs)
    groups, known = judge(runs, alone)["groups"], judge(runs, predicted(runs, 2))["groups"]
    names = ("kendall_tau", "regret")
    return {
        "groups": {
            name: {key: [plain[key], known[name][key]] for key in names}
            for name, plain in groups.items()
        },
        "two_chunks_over_one": chunks(runs, alone.step_s),
    }


if __name__ == "__main__":
    main()
