"""B4: does the planner predict this machine after measuring two points per layout?

    python bench/planner_here.py --data-path runs/quickstart/data/stdlib_text_document

Two CPU ranks, the quickstart's model. `tools/profile_layouts.py` times two micro-batch counts of
every layout and micro-batch; the planner predicts every configuration of three batches from them
(vpp up to 2, micro-batch up to 4); then those are measured, the profiled ones again. Also fits the
constants that ship for CPU ranks (copus_ext/cost_model/data/cpu.json). Writes
docs/results/planner_here.json and .svg. One rank per core, nothing else running; about 8 minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from planner_accuracy import errors, ship
from support import QUICKSTART_MODEL, RESULTS, ROOT, open_source, origin, torchrun

MODEL = f"""{QUICKSTART_MODEL} --lr 1e-3 --split 98,1,1 --train-iters 100000 --micro-batch-size 1
--global-batch-size 2"""


def profile(store: Path, args: argparse.Namespace, *more: str) -> None:
    """Runs the tool on two ranks."""
    tool = [ROOT / "tools/profile_layouts.py", "--store", store, "--largest", "vpp=2"]
    own = ["--max-micro-batch", "4", "--steps", str(args.steps), *more]
    data = ["--data-path", args.data_path, "--data-cache-path", store.parent / "cache"]
    command = torchrun(2, *tool, *own, "--", *MODEL.split(), *data)
    subprocess.run(command, check=True, cwd=ROOT)


def planner_of(model: Any, timings: list[Any]) -> Any:
    """A planner for two CPU ranks that knows some times."""
    from copus_ext.cost_model.cluster_spec import preset
    from copus_ext.planner.search import Planner
    from copus_ext.planner.space import Limits

    limits = Limits(cross_node_tp=True, max_micro_batch=4)
    return Planner(model, preset("cpu:2"), limits=limits, timings=timings)


def measure(args: argparse.Namespace) -> tuple[Any, list[Any], list[Any]]:
    """The model, the two-point profile, and times of every configuration of the batches."""
    from copus_ext.cost_model.model_spec import ModelSpec
    from copus_ext.cost_model.profile import read_profile

    with tempfile.TemporaryDirectory() as scratch:
        two, every = Path(scratch) / "two.jsonl", Path(scratch) / "every.jsonl"
        profile(two, args)
        profile(every, args, "--batches", args.batches)
        machine, timings = read_profile(two)
        return ModelSpec.from_json(machine["model"]), timings, read_profile(every)[1]


def measured_before(path: Path) -> tuple[Any, list[Any], list[Any]]:
    """The same from an earlier result."""
    from copus_ext.cost_model.model_spec import ModelSpec
    from copus_ext.cost_model.profile import Timing

    record = json.loads(path.read_text())
    timings, truth = ([Timing(**t) for t in record[name]] for name in ("timings", "truth"))
    return ModelSpec.from_json(record["model"]), timings, truth


def fit_here(timings: list[Any], model: Any) -> Any:
    """Constants of these ranks from all measured times."""
    from copus_ext.cost_model.cluster_spec import preset
    from copus_ext.cost_model.constants import Constants
    from copus_ext.cost_model.fit import fit_constants
    from copus_ext.planner.space import measured_points, to_rows

    prior = Constants(
        launch_s=5e-6,
        step_s=5e-3,
        exchange_s=1e-4,
        tp_bytes_per_s=1e9,
        tp_cross_bytes_per_s=1e9,
        tp_latency_s=2e-4,
        dp_bytes_per_s=1e9,
        nic_bytes_per_s=1e9,
    )
    rows = to_rows(model, preset("cpu:2"), measured_points(timings)).full()
    seconds = np.array([t.step_s for t in timings])
    return fit_constants(rows, seconds, prior=prior)


def compare(model: Any, timings: list[Any], truth: list[Any]) -> list[dict[str, Any]]:
    """Every measured configuration beside its prediction."""
    from copus_ext.planner.answers import Ranked
    from copus_ext.planner.configuration import Configuration

    base, profiled = planner_of(model, []), planner_of(model, timings)
    points = {(t.line, t.num_microbatches) for t in timings}
    rows = []
    for t in truth:
        c = Configuration.of_timing(t)
        found, plain = profiled.explain(c), base.explain(c)
        assert isinstance(found, Ranked) and isinstance(plain, Ranked), c
        rows.append(
            {
                "configuration": str(c),
                "global_batch_size": c.global_batch_size,
                "measured_s": t.step_s,
                "predicted_s": found.prediction.step_s,
                "source": found.prediction.source,
                "was_profiled": (t.line, t.num_microbatches) in points,
                "constants_alone_s": plain.prediction.step_s,
            }
        )
    return rows


def judged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors, and whether the fastest of each batch is among the two predicted fastest."""
    new, old = ([r for r in rows if r["was_profiled"] is was] for was in (False, True))
    top = {}
    for batch in sorted({r["global_batch_size"] for r in rows}):
        mine = [r for r in rows if r["global_batch_size"] == batch]
        best = min(mine, key=lambda r: r["measured_s"])
        order = sorted(mine, key=lambda r: r["predicted_s"])
        top[batch] = {
            "configurations": len(mine),
            "fastest": best["configuration"],
            "predicted_rank_of_fastest": order.index(best) + 1,
            "regret": order[0]["measured_s"] / best["measured_s"] - 1,
        }
    return {
        "not_measured_before": _errors(new, "predicted_s"),
        "measured_again": _errors(old, "predicted_s"),
        "constants_alone": _errors(rows, "constants_alone_s"),
        "choice": top,
    }


