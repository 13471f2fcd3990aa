"""Does the planner predict step times it has not seen?

    python -m bench.planner_accuracy

Fits the constants of the cost model on published measurements (bench/data) and predicts rows that
the fit has not seen: whole models left out, random fifths, other people's clusters. Writes
docs/results/planner_accuracy.json and .svg, and the constants that ship with the planner,
copus_ext/cost_model/data/*.json. About 4 minutes.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.support import RESULTS, ROOT, arguments, figure, origin, write
from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.correct import Steps, correct
from copus_ext.cost_model.fit import fit_constants
from copus_ext.cost_model.memory import PEAK_SD, memory
from copus_ext.cost_model.rows import (
    RECOMPUTE_FULL,
    RECOMPUTE_NONE,
    RECOMPUTE_SELECTIVE,
    Rows,
    concatenate,
)
from copus_ext.cost_model.step import StepTime, step_time

DATA = Path(__file__).parent / "data"
SINGLE_WEIGHT = 0.15
"""Of a row of one node in a fit for many."""
SEEDS = 20
SHIPPED = ROOT / "copus_ext" / "cost_model" / "data"
USUAL_LINKS = {"nic_efficiency": 0.5, "tp_bytes_per_s": 216e9}
"""What belongs to a cluster and not to its GPUs, as it ships: the middle of several clusters, and
not vTrain's (.91 of its network, 242 GB/s). Public all-reduces reach .2 to .95 of their network
(NCCL issues 495 and 1411, nccl-tests issues 152 and 290), large jobs a quarter in one case."""


_A100 = {
    "peak_flops": 312e12,
    "hbm_bytes_per_s": 2.039e12,
    "num_sms": 108,
    "gpus_per_node": 8,
    "intra_bytes_per_s": 300e9,
    "nic_bytes_per_s": 100e9,
}
_H100 = {
    "peak_flops": 989e12,
    "hbm_bytes_per_s": 3.35e12,
    "num_sms": 132,
    "gpus_per_node": 8,
    "intra_bytes_per_s": 450e9,
    "nic_bytes_per_s": 400e9,
}
_GPT = {
    "mlp_matrices": 2,
    "tied": True,
    "has_bias": True,
    "norm_vectors": 2,
    "element_bytes": 2,
    "dropout": True,
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A table of measured step times."""

    name: str
    """Of the data set."""
    rows: Any
    """What was run."""
    seconds: Any
    """[n] seconds of a step."""

    @property
    def models(self) -> Any:
        """[n] one number per model."""
        return self.rows.hidden_size * 1000 + self.rows.num_layers

    def take(self, at: Any) -> Measured:
        """Some of the rows."""
        return Measured(name=self.name, rows=self.rows.take(at), seconds=self.seconds[at])


def _read(file: str) -> Any:
    """Gives a column of a table as numbers, or as text where `text` is set."""
    with (DATA / file).open(encoding="utf-8-sig", newline="") as lines:
        records = list(csv.DictReader(lines))

    def column(name: str, default: float = math.nan, *, text: bool = False) -> Any:
        values = [r[name] for r in records]
        return np.array(values if text else [float(v) if v else default for v in values])

    return column


def _vocabulary(size: int, tp: Any) -> Any:
    return np.ceil(size / (128 * tp)) * 128 * tp


def _table(name: str, seconds: Any, *, batch: Any, **values: Any) -> Measured:
    """A table of a GPT on A100, where `values` says nothing else; a global batch gives `batch`."""
    known = {**_A100, **_GPT, "vpp": 1, "use_distributed_optimizer": False}
    known |= {"overlap_grad_reduce": False, "overlap_param_gather": False}
    known |= {"fused_attention": False, "sequence_parallel": False, "gradient_bytes": 4}
    known |= {"scatter_gather": True}
    known |= {"learned_positions": values["seq_length"], **values}
    hidden, heads = known["hidden_size"], known["num_attention_heads"]
    rows = Rows(
        **{"ffn_hidden_size": 4 * hidden, **known},
        num_query_groups=heads,
        kv_channels=hidden / heads,
        num_microbatches=batch / known["micro_batch_size"] / known["dp"],
    )
    return Measured(name=name, rows=rows.full(), seconds=seconds)


