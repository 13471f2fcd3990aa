"""B2: what measuring the noise scale costs.

    python bench/noise_overhead.py --data-path runs/quickstart/data/stdlib_text_document

Two ranks with data parallelism step one job in blocks in the order tap, plain, plain, tap: with the
controller measuring and recording every step, and without any of its hooks. Once per estimator.
Writes docs/results/noise_overhead.json; see docs/results.md. One rank per core, nothing else
running. On a machine with GPUs it runs there.
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

from jobs import batch_flags, open_job, step_of_loop
from support import (
    QUICKSTART_MODEL,
    RESULTS,
    block,
    mean,
    open_source,
    origin,
    ratio_summary,
    torchrun,
)

MODEL = f"{QUICKSTART_MODEL} --lr 1e-3 --split 98,1,1 --train-iters 100000 --log-interval 10"
ESTIMATORS = ("micro", "rank", "half")


def worker(args: argparse.Namespace) -> None:
    """One rank: writes the rows of every estimator."""
    results = {}
    run_dir = str(args.output.parent)
    places = ["--data-path", args.data_path, "--run-dir", run_dir, "--data-cache-path", run_dir]
    flags = [*(args.model or MODEL).split(), *batch_flags(args), *places]
    with contextlib.redirect_stdout(io.StringIO()), open_job(flags) as job:
        for estimator in args.estimators:
            results[estimator] = _rows(job, estimator, args)
    if int(os.environ["RANK"]) == 0:
        args.output.write_text(json.dumps(results))


def _rows(job: Any, estimator: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    import torch.distributed as dist

    from copus_ext.controller.flags import CopusConfig
    from copus_ext.controller.gns_callback import GradientNoiseCallback
    from megatron.training.train.callbacks import Callbacks
    from megatron.training.train.reporting import Reporter

    controller = GradientNoiseCallback(CopusConfig(copus=True, copus_gns_estimator=estimator))
    step = functools.partial(step_of_loop, job, Reporter(job))

    def side(name: str) -> dict[str, float]:
        if name == "tap":
            job.callbacks = Callbacks([controller])
            controller.on_setup_start(job.context)
        dist.barrier()
        seconds = block(step, args.steps)
        if name == "tap":
            controller.on_train_end(job.context)
            job.callbacks = Callbacks(())
        return seconds

    rows = []
    for name in ("tap", "plain"):
        side(name)
    for _ in range(args.blocks):
        blocks = [(name, side(name)) for name in ("tap", "plain", "plain", "tap")]
        rows.append({s: mean([b for t, b in blocks if t == s]) for s in ("tap", "plain")})
    return rows


def main() -> int:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-path", required=True, help="prefix of an indexed data set")
    parser.add_argument("--model", help="flags of another model than the quickstart's")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--estimators", nargs="+", choices=ESTIMATORS, default=ESTIMATORS)
    parser.add_argument("--blocks", type=int, default=30, help="rows of four blocks")
    parser.add_argument("--steps", type=int, default=4, help="of a block")
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--output", type=Path, default=RESULTS / "noise_overhead.json")
    args = parser.parse_args()
    open_source()
    if "RANK" in os.environ:
        worker(args)
        return 0
    before = origin()
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "rows.json"
        again = [a for a in sys.argv[1:] if a != str(args.output) and a != "--output"]
        subprocess.run(
            torchrun(args.ranks, Path(__file__).resolve(), *again, "--output", file), check=True
        )
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
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "per_row"}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
