"""B7: what the loop costs beside a bare megatron-core schedule on the same model and data.

    python bench/loop_overhead.py --data-path runs/quickstart/data/stdlib_text_document

Both sides work on one job in one process, in blocks of steps in the order ours, bare, bare, ours,
so that drift cancels: `train_step` with events, reporting and record, against the schedule,
optimizer and scheduler called directly. Both read the same stream of batches. Writes
docs/results/loop_overhead.json; see docs/results.md. CPU, one rank, nothing else running.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jobs import batch_flags, open_job, step_of_loop
from support import QUICKSTART_MODEL, RESULTS, block, mean, open_source, origin, ratio_summary

MODEL = f"""{QUICKSTART_MODEL} --device cpu --lr 1e-3 --split 98,1,1 --train-iters 100000
--log-interval 10"""


def bare_step(job: Any) -> None:
    """One step as a minimal script on megatron-core would take it: no events, counters, record,
    agreed stop or seeding."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    size = job.config.batch.initial_global_batch_size
    mbs = job.config.batch.micro_batch_size
    batches = job.train_data.read(
        consumed_samples=job.state.consumed_samples,
        global_batch_size=size,
        micro_batch_size=mbs,
        dp_rank=0,
        dp_size=1,
    )
    for chunk in job.model.chunks:
        chunk.zero_grad_buffer()
    job.optimizer.zero_grad()

    def loss_function(mask: torch.Tensor, output: torch.Tensor) -> tuple:
        total = torch.sum(output.float().reshape(-1) * mask.reshape(-1))
        return total, mask.sum().to(torch.int), {"lm loss": total.detach()}

    def forward(data: Iterator[dict[str, torch.Tensor]], chunk: Any) -> tuple:
        batch = next(data)
        output = chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return output, functools.partial(loss_function, batch["loss_mask"])

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=batches,
        model=job.model.chunks,
        num_microbatches=size // mbs,
        seq_length=job.config.batch.seq_length,
        micro_batch_size=mbs,
        forward_only=False,
    )
    job.optimizer.step()
    job.scheduler.step(increment=size)
    job.state.consumed_samples += size


def measure(args: argparse.Namespace) -> list[dict[str, dict[str, float]]]:
    """Rows of four blocks in balanced order, the two of a side averaged; drops the warm-up."""
    rows = []
    with tempfile.TemporaryDirectory() as run_dir, contextlib.redirect_stdout(io.StringIO()):
        places = ["--data-path", args.data_path, "--run-dir", run_dir, "--data-cache-path", run_dir]
        with open_job([*MODEL.split(), *batch_flags(args), *places]) as job:
            from megatron.training.train.reporting import Reporter

            sides = {
                "ours": functools.partial(step_of_loop, job, Reporter(job)),
                "bare": functools.partial(bare_step, job),
            }
            for step in sides.values():
                block(step, 2)
            for _ in range(args.blocks):
                order = ("ours", "bare", "bare", "ours")
                blocks = [(name, block(sides[name], args.steps)) for name in order]
                rows.append({name: mean([b for s, b in blocks if s == name]) for name in sides})
    return rows


def main() -> int:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-path", required=True, help="prefix of an indexed data set")
    parser.add_argument("--blocks", type=int, default=40, help="rows of four blocks")
    parser.add_argument("--steps", type=int, default=2, help="of a block")
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--output", type=Path, default=RESULTS / "loop_overhead.json")
    args = parser.parse_args()
    open_source()
    before = origin()
    rows = measure(args)
    result = {
        "what": "seconds per step, our loop / bare megatron-core schedule, per row of four blocks",
        "wall": ratio_summary(rows, "wall_s", of="ours", to="bare"),
        "cpu": ratio_summary(rows, "cpu_s", of="ours", to="bare"),
        "rows": args.blocks,
        "steps_of_a_block": args.steps,
        "global_batch_size": args.batch_size,
        "micro_batch_size": args.micro_batch_size,
        "ranks": 1,
        **before,
        "per_row": rows,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "per_row"}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
