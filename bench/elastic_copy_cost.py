"""What do the copies of an elastic run cost while nothing is lost?

    flock /tmp/ranks.lock torchrun --nproc-per-node 2 -m bench.elastic_copy_cost --data-path
    runs/quickstart/data/stdlib_text_document

One job on two CPU ranks takes balanced blocks of steps with and without `PeerCopies`. A block with
has one copy, as at the default interval: each rank copies its shard and sends it to the other while
both train on. Writes the time and the memory to docs/results/elastic_copy_cost.json. It needs a
core per rank and nothing else running.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
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
from copus_ext.launch.options import COPY_INTERVAL

MODEL = f"""{QUICKSTART_MODEL} --device cpu --lr 1e-3 --split 98,1,1 --train-iters 100000
--log-interval 1000 --micro-batch-size 4 --global-batch-size 16"""


def measure(data: str, rows: int) -> dict[str, Any]:
    """Balanced rows of seconds per step, and bytes of the copies for each parameter."""
    from copus_ext.elastic.copies import HeldCopies, PeerCopies
    from copus_ext.elastic.messages import Generation, Member
    from megatron.training.train.callbacks import Callbacks
    from megatron.training.train.reporting import Reporter

    # The same for both ranks, whose parent is torchrun.
    run_dir = Path(tempfile.gettempdir()) / f"elastic-copy-cost-{os.getppid()}"
    with contextlib.redirect_stdout(io.StringIO()):
        places = ["--data-path", data, "--run-dir", str(run_dir)]
        with open_job([*MODEL.split(), *places, "--data-cache-path", str(run_dir)]) as job:
            members = (Member(0, 0), Member(1, 0))
            generation = Generation(number=1, members=members, store="", kind="start")
            # Nothing is lost here, and nobody joins.
            membership: Any = SimpleNamespace(is_over=False, has_lost=False)
            held = HeldCopies()
            copies = PeerCopies(held, membership, generation, interval=COPY_INTERVAL)
            copies.on_train_start(job.context)
            step = functools.partial(step_of_loop, job, Reporter(job))
            most = [0]

            def with_copies() -> dict[str, float]:
                job.callbacks = Callbacks([copies])

                def counted() -> None:
                    step()
                    most[0] = max(most[0], held.num_bytes)

                return block(counted, COPY_INTERVAL)

            def without() -> dict[str, float]:
                job.callbacks = Callbacks()
                return block(step, COPY_INTERVAL)

            found = balanced_rows({"copies": with_copies, "none": without}, rows)
            copies.close()
            shutil.rmtree(run_dir, ignore_errors=True)
            own = sum(
                piece.buffer.numel() for one in held.sets.values() for piece in one.pieces[:1]
            )
            parameters = own / 3
            return {
                "rows": found,
                "bytes_per_parameter_of_the_shard": held.num_bytes / parameters,
                "most_bytes_per_parameter_of_the_shard": most[0] / parameters,
                "parameters_of_the_shard": parameters,
            }


def main() -> None:
    """Measures; rank 0 prints and writes."""
    parser = arguments(__doc__, "elastic_copy_cost.json", data=True)
    parser.add_argument("--rows", type=int, default=6, help="rows of four blocks")
    args = parser.parse_args()
    before = origin()
    found = measure(args.data_path, args.rows)
    if os.environ["RANK"] == "0":
        rows = found.pop("rows")
        result = {
            "what": "seconds per step with copies / without, per row of four blocks",
            "wall": ratio_summary(rows, "wall_s", of="copies", to="none"),
            "cpu": ratio_summary(rows, "cpu_s", of="copies", to="none"),
            "copy_interval": COPY_INTERVAL,
            **found,
            **before,
            "per_row": rows,
        }
        write(args.output, result, hide=["per_row"])


if __name__ == "__main__":
    main()
