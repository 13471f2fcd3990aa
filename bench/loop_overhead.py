"""What does the training loop cost beside a bare megatron-core schedule?

    python -m bench.loop_overhead --data-path runs/quickstart/data/stdlib_text_document

Both sides work on one job in one process, in balanced blocks of steps: `train_step` with events,
reporting and record, against the schedule, optimizer and scheduler called directly. Both read the
same stream of batches. Writes docs/results/loop_overhead.json. CPU, one rank, nothing else running.
"""

from __future__ import annotations

import contextlib
import functools
import io
import tempfile
from collections.abc import Iterator
from typing import Any

from bench.support import (
    QUICKSTART_MODEL,
    arguments,
    balanced_rows,
    block,
    open_job,
    origin,
    ratio_summary,
    step_of_loop,
    write,
)

MODEL = f"""{QUICKSTART_MODEL} --device cpu --lr 1e-3 --split 98,1,1 --train-iters 100000
--log-interval 10 --micro-batch-size 4 --global-batch-size 8"""


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


def measure(data: str, blocks: int, steps: int) -> list[dict[str, dict[str, float]]]:
    """Balanced rows of seconds per step."""
    with tempfile.TemporaryDirectory() as run_dir, contextlib.redirect_stdout(io.StringIO()):
        places = ["--data-path", data, "--run-dir", run_dir, "--data-cache-path", run_dir]
        with open_job([*MODEL.split(), *places]) as job:
            from megatron.training.train.reporting import Reporter

            ours = functools.partial(step_of_loop, job, Reporter(job))
            bare = functools.partial(bare_step, job)
            sides = {
                "ours": functools.partial(block, ours, steps),
                "bare": functools.partial(block, bare, steps),
            }
            return balanced_rows(sides, blocks)


def main() -> None:
    """Measures, prints and writes."""
    parser = arguments(__doc__, "loop_overhead.json", data=True)
    parser.add_argument("--blocks", type=int, default=40, help="rows of four blocks")
    parser.add_argument("--steps", type=int, default=2, help="of a block")
    args = parser.parse_args()
    before = origin()
    rows = measure(args.data_path, args.blocks, args.steps)
    result = {
        "what": "seconds per step, our loop / bare megatron-core schedule, per row of four blocks",
        "wall": ratio_summary(rows, "wall_s", of="ours", to="bare"),
        "cpu": ratio_summary(rows, "cpu_s", of="ours", to="bare"),
        "rows": args.blocks,
        "steps_of_a_block": args.steps,
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "ranks": 1,
        **before,
        "per_row": rows,
    }
    write(args.output, result, hide=["per_row"])


if __name__ == "__main__":
    main()
