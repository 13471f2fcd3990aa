"""Trains the same run under every layout of four ranks, in the same processes.

worker_layouts.py OUTPUT_DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.helpers.jobs import join, layout_flags, run

SHARDED = "--use-distributed-optimizer"
OVERLAP = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000"
CASES = [
    (1, 1, 1, ""),
    (1, 1, 1, OVERLAP),
    (2, 1, 1, SHARDED),
    (2, 1, 1, "--sequence-parallel"),
    (4, 1, 1, ""),
    (1, 2, 1, SHARDED),
    (1, 4, 1, ""),
    (2, 2, 1, "--sequence-parallel"),
    (1, 2, 2, ""),
    (1, 2, 2, f"{SHARDED} --overlap-grad-reduce"),
    (2, 2, 2, f"{SHARDED} --sequence-parallel"),
]


def main(output: Path) -> None:
    """Writes losses, gradient norms and resources of every case."""
    import psutil
    import torch.distributed as dist

    join()
    rows = []
    for number, (tp, pp, vpp, more) in enumerate(CASES):
        flags = [*layout_flags(tp, pp, vpp), *more.split(), "--train-iters", "20"]
        steps = run(flags, output / str(number))
        process = psutil.Process()
        rows.append(
            {
                "losses": [step["losses"]["lm loss"] for step in steps],
                "grad_norms": [step["grad_norm"] for step in steps],
                "num_fds": process.num_fds(),
                "num_threads": process.num_threads(),
            }
        )
        if dist.get_rank() == 0:
            (output / "result.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
