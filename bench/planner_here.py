"""Does the planner predict this machine after measuring two points per layout?

    python -m bench.planner_here --data-path runs/quickstart/data/stdlib_text_document

Two CPU ranks train the quickstart's model. `tools/profile_layouts.py` times two micro-batch counts
of every layout and micro-batch. From these the planner predicts every configuration of three
batches (vpp up to 2, micro-batch up to 4). Then all of them are measured; `--again` of a result
predicts its times anew. The times also give the
constants that ship for CPU ranks (copus_ext/cost_model/data/cpu.json). Writes
docs/results/planner_here.json in about 8 minutes. It needs a core per rank and nothing
else running.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.fit_constants import fit_constants
from bench.planner import Table, errors, ship
from bench.support import QUICKSTART_MODEL, ROOT, arguments, launch, origin, write
from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.planner.plan import Ranked
from copus_ext.planner.profile import Timing, read_profile
from copus_ext.planner.search import Planner
from copus_ext.planner.space import Limits, points_of, to_config_batch

MODEL = f"""{QUICKSTART_MODEL} --lr 1e-3 --split 98,1,1 --train-iters 100000 --micro-batch-size 1
--global-batch-size 2"""


def profile(store: Path, args: argparse.Namespace, *more: str) -> None:
    tool = [ROOT / "tools/profile_layouts.py", "--store", store, "--largest", "vpp=2"]
    own = ["--max-micro-batch", "4", "--steps", str(args.steps), *more]
    data = ["--data-path", args.data_path, "--data-cache-path", store.parent / "cache"]
    launch(2, *tool, *own, "--", *MODEL.split(), *data)


def planner_of(model: Any, timings: list[Any]) -> Any:
    """A planner for two CPU ranks that knows some times."""
    limits = Limits(cross_node_tp=True, max_micro_batch=4)
    return Planner(model, preset("cpu:2"), limits=limits, timings=timings)


def measure(args: argparse.Namespace) -> tuple[Any, list[Any], list[Any]]:
    """The model, the two-point profile, and times of every configuration of the batches."""
    with tempfile.TemporaryDirectory() as scratch:
        two, every = Path(scratch) / "two.jsonl", Path(scratch) / "every.jsonl"
        profile(two, args)
        profile(every, args, "--batches", args.batches)
        machine, timings = read_profile(two)
        return ModelSpec.from_json(machine["model"]), timings, read_profile(every)[1]


def measured_before(path: Path) -> tuple[Any, list[Any], list[Any]]:
    """The same from an earlier result."""
    record = json.loads(path.read_text())
    timings, truth = ([Timing.from_json(t) for t in record[name]] for name in ("timings", "truth"))
    return ModelSpec.from_json(record["model"]), timings, truth


def fit_here(timings: list[Any], model: Any) -> tuple[Constants, Table]:
    """Constants of these ranks from all measured times, and these."""
    prior = Constants(
        launch_s=5e-6,
        step_s=5e-3,
        exchange_s=1e-4,
        tp_bytes_per_s=1e9,
        tp_cross_bytes_per_s=1e9,
        tp_latency_s=2e-4,
        dp_bytes_per_s=1e9,
        nic_efficiency=1.0,
    )
    rows = to_config_batch(
        model, preset("cpu:2"), points_of([t.configuration for t in timings])
    ).full()
    seconds = np.array([t.step_s for t in timings])
    found = fit_constants(rows, seconds, prior=prior)
    return found, Table(name="planner here", rows=rows, seconds=seconds)


def compare(model: Any, timings: list[Any], truth: list[Any]) -> list[dict[str, Any]]:
    """Every measured configuration beside its prediction."""
    profiled = planner_of(model, timings)
    points = {t.key for t in timings}
    rows = []
    for t in truth:
        c = t.configuration
        found = profiled.explain(c)
        assert isinstance(found, Ranked), c
        rows.append(
            {
                "configuration": str(c),
                "global_batch_size": c.global_batch_size,
                "measured_s": t.step_s,
                "predicted_s": found.prediction.step_s,
                "source": found.prediction.source,
                "was_profiled": t.key in points,
            }
        )
    return rows


def judged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of those that were not profiled, and of those that were."""
    names = {"not_measured_before": False, "measured_again": True}
    return {
        name: errors(
            *np.array(
                [[r["predicted_s"], r["measured_s"]] for r in rows if r["was_profiled"] is was]
            ).T
        )
        for name, was in names.items()
    }


def main() -> None:
    parser = arguments(__doc__, "planner_here.json")
    parser.add_argument("--data-path", default="", help="prefix of an indexed data set")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a configuration")
    parser.add_argument("--batches", default="8,16,32")
    parser.add_argument("--again", type=Path, help="predict anew what this result measured")
    args = parser.parse_args()
    args.data_path = str(Path(args.data_path).resolve())
    before = origin()
    model, timings, truth = measured_before(args.again) if args.again else measure(args)
    found, table = fit_here(timings, model)
    source = f"{len(timings)} times of bench/planner_here.py on {before['nproc']} cores"
    residual = ship(args.output, "cpu", found, source, [table])
    rows = compare(model, timings, truth)
    result = {
        "what": "step times on two CPU ranks, predicted from two counts per layout and micro-batch",
        **judged(rows),
        "constants_residual": residual,
        **before,
        "model": model.to_json(),
        "timings": [t.to_json() for t in timings],
        "truth": [t.to_json() for t in truth],
        "rows": rows,
    }
    write(args.output, result, hide=["rows", "timings", "truth", "model"])


if __name__ == "__main__":
    main()
