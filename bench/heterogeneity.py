"""Does the planner rank orders of nodes and cuts of layers rightly, on nodes and links that differ?

    sudo python -m bench.heterogeneity

Four network namespaces on this machine are the nodes, with one rank in each. Two ranks share a
core, and each has a quota of processor time (cgroup), so that no rank slows down another. One node
has half the quota of the others. Two nodes share a link a tenth as fast as the others.
`copus probe-links` measures the links. The trainer then runs each layout with nodes as given and
with the best order, with even stages and with the best cut, and what is predicted to be fastest
with nodes as given and even stages. Writes docs/results/heterogeneity.json. It needs root,
iproute2, two cores and nothing else running, and takes about twenty minutes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import nodes
from bench.nodes import QUOTA, Nodes
from bench.support import (
    QUICKSTART_MODEL,
    ROOT,
    TRAINER,
    arguments,
    make_dataset,
    origin,
    read_run,
    write,
)
from copus_ext.cost_model.cluster_spec import ClusterSpec, preset
from copus_ext.cost_model.megatron_flags import spec_of_flags
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.extras.uneven.nodes import Site
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.plan import Ranked
from copus_ext.planner.search import Planner
from copus_ext.planner.space import Limits
from megatron.trainer.config.layout import Layout

NUM_NODES, SLOW_NODE, SLOW_PAIR = 4, 2, (0, 1)
SLOW_QUOTA = QUOTA / 2
USUAL_MBIT, SLOW_MBIT = 400.0, 40.0
BATCH = 16
WIDE = "--hidden-size 384 --ffn-hidden-size 1536"
"""The quickstart's model, wider, so that ranks compute more than they talk."""
TRAINING = """--lr 1e-3 --split 95,4,1 --eval-interval 100000 --log-interval 100
--overlap-grad-reduce --overlap-param-gather"""
MODEL = QUICKSTART_MODEL.replace("--hidden-size 256 --ffn-hidden-size 1024", WIDE)
LAYOUTS = ((4, 1, 1), (4, 2, 1), (2, 1, 2), (1, 1, 4))
"""pp, vpp, dp."""
WARM_UP, STEPS = 2, 5


def probe(site: Nodes, speeds: Sequence[float], work: Path) -> Path:
    """The cluster file: measured links and speeds."""
    output = work / "cluster.json"
    tool = [str(ROOT / "copus_ext/commands/main.py"), "probe-links"]
    tool += ["--output", str(output), "--every-rank"]
    tool += ["--cluster", f"cpu:{NUM_NODES}"]
    site.run(tool, work / "probe")
    data = json.loads(output.read_text())
    data |= {"num_nodes": NUM_NODES, "gpus_per_node": 1}
    data["nodes"] = [{"speed": speed} for speed in speeds]
    output.write_text(json.dumps(data))
    return output


def speeds_of(site: Nodes, data: str, work: Path) -> list[float]:
    """Work per second of every node over that of a rank as the planner knows it: one rank alone
    trains for some steps on a node of each quota."""
    planner = Planner(_model(), preset("cpu:1"))
    c = _configuration(1, 1, 1, 4, batch=4)
    known = planner.explain(c)
    assert isinstance(known, Ranked), known
    found = {}
    for node in (0, SLOW_NODE):
        one = {"name": f"alone {node}", "order": [node], "flags": c.to_flags()}
        measure(site, one, data, work)
        found[shares()[node]] = round(known.prediction.step_s / one["measured_s"], 3)
    return [found[share] for share in shares()]


def shares() -> list[float]:
    return [SLOW_QUOTA if node == SLOW_NODE else QUOTA for node in range(NUM_NODES)]


