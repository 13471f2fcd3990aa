"""Does a mixture of experts learn the same while --copus moves its batch and its layout?

    python -m bench.moe_live_run            # about ten minutes on two cores

A run on four CPU ranks starts in a layout that is slow there. The controller may change batch,
micro-batch and layout, experts included. Then the same steps are taken again without a controller,
in one layout from the first step to the last, with the batches and rates of the first run. Losses
differ by rounding alone, or the moves, the balance loss or the data have changed something.

In `any layout` the controller chooses among all sizes. In `ep alone` the sizes of the model leave
it data parallelism with ep 1, 2 and 4: two or four ranks cannot share its three layers, five heads
or 66 tokens. The start, ep 1, sends the gradients of all experts through the network. ep 4 sends
none, but at four samples it has one micro-batch and one copy of each expert, in which no noise can
be measured: the controller takes it once the batch has grown. It would leave ep 1 after the first
step. So that ep 1 is seen for longer, the file `control/pause` holds its decisions back for the
first steps. Which layout it goes to, and when after that, is its own decision.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.moe_live_run_ranks import RANKS
from bench.support import ROOT, RunRecord, arguments, launch, make_dataset, origin, read_run, write

MODEL = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
--use-distributed-optimizer --tokenizer-type ByteLevelTokenizer --eval-iters 0 --num-experts 8
--moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-router-score-function sigmoid
--moe-router-enable-expert-bias --lr-decay-style cosine --lr-warmup-fraction 0.05
--adam-beta2 0.95 --log-interval 100 --pad-vocab-for-tensor-parallel-size 4"""


@dataclass(frozen=True, kw_only=True)
class Course:
    """A run with the controller, and the same steps without it."""

    flags: str
    """Sizes of the model."""
    start: str
    """Layout that the controller starts in."""
    fixed: str
    """Layout without it; takes every batch that the controller can choose."""
    lr: str
    """Learning rate."""
    micro_batch_size: int
    """At the start."""
    global_batch_size: int
    """At the start."""
    steps: int
    """Of the first batch."""
    settings: str = ""
    """Of the controller, as in docs/copus.yaml."""
    paused_steps: int = 0
    """Steps before the controller decides anything."""


_ANY = Course(
    flags="""--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --moe-ffn-hidden-size 64
    --moe-token-dispatcher-type allgather""",
    start="""--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1
    --expert-model-parallel-size 4""",
    fixed="--pipeline-model-parallel-size 4",
    lr="2e-4",
    micro_batch_size=2,
    global_batch_size=8,
    steps=450,
)
COURSES = {
    "any layout": _ANY,
    # Rounding grows tenfold every fifteen steps.
    "any layout, five times the rate": replace(_ANY, lr="1e-3"),
    "ep alone": Course(
        flags="""--num-layers 3 --hidden-size 80 --num-attention-heads 5 --seq-length 66
        --max-position-embeddings 66 --moe-ffn-hidden-size 2048
        --moe-token-dispatcher-type alltoall""",
        start="--expert-model-parallel-size 1",
        fixed="--expert-model-parallel-size 1",
        lr="2e-4",
        micro_batch_size=1,
        global_batch_size=4,
        steps=500,
        settings="min_global_batch_size: 4\nmax_micro_batch_size: 1\n",
        paused_steps=15,
    ),
}


def main(argv: list[str] | None = None) -> None:
    """Runs both of every course and compares."""
    parser = arguments(__doc__, "moe_live_run.json")
    parser.add_argument("--courses", nargs="+", default=list(COURSES), choices=list(COURSES))
    args = parser.parse_args(argv)
    # Those of other courses stay.
    runs = json.loads(args.output.read_text())["runs"] if args.output.exists() else {}
    with tempfile.TemporaryDirectory(prefix="moe-live-") as name:
        folder = Path(name)
        data = ["--data-path", make_dataset(folder / "text"), "--split", "95,4,1"]
        for number, course in enumerate(args.courses):
            (at := folder / str(number)).mkdir()
            runs[course] = {**origin(), **_follow(COURSES[course], data, at)}
    write(args.output, {"command": "python -m bench.moe_live_run", "runs": runs})


def _follow(course: Course, data: list[str], folder: Path) -> dict[str, Any]:
    batch = course.global_batch_size
    both = [*MODEL.split(), *course.flags.split(), *data, "--lr", course.lr, "--min-lr", "0"]
    both += ["--train-samples", str(batch * course.steps), "--global-batch-size", str(batch)]
    both += ["--micro-batch-size", str(course.micro_batch_size)]
    (settings := folder / "copus.yaml").write_text(course.settings)
    own = ["--copus-config", str(settings)] if course.settings else []
    moved = _run("moved", folder, [*both, *course.start.split(), *own], course.paused_steps)
    fixed = _run("fixed", folder, [*both, *course.fixed.split()])
    return {"paused_steps": course.paused_steps, **compared(moved, fixed)}


def _run(kind: str, folder: Path, flags: list[str], paused_steps: int = 0) -> RunRecord:
    program = ROOT / "bench" / "moe_live_run_ranks.py"
    noted, where = folder / "settings.jsonl", ["--run-dir", folder / kind]
    launch(RANKS, program, kind, str(paused_steps), noted, *flags, *where)
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
    why = {d["number"]: d["decision"]["reason"] for d in moved.of("decision")}
    path = [batches[0][0]] + [b for a, b in zip(batches[0], batches[0][1:]) if a != b]
    return {
        "steps": len(losses[0]),
        "steps_by_layout": dict(Counter(s["layout"] for s in steps[0])),
        "layouts": [moved.steps[0]["layout"], *(s["to"] for s in changes)],
        "changes_of_layout": [
            {
                "after_step": s["iteration"],
                "from": s["start"],
                "to": s["to"],
                "why": why[s["number"]],
                "pause_s": round(s["outcome"]["pause_s"], 3),
            }
            for s in changes
        ],
        "layout_of_the_other": fixed.steps[0]["layout"],
        "batches": path,
        "largest_relative_difference": max(apart),
        "mean_relative_difference": sum(apart) / len(apart),
        "largest_difference_of_balance": max(abs(a - b) for a, b in zip(*balance, strict=True)),
        "first_loss": losses[0][0],
        "last_loss": losses[0][-1],
        "every_20th_difference": [float(f"{apart[i]:.2g}") for i in range(0, len(apart), 20)],
    }


if __name__ == "__main__":
    main(sys.argv[1:])
