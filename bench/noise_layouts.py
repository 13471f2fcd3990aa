"""The noise scale over one run, measured under two layouts on the same data: the curves must lie on
one another.

    python -m bench.noise_layouts --data-path runs/quickstart/data/stdlib_text_document

Trains the quickstart's model twice on two CPU ranks, with data and with pipeline parallelism, about
10 minutes each, with `--copus`. Writes docs/results/noise_layouts.json.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

from bench.support import (
    QUICKSTART_MODEL,
    TRAINER,
    arguments,
    launch,
    origin,
    read_run,
    write,
)

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
    with tempfile.TemporaryDirectory() as run_dir:
        places = ["--data-path", data, "--data-cache-path", run_dir, "--run-dir", run_dir]
        launch(2, TRAINER, *MODEL.split(), *places, "--train-iters", str(steps), *layout)
        return read_run(Path(run_dir)).steps


def curve(records: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The columns of a run that the figure and the comparison need."""

    def short(value: float | None) -> float | None:
        return None if value is None else float(f"{value:.6g}")

    noise = [r["noise"] for r in records]
    return {
        "samples": [r["consumed_samples"] for r in records],
        "loss": [round(r["losses"]["lm loss"], 5) for r in records],
        **{k: [short(n[k]) for n in noise] for k in ("phi_samples", "low_samples", "high_samples")},
        "vectors_phi": [short(n["groups"].get("vectors")) for n in noise],
    }


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


def main() -> None:
    """Trains twice, compares, writes."""
    parser = arguments(__doc__, "noise_layouts.json", data=True)
    parser.add_argument("--steps", type=int, default=850)
    args = parser.parse_args()
    curves = {n: curve(train(flags, args.steps, args.data_path)) for n, flags in LAYOUTS.items()}
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
    write(args.output, result, hide=["curves"])


if __name__ == "__main__":
    main()