def vtrain(kind: str) -> Measured:
    """vTrain's ground truth, `multi` or `single` (arXiv 2312.12391)."""
    column = _read(f"vtrain_ground_truth_{kind}_a100.csv")
    tp = column("tensor parallelism")
    return _table(
        f"vtrain {kind}",
        column("iteration time (ms)") / 1e3,
        batch=column("global batch"),
        num_layers=column("# layers"),
        hidden_size=column("hidden size"),
        num_attention_heads=column("attention heads"),
        padded_vocab_size=_vocabulary(50257, tp),
        seq_length=column("sequence length"),
        gradient_bytes=2,
        tp=tp,
        pp=column("pipeline parallelism"),
        dp=column("data parallelism"),
        micro_batch_size=column("micro batch"),
        recompute=RECOMPUTE_FULL,
    )


def _usual_columns(column: Any) -> dict[str, Any]:
    names = {"num_layers": "n_layers", "hidden_size": "hidden", "num_attention_heads": "heads"}
    names |= {"seq_length": "seq_len", "tp": "tp", "pp": "pp", "dp": "dp", "batch": "global_batch"}
    return {name: column(own) for name, own in names.items()}


def korthikanti() -> Measured:
    """Table 5 of arXiv 2205.05198."""
    column = _read("korthikanti2022_table5_a100.csv")
    full = column("recompute", text=True) == "full"
    return _table(
        "korthikanti",
        column("iter_time_s"),
        **_usual_columns(column),
        ffn_hidden_size=column("ffn"),
        vpp=column("virtual_pp", 1.0),
        micro_batch_size=column("micro_batch"),
        padded_vocab_size=_vocabulary(51200, column("tp")),
        recompute=np.where(full, RECOMPUTE_FULL, RECOMPUTE_SELECTIVE),
        sequence_parallel=column("seq_parallel", text=True) == "True",
    )


def narayanan() -> Measured:
    """Table 1 of arXiv 2104.04473; seconds derived from its throughput, which nobody checked."""
    column = _read("narayanan2021_table1_a100.csv")
    return _table(
        "narayanan",
        column("iter_s_derived_from_unverified"),
        **_usual_columns(column),
        vpp=column("virtual_pp", 1.0),
        micro_batch_size=column("micro_batch"),
        padded_vocab_size=column("vocab"),
        recompute=RECOMPUTE_FULL,
    )


def h100_weak_scaling() -> Measured:
    """Megatron-LM's table for H100; micro-batch 1 and no virtual stages are our assumptions."""
    column = _read("megatron_h100_weak_scaling.csv")
    return _table(
        "h100",
        column("derived_iter_s"),
        **{
            **_H100,
            "dropout": False,
            "tied": False,
            "scatter_gather": False,
            **_usual_columns(column),
        },
        micro_batch_size=1,
        padded_vocab_size=column("vocab"),
        fused_attention=True,
        learned_positions=0,
        recompute=RECOMPUTE_NONE,
        sequence_parallel=column("tp") > 1,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )


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


def fit(parts: list[tuple[Measured, float]], **how: Any) -> Any:
    """Constants from several tables with a weight each."""
    how.setdefault("prior", Constants())
    return fit_constants(
        concatenate([part.rows for part, _ in parts]),
        np.concatenate([part.seconds for part, _ in parts]),
        weights=np.concatenate([np.full(len(part.seconds), w) for part, w in parts]),
        **how,
    )


def predict(table: Measured, constants: Any) -> Any:
    """[n] predicted seconds."""
    return step_time(table.rows, constants).step_s


def leave_model_out(table: Measured, others: list[tuple[Measured, float]]) -> Any:
    """[n] predictions, each from a fit that saw no row of its model."""
    predicted = np.empty(len(table.seconds))
    for model in np.unique(table.models):
        out = table.models == model
        found = fit([(table.take(~out), 1.0), *others])
        predicted[out] = predict(table.take(out), found.constants)
        print(f"   without {model:.0f}: {errors(predicted[out], table.seconds[out])}", flush=True)
    return predicted


