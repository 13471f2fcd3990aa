"""The public tables of measured step times, in the columns of `copus validate-planner`.

Every benchmark of the planner's times reads them here. They lie in bench/data.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.support import ROOT
from copus_ext.cost_model.rows import Rows
from copus_ext.extras.planner_validation.validation import MeasuredRun, read_table, rows_of
from megatron.training.model.flops import training_flops_per_sample

DATA = Path(__file__).parent / "data"
GPT = {"dropout": 1, "fused_attention": 0, "use_distributed_optimizer": 0, "overlap": 0}
GPT |= {"scatter_gather": 1}
"""How the tables on A100 were trained, beside what their columns say: with the code of before
megatron-core."""
SELENE = {"nic_bytes_per_s": "200GB/s"}
"""Eight adapters of 200 Gbit/s a node (arXiv 2104.04473, section 5)."""
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


def _megatron(r: dict[str, str], cluster: str, seconds: str) -> Row:
    """What the tables in Megatron's words have in common."""
    return {
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


LLAMA_3 = {
    "llama-3-8b": {
        "num_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "ffn_hidden_size": 14336,
    },
    # 126 layers: the first and the last stage have one less, in place of embedding and head.
    "llama-3-405b": {
        "num_layers": 128,
        "hidden_size": 16384,
        "num_attention_heads": 128,
        "ffn_hidden_size": 53248,
    },
}
"""Sizes of models whose samples were shared by ranks."""


def _shared(r: dict[str, str]) -> Row:
    """A run whose samples ranks may share. Throughput is of the model's own arithmetic."""
    shape, length, gpus = LLAMA_3[r["model"]], int(r["seq_len"]), int(r["gpus"])
    samples = int(r["global_batch"])
    if rate := r["tokens_per_s_per_gpu"]:
        step_s = samples * length / gpus / float(rate)
    else:
        flops = training_flops_per_sample(
            num_layers=126,
            hidden_size=shape["hidden_size"],
            ffn_hidden_size=shape["ffn_hidden_size"],
            num_attention_heads=shape["num_attention_heads"],
            num_query_groups=8,
            kv_channels=128,
            seq_length=length,
            padded_vocab_size=128256,
            gated_mlp=True,
        )
        step_s = samples * flops / gpus / (1e12 * float(r["tflops_per_gpu"]))
    return {
        **shape,
        "group": r["model"],
        "cluster": f"h100-80g:{gpus}",
        "num_query_groups": 8,
        "kv_channels": 128,
        "vocab_size": 128256,
        "gated": 1,
        "bias": 0,
        "normalization": "RMSNorm",
        "tied": 0,
        "seq_length": length,
        **{name: r[name] for name in ("tp", "cp", "pp", "vpp", "recompute")},
        "cp_comm_type": r["exchange"],
        "micro_batch_size": r["micro_batch"],
        "global_batch_size": samples,
        "step_s": step_s,
    }


def tables() -> dict[str, list[Row]]:
    """All public tables, by name."""
    korthikanti = [
        {
            **GPT,
            **SELENE,
            **_megatron(r, "a100-80g", "iter_time_s"),
            "ffn_hidden_size": r["ffn"],
            "learned_positions": r["seq_len"],
            "recompute": r["recompute"],
            "sequence_parallel": int(r["seq_parallel"] == "True"),
        }
        for r in _records("korthikanti2022_table5_a100.csv")
    ]
    narayanan = [
        {
            **GPT,
            **SELENE,
            **_megatron(r, "a100-80g", "iter_s_derived_from_unverified"),
            "tp_overlap": 0,
            "learned_positions": r["seq_len"],
            "recompute": r["recompute"],
            "sequence_parallel": 0,
        }
        for r in _records("narayanan2021_table1_a100.csv")
    ]
    weak = [
        {**_megatron(r, "h100-80g", "derived_iter_s"), "tied": 0}
        for r in _records("megatron_h100_weak_scaling.csv")
    ]
    return {
        "context_parallel": [_shared(r) for r in _records("context_parallel_h100.csv")],
        "vtrain_multi": list(_vtrain("multi")),
        "vtrain_single": list(_vtrain("single")),
        "korthikanti": korthikanti,
        "narayanan": narayanan,
        "h100_weak_scaling": weak,
    }


def save(rows: list[Row], path: Path) -> Path:
    """Writes a table as `copus validate-planner` reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        table.writeheader()
        table.writerows(rows)
    return path


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of measured step times as the cost model sees it."""

    name: str
    """Of the data set."""
    rows: Rows
    """What was run."""
    seconds: Any
    """[n] seconds of a step."""

    @property
    def models(self) -> Any:
        """[n] one number per model."""
        return self.rows.hidden_size * 1000 + self.rows.num_layers

    def take(self, at: Any) -> Table:
        """Some of the rows."""
        return Table(name=self.name, rows=self.rows.take(at), seconds=self.seconds[at])


def read(name: str) -> list[MeasuredRun]:
    """The runs of a table, written to runs/planner_validation/ and read as a user's."""
    path = ROOT / "runs" / "planner_validation" / f"{name}.csv"
    return read_table(save(tables()[name], path))


def timed_table(name: str) -> Table:
    """A table whose runs were all timed."""
    runs = read(name)
    seconds = np.array([run.step_s for run in runs], dtype=float)
    return Table(name=name.replace("_", " "), rows=rows_of(runs), seconds=seconds)