def configurations(cluster: Path, layouts: Any) -> list[dict[str, Any]]:
    """What is run: every layout in its best micro-batch, with and without order and cut. And what a
    user would run who has neither."""
    spec = ClusterSpec.load(cluster)
    planner = Planner(_model(), spec, limits=Limits(recompute=("none",)))
    given = tuple(range(NUM_NODES))
    found, sites = [], []
    for pp, vpp, dp in layouts:
        best = None
        for b in (1, 2, 4):
            if BATCH % (b * dp) or (vpp > 1 and BATCH // (b * dp) % pp):
                continue
            c = _configuration(pp, vpp, dp, b)
            priced = Site(planner, c)
            sites.append((c, priced))
            fitted = priced.fit()
            if fitted is not None and (best is None or fitted.step_s < best[2].step_s):
                best = (c, priced, fitted)
        assert best is not None
        c, priced, fitted = best
        cut = priced.best_layers(given) or priced.layers
        orders = itertools.permutations(given)
        order = min(orders, key=lambda way: priced.step_s(way, priced.layers))
        ways = {
            "as given": (given, priced.layers),
            "order": (order, priced.layers),
            "cut": (given, cut),
            "both": (fitted.order, fitted.partition.layers),
        }
        seen = set()
        for way, (order, layers) in ways.items():
            if (order, layers) not in seen:
                seen.add((order, layers))
                found.append(_row(c, priced, way, order, layers))
    c, priced = min(sites, key=lambda one: one[1].step_s(given, one[1].layers))
    usual = _row(c, priced, "fastest as given", given, priced.layers)
    if not any((r["order"], r["flags"]) == (usual["order"], usual["flags"]) for r in found):
        found.append(usual)
    return found


def _row(c: Any, priced: Site, way: str, order: Any, layers: Any) -> dict[str, Any]:
    size, layout = c.layout, dataclasses.replace(c.layout, layer_partition=layers)
    return {
        "name": f"pp{size.pp}{f'.vpp{size.vpp}' if size.vpp > 1 else ''}.dp{size.dp}, {way}",
        "order": list(order),
        "cut": list(layers),
        "flags": dataclasses.replace(c, layout=layout).to_flags(),
        "predicted_s": priced.step_s(order, layers),
    }


def _model() -> ModelSpec:
    return spec_of_flags([*MODEL.split(), "--vocab-size", "257"])


def _configuration(pp: int, vpp: int, dp: int, b: int, batch: int = BATCH) -> Any:
    return Configuration(
        layout=Layout(tp=1, pp=pp, vpp=vpp, dp=dp), micro_batch_size=b, global_batch_size=batch
    )


def measure(site: Nodes, one: dict[str, Any], data: str, work: Path) -> None:
    """Trains a configuration for some steps and takes their median."""
    at = work / one["name"].replace(" ", "_").replace(",", "")
    flags = [*MODEL.split(), *TRAINING.split(), "--data-path", data, *one["flags"]]
    flags += ["--train-iters", str(WARM_UP + STEPS), "--run-dir", str(at)]
    flags += ["--data-cache-path", str(work / "cache")]
    site.run([TRAINER, *flags], at, order=one["order"], max_s=900.0)
    seconds = [r["seconds"] for r in read_run(at).steps[WARM_UP:]]
    one |= {"measured_s": statistics.median(seconds), "seconds": seconds}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How far predicted and measured order agree: pairs, and rows that have one place in both."""
    predicted, measured = (
        sorted(rows, key=lambda r: r[name]) for name in ("predicted_s", "measured_s")
    )
    pairs = list(itertools.combinations(predicted, 2))
    same = sum(a["measured_s"] <= b["measured_s"] for a, b in pairs)
    in_place = sum(a is b for a, b in zip(predicted, measured))
    return {"rows": len(rows), "in_place": in_place, "pairs": len(pairs), "pairs_in_order": same}


def main() -> None:
    parser = arguments(__doc__, "heterogeneity.json")
    parser.add_argument("--layouts", type=int, default=len(LAYOUTS), help="only the first so many")
    args = parser.parse_args()
    nodes.require()
    result: dict[str, Any] = {"what": "uneven nodes and links", "machine": origin()}
    links = {"slow_pairs": [SLOW_PAIR], "rate_mbit": SLOW_MBIT}
    with (
        tempfile.TemporaryDirectory() as folder,
        nodes.emulated(NUM_NODES, USUAL_MBIT, shares(), **links) as site,
    ):
        work = Path(folder)
        data = make_dataset(work / "stdlib")
        print("timing a node of each kind, then the links", flush=True)
        cluster = probe(site, speeds_of(site, data, work), work)
        result["cluster"] = json.loads(cluster.read_text())
        rows = configurations(cluster, LAYOUTS[: args.layouts])
        for one in rows:
            measure(site, one, data, work)
            print(f"{one['name']}: {one['predicted_s']:.2f}, measured {one['measured_s']:.2f} s")
    write(args.output, {**result, "rows": rows, "summary": summary(rows)}, hide=["rows"])


if __name__ == "__main__":
    main()
