"""What does measuring the noise scale cost?

    python -m bench.noise_overhead --data-path runs/quickstart/data/stdlib_text_document
    python -m bench.noise_overhead --data-path ... --experts

Two ranks with data parallelism step one job in balanced blocks: with the controller measuring and
recording every step, and without any of its hooks. Once per estimator, and once with hooks that
measure no step (`between`). Writes
docs/results/noise_overhead.json, or with experts noise_overhead_experts.json. One rank per core,
nothing else running. On a machine with GPUs it runs there.

By default not every step is measured. The share of measured steps is found by running the schedule
of measurements over whole runs. What the default costs is that share of the cost of a measured
step, and the rest of the cost of a step between.
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
    RESULTS,
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
from copus_ext.gns.estimators import Estimate
from copus_ext.gns.observer import CONTROL, NoiseObserver

MODEL = f"{QUICKSTART_MODEL} --lr 1e-3 --split 98,1,1 --train-iters 100000 --log-interval 10"
EXPERTS = f"""{MODEL} --num-layers 4 --num-experts 8 --moe-router-topk 2
--moe-ffn-hidden-size 512 --moe-aux-loss-coeff 1e-2 --moe-balance lagged
--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2"""
ESTIMATORS = ("micro", "rank", "half")
BETWEEN = "between"
"""Hooks are there, and no step is measured."""
RUN_STEPS = (300, 1_000, 10_000, 30_000)
"""Lengths of runs for the cost by default."""


def worker(args: argparse.Namespace) -> None:
    """One rank: rank 0 writes the rows of every estimator."""
    run_dir = str(args.output.parent)
    flags = [*model_of(args).split(), "--data-path", args.data_path, "--run-dir", run_dir]
    flags += ["--micro-batch-size", str(args.micro_batch_size), "--data-cache-path", run_dir]
    flags += ["--global-batch-size", str(args.batch_size)]
    with contextlib.redirect_stdout(io.StringIO()), open_job(flags) as job:
        results = {name: rows_of(job, name, args) for name in (*args.estimators, BETWEEN)}
    if int(os.environ["RANK"]) == 0:
        args.output.write_text(json.dumps(results))


def rows_of(job: Any, estimator: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Balanced rows of seconds per step with and without one estimator."""
    import torch.distributed as dist

    from copus_ext.controller.flags import CopusConfig
    from copus_ext.controller.gns_callback import GradientNoiseCallback
    from megatron.training.train.callbacks import Callbacks
    from megatron.training.train.reporting import Reporter

    own: dict[str, Any] = {"copus_gns_estimator": estimator}
    if estimator == BETWEEN:
        own = {"copus_gns_interval": 10**9}
    watch = GradientNoiseCallback(CopusConfig(copus=True, **own))
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


def model_of(args: argparse.Namespace) -> str:
    """Its flags."""
    return args.model or (EXPERTS if args.experts else MODEL)


def measured_share(steps: int, batch_size: int, tokens_per_sample: int) -> float:
    """Share of the steps of a run of one batch that the default measures."""
    observer, one = NoiseObserver(), Estimate(grad_norm_sq=1.0, grad_variance_trace=1.0)
    for step in range(1, steps + 1):
        consumed = step * batch_size
        if step % observer.interval_at(batch_size):
            observer.skip(consumed)
            continue
        observer.update(
            {CONTROL: one},
            estimator="micro",
            global_batch_size=batch_size,
            consumed_samples=consumed,
            tokens=batch_size * tokens_per_sample,
        )
    return observer.num_measured / steps


def cost_by_default(
    by_clock: dict[str, Any], estimator: str, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Share of measured steps and the time that measuring costs, 0.01 being a hundredth of the
    run's, for runs of several lengths.

    Args:
        by_clock: summaries of the ratios by clock and estimator.
        estimator: of the measured steps.
        args: of the command line.
    """
    words = model_of(args).split()
    length = int(words[words.index("--seq-length") + 1])
    found = []
    for steps in RUN_STEPS:
        share = measured_share(steps, args.batch_size, length)
        costs = {
            clock: share * of[estimator]["median_ratio"]
            + (1 - share) * of[BETWEEN]["median_ratio"]
            - 1
            for clock, of in by_clock.items()
        }
        found.append({"steps": steps, "measured_share": share, **costs})
    return found


def main() -> None:
    """Measures, prints and writes."""
    parser = arguments(__doc__, "noise_overhead.json", data=True)
    parser.add_argument("--model", help="flags of another model than the quickstart's")
    parser.add_argument("--experts", action="store_true", help="a mixture of experts")
    parser.add_argument("--estimators", nargs="+", default=ESTIMATORS, choices=ESTIMATORS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=30, help="rows of four blocks")
    parser.add_argument("--steps", type=int, default=4, help="of a block")
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    if "RANK" in os.environ:
        worker(args)
        return
    if args.experts and args.output == parser.get_default("output"):
        args.output = RESULTS / "noise_overhead_experts.json"
    before = origin()
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "rows.json"
        again = torchrun(args.ranks, "-m", "bench.noise_overhead", *sys.argv[1:], "--output", file)
        subprocess.run(again, check=True, cwd=ROOT)
        rows = json.loads(file.read_text())
    by_clock = {
        clock: {e: ratio_summary(r, f"{clock}_s", of="tap", to="plain") for e, r in rows.items()}
        for clock in ("wall", "cpu")
    }
    first = args.estimators[0]
    result = {
        "what": "seconds per step with the noise scale measured at every step / without",
        "model": " ".join(model_of(args).split()),
        **by_clock,
        "by_default": {"estimator": first, "runs": cost_by_default(by_clock, first, args)},
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