def random_fifths(table: Measured, others: list[tuple[Measured, float]]) -> dict[str, Any]:
    """Errors on a random fifth, plain and corrected by the measured rows of the same model."""
    rng = np.random.default_rng(0)
    plain, corrected = [], []
    rows = table.rows
    keys = np.stack([rows.tp, rows.pp, rows.micro_batch_size], axis=1).astype(int)
    for _ in range(SEEDS):
        test = np.zeros(len(keys), dtype=bool)
        test[rng.permutation(len(keys))[: len(keys) // 5]] = True
        found = fit([(table.take(~test), 1.0), *others])
        times = step_time(table.rows, found.constants)
        better = corrected_by_kin(table, keys, times, test)
        plain.append(errors(times.step_s[test], table.seconds[test])["mean"])
        corrected.append(errors(better[test], table.seconds[test])["mean"])
    return {
        "seeds": SEEDS,
        "mean_without_correction": float(np.mean(plain)),
        "mean": float(np.mean(corrected)),
        "worst_seed": float(np.max(corrected)),
    }


def corrected_by_kin(table: Measured, keys: Any, times: StepTime, test: Any) -> Any:
    """Predictions of the rows `test`, corrected by the other rows of the same model."""
    predicted, better = times.step_s, times.step_s.copy()
    steps = Steps.of(
        keys, table.rows.num_microbatches, times.parts, times.reduction, times.launch_s
    )
    for model in np.unique(table.models):
        mine = table.models == model
        ask, known = np.flatnonzero(mine & test), np.flatnonzero(mine & ~test)
        ratios = np.log(table.seconds[known] / predicted[known])
        better[ask] *= correct(steps.take(ask), steps.take(known), ratios).factor
    return better


def choice(table: Measured, predicted: Any) -> dict[str, Any]:
    """What picking the best predicted layout costs, over sweeps of one (model, GPUs, batch)."""
    from scipy.stats import kendalltau

    r = table.rows
    batch = r.micro_batch_size * r.num_microbatches * r.dp
    sweep = np.stack([table.models, r.tp * r.pp * r.dp, batch], axis=1)
    regrets, order = [], []
    for one in np.unique(sweep, axis=0):
        at = np.flatnonzero((sweep == one).all(axis=1))
        if len(at) >= 3:
            seconds = table.seconds[at]
            regrets.append(seconds[np.argmin(predicted[at])] / seconds.min() - 1)
            order.append(float(kendalltau(predicted[at], seconds)[0]))  # pyright: ignore[reportArgumentType]
    return {
        "sweeps": len(regrets),
        "regret_mean": float(np.mean(regrets)),
        "regret_worst": float(np.max(regrets)),
        "kendall_tau": float(np.mean(order)),
    }


def refused_for_memory(tables: list[Measured]) -> dict[str, Any]:
    """False alarms: rows that ran on 80 GB and are predicted not to fit. Misses cannot be seen
    here: no row ran out of memory."""
    from copus_ext.planner.search import MEMORY_MARGIN, Z_SURE

    found = {}
    for table in tables:
        peaks = memory(table.rows).peak_bytes
        limit = 80 * 2**30 * (1 - MEMORY_MARGIN) * math.exp(-Z_SURE * PEAK_SD)
        found[table.name] = {
            "ran": len(peaks),
            "refused": int((peaks > limit).sum()),
            "largest_peak_gib": float(peaks.max() / 2**30),
        }
    return found


def ship(
    output: Path, name: str, constants: Any, fitted_on: str, residual: dict[str, Any] | None
) -> None:
    """Writes constants that come with the planner; beside a result that is none of RESULTS."""
    record = {
        "name": name,
        "fitted_on": fitted_on,
        "residual": residual,
        "constants": {k: float(f"{v:.4g}") for k, v in constants.to_json().items()},
    }
    folder = SHIPPED if output.parent == RESULTS else output.parent
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


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


def ship_all(output: Path, everything: Any, joint: dict[str, Any]) -> dict[str, Any]:
    """Writes the constants of every kind of GPU; returns the residual of the H100 ones."""
    source = "vTrain multi (109 rows) and single (1,440 rows, weight 0.15), bench/data; usual links"
    usual = dataclasses.replace(everything.constants, **USUAL_LINKS)
    ship(output, "a100-80g", usual, source, joint)
    table = h100_weak_scaling()
    found = fit([(table, 1.0)], prior=newer(everything.constants), prior_weight=0.3)
    residual = errors(predict(table, found.constants), table.seconds)
    here = dataclasses.replace(found.constants, nic_efficiency=0.6)
    source = "Megatron-LM's H100 table (9 rows, micro-batch 1 assumed), priors from the A100 fit"
    ship(output, "h100-80g", here, source, residual)
    ship(output, "h200-141g", here, "no rows of its own: those of h100-80g", None)
    start = dataclasses.replace(
        usual, attention_efficiency=0.3, tp_bytes_per_s=60e9, dp_bytes_per_s=50e9
    )
    ship(output, "mi210-64g", start, "no rows of its own: the A100 fit with assumed links", None)
    return residual


def draw(tables: dict[str, tuple[Any, Any]], path: Path) -> None:
    """Predicted against measured seconds."""
    with figure(path, figsize=(5.5, 5.5)) as axes:
        for name, (measured, predicted) in tables.items():
            label = f"{name}: {100 * errors(predicted, measured)['mean']:.1f} %"
            axes.scatter(measured, predicted, s=9, alpha=0.5, linewidths=0, label=label)
        ends = [0.05, 200]
        axes.plot(ends, ends, color="black", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        axes.set(xlabel="measured step, s", ylabel="predicted step, s (model not in the fit)")
        axes.legend()


def listed(table: Measured, predicted: Any) -> list[list[float]]:
    """Every row: model, tp, pp, dp, micro-batch, micro-batches, measured, predicted."""
    r = table.rows
    columns = [table.models, r.tp, r.pp, r.dp, r.micro_batch_size, r.num_microbatches]
    rows = np.stack([*columns, table.seconds, predicted], axis=1)
    return [[float(f"{x:.6g}") for x in row] for row in rows]


def main() -> None:
    """Fits, predicts, prints and writes."""
    args = arguments(__doc__, "planner_accuracy.json").parse_args()
    multi, single = vtrain("multi"), vtrain("single")
    others = [(single, SINGLE_WEIGHT)]
    left = {
        "vtrain multi": (multi, leave_model_out(multi, others)),
        "vtrain single": (single, leave_model_out(single, [])),
    }
    everything = fit([(multi, 1.0), *others])
    joint = errors(predict(multi, everything.constants), multi.seconds)
    transfer = {t.name: (t, predict(t, everything.constants)) for t in (korthikanti(), narayanan())}
    result = {
        "what": "relative error of predicted step times, models left out of the fit",
        "leave_model_out": {n: errors(p, t.seconds) for n, (t, p) in left.items()},
        "random_80_20_multi": random_fifths(multi, others),
        "choice": {n: choice(t, p) for n, (t, p) in left.items()},
        "transfer": {n: errors(p, t.seconds) for n, (t, p) in transfer.items()},
        "in_sample_multi": joint,
        "memory": refused_for_memory([multi, single, korthikanti(), narayanan()]),
        "h100_in_sample": ship_all(args.output, everything, joint),
        "constants": everything.constants.to_json(),
        **origin(),
        "columns": ["model", "tp", "pp", "dp", "micro_batch", "M", "measured_s", "predicted_s"],
        "rows": {n: listed(t, p) for n, (t, p) in {**left, **transfer}.items()},
    }
    tables = {n: (t.seconds, p) for n, (t, p) in {**left, **transfer}.items()}
    draw(tables, args.output.with_suffix(".svg"))
    write(args.output, result, hide=["rows"])


if __name__ == "__main__":
    main()
