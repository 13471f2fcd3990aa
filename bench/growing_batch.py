"""Does the batch follow the noise scale in a run under the controller?

    python -m bench.growing_batch --data-path runs/quickstart/data/stdlib_text_document

Trains the quickstart's model on two ranks with `--copus` for about ten minutes, decides the journal
again, and draws batch, noise scale and losses. Writes docs/results/act_run.json, .svg and the
journal beside them.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from bench.support import (
    QUICKSTART_MODEL,
    TRAINER,
    RunRecord,
    arguments,
    figure,
    launch,
    origin,
    read_run,
    write,
)
from copus_ext.commands.replay import replayed
from copus_ext.controller.decision_log import NAME

FLAGS = f"""{QUICKSTART_MODEL} --micro-batch-size 4 --global-batch-size 8 --lr 1e-3
--min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.03 --adam-beta2 0.95
--split 95,4,1 --eval-interval 100 --eval-iters 32 --log-interval 50 --copus"""


def curves(run: RunRecord) -> dict[str, Any]:
    """Batch, noise scale and losses over the samples."""
    steps = run.steps
    return {
        "samples": [r["consumed_samples"] for r in steps],
        "batch": [r["global_batch_size"] for r in steps],
        "micro_batch": [r["micro_batch_size"] for r in steps],
        "learning_rate": [r["learning_rate"] for r in steps],
        "phi": [r["noise"]["phi_samples"] for r in steps],
        "loss": [r["losses"]["lm loss"] for r in steps],
        "seconds": sum(r["seconds"] for r in steps),
        "validation": [[r["consumed_samples"], r["losses"]["lm loss"]] for r in run.evaluations],
    }


def draw(rows: dict[str, Any], path: Path) -> None:
    """Batch and noise scale above, losses below."""
    x = rows["samples"]
    known = [i for i, phi in enumerate(rows["phi"]) if phi]
    with figure(path, 2, sharex=True, figsize=(7, 5)) as (above, below):
        twice = [2 * rows["phi"][i] for i in known]
        above.plot([x[i] for i in known], twice, color="C1", linewidth=0.8, label="2 x noise scale")
        above.step(x, rows["batch"], where="post", color="C0", label="global batch")
        above.set_yscale("log", base=2)
        above.set_ylabel("samples")
        above.legend()
        below.plot(x, rows["loss"], color="C0", linewidth=0.5, label="training loss")
        if rows["validation"]:
            below.plot(*zip(*rows["validation"]), "o-", color="C3", label="validation loss")
        below.set(ylim=(1, 3.5), xlabel="samples", ylabel="nats per token")
        below.legend()


def main() -> None:
    """Trains, replays, writes."""
    parser = arguments(__doc__, "act_run.json", data=True)
    parser.add_argument("--samples", type=int, default=12000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        flags = [*FLAGS.split(), "--train-samples", str(args.samples), "--run-dir", folder]
        text = launch(2, TRAINER, *flags, "--data-path", args.data_path)
        run = read_run(folder)
        shutil.copy(folder / NAME, args.output.with_suffix(".journal.jsonl"))
    rows, decisions = curves(run), run.of("decision")
    result = {
        "what": "the quickstart's model on two ranks, batch following the noise scale",
        "samples": args.samples,
        "seconds_of_steps": rows["seconds"],
        "decisions": len(decisions),
        "decided_again_the_same": sum(replayed(r, {})[0] for r in decisions),
        "median_decision_ms": 1000 * sorted(r["seconds"] for r in decisions)[len(decisions) // 2],
        "slowest_decision_ms": 1000 * max(r["seconds"] for r in decisions),
        "outcomes": run.of("outcome"),
        "summary": text[text.index("copus: ", text.rindex("iteration")) :].splitlines(),
        **origin(),
        "curves": rows,
    }
    draw(rows, args.output.with_suffix(".svg"))
    write(args.output, result, hide=["curves"])


if __name__ == "__main__":
    main()