def _errors(rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    values = [[r[name], r["measured_s"]] for r in rows]
    return errors(*np.array(values).T)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Throughput against batch by layout: measured points on predicted lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "copus"
    figure, axes = pyplot.subplots(figsize=(6.5, 4), layout="constrained")
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for r in rows:
        key = (r["configuration"].split(",micro")[0], r["global_batch_size"])
        if key not in best or r["measured_s"] < best[key]["measured_s"]:
            best[key] = r
    for i, layout in enumerate(sorted({name for name, _ in best})):
        batches = sorted(b for name, b in best if name == layout)
        some = [best[layout, b] for b in batches]
        colour = f"C{i}"
        axes.plot(batches, [b / r["predicted_s"] for b, r in zip(batches, some)], color=colour)
        points = [b / r["measured_s"] for b, r in zip(batches, some)]
        axes.plot(batches, points, "o", color=colour, label=layout)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="global batch, samples", ylabel="samples/s (points measured, lines predicted)")
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    """Measures, predicts, prints and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-path", default="", help="prefix of an indexed data set")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a configuration")
    parser.add_argument("--batches", default="8,16,32")
    parser.add_argument("--again", type=Path, help="predict anew what this result measured")
    args = parser.parse_args()
    args.data_path = str(Path(args.data_path).resolve())
    open_source()
    before = origin()
    model, timings, truth = measured_before(args.again) if args.again else measure(args)
    found = fit_here(timings, model)
    residual = errors(np.exp(found.residuals), 1.0)
    source = f"{len(timings)} times of bench/planner_here.py on {before['nproc']} cores"
    ship("cpu", found.constants, source, residual)
    rows = compare(model, timings, truth)
    result = {
        "what": "step times on two CPU ranks, predicted from two counts per layout and micro-batch",
        **judged(rows),
        "constants_residual": residual,
        **before,
        "model": model.to_json(),
        "timings": [dataclasses.asdict(t) for t in timings],
        "truth": [dataclasses.asdict(t) for t in truth],
        "rows": rows,
    }
    (RESULTS / "planner_here.json").write_text(json.dumps(result) + "\n")
    draw(rows, RESULTS / "planner_here.svg")
    long = ("rows", "timings", "truth", "model")
    print(json.dumps({k: v for k, v in result.items() if k not in long}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
