"""How right is the planner of step times that it has not seen, and how fast does it search?

    python -m bench.planner PART

* accuracy: the constants are fitted on published measurements (bench/data), without the model whose
  rows are predicted. Writes planner_accuracy.json, and the constants that ship with the planner,
  copus_ext/cost_model/data/*.json. A minute.
* clusters: each public cluster in turn is left out. The constants are fitted on the other one with
  such GPUs (H100: on vTrain's, with what newer software is expected to change), and links are the
  usual ones. All its runs are predicted without any measured time and, where groups have more than
  two runs, with two of each group, which the planner has proposed. A group is of one model on one
  number of GPUs, with one batch. Writes planner_clusters.json. A minute.
* context: Llama 3 8B on 8 H100 at 32k to 256k tokens (torchtitan), and 405B on 16,384 at 8k and
  128k (arXiv 2407.21783), with the constants that ship, which have seen none of them. The model has
  no sharded weights as both had. Beside the whole error stands that of the change from the shortest
  length of a model, in which its own speed falls out. Writes planner_context.json in seconds.
* speed: seconds of a search for three batches, by model and cluster. Writes planner_speed.json.

Results go to docs/results.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.fit_constants import fit_constants
from bench.support import RESULTS, ROOT, arguments, origin, write
from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.memory import peaks
from copus_ext.cost_model.models import PRESETS
from copus_ext.cost_model.peak_correction import max_bytes
from copus_ext.cost_model.rows import ConfigBatch, concatenate
from copus_ext.cost_model.step import step_time
from copus_ext.extras.planner_validation import validation
from copus_ext.extras.planner_validation.validation import MeasuredRun, read_table, rows_of
from copus_ext.planner.search import MEMORY_MARGIN, Z_SURE, Planner
from megatron.trainer.config.model_shape import ModelShape
from megatron.trainer.model.flops import training_flops_per_sample

DATA = Path(__file__).parent / "data"
SHIPPED = ROOT / "copus_ext" / "cost_model" / "data"
SINGLE_WEIGHT = 0.15
"""Of a row of one node in a fit for many."""
USUAL_LINKS = {"nic_efficiency": 0.5, "tp_bytes_per_s": 216e9, "launch_s": 20e-6}
"""What belongs to a cluster and not to its GPUs, as it ships: the middle of several clusters, and
not vTrain's (.89 of its network, 196 GB/s, 34 us to start a kernel: `constants` of the result).
Public all-reduces reach .2 to .95 of their network (NCCL issues 495 and 1411, nccl-tests issues 152
and 290), large jobs a quarter in one case. 20 us to start a kernel lie between vTrain's and the 12
that are assumed of faster hosts. All three were kept or chosen with vTrain's rows in view
(decisions 036 and 049)."""
NEWER_NETWORK = 0.8
"""Share of its network that a node of H100 reaches: 46 to 48 of 50 GB/s a card are to be expected
of an all-reduce (nccl-tests issue 290), and less beside computation. It came in with the nine rows
of H100 in view, which say .9 or more (decision 059)."""
GPT = {"dropout": 1, "fused_attention": 0, "use_distributed_optimizer": 0, "overlap": 0}
GPT |= {"scatter_gather": 1}
"""How the tables on A100 were trained, beside what their columns say: with the code of before
megatron-core."""
SELENE = {"nic_bytes_per_s": "200GB/s"}
"""Eight adapters of 200 Gbit/s a node (arXiv 2104.04473, section 5)."""
LLAMA_3 = {"llama-3-8b": (32, 4096, 32, 14336), "llama-3-405b": (128, 16384, 128, 53248)}
"""Layers, width, heads and feed-forward width. 405B has 126 layers: the first and the last stage
have one less, in place of embedding and head."""
CLUSTERS = {
    "vTrain's, A100": ("vtrain_multi", "vtrain_single"),
    "Selene, A100": ("korthikanti", "narayanan"),
    "Megatron-LM's, H100": ("h100_weak_scaling",),
}
"""Tables of each."""
_FEW = ("korthikanti", "narayanan", "h100_weak_scaling")
"""Tables whose groups have one or two runs."""
SEARCHES = {"llama-2-13b": 64, "llama-3-70b": 512, "gpt3-175b": 1024}
"""Model -> H100 to search layouts for."""
SEARCHED_BATCHES = (256, 512, 1024)
Row = dict[str, Any]


def _records(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def _vtrain(kind: str) -> Iterator[Row]:
    for r in _records(f"vtrain_ground_truth_{kind}_a100.csv"):
        gpus = int(r["# GPUs"])
        shape = f"{r['hidden size']} x {r['# layers']}"
        yield {
            **GPT,
            "group": f"{shape} on {gpus}, batch {r['global batch']}",
            "cluster": f"a100-80g:{gpus}",
            "num_layers": r["# layers"],
            "hidden_size": r["hidden size"],
            "num_attention_heads": r["attention heads"],
            "seq_length": r["sequence length"],
            "learned_positions": r["sequence length"],
            "vocab_size": 50257,
            "precision": "fp16",
            "gradient_bytes": 2,
            "tp": r["tensor parallelism"],
            "pp": r["pipeline parallelism"],
            "micro_batch_size": r["micro batch"],
            "global_batch_size": r["global batch"],
            "recompute": "full",
            "sequence_parallel": 0,
            "step_s": float(r["iteration time (ms)"]) / 1e3,
        }


def _megatron(name: str, cluster: str, seconds: str) -> Iterator[Row]:
    for r in _records(name):
        row = {
            "group": f"{r['model']} on {r['world_size']}",
            "cluster": f"{cluster}:{r['world_size']}",
            "num_layers": r["n_layers"],
            "hidden_size": r["hidden"],
            "num_attention_heads": r["heads"],
            "seq_length": r["seq_len"],
            "vocab_size": r.get("vocab", 51200),
            "tp": r["tp"],
            "pp": r["pp"],
            "vpp": r.get("virtual_pp") or 1,
            "micro_batch_size": r["micro_batch"] or 1,
            "global_batch_size": r["global_batch"],
            "step_s": r[seconds],
        }
        if cluster == "h100-80g":
            yield {**row, "tied": 0}
            continue
        on_selene = {"learned_positions": r["seq_len"], "recompute": r["recompute"]}
        parallel = int(r.get("seq_parallel") == "True")
        yield {**GPT, **SELENE, **row, **on_selene, "sequence_parallel": parallel}


def _shared(r: dict[str, str]) -> Row:
    """A run whose samples ranks may share. Throughput is of the model's own arithmetic."""
    layers, hidden, heads, ffn = LLAMA_3[r["model"]]
    length, gpus, samples = int(r["seq_len"]), int(r["gpus"]), int(r["global_batch"])
    sizes: dict[str, Any] = {"num_query_groups": 8, "kv_channels": 128, "hidden_size": hidden}
    sizes |= {"num_attention_heads": heads, "ffn_hidden_size": ffn}
    if rate := r["tokens_per_s_per_gpu"]:
        step_s = samples * length / gpus / float(rate)
    else:
        shape = ModelShape(num_layers=126, padded_vocab_size=128256, gated=True, **sizes)
        flops = training_flops_per_sample(shape, length)
        step_s = samples * flops / gpus / (1e12 * float(r["tflops_per_gpu"]))
    return {
        **sizes,
        "seq_length": length,
        "num_layers": layers,
        "group": r["model"],
        "cluster": f"h100-80g:{gpus}",
        "vocab_size": 128256,
        "gated": 1,
        "bias": 0,
        "normalization": "RMSNorm",
        "tied": 0,
        **{name: r[name] for name in ("tp", "cp", "pp", "vpp", "recompute")},
        "cp_comm_type": r["exchange"],
        "micro_batch_size": r["micro_batch"],
        "global_batch_size": samples,
        "step_s": step_s,
    }


