"""The noise scale over one run, measured under two layouts on the same data: the curves must lie on
one another.

    python bench/noise_layouts.py --data-path runs/quickstart/data/stdlib_text_document

Trains the quickstart's model twice on two CPU ranks, with data and with pipeline parallelism, about
10 minutes each, with `--copus`. Writes docs/results/noise_layouts.json and .svg.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from support import QUICKSTART_MODEL, RESULTS, ROOT, open_source, origin, torchrun

_BATCH = 16
MODEL = f"""{QUICKSTART_MODEL} --micro-batch-size 4 --global-batch-size {_BATCH} --lr 2e-3
--min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 --split 95,4,1 --log-interval 50
--copus"""
LAYOUTS = {
    "DP 2": ["--tensor-model-parallel-size", "1"],
    "PP 2": ["--pipeline-model-parallel-size", "2"],
}


def train(layout: list[str], steps: int, data: str) -> list[dict[str, Any]]:
    """Runs the trainer on two ranks and returns its step records."""
    from megatron.training.logging.metrics import read_metrics

    with tempfile.TemporaryDirectory() as run_dir:
        command = torchrun(2, ROOT / "pretrain_gpt.py", *MODEL.split())
        command += ["--data-path", data, "--data-cache-path", run_dir, "--run-dir", run_dir]
        command += ["--train-iters", str(steps), *layout]
        subprocess.run(command, check=True, cwd=ROOT)
        return [r for r in read_metrics(Path(run_dir)) if r["kind"] == "step"]


def curve(records: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The columns of a run that the figure and the comparison need."""
    noise = [r["noise"] for r in records]
    return {
        "samples": [r["consumed_samples"] for r in records],
        "loss": [round(r["losses"]["lm loss"], 5) for r in records],
        "phi_samples": [_short(n["phi_samples"]) for n in noise],
        "low_samples": [_short(n["low_samples"]) for n in noise],
        "high_samples": [_short(n["high_samples"]) for n in noise],
        "vectors_phi": [_short(n["groups"].get("vectors")) for n in noise],
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def compare(a: dict[str, list[Any]], b: dict[str, list[Any]]) -> dict[str, float]:
    """How far apart the curves of two layouts are, against the width of their band."""
    rows = [
        (abs(math.log(x / y)), math.log(high / low))
        for x, y, low, high in zip(
            a["phi_samples"], b["phi_samples"], a["low_samples"], a["high_samples"]
        )
        if x and y and low and high
    ]
    assert rows, "no step had a bounded interval"
    gaps = sorted(gap for gap, _ in rows)
    return {
        "steps_compared": len(rows),
        "median_relative_difference": math.expm1(gaps[len(gaps) // 2]),
        "largest_relative_difference": math.expm1(gaps[-1]),
        "largest_share_of_band": max(gap / width for gap, width in rows),
    }


def vectors_against_layers(rows: dict[str, list[Any]]) -> dict[str, float]:
    """phi of norms and biases alone over phi of the weight matrices, over the run."""
    ratios = sorted(v / p for v, p in zip(rows["vectors_phi"], rows["phi_samples"]) if v and p)
    return {
        "median": ratios[len(ratios) // 2],
        "5_percent": ratios[len(ratios) // 20],
        "95_percent": ratios[-1 - len(ratios) // 20],
    }


def draw(curves: dict[str, dict[str, list[Any]]], path: Path) -> None:
    """phi with its band over the samples, one colour per layout; the loss below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "copus"
    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(7, 5), height_ratios=[3, 1], layout="constrained"
    )
    for (name, rows), colour, style in zip(curves.items(), ("C0", "C1"), ("-", "--")):
        ok = [i for i, high in enumerate(rows["high_samples"]) if high]
        x = [rows["samples"][i] for i in ok]
        low, high = ([rows[k][i] for i in ok] for k in ("low_samples", "high_samples"))
        above.fill_between(x, low, high, alpha=0.2, color=colour, linewidth=0)
        above.plot(x, [rows["phi_samples"][i] for i in ok], style, color=colour, label=name)
        below.plot(rows["samples"], rows["loss"], style, color=colour, linewidth=0.8)
    above.set_yscale("log")
    above.set_ylabel("noise scale, samples\n(band: 95 %)")
    above.legend()
    below.set_ylabel("loss")
    below.set_xlabel("samples")
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    """Trains twice, compares, writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-path", required=True, help="prefix of an indexed data set")
    parser.add_argument("--steps", type=int, default=850)
    parser.add_argument("--output", type=Path, default=RESULTS / "noise_layouts.json")
    args = parser.parse_args()
    open_source()
    data = str(Path(args.data_path).resolve())
    curves = {name: curve(train(flags, args.steps, data)) for name, flags in LAYOUTS.items()}
    first, second = curves.values()
    result = {
        "what": "noise scale per step of one run under two layouts",
        "comparison": compare(first, second),
        "phi_of_vectors_over_phi_of_layers": vectors_against_layers(first),
        "global_batch_size": _BATCH,
        "ranks": 2,
        **origin(),
        "curves": curves,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result) + "\n")
    draw(curves, args.output.with_suffix(".svg"))
    print(json.dumps({k: v for k, v in result.items() if k != "curves"}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
