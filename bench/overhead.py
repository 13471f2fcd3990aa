"""What do the noise scale, the controller and the copies cost in each step?

    python -m bench.overhead PART --data-path runs/quickstart/data/stdlib_text_document

* noise: two ranks with and without the hooks of each estimator, every step measured. Writes
  noise_overhead.json, with `--experts` (a mixture of experts) noise_overhead_experts.json.
* controller: its part of a step between decisions, in a small run that needs no data. Writes
  controller_cost.json.
* copies: two ranks of an elastic run with a copy in each block and without. Writes
  elastic_copy_cost.json.

The sides of a comparison step one job in balanced blocks. Results go to docs/results. It needs a
core for each rank and nothing else running.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.support import (
    QUICKSTART_MODEL,
    RESULTS,
    arguments,
    balanced_rows,
    block,
    launch,
    open_job,
    origin,
    ratio_summary,
    step_of_loop,
    write,
)
from copus_ext.extras.elastic.environment import COPY_INTERVAL

ConfigBatch = list[dict[str, dict[str, float]]]
MODEL = f"""{QUICKSTART_MODEL} --lr 1e-3 --split 98,1,1 --train-iters 100000 --log-interval 10
--micro-batch-size 4"""
EXPERTS = """--num-layers 4 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512
--moe-aux-loss-coeff 1e-2 --moe-balance lagged --moe-token-dispatcher-type alltoall
--expert-model-parallel-size 2"""
TINY = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 --lr 1e-3
--tokenizer-type NullTokenizer --vocab-size 127 --mock-data --eval-iters 0 --log-interval 1000
--hidden-dropout 0 --attention-dropout 0 --adam-beta2 0.95 --train-samples 8000"""
PARTS = {
    "noise": (2, 16, "noise_overhead.json"),
    "controller": (1, 8, "controller_cost.json"),
    "copies": (2, 16, "elastic_copy_cost.json"),
}
"""Ranks, samples of a batch, file of the result."""
BLOCKS = {"noise": (20, 4), "controller": (1, 1), "copies": (4, COPY_INTERVAL)}
"""Rows of four blocks, and steps of a block."""
ESTIMATORS = ("micro", "rank", "half")


def noise(job: Any, step: Any, args: argparse.Namespace) -> dict[str, ConfigBatch]:
    """With and without the hooks of every estimator."""
    return {name: _rows_of(job, step, name, args) for name in ESTIMATORS}


def _rows_of(job: Any, step: Any, estimator: str, args: argparse.Namespace) -> ConfigBatch:
    import torch.distributed as dist

    from copus_ext.controller.flags import CopusConfig
    from copus_ext.controller.gns_callback import GradientNoiseCallback
    from megatron.trainer.train.callbacks import Callbacks

    watch = GradientNoiseCallback(CopusConfig(copus=True, copus_gns_estimator=estimator))

    def plain() -> dict[str, float]:
        dist.barrier()
        return block(step, args.steps)

    def tap() -> dict[str, float]:
        job.callbacks = Callbacks([watch])
        watch.on_setup_start(job.context)
        seconds = plain()
        watch.on_train_end(job.context)
        job.callbacks = Callbacks(())
        return seconds

    return balanced_rows({"tap": tap, "plain": plain}, args.blocks)


def controller(folder: Path) -> dict[str, list[float]]:
    """Seconds of the controller's part of every step, and of its decisions."""
    from copus_ext.controller.callback import Controller
    from copus_ext.controller.flags import CopusConfig
    from megatron.trainer.config.arguments import parse_args, resolve
    from megatron.trainer.train.pretrain import pretrain

    spent: dict[str, list[float]] = {"own": [], "decide": []}

    class Timed(Controller):
        """Knows how long it takes."""

        def __init__(self) -> None:
            super().__init__(CopusConfig(copus=True))
            self._others = 0.0
            measure = self.gns.on_train_step_end
            self.gns.on_train_step_end = lambda c: self._aside(measure, c)  # type: ignore[method-assign]

        def _aside(self, action: Any, *args: Any) -> Any:
            start = time.perf_counter()
            result = action(*args)
            self._others += time.perf_counter() - start
            return result

        def _decide(self, context: Any) -> Any:
            before = self._others
            result = self._aside(super()._decide, context)
            spent["decide"].append(self._others - before)
            return result

        def on_train_step_end(self, context: Any) -> Any:
            self._others, start = 0.0, time.perf_counter()
            request = super().on_train_step_end(context)
            spent["own"].append(time.perf_counter() - start - self._others)
            return request

    pretrain(resolve(parse_args([*TINY.split(), "--run-dir", str(folder)]), 1), [Timed()])
    return spent


