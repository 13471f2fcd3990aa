"""What does a change of layout cost, in the same processes and by a restart?

    python -m bench.switch_cost changes restarts soak planning [--size 40M] [--ranks 4]

* changes: every ordered pair of layouts, with the seconds of each phase. After each, the same bytes
  travel over bare gloo.
* restarts: every ordered pair three ways in turn. In the same processes; by save, new processes,
  load and one step; by save and load in the same processes.
* soak: random changes with a step between.
* planning: the plan of a 70B model on 512 ranks.

Each section replaces its own part of docs/results/switch_cost.json and redraws the figures beside
it. It needs a core per rank and nothing else running.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.support import ROOT, arguments, figure, make_dataset, origin, ratio_summary, torchrun

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
PLANNING_S, PLANNING_BYTES = 2.0, 1e9
# Drift of the second half of a soak that counts as none, as a share of the mean.
_FLAT = 0.02


def measure(section: str, args: argparse.Namespace) -> Rows:
    """Runs a section on the ranks; its rows."""
    count = args.soak if section == "soak" else args.repeats
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        command = torchrun(args.ranks, "-m", "bench.switch_cost_ranks", section, output)
        flags = [*COMMON.split(), *SIZES[args.size].split()]
        flags += ["--data-path", make_dataset(Path(folder) / "stdlib")]
        command += [str(count), args.launcher, *flags]
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
    less a usual step. `ratio_of_reload` is without new processes.
    """
    by_kind = {kind: by_pair(of_kind(rows, kind)) for kind in ("change", "restart", "reload")}
    steps: dict[str, list[float]] = {}
    for row in rows:
        if "step_s" in row:
            steps.setdefault(row["to"], []).append(row["step_s"])
    usual = {layout: statistics.median(some) for layout, some in steps.items()}
    sides = []
    for pair in by_kind["restart"]:
        ways = (by_kind[kind][pair] for kind in ("change", "restart", "reload"))
        for change, restart, reload in zip(*ways, strict=True):
            seconds = [change["pause_s"], restart["pause_s"] - usual[change["to"]]]
            seconds.append(reload["pause_s"])
            names = ("change", "restart", "reload")
            sides.append({name: {"pause_s": s} for name, s in zip(names, seconds)})
    ratio = ratio_summary(sides, "pause_s", of="restart", to="change")
    pairs = {
        kind: {pair: medians(some) for pair, some in of.items()} for kind, of in by_kind.items()
    }
    return {
        "pairs": pairs,
        "usual_step_s": usual,
        "ratio": ratio,
        "ratio_of_reload": ratio_summary(sides, "pause_s", of="reload", to="change"),
        "goals": {f"ratio >= {RATIO}": ratio["median_ratio"] >= RATIO},
    }


def slope(values: list[float]) -> tuple[float, float]:
    """Growth per row by least squares, and its standard error."""
    n = len(values)
    if n < 3:
        return 0.0, 0.0
    x = [i - (n - 1) / 2 for i in range(n)]
    mean, squares = statistics.fmean(values), sum(i * i for i in x)
    found = sum(i * v for i, v in zip(x, values)) / squares
    rest = sum((v - mean - found * i) ** 2 for i, v in zip(x, values))
    return found, math.sqrt(rest / (n - 2) / squares)