TABLES: dict[str, Callable[[], list[Row]]] = {
    "context_parallel": lambda: [_shared(r) for r in _records("context_parallel_h100.csv")],
    "vtrain_multi": lambda: list(_vtrain("multi")),
    "vtrain_single": lambda: list(_vtrain("single")),
    "korthikanti": lambda: [
        {**row, "ffn_hidden_size": r["ffn"]}
        for row, r in zip(
            _megatron("korthikanti2022_table5_a100.csv", "a100-80g", "iter_time_s"),
            _records("korthikanti2022_table5_a100.csv"),
        )
    ],
    "narayanan": lambda: [
        {**row, "tp_overlap": 0}
        for row in _megatron(
            "narayanan2021_table1_a100.csv", "a100-80g", "iter_s_derived_from_unverified"
        )
    ],
    "h100_weak_scaling": lambda: list(
        _megatron("megatron_h100_weak_scaling.csv", "h100-80g", "derived_iter_s")
    ),
}
"""The public tables, in the columns of `copus validate-planner`."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of measured step times as the cost model sees it."""

    name: str
    rows: ConfigBatch
    seconds: Any
    """[n] seconds of a step."""

    @property
    def models(self) -> Any:
        return self.rows.hidden_size * 1000 + self.rows.num_layers

    def take(self, at: Any) -> Table:
        return Table(name=self.name, rows=self.rows.take(at), seconds=self.seconds[at])