def copies(job: Any, step: Any, args: argparse.Namespace) -> dict[str, Any]:
    """With and without copies, and the bytes that they take for each parameter."""
    from copus_ext.extras.elastic.copies import HeldCopies, PeerCopies
    from copus_ext.extras.elastic.messages import Generation, Member
    from megatron.trainer.train.callbacks import Callbacks

    members = (Member(0, 0), Member(1, 0))
    generation = Generation(number=1, members=members, store="", kind="start")
    # Nothing is lost here, and nobody joins.
    membership: Any = SimpleNamespace(is_over=False, has_lost=False)
    held = HeldCopies()
    peers = PeerCopies(held, membership, generation, interval=COPY_INTERVAL)
    peers.on_train_start(job.context)
    most = [0]

    def counted() -> None:
        step()
        most[0] = max(most[0], held.num_bytes)

    def with_copies() -> dict[str, float]:
        job.callbacks = Callbacks([peers])
        return block(counted, args.steps)

    def without() -> dict[str, float]:
        job.callbacks = Callbacks()
        return block(step, args.steps)

    rows = balanced_rows({"copies": with_copies, "none": without}, args.blocks)
    peers.close()
    own = sum(piece.buffer.numel() for one in held.sets.values() for piece in one.pieces[:1])
    parameters = own / 3
    return {
        "rows": rows,
        "bytes_per_parameter_of_the_shard": held.num_bytes / parameters,
        "most_bytes_per_parameter_of_the_shard": most[0] / parameters,
        "parameters_of_the_shard": parameters,
    }


def worker(args: argparse.Namespace) -> None:
    """One rank of a part; rank 0 writes what it timed."""
    run_dir = args.output.parent / "run"
    with contextlib.redirect_stdout(io.StringIO()):
        if args.part == "controller":
            found: Any = controller(run_dir)
        else:
            flags = [*model_of(args).split(), "--global-batch-size", str(PARTS[args.part][1])]
            places = ["--data-path", args.data_path, "--data-cache-path", str(run_dir)]
            with open_job([*flags, *places, "--run-dir", str(run_dir)]) as job:
                from megatron.trainer.train.reporting import Reporter

                step = functools.partial(step_of_loop, job, Reporter(job))
                measure: Any = {"noise": noise, "copies": copies}[args.part]
                found = measure(job, step, args)
    if os.environ["RANK"] == "0":
        args.output.write_text(json.dumps(found))


def model_of(args: argparse.Namespace) -> str:
    return f"{MODEL} {EXPERTS}" if args.experts else MODEL


def result_of(found: Any, args: argparse.Namespace) -> dict[str, Any]:
    """What is written of a part, from what its ranks timed."""
    if args.part == "controller":
        return {
            "what": "seconds of the controller per step, noise measurement and decisions left out",
            "steps": len(found["own"]),
            "median_s": statistics.median(found["own"]),
            "mean_s": statistics.fmean(found["own"]),
            "decisions": len(found["decide"]),
            "median_decision_s": statistics.median(found["decide"]),
        }
    ranks, batch_size, _ = PARTS[args.part]
    model, clocks = " ".join(model_of(args).split()), ("wall", "cpu")
    how = {"model": model, "rows": args.blocks, "steps_of_a_block": args.steps}
    how |= {"global_batch_size": batch_size, "ranks": ranks}
    if args.part == "noise":
        ratios = {
            clock: {
                name: ratio_summary(rows, f"{clock}_s", of="tap", to="plain")
                for name, rows in found.items()
            }
            for clock in clocks
        }
        what = "seconds per step with the noise scale measured at every step / without"
        return {"what": what, **ratios, **how, "per_row": found}
    rows = found.pop("rows")
    return {
        "what": "seconds per step, copies / none, per row of four blocks",
        **{c: ratio_summary(rows, f"{c}_s", of="copies", to="none") for c in clocks},
        **found,
        **how,
        "per_row": rows,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--data-path", default="", help="prefix of an indexed data set")
    parser.add_argument("--experts", action="store_true", help="noise: of a mixture of experts")
    parser.add_argument("--blocks", type=int, help="rows of four blocks")
    parser.add_argument("--output", type=Path, help="instead of the file in docs/results")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    blocks, args.steps = BLOCKS[args.part]
    args.blocks = args.blocks or blocks
    if args.worker:
        worker(args)
        return
    if not args.data_path and args.part != "controller":
        parser.error("give --data-path PREFIX, such as the quickstart's")
    ranks, _, name = PARTS[args.part]
    output = args.output or RESULTS / name.replace(
        ".json", "_experts.json" * args.experts or ".json"
    )
    before = origin()
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "rows.json"
        again = [args.part, "--worker", "--output", file, "--blocks", str(args.blocks)]
        if args.data_path:
            again += ["--data-path", str(Path(args.data_path).resolve())]
        launch(ranks, "-m", "bench.overhead", *again, *["--experts"] * args.experts)
        found = json.loads(file.read_text())
    write(output, {**result_of(found, args), **before}, hide=["per_row"])


if __name__ == "__main__":
    main()
