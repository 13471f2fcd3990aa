"""Holds the planner against measured step times of your own.

    copus validate-planner FILE.csv [--known 2] [--json]

Every line of the file is a run: its model, cluster and configuration, and its seconds of a step or
that it ran out of memory. docs/validate-planner.md describes the columns. Runs of one group are
compared with each other. Exit codes: 0, 2 wrong flags, 5 the file cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from megatron.trainer.common.program import CommandParser, tell

NAME = "copus validate-planner"


def parser() -> argparse.ArgumentParser:
    p = CommandParser(
        prog=NAME,
        description="Holds the planner against measured step times.",
    )
    p.add_argument("file", type=Path, metavar="FILE.csv", help="measured runs, one a line")
    words = "correct each group by the times of this many of its runs (default: none)"
    p.add_argument("--known", type=int, default=0, metavar="N", help=words)
    p.add_argument("--json", action="store_true", help="every figure as JSON")
    return p


def table(result: dict[str, Any]) -> str:
    """The figures as text, the worst group last."""
    wide = max([40, *map(len, result["groups"])])
    lines = [
        f"{'group':{wide}} {'runs':>5} {'error':>7} {'bias':>7} {'order':>6} {'regret':>7}  best"
    ]
    groups = sorted(result["groups"].items(), key=lambda item: item[1]["mean"] or 0.0)
    for name, g in groups:
        best = {None: "", True: "fits", False: "REFUSED"}[g["best_fits"]]
        lines.append(
            f"{name:{wide}} {g['runs']:>5} {_percent(g['mean']):>7} {_percent(g['bias']):>7} "
            f"{_number(g['kendall_tau']):>6} {_percent(g['regret']):>7}  {best}"
        )
    a = result["in_all"]
    lines += ["", f"{a['runs']} runs in {a['groups']} groups"]
    for text, value in (
        ("mean error of a step time", _percent(a.get("mean"))),
        ("median error", _percent(a.get("median"))),
        ("measured within one stated standard deviation", _percent(a.get("within_one_sd"))),
        ("order of a group (Kendall's tau), mean", _number(a["mean_kendall_tau"])),
        ("order, worst group", _number(a["worst_kendall_tau"])),
        ("loss by taking the best predicted, mean", _percent(a["mean_regret"])),
        ("loss, worst group", _percent(a["worst_regret"])),
        ("groups whose best run is a candidate", _percent(a["best_fits"])),
        ("groups whose best run is one, or may fit", _percent(a["best_shown"])),
        ("runs refused for memory that ran", _percent(a["false_alarms"])),
        ("runs out of memory that were refused", _percent(a["out_of_memory_recall"])),
        ("runs out of memory called sure to fit", _percent(a["failed_but_sure_to_fit"])),
    ):
        lines.append(f"  {text:48} {value or 'unknown'}")
    if "peak_mean" in a:
        for text, name in (
            ("mean error of a peak of memory", "peak_mean"),
            ("median error", "peak_median"),
            ("bias", "peak_bias"),
            ("measured within one stated standard deviation", "peak_within_one_sd"),
        ):
            lines.append(f"  {text:48} {_percent(a[name])}")
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def main(argv: list[str] | None = None) -> int:
    from copus_ext.cost_model.spec_file import SpecError
    from copus_ext.extras.planner_validation import validation

    args = parser().parse_args(argv)
    if args.known < 0:
        tell(NAME, f"error: --known {args.known} must be at least 0")
        return 2
    try:
        runs = validation.read_table(args.file)
        result = validation.judge(runs, validation.predict(runs, num_known=args.known))
    except (OSError, SpecError, UnicodeDecodeError) as error:
        tell(NAME, f"error: {args.file}: {error}")
        return 5
    print(json.dumps(result, indent=1) if args.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
