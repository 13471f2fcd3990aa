"""What does a change of layout cost, in the same processes and by a restart?

    python -m bench.switch_cost changes restarts [--size 40M] [--ranks 4]

* changes: every ordered pair of layouts, with the seconds of each phase. After each, the same bytes
  travel over bare gloo.
* restarts: every ordered pair both ways in turn, in the same processes, and by save, new processes,
  load and one step.

Each section replaces its own part of docs/results/switch_cost.json. It needs a core per rank and
nothing else running.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.support import ROOT, arguments, make_dataset, origin, ratio_summary, torchrun

Rows = list[dict[str, Any]]

COMMON = """--seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4
--lr 1e-4 --tokenizer-type NullTokenizer --swiglu --normalization RMSNorm
--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
--hidden-dropout 0 --attention-dropout 0 --use-distributed-optimizer --eval-iters 0
--log-interval 100000 --train-samples 100000 --device cpu"""
SIZES = {
    "tiny": """--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
--vocab-size 511""",
    "8M": """--num-layers 8 --hidden-size 256 --ffn-hidden-size 1024 --num-attention-heads 8
--vocab-size 383""",
    "20M": """--num-layers 8 --hidden-size 384 --ffn-hidden-size 1024 --num-attention-heads 8
--vocab-size 8191""",
    "40M": """--num-layers 12 --hidden-size 512 --ffn-hidden-size 1088 --num-attention-heads 8
--vocab-size 8191""",
}
RATIO, BANDWIDTH_SHARE, BYTES_RATIO = 16, 0.6, 1.05


def measure(section: str, args: argparse.Namespace) -> Rows:
    """Runs a section on the ranks; its rows."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        command = torchrun(args.ranks, "-m", "bench.switch_cost_ranks", section, output)
        flags = [*COMMON.split(), *SIZES[args.size].split()]
        flags += ["--data-path", make_dataset(Path(folder) / "stdlib")]
        command += [str(args.repeats), args.launcher, *flags]
        if subprocess.run(command, cwd=ROOT).returncode:
            raise SystemExit(f"{section} failed")
        return json.loads(output.read_text())


def of_kind(rows: Rows, kind: str) -> Rows:
    """The rows of one way."""
    return [row for row in rows if row["kind"] == kind]


def by_pair(rows: Rows) -> dict[str, Rows]:
    """The rows of each ordered pair of layouts."""
    pairs: dict[str, Rows] = {}
    for row in rows:
        pairs.setdefault(f"{row['from']} -> {row['to']}", []).append(row)
    return pairs


def medians(rows: Rows) -> dict[str, Any]:
    """Medians of the numbers of some rows, phase by phase."""
    names = [k for k, v in rows[0].items() if isinstance(v, int | float) and k != "repeat"]
    phases = {p: statistics.median(r["phases"][p] for r in rows) for p in rows[0]["phases"]}
    numbers = {name: statistics.median(r[name] for r in rows) for name in names}
    pauses = [r["pause_s"] for r in rows]
    return {**numbers, "pause_range_s": [min(pauses), max(pauses)], "phases": phases}


def summary_of_changes(rows: Rows) -> dict[str, Any]:
    """Bytes against the least possible, and the transfer against bare gloo, without and with the
    copies of what stays on a rank."""

    def against_gloo(*phases: str) -> dict[str, float]:
        sides = [
            {
                "gloo": {"rate": r["wire_bytes"] / r["gloo_s"]},
                "transfer": {"rate": r["wire_bytes"] / sum(r["phases"][p] for p in phases)},
            }
            for r in rows
        ]
        return ratio_summary(sides, "rate", of="transfer", to="gloo")

    bandwidth = against_gloo("transfer")
    worst = max(r["wire_bytes"] / r["minimum_bytes"] for r in rows)
    return {
        "pairs": {pair: medians(some) for pair, some in by_pair(rows).items()},
        "bandwidth": bandwidth,
        "bandwidth_with_copies": against_gloo("copy", "transfer"),
        "state_bytes": rows[0]["state_bytes"],
        "worst_bytes_ratio": worst,
        "worst_peak_over_step_peak": max(r["peak_rss"] / r["step_peak_rss"] for r in rows),
        "goals": {
            f"transfer >= {BANDWIDTH_SHARE} of gloo": bandwidth["median_ratio"] >= BANDWIDTH_SHARE,
            f"bytes <= {BYTES_RATIO} of the minimum": worst <= BYTES_RATIO,
        },
    }


def summary_of_restarts(rows: Rows) -> dict[str, Any]:
    """How many times longer the job stands still when it is restarted.

    `ratio` compares the pause with the time from the save to the first step of the new processes,
    less a usual step.
    """
    by_kind = {kind: by_pair(of_kind(rows, kind)) for kind in ("change", "restart")}
    steps: dict[str, list[float]] = {}
    for row in rows:
        if "step_s" in row:
            steps.setdefault(row["to"], []).append(row["step_s"])
    usual = {layout: statistics.median(some) for layout, some in steps.items()}
    sides = []
    for pair in by_kind["restart"]:
        for change, restart in zip(by_kind["change"][pair], by_kind["restart"][pair], strict=True):
            usual_s = usual[change["to"]]
            both = {"change": change["pause_s"], "restart": restart["pause_s"] - usual_s}
            sides.append({name: {"pause_s": s} for name, s in both.items()})
    ratio = ratio_summary(sides, "pause_s", of="restart", to="change")
    pairs = {
        kind: {pair: medians(some) for pair, some in of.items()} for kind, of in by_kind.items()
    }
    return {
        "pairs": pairs,
        "usual_step_s": usual,
        "ratio": ratio,
        "goals": {f"ratio >= {RATIO}": ratio["median_ratio"] >= RATIO},
    }


SECTIONS: dict[str, Callable[[Rows], dict[str, Any]]] = {
    "changes": summary_of_changes,
    "restarts": summary_of_restarts,
}


def main() -> None:
    """Measures, and writes after every section."""
    p = arguments(__doc__, "switch_cost.json")
    p.add_argument("sections", nargs="+", choices=SECTIONS)
    p.add_argument("--size", choices=SIZES, default="20M", help="parameters of the model")
    p.add_argument("--ranks", type=int, choices=(2, 4), default=2)
    p.add_argument("--repeats", type=int, default=5, help="of every ordered pair")
    usual = "of new processes; usual: megatron-core is imported as it is"
    p.add_argument("--launcher", choices=("torchrun", "usual"), default="torchrun", help=usual)
    args = p.parse_args()
    for section in args.sections:
        how = {"repeats": args.repeats, "launcher": args.launcher, **origin()}
        rows = measure(section, args)
        found = SECTIONS[section](rows)
        place = f"{args.size}, {args.ranks} ranks"
        result = json.loads(args.output.read_text()) if args.output.exists() else {}
        result.setdefault("what", "seconds and bytes of changes of layout; see bench/switch_cost")
        result.setdefault(section, {})[place] = {**found, **how, "rows": rows}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps({section: {place: {**found, "pairs": "..."}}}, indent=1), flush=True)


if __name__ == "__main__":
    main()
