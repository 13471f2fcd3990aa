"""Does a mixture of experts learn the same while --copus moves its batch and its layout?

    python -m bench.moe_live_run            # about ten minutes on two cores

A run on four CPU ranks starts in a layout that is slow there. The controller may change batch,
micro-batch and layout, experts included. Then the same steps are taken again without a controller,
in one layout from the first step to the last, with the batches and rates of the first run. Losses
differ by rounding alone, or the moves, the balance loss or the data have changed something.

In `any layout` the controller chooses among all sizes. In `ep alone` the sizes of the model leave
it data parallelism with ep 1, 2 and 4: two or four ranks cannot share its three layers, five heads
or 66 tokens. It would leave ep 1, whose gradients of all experts go through the network, after the
first step. So the file `control/pause` holds its decisions back for the first fifteen.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from bench.support import RunRecord, arguments, launch, make_dataset, origin, read_run, write

RANKS = 4
MODEL = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
--use-distributed-optimizer --tokenizer-type ByteLevelTokenizer --eval-iters 0 --num-experts 8
--moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-router-score-function sigmoid
--moe-router-enable-expert-bias --lr-decay-style cosine --lr-warmup-fraction 0.05 --min-lr 0
--adam-beta2 0.95 --log-interval 100 --pad-vocab-for-tensor-parallel-size 4"""
ANY = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64
--max-position-embeddings 64 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type allgather
--micro-batch-size 2 --global-batch-size 8 --train-samples 3600"""
EP = """--num-layers 3 --hidden-size 80 --num-attention-heads 5 --seq-length 66
--max-position-embeddings 66 --moe-ffn-hidden-size 2048 --moe-token-dispatcher-type alltoall
--micro-batch-size 1 --global-batch-size 4 --train-samples 2000 --lr 2e-4"""
_SIZES = (
    "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --expert-model-parallel-size 4",
    "--pipeline-model-parallel-size 4",
)
RUNS = {
    "any layout": (f"{ANY} --lr 2e-4", *_SIZES, 0),
    # Rounding grows tenfold every fifteen steps.
    "any layout, five times the rate": (f"{ANY} --lr 1e-3", *_SIZES, 0),
    "ep alone": (EP, "--expert-model-parallel-size 1", "--expert-model-parallel-size 1", 15),
}
"""Flags of both, sizes at the start with the controller, sizes without it, and steps before the
controller decides anything."""
SETTINGS = "min_global_batch_size: 4\nmax_micro_batch_size: 1\n"
"""Of the controller in `ep alone`."""


def worker(kind: str, paused_steps: int, path: Path, flags: list[str]) -> None:
    """One rank. `moved` trains with the controller and notes the settings of every step; `fixed`
    takes the same steps without it."""
    from copus_ext.commands.pretrain import controllers, with_lagged_balance
    from copus_ext.controller.flags import CopusConfig
    from megatron.training.common.control import PAUSE_FILE
    from megatron.training.common.step_settings import Request, StepSettings
    from megatron.training.config.arguments import parse_args, resolve
    from megatron.training.resilience.env_checks import check_environment, set_process_defaults
    from megatron.training.train.callbacks import Callback, CallbackContext
    from megatron.training.train.pretrain import pretrain

    class Notes(Callback):
        """Writes the settings of every step, and holds the controller back at first."""

        def on_train_step_start(self, context: CallbackContext) -> None:
            if context.run_dir is not None:
                pause = context.run_dir / PAUSE_FILE
                pause.parent.mkdir(exist_ok=True)
                pause.touch()
                if context.state.iteration >= paused_steps:
                    pause.unlink()
                settings = dataclasses.asdict(context.state.settings)
                with path.open("a") as file:
                    file.write(json.dumps({"steps": context.state.iteration, **settings}) + "\n")

    class Repeats(Callback):
        """Asks for the settings that the other run had after as many steps; not for its
        micro-batches, which belong to its layout."""

        def __init__(self) -> None:
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            self.by_steps = {
                line.pop("steps"): StepSettings(**{**line, "micro_batch_size": 1}) for line in lines
            }

        def on_train_step_end(self, context: CallbackContext) -> Request | None:
            settings = self.by_steps.get(context.state.iteration)
            if settings in (None, context.state.settings):
                return None
            return Request(kind="change", reason="the step of the other run", settings=settings)

    set_process_defaults()
    check_environment()
    own = ["--copus", "--copus-layouts", "all"] if kind == "moved" else ["--moe-balance", "lagged"]
    args = parse_args([*flags, *own], {"copus controller": CopusConfig})
    callback = Notes() if kind == "moved" else Repeats()
    pretrain(resolve(with_lagged_balance(args), RANKS), [*controllers(args), callback])


def compared(moved: RunRecord, fixed: RunRecord) -> dict[str, Any]:
    """How far the losses are apart, and what moved."""
    batches = [[s["global_batch_size"] for s in run.steps] for run in (moved, fixed)]
    count = next((i for i, (a, b) in enumerate(zip(*batches)) if a != b), len(moved.steps))
    if count < len(moved.steps) - 1:  # the last one takes what is left, as its layout can
        raise SystemExit(f"step {count} of the second run is not that of the first")
    steps = [run.steps[:count] for run in (moved, fixed)]
    losses, balance = (
        [[s["losses"][name] for s in some] for some in steps]
        for name in ("lm loss", "load_balancing_loss")
    )
    apart = [abs(a / b - 1) for a, b in zip(*losses, strict=True)]
    changes = [s for s in moved.of("switch") if s["outcome"]["kind"] == "moved"]
    return {
        "steps": len(losses[0]),
        "steps_by_layout": dict(Counter(s["layout"] for s in steps[0])),
        "layouts": [moved.steps[0]["layout"], *(s["to"] for s in changes)],
        "layout_of_the_other": fixed.steps[0]["layout"],
        "batches": [b for a, b in zip([0, *batches[0]], batches[0]) if a != b],
        "largest_relative_difference": max(apart),
        "mean_relative_difference": sum(apart) / len(apart),
        "largest_difference_of_balance": max(abs(a - b) for a, b in zip(*balance, strict=True)),
        "first_loss": losses[0][0],
        "last_loss": losses[0][-1],
    }


def main() -> None:
    """Runs both of every kind and compares."""
    parser = arguments(__doc__, "moe_live_run.json")
    parser.add_argument("--only", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--samples", help="instead of those of the runs")
    args = parser.parse_args()
    # Others stay.
    found = json.loads(args.output.read_text())["runs"] if args.output.exists() else {}
    with tempfile.TemporaryDirectory(prefix="moe-live-") as name:
        data = ["--data-path", make_dataset(Path(name) / "text"), "--split", "95,4,1"]
        (settings := Path(name) / "copus.yaml").write_text(SETTINGS)
        for number, kind in enumerate(args.only):
            flags, start, fixed, paused = RUNS[kind]
            both = [*MODEL.split(), *flags.split(), *data]
            both += ["--train-samples", args.samples] if args.samples else []
            own = ["--copus-config", str(settings)] if paused else []
            for which, sizes in (("moved", [*start.split(), *own]), ("fixed", fixed.split())):
                where = ["--run-dir", Path(name) / f"{which}{number}"]
                words = ["--worker", which, str(paused), Path(name) / f"{number}.jsonl"]
                launch(RANKS, "-m", "bench.moe_live_run", *words, *both, *sizes, *where)
            runs = [read_run(Path(name) / f"{which}{number}") for which in ("moved", "fixed")]
            found[kind] = {**origin(), "paused_steps": paused, **compared(*runs)}
    write(args.output, {"command": "python -m bench.moe_live_run", "runs": found})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
    else:
        main()
