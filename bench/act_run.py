"""Ten minutes of the quickstart's model with a batch that follows the noise scale.

    python bench/act_run.py --data-path runs/quickstart/data/stdlib_text_document

Trains on two ranks with `--copus`, decides the journal again, and draws batch, noise scale and
losses. Writes docs/results/act_run.json, .svg and the journal beside them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from support import RESULTS, ROOT, open_source, origin, torchrun

FLAGS = """--num-layers 8 --hidden-size 256 --ffn-hidden-size 1024 --num-attention-heads 8
--seq-length 128 --max-position-embeddings 128 --swiglu --normalization RMSNorm
--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 4 --global-batch-size 8 --lr 1e-3
--min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.03 --adam-beta2 0.95
--use-distributed-optimizer --tokenizer-type ByteLevelTokenizer --split 95,4,1 --eval-interval 100
--eval-iters 32 --log-interval 50 --copus"""


def run(data: str, samples: int, folder: Path) -> str:
    """Trains; returns what it printed."""
    flags = [*FLAGS.split(), "--train-samples", str(samples), "--data-path", data]
    command = torchrun(2, ROOT / "pretrain_gpt.py", *flags, "--run-dir", folder)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def curves(folder: Path) -> dict[str, Any]:
    """Batch, noise scale and losses over the samples."""
    from megatron.training.logging.metrics import read_metrics

    records = list(read_metrics(folder))
    steps = [r for r in records if r["kind"] == "step"]
    evaluations = [r for r in records if r["kind"] == "eval" and r["split"] == "valid"]
    return {
        "samples": [r["consumed_samples"] for r in steps],
        "batch": [r["global_batch_size"] for r in steps],
        "micro_batch": [r["micro_batch_size"] for r in steps],
        "learning_rate": [r["learning_rate"] for r in steps],
        "phi": [r["noise"]["phi_samples"] for r in steps],
        "loss": [r["losses"]["lm loss"] for r in steps],
        "seconds": sum(r["elapsed_per_iteration_ms"] for r in steps) / 1000,
        "validation": [[r["consumed_samples"], r["losses"]["lm loss"]] for r in evaluations],
    }


def draw(rows: dict[str, Any], path: Path) -> None:
    """Batch and noise scale above, losses below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "copus"
    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(7, 5), layout="constrained"
    )
    x = rows["samples"]
    known = [i for i, phi in enumerate(rows["phi"]) if phi]
    twice = [2 * rows["phi"][i] for i in known]
    above.plot([x[i] for i in known], twice, color="C1", linewidth=0.8, label="2 x noise scale")
    above.step(x, rows["batch"], where="post", color="C0", label="global batch")
    above.set_yscale("log", base=2)
    above.set_ylabel("samples")
    above.legend()
    below.plot(x, rows["loss"], color="C0", linewidth=0.5, label="training loss")
    at, losses = zip(*rows["validation"])
    below.plot(at, losses, "o-", color="C3", label="validation loss")
    below.set_ylim(1, 3.5)
    below.set_ylabel("nats per token")
    below.set_xlabel("samples")
    below.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    """Trains, replays, writes."""
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--data-path", required=True, help="prefix of an indexed data set")
    p.add_argument("--samples", type=int, default=12000)
    p.add_argument("--output", type=Path, default=RESULTS / "act_run.json")
    args = p.parse_args()
    open_source()
    from copus_ext.commands.replay import replayed
    from copus_ext.controller.decision_log import NAME, read_journal

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        text = run(str(Path(args.data_path).resolve()), args.samples, folder)
        rows = curves(folder)
        journal = list(read_journal(folder / NAME))
        shutil.copy(folder / NAME, args.output.with_suffix(".journal.jsonl"))
    decisions = [r for r in journal if r["kind"] == "decision"]
    result = {
        "what": "the quickstart's model on two ranks, batch following the noise scale",
        "samples": args.samples,
        "seconds_of_steps": rows["seconds"],
        "decisions": len(decisions),
        "decided_again_the_same": sum(replayed(r, {})[0] for r in decisions),
        "median_decision_ms": 1000 * sorted(r["seconds"] for r in decisions)[len(decisions) // 2],
        "slowest_decision_ms": 1000 * max(r["seconds"] for r in decisions),
        "outcomes": [r for r in journal if r["kind"] == "outcome"],
        "summary": text[text.index("copus: ", text.rindex("iteration")) :].splitlines(),
        **origin(),
        "curves": rows,
    }
    args.output.write_text(json.dumps(result) + "\n")
    draw(rows, args.output.with_suffix(".svg"))
    print(json.dumps({k: v for k, v in result.items() if k != "curves"}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
