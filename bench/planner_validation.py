"""What does `copus validate-planner` say of published step times?

    python -m bench.planner_validation

Writes the public tables of bench/data to runs/planner_validation/, in the columns of that command.
Judges each with the constants that ship: without any measured time, and with two of each group. The
constants were fitted on vTrain's and Megatron-LM's rows, but not on the other two tables. Writes
docs/results/planner_validation.json.
"""

from __future__ import annotations

from typing import Any

from bench.planner_tables import read, tables
from bench.support import arguments, origin, write
from copus_ext.planner import validation


def main() -> None:
    """Writes the tables, judges them, prints and writes the figures."""
    args = arguments(__doc__, "planner_validation.json").parse_args()
    found: dict[str, Any] = {}
    for name in tables():
        runs = read(name)
        found[name] = {}
        for known in (0, 2):
            result = validation.judge(runs, validation.predict(runs, num_known=known))
            groups = result["groups"].values()
            worst = max((g["mean"] for g in groups if g["mean"] is not None), default=None)
            found[name][f"known_{known}"] = {**result["in_all"], "worst_group_mean": worst}
    write(args.output, {"tables": found, "origin": origin()})


if __name__ == "__main__":
    main()
