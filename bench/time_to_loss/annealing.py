"""Does a growing batch anneal real small runs at a constant learning rate?

    python -m bench.time_to_loss.annealing [--seeds N]

The GPT of `small_gpt` trains with a batch of 32: at a constant rate to the end; with
the batch that `anneal_by_batch` asks for over the last tenth or fifth, by powers of two up to 512,
while the rate stays; and with a rate that falls over the last fifth (WSD). Each way has the best of
four rates on seed 0. Figures are of further seeds. Adds to docs/results/annealing.json what is
missing there.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from typing import Any

from bench.support import arguments, origin
from bench.time_to_loss import atlas
from bench.time_to_loss.small_gpt import REFERENCE_BATCH, Kind, Recipe, SmallRun
from copus_ext.goodput.inputs import annealing_batch

FILE = "annealing.json"
BATCHES, MOST = (32,), 512
RATES = (-2, -1, 0, 1)
"""k of 2^(k/2) times the first rate of the atlas."""
WARMUP = 0.2
WAYS: dict[str, tuple[Kind, float]] = {
    "static": ("constant", 0.0),
    "annealed over a tenth": ("constant", 0.1),
    "annealed over a fifth": ("constant", 0.2),
    "falling rate": ("wsd", 0.0),
}
"""Schedule of the rate, and part of the run that anneals by batch."""


def one(batch: int, way: str, rate: int, seed: int) -> dict[str, Any]:
    """Trains a run to its end; its row."""
    kind, share = WAYS[way]
    run = SmallRun(
        Recipe(
            total_samples=atlas.SHORT,
            learning_rate=atlas.BASE_RATE * 2 ** (rate / 2),
            warmup=WARMUP,
            kind=kind,
            seed=seed,
        )
    )
    run.lr_multiple = math.sqrt(batch / REFERENCE_BATCH)
    while (left := atlas.SHORT - run.samples) > 0:
        asked = annealing_batch(batch, share * atlas.SHORT, left)
        size = batch * 2 ** round(math.log2(min(asked, MOST) / batch))
        run.step(min(size, left))
    return {"loss": round(run.evaluate(), 5), "steps": run.steps}


def main() -> None:
    """Trains, prints and writes."""
    parser = arguments(__doc__, FILE)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    known = json.loads(args.output.read_text()) if args.output.exists() else {"rows": {}}
    rows: dict[str, Any] = known["rows"]

    def loss(batch: int, way: str, rate: int, seed: int) -> float:
        key = f"{batch}, {way}, rate {rate}, seed {seed}"
        if key not in rows:
            rows[key] = one(batch, way, rate, seed)
            print(f"{key}: {rows[key]}", flush=True)
            args.output.write_text(json.dumps({"rows": rows, "origin": origin()}, indent=1) + "\n")
        return rows[key]["loss"]

    figures: dict[str, Any] = {}
    for batch, way in itertools.product(BATCHES, WAYS):
        best = min(RATES, key=lambda rate: loss(batch, way, rate, 0))
        losses = [loss(batch, way, best, seed) for seed in range(1, args.seeds + 1)]
        steps = rows[f"{batch}, {way}, rate {best}, seed 0"]["steps"]
        mean = statistics.fmean(losses)
        figures[f"{batch}, {way}"] = {"rate": best, "steps": steps, "loss": mean, "losses": losses}
        print(f"{batch}, {way}: rate {best}, {steps} steps, loss {mean:.4f}", flush=True)
    result = {"figures": figures, "rows": rows, "origin": origin()}
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
