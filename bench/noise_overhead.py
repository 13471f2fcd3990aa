"""What does measuring the noise scale cost?

    python -m bench.noise_overhead --data-path runs/quickstart/data/stdlib_text_document

Two ranks with data parallelism step one job in balanced blocks: with the controller measuring and
recording every step, and without any of its hooks. Once per estimator. Writes
docs/results/noise_overhead.json. One rank per core, nothing else running. On a machine with GPUs it
runs there.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.support import (
    QUICKSTART_MODEL,
    ROOT,
    arguments,
    balanced_rows,
    block,
    open_job,
    origin,
    ratio_summary,
    step_of_loop,
    torchrun,
    write,
)

MODEL = f"{QUICKSTART_MODEL} --lr 1e-3 --split 98,1,1 --train-iters 100000 --log-interval 10"
ESTIMATORS = ("micro", "rank", "half")


def worker(args: argparse.Namespace) -> None:
    """One rank: rank 0 writes the rows of every estimator."""
    run_dir = str(args.output.parent)
    flags = [*(args.model or MODEL).split(), "--data-path", args.data_path, "--run-dir", run_dir]
    flags += ["--micro-batch-size", str(args.micro_batch_size), "--data-cache-path", run_dir]
    flags += ["--global-batch-size", str(args.batch_size)]
    with contextlib.redirect_stdout(io.StringIO()), open_job(flags) as job:
        results = {name: rows_of(job, name, args) for name in ESTIMATORS}
    if int(os.environ["RANK"]) == 0:
        args.output.write_text(json.dumps(results))


def rows_of(job: Any, estimator: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Balanced rows of seconds per step with and without one estimator."""
    import torch.distributed as dist

    from copus_ext.controller.flags import CopusConfig
    from copus_ext.controller.gns_callback import GradientNoiseCallback
    from megatron.training.train.callbacks import Callbacks
    from megatron.training.train.reporting import Reporter

    watch = GradientNoiseCallback(CopusConfig(copus=True, copus_gns_estimator=estimator))
    step = functools.partial(step_of_loop, job, Reporter(job))

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


def main() -> None:
    """Measures, prints and writes."""
    parser = arguments(__doc__, "noise_overhead.json", data=True)
    parser.add_argument("--model", help="flags of another model than the quickstart's")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=30, help="rows of four blocks")
    parser.add_argument("--steps", type=int, default=4, help="of a block")
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    if "RANK" in os.environ:
        worker(args)
        return
    before = origin()
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "rows.json"
        again = torchrun(args.ranks, "-m", "bench.noise_overhead", *sys.argv[1:], "--output", file)
        subprocess.run(again, check=True, cwd=ROOT)
        rows = json.loads(file.read_text())
    result = {
        "what": "seconds per step with the noise scale measured at every step / without",
        "wall": {e: ratio_summary(r, "wall_s", of="tap", to="plain") for e, r in rows.items()},
        "cpu": {e: ratio_summary(r, "cpu_s", of="tap", to="plain") for e, r in rows.items()},
        "rows": args.blocks,
        "steps_of_a_block": args.steps,
        "global_batch_size": args.batch_size,
        "micro_batch_size": args.micro_batch_size,
        "ranks": args.ranks,
        **before,
        "per_row": rows,
    }
    write(args.output, result, hide=["per_row"])


if __name__ == "__main__":
    main()