def read(name: str) -> list[MeasuredRun]:
    """The runs of a table, written to runs/planner_validation/ and read as a user's."""
    path, rows = ROOT / "runs" / "planner_validation" / f"{name}.csv", TABLES[name]()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        table.writeheader()
        table.writerows(rows)
    return read_table(path)


def timed_table(name: str) -> Table:
    """A table whose runs were all timed."""
    runs = read(name)
    seconds = np.array([run.step_s for run in runs], dtype=float)
    return Table(name=name.replace("_", " "), rows=rows_of(runs), seconds=seconds)


def errors(predicted: Any, measured: Any) -> dict[str, float]:
    """Relative errors: mean of the absolute, median, 90th percentile, bias, worst."""
    relative = predicted / measured - 1
    size = np.abs(relative)
    return {
        "rows": len(size),
        "mean": float(size.mean()),
        "median": float(np.median(size)),
        "p90": float(np.quantile(size, 0.9)),
        "bias": float(relative.mean()),
        "worst": float(size.max()),
    }


def fit(parts: Sequence[tuple[Table, float]], **how: Any) -> Constants:
    """Constants from several tables with a weight each."""
    how.setdefault("prior", Constants())
    return fit_constants(
        concatenate([part.rows for part, _ in parts]),
        np.concatenate([part.seconds for part, _ in parts]),
        weights=np.concatenate([np.full(len(part.seconds), w) for part, w in parts]),
        **how,
    )


def on_vtrain() -> Constants:
    """Constants from both of vTrain's tables."""
    return fit([(timed_table("vtrain_multi"), 1.0), (timed_table("vtrain_single"), SINGLE_WEIGHT)])


def predict(table: Table, constants: Constants) -> Any:
    return step_time(table.rows, constants).step_s


def leave_model_out(table: Table, others: Sequence[tuple[Table, float]]) -> Any:
    """[n] predictions, each from a fit that saw no row of its model."""
    predicted = np.empty(len(table.seconds))
    for model in np.unique(table.models):
        out = table.models == model
        predicted[out] = predict(table.take(out), fit([(table.take(~out), 1.0), *others]))
        print(f"   without {model:.0f}: {errors(predicted[out], table.seconds[out])}", flush=True)
    return predicted


def refused_for_memory(tables: Sequence[Table]) -> dict[str, Any]:
    """False alarms: rows that ran on 80 GB and are predicted not to fit. Misses cannot be seen
    here: no row ran out of memory."""
    found: dict[str, Any] = {}
    for table in tables:
        peak, sd = peaks(table.rows)
        limit = 80 * 2**30 * (1 - MEMORY_MARGIN) / max_bytes(1.0, sd, Z_SURE)
        found[table.name] = {
            "ran": len(peak),
            "refused": int((peak > limit).sum()),
            "largest_peak_gib": float(peak.max() / 2**30),
        }
    found["all"] = {n: sum(f[n] for f in found.values()) for n in ("ran", "refused")}
    return found


