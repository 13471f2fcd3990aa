"""Compares policies on a virtual clock: which one reaches a loss first.

    copus simulate --preset 8xh100-3b --policies static,cbs,adaptive --seeds 3

The controller decides, the planner gives the throughputs, and noise and loss follow known curves.
Exit codes: 0 done, 2 wrong usage, 3 nothing fits on the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.program import run_command
from megatron.trainer.config.arguments import Parser

_NAME = "copus simulate"
_MAX_SEEDS = 10_000


def parser() -> argparse.ArgumentParser:
    p = Parser(prog=_NAME, description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    p.add_argument("--preset", help="machine, model and training; --list shows them")
    p.add_argument("--list", action="store_true", help="list presets and policies, and stop")
    p.add_argument("--policies", help="such as static,cbs,adaptive; default: all")
    p.add_argument("--seeds", type=int, default=3, help="how many; each draws other estimates")
    p.add_argument("--first-seed", type=int, default=0)
    words = "seconds that every change of layout takes; default: predicted from bytes and links"
    p.add_argument("--relayout-cost-s", type=float, help=words)
    words = "true worth of a sample. progress: 1 / (1 + batch / critical batch size). "
    words += "noisy_quadratic: rate, length and annealing count, too"
    p.add_argument(
        "--truth", choices=("progress", "noisy_quadratic"), default="progress", help=words
    )
    p.add_argument("--journal", type=Path, help="a directory for the decisions of a single policy")
    p.add_argument("--output", type=Path, metavar="FILE.json")
    return p


def scenario_of(args: argparse.Namespace) -> Any:
    """What is simulated.

    Raises:
        UsageError: flags that make no sense.
        SpecError: no such preset.
    """
    from copus_ext.extras.simulate.scenario import NOISY_QUADRATIC, preset

    if args.preset is None:
        raise UsageError("give --preset; --list shows them")
    if not 1 <= args.seeds <= _MAX_SEEDS:
        raise UsageError(f"--seeds {args.seeds} must be from 1 to {_MAX_SEEDS}")
    if args.first_seed < 0:
        raise UsageError(f"--first-seed {args.first_seed} must be at least 0")
    cost_s = args.relayout_cost_s
    if cost_s is not None and not 0 <= cost_s < 1e9:
        raise UsageError(f"--relayout-cost-s {cost_s:g} must be a number from 0 on")
    scenario = preset(args.preset)
    if cost_s is not None:
        scenario = scenario.change(relayout_cost_s=cost_s)
    return scenario.with_noisy_quadratic() if args.truth == NOISY_QUADRATIC else scenario


def listed() -> int:
    from copus_ext.extras.simulate.contenders import contenders
    from copus_ext.extras.simulate.scenario import preset, presets

    for name in presets():
        s = preset(name)
        print(f"{name}: {s.model} on {s.cluster.world_size} x {s.cluster.gpu.name}; ", end="")
        print(f"{s.about['links']}\n    {s.about['source']}")
    print("policies:", ", ".join(contenders(preset(presets()[0]).batches)))
    return 0


def answer(args: argparse.Namespace) -> int:
    """Simulates, prints and writes; returns the exit code."""
    from tqdm import tqdm

    from copus_ext.controller.decision_log import DecisionLog
    from copus_ext.extras.simulate import compare, report
    from copus_ext.extras.simulate.contenders import chosen, contenders
    from copus_ext.extras.simulate.run import simulate
    from copus_ext.planner.report import console_for

    if args.list:
        return listed()
    scenario = scenario_of(args)
    everybody = contenders(scenario.batches)
    names = None if args.policies is None else [n.strip() for n in args.policies.split(",")]
    who = chosen(everybody, names)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    if args.journal is not None:
        acting = [c for c in who if c.flags is not None]
        if len(acting) != 1:
            raise UsageError("--journal goes with one policy of --policies that decides")
        try:
            args.journal.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--journal {args.journal}: {error.strerror}") from error
        simulate(scenario, acting[0], seed=args.first_seed, journal=DecisionLog(args.journal))
    baselines = [c for c in everybody.values() if c.is_baseline]
    tqdm.monitor_interval = 0
    total = len({c.name for c in [*who, *baselines]}) * len(seeds)
    with tqdm(total=total, unit="run", delay=2, leave=False) as bar:
        result = compare.compare(scenario, who, seeds=seeds, baselines=baselines, done=bar.update)
    report.show(result, console_for(sys.stdout))
    if args.output is not None:
        try:
            args.output.write_text(json.dumps(result.to_json(), indent=1) + "\n")
        except OSError as error:
            raise UsageError(f"--output {args.output}: {error}") from error
    return 0


def main(argv: list[str] | None = None) -> int:
    from copus_ext.cost_model.spec_file import SpecError
    from copus_ext.extras.simulate.contenders import UnknownPolicy

    def run() -> int:
        try:
            return answer(parser().parse_args(argv))
        except (UnknownPolicy, SpecError) as error:
            raise UsageError(str(error)) from error

    return run_command(_NAME, run)


if __name__ == "__main__":
    sys.exit(main())