def summary_of_soak(rows: Rows) -> dict[str, Any]:
    """What grows in the second half: memory and seconds by their slope, counts by their largest
    value against that of the first half."""
    late, early = rows[len(rows) // 2 :], rows[: len(rows) // 2]
    found: dict[str, Any] = {}
    for name in ("rss", "pause_s"):
        of = [float(sum(r[name])) if isinstance(r[name], list) else r[name] for r in late]
        growth, error = slope(of)
        share = growth * len(of) / statistics.fmean(of)
        found[name] = {
            "mean": statistics.fmean(of),
            "growth_per_change": growth,
            "standard_error": error,
            "growth_over_half": share,
            "is_flat": share <= _FLAT or growth <= 2 * error,
        }
    for name in ("fds", "threads", "groups"):
        before, after = (max(max(r[name]) for r in half) for half in (early, late))
        found[name] = {"first_half": before, "second_half": after, "is_flat": after <= before}
    return {
        "changes": len(rows),
        "median_pause_s": statistics.median(r["pause_s"] for r in rows),
        "worst_pause_s": max(r["pause_s"] for r in rows),
        "second_half": found,
        "goals": {f"no growth of {name}": of["is_flat"] for name, of in found.items()},
    }


def plan_once() -> None:
    """Prints rows of the way between layouts of 512 ranks, each with the memory it takes on top."""
    import psutil

    from bench.switch_cost_ranks import peak_rss, reset_peak
    from copus_ext.cost_model.model_spec import PRESETS
    from copus_ext.reshard.model_shape import shape_of_spec
    from copus_ext.reshard.ownership import all_of_layout
    from copus_ext.reshard.plan import make_plan
    from megatron.training.config.layout import Layout

    spec = PRESETS["llama-3-70b"]
    shape = shape_of_spec(spec, padded_vocab_size=int(spec.padded_vocab_size(8)))
    start, rows = Layout(tp=8, pp=4, dp=16), []
    for to in (Layout(tp=8, pp=8, dp=8), Layout(tp=4, pp=8, dp=16), Layout(tp=8, pp=2, dp=32)):
        reset_peak()
        resident, begin = psutil.Process().memory_info().rss, time.perf_counter()
        source, target = all_of_layout(shape, start), all_of_layout(shape, to)
        plan = make_plan(source, target, ranks_per_node=8)
        row = {"from": str(start), "to": str(to), "seconds": time.perf_counter() - begin}
        row |= {"memory_bytes": peak_rss() - resident, "pieces": len(plan.ops)}
        rows.append({**row, "wire_bytes": plan.wire_bytes, "minimum_bytes": plan.minimum_bytes})
        del source, target, plan
    print(json.dumps(rows))


def summary_of_planning(rows: Rows) -> dict[str, Any]:
    """Medians over the processes."""
    names = [k for k, v in rows[0].items() if isinstance(v, int | float)]
    pairs = {
        pair: {name: statistics.median(r[name] for r in some) for name in names}
        for pair, some in by_pair(rows).items()
    }
    slowest = max(p["seconds"] for p in pairs.values())
    largest = max(p["memory_bytes"] for p in pairs.values())
    return {
        "model": "llama-3-70b on 512 ranks",
        "pairs": pairs,
        "goals": {
            f"seconds < {PLANNING_S}": slowest < PLANNING_S,
            f"bytes < {PLANNING_BYTES:.0e}": largest < PLANNING_BYTES,
        },
    }


def plan(args: argparse.Namespace) -> Rows:
    """Each repeat in a process of its own."""
    rows: Rows = []
    command = [sys.executable, "-c", "from bench.switch_cost import plan_once; plan_once()"]
    for _ in range(args.repeats):
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        rows += json.loads(done.stdout)
        print(f"planning: {[round(r['seconds'], 2) for r in rows[-3:]]} s", flush=True)
    return rows


SECTIONS: dict[str, Callable[[Rows], dict[str, Any]]] = {
    "changes": summary_of_changes,
    "restarts": summary_of_restarts,
    "soak": summary_of_soak,
    "planning": summary_of_planning,
}


def draw_phases(result: dict[str, Any], path: Path) -> None:
    """The phases of every pair in the same processes and by a restart."""
    panels = [
        (f"in the same processes, {place}", part["pairs"])
        for place, part in result.get("changes", {}).items()
    ]
    panels += [
        (f"{name}, {place}", part["pairs"][kind])
        for place, part in result.get("restarts", {}).items()
        for kind, name in (("restart", "restart"), ("reload", "save and load without restart"))
    ]
    if not panels:
        return
    from matplotlib import pyplot

    size = (8, 2.6 * len(panels))
    with figure(path, len(panels), figsize=size, squeeze=False) as axes:
        for axis, (title, pairs) in zip(axes[:, 0], panels):
            names = list(dict.fromkeys(name for pair in pairs.values() for name in pair["phases"]))
            left = [0.0] * len(pairs)
            for i, name in enumerate(names):
                seconds = [pair["phases"].get(name, 0.0) for pair in pairs.values()]
                axis.barh(list(pairs), seconds, left=left, label=name, color=pyplot.cm.tab20(i))
                left = [a + b for a, b in zip(left, seconds)]
            axis.invert_yaxis()
            axis.set_title(title, fontsize="medium")
            axis.set_xlabel("s")
            axis.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))


def draw_soak(result: dict[str, Any], path: Path) -> None:
    """What the processes hold after each change."""
    runs = result.get("soak", {})
    if not runs:
        return
    with figure(path, 3, sharex=True, figsize=(7, 6)) as axes:
        for number, (place, run) in enumerate(runs.items()):
            rows, color = run["rows"], f"C{number}"
            x = [row["number"] for row in rows]
            for rank in range(len(rows[0]["rss"])):
                rss = [row["rss"][rank] / 1e6 for row in rows]
                label = None if rank else place
                axes[0].plot(x, rss, color=color, linewidth=0.8, label=label)
            axes[1].plot(x, [row["pause_s"] for row in rows], ".", color=color, label=place)
            for name, line in (("fds", "-"), ("threads", "--"), ("groups", ":")):
                most = [max(row[name]) for row in rows]
                axes[2].plot(x, most, line, color=color, label=f"{name}, {place}")
        for axis, label in zip(axes, ("resident MB per rank", "pause, s", "per rank")):
            axis.set_ylabel(label)
            axis.set_ylim(bottom=0)
            axis.legend(fontsize="x-small")
        axes[2].set_xlabel("change of layout")


def main() -> None:
    """Measures, writes after every section, and draws."""
    p = arguments(__doc__, "switch_cost.json")
    p.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="default: draw alone")
    p.add_argument("--size", choices=SIZES, default="20M", help="parameters of the model")
    p.add_argument("--ranks", type=int, choices=(2, 4), default=2)
    p.add_argument("--repeats", type=int, default=5, help="of every ordered pair")
    p.add_argument("--soak", type=int, default=100, help="random changes")
    usual = "of new processes; usual: megatron-core is imported as it is"
    p.add_argument("--launcher", choices=("torchrun", "usual"), default="torchrun", help=usual)
    args = p.parse_args()
    for section in args.sections:
        how = {"repeats": args.repeats, "launcher": args.launcher, **origin()}
        rows = plan(args) if section == "planning" else measure(section, args)
        found = SECTIONS[section](rows)
        place = "all" if section == "planning" else f"{args.size}, {args.ranks} ranks"
        result = json.loads(args.output.read_text()) if args.output.exists() else {}
        result.setdefault("what", "seconds and bytes of changes of layout; see bench/switch_cost")
        result.setdefault(section, {})[place] = {**found, **how, "rows": rows}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps({section: {place: {**found, "pairs": "..."}}}, indent=1), flush=True)
    result = json.loads(args.output.read_text())
    draw_phases(result, args.output.with_suffix(".svg"))
    draw_soak(result, args.output.with_name(f"{args.output.stem}_soak.svg"))


if __name__ == "__main__":
    main()