def ship(
    output: Path, name: str, constants: Constants, fitted_on: str, tables: Sequence[Table] = ()
) -> dict[str, Any] | None:
    """Writes constants that come with the planner; beside a result that is none of RESULTS.

    Returns:
        Their errors on each table that they were fitted on, as they ship: rounded, and with all
        that replaced what was fitted. None without tables.
    """
    values = {k: float(f"{v:.4g}") for k, v in constants.to_json().items()}
    shipped = Constants(**values)
    residual = {t.name: errors(predict(t, shipped), t.seconds) for t in tables} or None
    record = {"name": name, "fitted_on": fitted_on, "residual": residual, "constants": values}
    folder = SHIPPED if output.parent == RESULTS else output.parent
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    return residual


def newer(constants: Constants) -> Constants:
    """Newer software and an H100, to start from: fused kernels, fewer launches, other links."""
    return dataclasses.replace(
        constants,
        attention_efficiency=0.5,
        launch_s=8e-6,
        tp_bytes_per_s=350e9,
        dp_bytes_per_s=300e9,
        step_s=2e-3,
    )


def ship_all(output: Path, everything: Constants, fitted_on: list[Table]) -> dict[str, Any]:
    """Writes the constants of every kind of GPU; returns their errors on what they were fitted on,
    and those of the H100 fit before its network was replaced."""
    source = "vTrain multi (109 rows) and single (1,440 rows, weight 0.15), bench/data; usual links"
    usual = dataclasses.replace(everything, **USUAL_LINKS)
    shipped = {"a100-80g": ship(output, "a100-80g", usual, source, fitted_on)}
    h100 = timed_table("h100_weak_scaling")
    found = fit([(h100, 1.0)], prior=newer(everything), prior_weight=0.3)
    here = dataclasses.replace(found, nic_efficiency=NEWER_NETWORK)
    source = "Megatron-LM's H100 table (9 rows, micro-batch 1 assumed), priors from the A100 fit"
    shipped["h100-80g"] = ship(output, "h100-80g", here, source, [h100])
    ship(output, "h200-141g", here, "no rows of its own: those of h100-80g")
    start = dataclasses.replace(
        usual, attention_efficiency=0.3, tp_bytes_per_s=60e9, dp_bytes_per_s=50e9
    )
    ship(output, "mi210-64g", start, "no rows of its own: the A100 fit with assumed links")
    return {"shipped": shipped, "h100_in_sample": errors(predict(h100, found), h100.seconds)}


def accuracy(output: Path) -> dict[str, Any]:
    """Models left out, false alarms of memory, and what ships."""
    multi, single = timed_table("vtrain_multi"), timed_table("vtrain_single")
    left = {
        "vtrain multi": errors(leave_model_out(multi, [(single, SINGLE_WEIGHT)]), multi.seconds),
        "vtrain single": errors(leave_model_out(single, []), single.seconds),
    }
    everything = on_vtrain()
    return {
        "what": "relative error of predicted step times, models left out of the fit",
        "leave_model_out": left,
        "in_sample_multi": errors(predict(multi, everything), multi.seconds),
        "memory": refused_for_memory(
            [multi, single, *map(timed_table, (*_FEW, "context_parallel"))]
        ),
        **ship_all(output, everything, [multi, single]),
        "constants": everything.to_json(),
    }


def constants_without() -> dict[str, Constants]:
    """Constants for each cluster, from what was measured on others."""
    vtrain, selene = on_vtrain(), fit([(timed_table(name), 1.0) for name in _FEW[:2]])
    usual_vtrain, usual_selene = (
        dataclasses.replace(one, **USUAL_LINKS) for one in (vtrain, selene)
    )
    h100 = dataclasses.replace(newer(vtrain), nic_efficiency=NEWER_NETWORK)
    return dict(zip(CLUSTERS, (usual_selene, usual_vtrain, h100)))


