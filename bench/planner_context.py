"""How right is the planner of published runs whose samples ranks share?

    python -m bench.planner_context

Llama 3 8B on 8 H100 at 32k to 256k tokens (torchtitan), and 405B on 16,384 at 8k and 128k (arXiv
2407.21783), with the constants that ship, which have seen none of them. The model has no sharded
weights as both had; what it says of time is compared. Beside the whole error stands that of the
change from the shortest length of a model, in which its own speed falls out. Writes
docs/results/planner_context.json in seconds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.planner_tables import read
from bench.support import arguments, origin, write
from copus_ext.cost_model.step import step_time
from copus_ext.extras.planner_validation import validation
from copus_ext.planner.space import points_of, to_rows


def main() -> None:
    """Predicts, prints and writes."""
    args = arguments(__doc__, "planner_context.json").parse_args()
    runs = read("context_parallel")
    found = validation.predict(runs)
    firsts: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for run, predicted in zip(runs, found.step_s):
        assert run.step_s is not None
        c, ratio = run.configuration, float(predicted) / run.step_s
        first = firsts.setdefault(run.group, ratio)
        tokens = c.global_batch_size * run.model.seq_length / run.cluster.world_size
        table = to_rows(run.model, run.cluster, points_of([c]))
        parts = step_time(table, run.cluster.load_constants()).parts
        rows.append(
            {
                "model": run.group,
                "seq_length": run.model.seq_length,
                "configuration": str(c),
                "measured_tokens_per_s_per_gpu": tokens / run.step_s,
                "predicted_tokens_per_s_per_gpu": tokens / float(predicted),
                "error_of_step": ratio - 1,
                "error_of_change": ratio / first - 1,
                "parts": {name: float(x[0] / predicted) for name, x in parts.items() if x[0]},
            }
        )
    sizes = [abs(row["error_of_step"]) for row in rows]
    result = {
        "what": "step times of published runs with context parallelism, predicted without any",
        "mean_error": float(np.mean(sizes)),
        "worst_error": float(np.max(sizes)),
        "rows": rows,
        **origin(),
    }
    write(args.output, result)


if __name__ == "__main__":
    main()
