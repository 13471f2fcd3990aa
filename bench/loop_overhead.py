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
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODEL = """--device cpu --num-layers 8 --hidden-size 256 --ffn-hidden-size 1024
--num-attention-heads 8 --seq-length 128 --max-position-embeddings 128 --position-embedding-type
rope --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
--attention-dropout 0 --hidden-dropout 0 --lr 1e-3 --tokenizer-type ByteLevelTokenizer --split
98,1,1 --eval-iters 0 --train-iters 100000 --use-distributed-optimizer --log-interval 10"""


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


def our_step(job: Any, reporter: Any) -> None:
    """One step as `loop.train` takes it, without evaluation and saving."""
    from megatron.training.step import train_step

    job.fire("on_train_step_start")
    info, _ = train_step(job)
    job.fire(
        "on_train_step_end",
        step=info,
        loss_dict={"lm loss": info.loss},
        grad_norm=info.grad_norm,
        skipped_iter=not info.updated,
    )
    reporter.record(info)


def block(step: Callable[[], None], num_steps: int) -> dict[str, float]:
    """Wall and CPU seconds per step of one block."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(num_steps):
        step()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"wall_s": wall / num_steps, "cpu_s": cpu / num_steps}


@contextlib.contextmanager
def open_job(args: argparse.Namespace, run_dir: str) -> Iterator[Any]:
    """A job of one rank with record and reporter, as `pretrain` makes it."""
    from megatron.training.guard import check_environment, set_process_defaults

    set_process_defaults()
    check_environment()
    import torch

    from megatron.training.arguments import parse_args, resolve
    from megatron.training.callbacks import Callbacks
    from megatron.training.device import use_device
    from megatron.training.parallel import init_distributed
    from megatron.training.pretrain import _tokenizer_flags, build_job, open_run, tear_down
    from megatron.training.settle import settle
    from megatron.training.state import TrainState
    from megatron.training.tokenizer import build_tokenizer

    torch.set_num_threads(1)
    batch = ["--micro-batch-size", args.micro_batch_size, "--global-batch-size", args.batch_size]
    places = ["--data-path", args.data_path, "--run-dir", run_dir, "--data-cache-path", run_dir]
    config = resolve(parse_args([*MODEL.split(), *map(str, batch), *places]), 1)
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(ranks)
    with use_device("cpu", local_rank=0, backend=config.parallel.distributed_backend) as device:
        init_distributed(device, timeout_minutes=10)
        tokenizer = build_tokenizer(**_tokenizer_flags(config))
        config = settle(config, None, vocab_size=tokenizer.vocab_size)
        state = TrainState()
        with open_run(config, None, state) as tracker:
            job = build_job(config, None, state, tokenizer, device, Callbacks(()), tracker)
            yield job
            tear_down(job)
        torch.distributed.destroy_process_group()


def measure(args: argparse.Namespace) -> list[dict[str, dict[str, float]]]:
    """Rows of four blocks in balanced order, the two of a side averaged; drops the warm-up."""
    rows = []
    with (
        tempfile.TemporaryDirectory() as run_dir,
        contextlib.redirect_stdout(io.StringIO()),
        open_job(args, run_dir) as job,
    ):
        from megatron.training.reporting import Reporter

        sides = {
            "ours": functools.partial(our_step, job, Reporter(job)),
            "bare": functools.partial(bare_step, job),
        }
        for step in sides.values():
            block(step, 2)
        for _ in range(args.blocks):
            order = ("ours", "bare", "bare", "ours")
            blocks = [(name, block(sides[name], args.steps)) for name in order]
            rows.append({name: _mean([b for side, b in blocks if side == name]) for name in sides})
    return rows


def _mean(blocks: list[dict[str, float]]) -> dict[str, float]:
    return {clock: statistics.fmean(b[clock] for b in blocks) for clock in blocks[0]}


def summary(rows: list[dict[str, dict[str, float]]], clock: str) -> dict[str, float]:
    """Median of ours / bare over the rows, its 95 % interval (order statistics, binomial) and the
    quartiles."""
    ratios = sorted(row["ours"][clock] / row["bare"][clock] for row in rows)
    low, middle, high = statistics.quantiles(ratios, n=4)
    num = len(ratios)
    # The largest k with P(Binomial(n, 1/2) < k) <= 2.5 %: the median lies between the k-th smallest
    # and the k-th largest with at least 95 %.
    rank = max(
        (k for k in range(1, num // 2 + 1) if _binomial_below(k, num) <= 0.025),
        default=1,
    )
    medians = {
        f"{side}_{clock}": statistics.median(r[side][clock] for r in rows)
        for side in ("ours", "bare")
    }
    return {
        "median_ratio": middle,
        "median_low_95": ratios[rank - 1],
        "median_high_95": ratios[num - rank],
        "quartile_1": low,
        "quartile_3": high,
        **medians,
    }


def _binomial_below(k: int, num: int) -> float:
    return sum(math.comb(num, i) for i in range(k)) / 2**num


def main() -> int:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-path", required=True, help="prefix of an indexed data set")
    parser.add_argument("--blocks", type=int, default=40, help="rows of four blocks")
    parser.add_argument("--steps", type=int, default=2, help="of a block")
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/results/loop_overhead.json")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(ROOT))
    load_before = os.getloadavg()[0]
    rows = measure(args)
    commit = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    result = {
        "what": "seconds per step, our loop / bare megatron-core schedule, per row of four blocks",
        "wall": summary(rows, "wall_s"),
        "cpu": summary(rows, "cpu_s"),
        "rows": args.blocks,
        "steps_of_a_block": args.steps,
        "global_batch_size": args.batch_size,
        "micro_batch_size": args.micro_batch_size,
        "ranks": 1,
        "nproc": os.cpu_count(),
        "load_average_before": load_before,
        "load_average_after": os.getloadavg()[0],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": subprocess.run(commit, capture_output=True, text=True).stdout.strip(),
        "python": sys.version.split()[0],
        "versions": {name: version(name) for name in ("torch", "megatron-core", "numpy")},
        "per_row": rows,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "per_row"}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