def among_others(runs: list[Any], found: validation.Predictions) -> dict[str, Any]:
    """Of the runs of a group whose times were not used: pairs, those in the measured order, and
    what the best predicted run costs over the fastest."""
    right, total, lost = 0, 0, []
    for at in validation.groups(runs).values():
        others = [i for i in at if not found.known[i]]
        for i, j in itertools.combinations(others, 2):
            measured = float(runs[i].step_s or 0.0) - float(runs[j].step_s or 0.0)
            total += measured != 0
            right += int(measured * (found.step_s[i] - found.step_s[j]) > 0)
        if len(others) > 1 and found.fits[others].any():
            seconds = np.array([float(runs[i].step_s or 0.0) for i in others])
            chosen = np.argmin(np.where(found.fits[others], found.step_s[others], np.inf))
            lost.append(float(seconds[chosen] / seconds.min() - 1))
    return {
        "mean_regret_of_others": float(np.mean(lost)) if lost else None,
        "worst_regret_of_others": max(lost, default=None),
        "pairs": total,
        "pairs_in_order": right,
    }


def judged(name: str, constants: Constants, known: int) -> dict[str, Any]:
    runs = read(name)
    found = validation.predict(runs, num_known=known, constants=constants)
    result = validation.judge(runs, found)
    worst = worst_groups(result["groups"])
    return {**result["in_all"], **among_others(runs, found), "worst_groups": worst}


def worst_groups(groups: dict[str, dict[str, Any]]) -> dict[str, list[Any]]:
    """Name and value of the group with the largest error, the worst order and the dearest choice;
    without what no group has."""
    found = {}
    for name, sign in (("mean", 1), ("kendall_tau", -1), ("regret", 1)):
        known = {group: g[name] for group, g in groups.items() if g[name] is not None}
        if known:
            worst = max(known, key=lambda group: sign * known[group])
            found[name] = [worst, known[worst]]
    return found


def clusters(output: Path) -> dict[str, Any]:
    """Every cluster, left out of the fit."""
    result: dict[str, Any] = {}
    for cluster, constants in constants_without().items():
        result[cluster] = {
            name: {
                f"known_{known}": judged(name, constants, known)
                for known in ((0,) if name in _FEW else (0, 2))
            }
            for name in CLUSTERS[cluster]
        }
    return {"what": "step times on clusters left out of the fit", "clusters": result}


def context(output: Path) -> dict[str, Any]:
    """Published runs whose samples ranks share."""
    runs, firsts, rows = read("context_parallel"), {}, []
    for run, predicted in zip(runs, validation.predict(runs).step_s):
        assert run.step_s is not None
        ratio = float(predicted) / run.step_s
        first = firsts.setdefault(run.group, ratio)
        rows.append(
            {
                "model": run.group,
                "seq_length": run.model.seq_length,
                "configuration": str(run.configuration),
                "error_of_step": ratio - 1,
                "error_of_change": ratio / first - 1,
            }
        )
    sizes = [abs(row["error_of_step"]) for row in rows]
    return {
        "what": "step times of published runs with context parallelism, predicted without any",
        "mean_error": statistics.fmean(sizes),
        "worst_error": max(sizes),
        "rows": rows,
    }


def speed(output: Path) -> dict[str, Any]:
    """Seconds of searches, the first of a process apart."""
    rows = []
    for model, gpus in SEARCHES.items():
        cluster = f"h100-80g:{gpus}"
        began, cpu = time.perf_counter(), time.process_time()
        plans = Planner(PRESETS[model], preset(cluster)).rank(SEARCHED_BATCHES, top=5)
        seconds = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
        rows.append({"model": model, "cluster": cluster, "plans": len(plans), **seconds})
    return {"what": "seconds of a search", "batches": SEARCHED_BATCHES, "rows": rows}


PARTS = {"accuracy": accuracy, "clusters": clusters, "context": context, "speed": speed}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--output", type=Path, help="instead of the file in docs/results")
    args = parser.parse_args()
    output = args.output or RESULTS / f"planner_{args.part}.json"
    write(output, {**PARTS[args.part](output), **origin()})


if __name__ == "__main__":
    main()
