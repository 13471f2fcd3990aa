"""Does the loss rise where the batch changes, and do ramp and beta2 rule help?

    python -m bench.batch_changes --data-path runs/quickstart/data/stdlib_text_document

Doubles the batch of a small model at fixed samples (8 to 16 to 32 to 64), with the learning rate
following at once or over a ramp, and with beta2 constant or per token; several seeds; and without
any change. Others shrink it to a quarter twice, from 128. `--only WORDS` runs the variants that
have these words in their names, and keeps the others of the file. Writes
docs/results/batch_changes.json.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench.support import TRAINER, arguments, launch, origin, read_run, write

FLAGS = """--num-layers 4 --hidden-size 128 --ffn-hidden-size 512 --num-attention-heads 4
--seq-length 128 --max-position-embeddings 128 --swiglu --normalization RMSNorm
--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 8 --global-batch-size 8 --lr 2e-3
--lr-decay-style constant --lr-warmup-fraction 0.03 --adam-beta2 0.95
--use-distributed-optimizer --tokenizer-type ByteLevelTokenizer --split 95,4,1 --eval-interval 300
--eval-iters 64 --log-interval 500 --copus"""
SETTINGS = {"policy": "doubling", "doubling_ratio": 1.5, "max_micro_batch_size": 8}
VARIANTS: dict[str, dict[str, Any]] = {
    "no change": {"max_global_batch_size": 8},
    "jump, beta2 constant": {"lr_ramp_steps": 0},
    "ramp, beta2 constant": {},
    "jump, beta2 per token": {"lr_ramp_steps": 0, "beta2_rule": "tokens"},
    "ramp, beta2 per token": {"beta2_rule": "tokens"},
    "learning rate constant": {"lr_rule": "none"},
    "shrink, beta2 constant": {},
    "shrink, beta2 per token": {"beta2_rule": "tokens"},
    "shrink, learning rate constant": {"lr_rule": "none"},
}
"""What each adds to the settings of the controller."""


SHRINKS = ((0.0, 128), (0.5, 32), (0.75, 8))
"""Parts of the samples, and the batch from there on."""


def changes_of(variant: str, samples: int) -> tuple[dict[str, Any], list[str]]:
    """Settings of the controller and flags that say when the batch changes."""
    if not variant.startswith("shrink"):
        # The first doubling comes after a quarter of the samples.
        return {**SETTINGS, "doubling_first_tokens": 128 * samples // 4}, []
    schedule = " ".join(f"{int(part * samples) * 128}:{batch}" for part, batch in SHRINKS)
    settings = {"policy": "step_schedule", "max_micro_batch_size": 8, "reference_batch_size": 8}
    return settings, ["--step-batch-size-schedule", schedule]


def run(data: str, variant: str, seed: int, samples: int) -> dict[str, Any]:
    """One training: the rise of the loss at each change, and the losses on held-out text."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, settings = Path(temporary) / "run", Path(temporary) / "copus.yaml"
        values, more = changes_of(variant, samples)
        settings.write_text(json.dumps({**values, **VARIANTS[variant]}))
        flags = [*FLAGS.split(), *more, "--copus-config", settings, "--seed", str(seed)]
        flags += ["--train-samples", str(samples), "--data-path", data, "--run-dir", folder]
        launch(1, TRAINER, *flags)
        record = read_run(folder)
    grown = [o for o in record.of("outcome") if o["to_batch"] != o["from_batch"]]
    steps = record.steps
    rises, norms = [], []
    for outcome in grown:
        at = outcome["iteration"]
        before, after = steps[max(at - 20, 0) : at], steps[at : at + 20]
        means = [statistics.fmean(s["losses"]["lm loss"] for s in x) for x in (before, after)]
        rises.append(means[1] - means[0])
        norms.append(max(s["grad_norm"] for s in after))
    return {
        "variant": variant,
        "seed": seed,
        "changes": [[o["consumed_samples"], o["from_batch"], o["to_batch"]] for o in grown],
        "rise_of_the_mean_over_20_steps": rises,
        "largest_rise_over_50_steps": [o["loss_rise"] for o in grown],
        "largest_gradient_norm": norms,
        "validation": [[r["consumed_samples"], r["losses"]["lm loss"]] for r in record.evaluations],
    }


def main() -> None:
    """Runs all variants and seeds, prints and writes."""
    parser = arguments(__doc__, "batch_changes.json", data=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--samples", type=int, default=4800, help="of a run")
    parser.add_argument("--only", default="", help="words in the names of the variants to run")
    args = parser.parse_args()
    variants = [name for name in VARIANTS if args.only in name]
    runs = []
    if args.only:
        runs = [
            r for r in json.loads(args.output.read_text())["runs"] if args.only not in r["variant"]
        ]
    for seed in range(1, args.seeds + 1):
        for variant in variants:
            runs.append(run(args.data_path, variant, seed, args.samples))
            print(f"seed {seed}, {variant}: {runs[-1]['validation'][-1][1]:.4f}", flush=True)
    table = {}
    for variant in VARIANTS:
        mine = [r for r in runs if r["variant"] == variant]
        rises = [x for r in mine for x in r["rise_of_the_mean_over_20_steps"]]
        table[variant] = {
            "mean_rise": statistics.fmean(rises) if rises else None,
            "worst_rise": max(
                (x for r in mine for x in r["largest_rise_over_50_steps"]), default=None
            ),
            "validation": [r["validation"][-1][1] for r in mine],
        }
    result = {"what": "loss around doublings of the batch", **origin(), "table": table}
    write(args.output, {**result, "runs": runs}, hide=["runs"])


if __name__ == "__main__":
    main()
