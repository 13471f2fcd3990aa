"""Is the efficiency curve right?

    python -m bench.efficiency_curve

Tokens that 117 published runs of MLPerf's GPT-3 175B took to a log-perplexity, at nine batch sizes
(bench/data), against E(B) = E_min (1 + B/B_c) fitted without the batch in question. Writes
docs/results/efficiency_curve.json. Seconds.
"""

from __future__ import annotations

import csv
import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.support import arguments, origin, write

DATA = Path(__file__).parent / "data" / "mlperf_gpt3_evaluations.csv"
SEQ_LENGTH = 2048
GOALS = {2.69: 0.025, 2.70: 0.035}
"""Worst relative error of a batch that the fit has not seen, by log-perplexity."""
ALSO = (2.695,)
Curve = list[tuple[float, float]]


def curves(path: Path = DATA) -> dict[int, list[Curve]]:
    """(tokens, log-perplexity) of every run, by batch."""
    runs: dict[tuple[str, int], Curve] = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            at = float(row["tokens"]), float(row["eval_log_ppl"])
            runs[row["source"], int(row["global_batch"])].append(at)
    by_batch: dict[int, list[Curve]] = defaultdict(list)
    for (_, batch), curve in sorted(runs.items()):
        by_batch[batch].append(sorted(curve))
    return dict(sorted(by_batch.items()))


def tokens_to(curve: Curve, target: float) -> float | None:
    """Tokens at which a run first comes down to a log-perplexity, on a straight line between two
    evaluations; None if it does not."""
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if y0 > target >= y1:
            return x0 + (x1 - x0) * (y0 - target) / (y0 - y1)
    return None


def fit(batches: Sequence[float], tokens: Sequence[float]) -> tuple[float, float]:
    """E_min in tokens and B_c in samples: least squares."""
    x = np.stack([np.ones(len(batches)), np.asarray(batches, dtype=float)], axis=1)
    base, slope = np.linalg.lstsq(x, np.asarray(tokens), rcond=None)[0]
    return float(base), float(base / slope)


def needed(batch: Any, curve: tuple[float, float]) -> Any:
    """E(B), tokens."""
    least, critical = curve
    return least * (1 + batch / critical)


def judged(found: dict[int, list[float]]) -> dict[str, Any]:
    """The fit of all batches, and how each is predicted by the fit of the others."""
    batches = list(found)
    middle = {b: statistics.median(found[b]) for b in batches}
    whole = fit(batches, list(middle.values()))
    left_out = {}
    for b in batches:
        others = [o for o in batches if o != b]
        left_out[b] = needed(b, fit(others, [middle[o] for o in others])) / middle[b] - 1
    inside = [needed(b, whole) / middle[b] - 1 for b in batches]
    return {
        "runs": {b: len(found[b]) for b in batches},
        "median_tokens": middle,
        "least_tokens": {b: min(found[b]) for b in batches},
        "most_tokens": {b: max(found[b]) for b in batches},
        "e_min_tokens": whole[0],
        "b_c_samples": whole[1],
        "b_c_tokens": whole[1] * SEQ_LENGTH,
        "rms_in_sample": float(np.sqrt(np.mean(np.square(inside)))),
        "left_out_error": left_out,
        "worst_left_out": max(map(abs, left_out.values())),
        "worst_batch": max(left_out, key=lambda b: abs(left_out[b])),
    }


def at_target(runs: dict[int, list[Curve]], target: float) -> dict[str, Any]:
    """What the runs that reach a target say."""
    found = {}
    for batch, listed in runs.items():
        tokens = [tokens_to(curve, target) for curve in listed]
        found[batch] = [t for t in tokens if t is not None]
    answer = judged({b: t for b, t in found.items() if t})
    goal = GOALS.get(target)
    return {**answer, "goal": goal, "is_met": goal and answer["worst_left_out"] <= goal}


def main() -> None:
    """Fits, prints and writes."""
    args = arguments(__doc__, "efficiency_curve.json").parse_args()
    runs = curves()
    result = {
        "what": "tokens to a log-perplexity by batch, MLPerf GPT-3 175B, against E_min (1 + B/B_c)",
        "targets": {t: at_target(runs, t) for t in sorted({*GOALS, *ALSO})},
        **origin(),
    }
    write(args.output, result)


if __name__ == "__main__":
    main()
