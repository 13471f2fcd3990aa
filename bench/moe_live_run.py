"""Does a mixture of experts learn the same while --copus moves its batch and its layout?

    python -m bench.moe_live_run            # about four minutes on two cores

One run on four CPU ranks starts in a layout that is slow there. The controller may change batch,
micro-batch and layout, experts included. Then the same steps are taken again without a controller,
in one layout from the first step to the last, with the batches and rates of the first run. Losses
differ by rounding alone, or the moves, the balance loss or the data have changed something.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.moe_live_run_ranks import RANKS
from bench.support import ROOT, RunRecord, arguments, launch, make_dataset, origin, read_run, write

MODEL = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64
--max-position-embeddings 64 --swiglu --normalization RMSNorm --position-embedding-type rope
--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0
--hidden-dropout 0 --use-distributed-optimizer --tokenizer-type ByteLevelTokenizer --eval-iters 0
--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-aux-loss-coeff 1e-2
--moe-token-dispatcher-type allgather --moe-router-score-function sigmoid
--moe-router-enable-expert-bias --lr-decay-style cosine
--lr-warmup-fraction 0.05 --adam-beta2 0.95 --micro-batch-size 2 --global-batch-size 8
--log-interval 100 --pad-vocab-for-tensor-parallel-size 4"""
START = """--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1
--expert-model-parallel-size 4"""

RATES = ("2e-4", "1e-3")
"""Learning rates. At the second one rounding grows tenfold every fifteen steps."""
FIXED = "--pipeline-model-parallel-size 4"
"""One replica: any batch divides."""


def main(argv: list[str] | None = None) -> None:
    """Runs both and compares."""
    parser = arguments(__doc__, "moe_live_run.json")
    parser.add_argument("--steps", type=int, default=450, help="of the first batch")
    args = parser.parse_args(argv)
    runs = {}
    with tempfile.TemporaryDirectory(prefix="moe-live-") as name:
        folder = Path(name)
        data = ["--data-path", make_dataset(folder / "text"), "--split", "95,4,1"]
        for lr in RATES:
            both = [*MODEL.split(), *data, "--train-samples", str(8 * args.steps)]
            both += ["--lr", lr, "--min-lr", "0"]
            (at := folder / lr).mkdir()
            moved = _run("moved", at, [*both, *START.split()])
            fixed = _run("fixed", at, [*both, *FIXED.split()])
            runs[lr] = compared(moved, fixed)
    write(args.output, {**origin(), "command": "python -m bench.moe_live_run", "runs": runs})


def _run(kind: str, folder: Path, flags: list[str]) -> RunRecord:
    program = ROOT / "bench" / "moe_live_run_ranks.py"
    launch(RANKS, program, kind, folder / "settings.jsonl", *flags, "--run-dir", folder / kind)
    return read_run(folder / kind)


def compared(moved: RunRecord, fixed: RunRecord) -> dict[str, Any]:
    """How far the losses are apart, and what moved."""
    batches = [[s["global_batch_size"] for s in run.steps] for run in (moved, fixed)]
    count = next((i for i, (a, b) in enumerate(zip(*batches)) if a != b), len(moved.steps))
    if count < len(moved.steps) - 1:  # the last one takes what is left, as its layout can
        raise SystemExit(f"step {count} of the second run is not that of the first")
    steps = [run.steps[:count] for run in (moved, fixed)]
    losses = [[s["losses"]["lm loss"] for s in some] for some in steps]
    balance = [[s["losses"]["load_balancing_loss"] for s in some] for some in steps]
    apart = [abs(a / b - 1) for a, b in zip(*losses, strict=True)]
    changes = [s for s in moved.of("switch") if s["outcome"]["kind"] == "moved"]
    path = [batches[0][0]] + [b for a, b in zip(batches[0], batches[0][1:]) if a != b]
    return {
        "steps": len(losses[0]),
        "layouts": [moved.steps[0]["layout"], *(s["to"] for s in changes)],
        "layout_of_the_other": fixed.steps[0]["layout"],
        "batches": path,
        "largest_relative_difference": max(apart),
        "mean_relative_difference": sum(apart) / len(apart),
        "largest_difference_of_balance": max(abs(a - b) for a, b in zip(*balance, strict=True)),
        "pauses_s": [round(s["outcome"]["pause_s"], 3) for s in changes],
        "first_loss": losses[0][0],
        "last_loss": losses[0][-1],
        "every_20th_difference": [float(f"{apart[i]:.2g}") for i in range(0, len(apart), 20)],
    }


if __name__ == "__main__":
    main(sys.argv[1:])
