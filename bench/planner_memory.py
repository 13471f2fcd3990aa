"""Is the predicted peak of memory right on this machine?

    python -m bench.planner_memory [--cases N]

Small models train on 1, 2 and 4 CPU ranks under several layouts; `worker_memory.py` of the tests
says what is counted. Writes docs/results/planner_memory.json.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from bench.support import arguments, launch, origin, write
from tests.distributed.worker_memory import CASES


def main() -> None:
    """Runs the cases one after the other, prints and writes."""
    parser = arguments(__doc__, "planner_memory.json")
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first so many")
    args = parser.parse_args()
    results, errors = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.cases):
            file = Path(folder) / f"{number}.json"
            launch(CASES[number][0], "-m", "tests.distributed.worker_memory", str(number), file)
            result = json.loads(file.read_text())
            own = [r["predicted_bytes"] / r["measured_bytes"] - 1 for r in result["ranks"]]
            results.append({**result, "errors": own})
            errors += own
            shown = ", ".join(f"{100 * e:+.1f} %" for e in own)
            print(f"{result['configuration']} on {result['world_size']}: {shown}", flush=True)
    record = {
        "what": "predicted over measured peak bytes of torch's allocator on CPU ranks, minus 1",
        "mean_abs_error": sum(map(abs, errors)) / len(errors),
        "worst_abs_error": max(map(abs, errors)),
        "cases": results,
        **origin(),
    }
    write(args.output, record, hide=["cases"])


if __name__ == "__main__":
    main()
