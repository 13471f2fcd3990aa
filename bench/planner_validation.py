"""What does `copus validate-planner` say of published step times?

    python -m bench.planner_validation

Writes the public tables of bench/data to runs/planner_validation/, in the columns of that command.
Judges each with the constants that ship: without any measured time, and with two of each group. The
constants were fitted on vTrain's and Megatron-LM's rows, but not on the other two tables. Writes
docs/results/planner_validation.json.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.support import ROOT, arguments, origin, write
from copus_ext.planner import validation

DATA = Path(__file__).parent / "data"
GPT = {"dropout": 1, "fused_attention": 0, "use_distributed_optimizer": 0, "overlap": 0}
GPT |= {"scatter_gather": 1}
"""How the tables on A100 were trained, beside what their columns say: with the code of before
megatron-core."""
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


def tables() -> dict[str, list[Row]]:
    """All public tables, by name."""
    korthikanti = [
        {
            **GPT,
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
            **_megatron(r, "a100-80g", "iter_s_derived_from_unverified"),
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


def main() -> None:
    """Writes the tables, judges them, prints and writes the figures."""
    args = arguments(__doc__, "planner_validation.json").parse_args()
    found: dict[str, Any] = {}
    for name, rows in tables().items():
        path = ROOT / "runs" / "planner_validation" / f"{name}.csv"
        runs = validation.read_table(save(rows, path))
        found[name] = {}
        for known in (0, 2):
            result = validation.judge(runs, validation.predict(runs, num_known=known))
            groups = result["groups"].values()
            worst = max((g["mean"] for g in groups if g["mean"] is not None), default=None)
            found[name][f"known_{known}"] = {**result["in_all"], "worst_group_mean": worst}
    write(args.output, {"tables": found, "origin": origin()})


if __name__ == "__main__":
    main()
