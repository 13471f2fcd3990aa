"""How often does `scripts/quickstart.sh` end ahead with --copus, and how long does it take?

    python -m bench.quickstart [--runs 10]      # about 90 s a run on two quiet cores

Runs the script as a user does, in a directory of its own, and keeps its last comparison: held-out
losses, seconds of training, and when the run with --copus had the loss of the plain one. A run is
ahead when it had that loss sooner. Writes docs/results/quickstart.json after each run.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from bench.support import ROOT, arguments, origin, write
from scripts.compare_runs import curve, seconds_to


def run_once(folder: Path) -> dict[str, float | None]:
    """Losses, seconds of training and of the whole command of one quickstart."""
    environment = dict(os.environ, QUICKSTART_DIR=str(folder))
    began = time.perf_counter()
    subprocess.run(
        ["bash", "scripts/quickstart.sh"],
        cwd=ROOT,
        env=environment,
        check=True,
        timeout=900,
        stdout=subprocess.DEVNULL,
    )
    seconds = time.perf_counter() - began
    plain, copus = curve(folder / "plain"), curve(folder)
    there = seconds_to(copus, plain[-1].loss)
    return {
        "plain_loss": plain[-1].loss,
        "copus_loss": copus[-1].loss,
        "plain_s": round(plain[-1].seconds, 2),
        "copus_s": round(copus[-1].seconds, 2),
        "copus_s_to_plain_loss": there if there is None else round(there, 2),
        "command_s": round(seconds, 1),
    }


def summary(rows: list[dict[str, float | None]]) -> dict[str, object]:
    """Runs that were ahead, the median of each figure, and the rows."""
    ahead = [
        r["copus_s_to_plain_loss"] is not None and r["copus_s_to_plain_loss"] < (r["plain_s"] or 0)
        for r in rows
    ]
    medians = {k: statistics.median(v for r in rows if (v := r[k]) is not None) for k in rows[0]}
    found = {"runs": len(rows), "ahead": sum(ahead), **medians}
    return {**origin(), **found, "rows": rows}


def main() -> None:
    parser = arguments(__doc__, "quickstart.json")
    parser.add_argument("--runs", type=int, default=10)
    args = parser.parse_args()
    rows: list[dict[str, float | None]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for i in range(args.runs):
            rows.append(run_once(Path(scratch) / str(i)))
            write(args.output, summary(rows), hide=["rows"])


if __name__ == "__main__":
    main()
