"""How long does a save hold training up, with --async-save and without?

    python -m bench.save_pause      # about 3 minutes on two cores with nothing else running

Two stages on two ranks step a model of 34M parameters. Every save is timed until training goes on,
and so are the steps that follow while it is being written. Each round has plain steps, an
asynchronous save and a synchronous one. Writes docs/results/save_pause.json.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.support import (
    QUICKSTART_MODEL,
    arguments,
    launch,
    make_dataset,
    open_job,
    origin,
    step_of_loop,
    write,
)

MODEL = f"""{QUICKSTART_MODEL} --hidden-size 512 --ffn-hidden-size 2048 --lr 1e-3
--train-iters 1000 --log-interval 100 --micro-batch-size 2 --global-batch-size 8
--pipeline-model-parallel-size 2"""
WAYS = {"async": ["--async-save"], "sync": []}
RANKS, ROUNDS, STEPS = 2, 6, 4


def worker(args: argparse.Namespace) -> None:
    folder = args.output.parent
    flags = [*MODEL.split(), "--run-dir", str(folder / "run"), "--data-path", args.data_path]
    rows = rounds_of([*flags, *WAYS[args.way]], folder / args.way)
    if int(os.environ["RANK"]) == 0:
        args.output.write_text(json.dumps(rows))


def rounds_of(flags: list[str], save: Path) -> list[dict[str, float]]:
    """Seconds of plain steps, of the pause for a save, and of the steps after it."""
    import torch.distributed as dist

    from megatron.trainer.train.reporting import Reporter

    def timed(act: Any) -> float:
        dist.barrier()
        started = time.perf_counter()
        act()
        return time.perf_counter() - started

    with contextlib.redirect_stdout(io.StringIO()), open_job([*flags, "--save", str(save)]) as job:
        reporter, rows = Reporter(job), []

        def step() -> None:
            step_of_loop(job, reporter)

        for _ in range(STEPS):
            step()
        for _ in range(ROUNDS):
            plain = statistics.median(timed(step) for _ in range(STEPS))
            pause = timed(lambda: job.save(must=False))
            after = [timed(step) for _ in range(2)]
            job.checkpointer.finish()
            rows.append(
                {"step_s": plain, "pause_s": pause, "next_s": after[0], "third_s": after[1]}
            )
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__, "save_pause.json")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--data-path", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.way is not None:
        worker(args)
        return
    with tempfile.TemporaryDirectory() as name:
        path, rows = Path(name) / "rows.json", {}
        own = ["--data-path", make_dataset(Path(name) / "stdlib"), "--output", str(path)]
        for way in WAYS:
            launch(RANKS, "-m", "bench.save_pause", "--way", way, *own)
            rows[way] = json.loads(path.read_text())
    medians = {
        way: {key: statistics.median(row[key] for row in some) for key in some[0]}
        for way, some in rows.items()
    }
    write(args.output, {**origin(), "medians": medians, "rounds": rows})


if __name__ == "__main__":
    main()
