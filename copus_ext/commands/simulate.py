"""Compares policies on a virtual clock: which one reaches a loss first.

python tools/simulate.py --preset 8xh100-3b --policies static,cbs,adaptive --seeds 3

The controller decides, the planner or a profile gives the throughputs, and noise and loss follow
known curves. Exit codes: 0 done, 2 wrong usage, 5 a file cannot be used.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from megatron.training.common.program import (
    other_command,
    program_name,
    tell,
    with_hint,
)

_MOST_SEEDS = 10_000
TRUTHS = ("goodput", "lr_model", "copus")
"""Objectives that may be the simulated truth: those whose scale was checked."""


_NOISY_QUADRATIC = "noisy_quadratic"


class UsageProblem(Exception):
    """Wrong flags or values."""


class InputProblem(Exception):
    """A file that cannot be used."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageProblem(with_hint(self, message))


def parser() -> argparse.ArgumentParser:
    p = _Parser(
        prog=program_name("simulate.py"),
        description=(__doc__ or "").splitlines()[0],
        allow_abbrev=False,
    )
    p.add_argument("--preset", help="machine, model and training; --list shows them")
    p.add_argument("--list", action="store_true", help="list presets and policies, and stop")
    p.add_argument("--policies", help="such as static,cbs,adaptive_goodput_forward; default: all")
    p.add_argument("--seeds", type=int, default=3, help="how many; each draws other estimates")
    p.add_argument("--first-seed", type=int, default=0)
    p.add_argument("--trajectory", type=Path, help="noise scale over progress: JSON, or a journal")
    p.add_argument("--profile", type=Path, help=f"times from {other_command('profile_layouts.py')}")
    p.add_argument(
        "--switch-cost-s",
        type=float,
        help="seconds that every change of layout takes; default: predicted from bytes and links",
    )
    p.add_argument(
        "--assumed-cost-s",
        type=float,
        help="seconds that the controller predicts for each; default: as in a real run",
    )
    p.add_argument(
        "--noise-scale-multiplier",
        type=float,
        help="critical batch size over noise scale, as the policies assume; default: their own",
    )
    p.add_argument(
        "--true-noise-scale-multiplier",
        type=float,
        help="the true one: critical batch size over the measured noise scale; default: 8",
    )
    p.add_argument(
        "--truth",
        choices=(*TRUTHS, _NOISY_QUADRATIC),
        help="true worth of a sample: goodput: optimal learning rate at every batch; lr_model: "
        "only at the first batch; copus: progress also proportional to sqrt(batch). "
        "noisy_quadratic: rate, length and annealing count too",
    )
    p.add_argument("--speed-error", type=float, help="relative error of the speeds known before")
    p.add_argument("--gns-interval", type=int, help="steps between measurements of the noise")
    p.add_argument("--journal", type=Path, help="a directory for the decisions of a single policy")
    p.add_argument("--output", type=Path, metavar="FILE.json")
    p.add_argument("--figure", type=Path, metavar="FILE.svg")
    return p


def scenario_of(args: argparse.Namespace) -> Any:
    from copus_ext.planner.request import timings_of
    from copus_ext.simulate.noise_trajectory import TrajectoryError, load
    from copus_ext.simulate.scenario import preset

    if args.preset is None:
        raise UsageProblem("give --preset; --list shows them")
    scenario = preset(args.preset)
    if args.true_noise_scale_multiplier is not None:
        scenario = scenario.recalibrated(args.true_noise_scale_multiplier)
    values: dict[str, Any] = {
        "switch_cost_s": args.switch_cost_s,
        "assumed_cost_s": args.assumed_cost_s,
        "speed_error": args.speed_error,
        "gns_interval": args.gns_interval,
    }
    values = {name: value for name, value in values.items() if value is not None}
    if args.truth not in (None, _NOISY_QUADRATIC):
        values["truth"] = dataclasses.replace(scenario.truth, objective=args.truth)
    if args.profile is not None:
        found = timings_of(args.profile, scenario.planner.model, scenario.cluster)
        values["timings"] = tuple(found)
    scenario = scenario.change(**values)
    if args.trajectory is not None:
        try:
            scenario = scenario.follow(load(args.trajectory, scenario.truth))
        except TrajectoryError as error:
            raise InputProblem(f"--trajectory {error}") from error
    return scenario.with_noisy_quadratic() if args.truth == _NOISY_QUADRATIC else scenario


def check(args: argparse.Namespace) -> None:
    """Refuses values that make no sense."""
    if not 1 <= args.seeds <= _MOST_SEEDS:
        raise UsageProblem(f"--seeds {args.seeds} must be from 1 to {_MOST_SEEDS}")
    if args.first_seed < 0:
        raise UsageProblem(f"--first-seed {args.first_seed} must be at least 0")
    if args.gns_interval is not None and args.gns_interval < 1:
        raise UsageProblem(f"--gns-interval {args.gns_interval} must be at least 1")
    numbers = {
        "--switch-cost-s": (args.switch_cost_s, 0.0),
        "--assumed-cost-s": (args.assumed_cost_s, 0.0),
        "--speed-error": (args.speed_error, 0.0),
        "--noise-scale-multiplier": (args.noise_scale_multiplier, 1e-6),
        "--true-noise-scale-multiplier": (args.true_noise_scale_multiplier, 1e-6),
    }
    for flag, (value, least) in numbers.items():
        if value is not None and not least <= value < 1e9:
            raise UsageProblem(f"{flag} {value:g} must be a number from {least:g} on")
    if args.speed_error is not None and args.speed_error >= 1:
        raise UsageProblem(f"--speed-error {args.speed_error:g} must be below 1")


def listed() -> int:
    from copus_ext.simulate.contenders import ORACLE, contenders
    from copus_ext.simulate.scenario import preset, presets

    for name in presets():
        s = preset(name)
        print(f"{name}: {s.model} on {s.cluster.world_size} x {s.cluster.gpu.name}; ", end="")
        print(s.about["links"])
        print(f"    {s.about['source']}")
    print("policies:", ", ".join([*contenders(preset(presets()[0]).batches), ORACLE]))
    return 0


def answer(args: argparse.Namespace) -> int:
    """Simulates, prints and writes; returns the exit code."""
    from tqdm import tqdm

    from copus_ext.controller.decision_log import DecisionLog
    from copus_ext.planner.report import console_for
    from copus_ext.simulate import compare, report
    from copus_ext.simulate.contenders import chosen, contenders
    from copus_ext.simulate.run import simulate

    if args.list:
        return listed()
    check(args)
    scenario = scenario_of(args)
    everybody = contenders(scenario.batches, noise_scale_multiplier=args.noise_scale_multiplier)
    names = None if args.policies is None else [n.strip() for n in args.policies.split(",")]
    who = chosen(everybody, names)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    if args.journal is not None:
        acting = [c for c in who if c.flags is not None]
        if len(acting) != 1:
            raise UsageProblem("--journal goes with one policy of --policies that decides")
        if not args.journal.is_dir():
            raise UsageProblem(f"--journal {args.journal} is not a directory")
        simulate(scenario, acting[0], seed=args.first_seed, journal=DecisionLog(args.journal))
    baselines = [c for c in everybody.values() if c.is_baseline]
    tqdm.monitor_interval = 0
    total = len({c.name for c in [*who, *baselines]}) * len(seeds)
    with tqdm(total=total, unit="run", delay=2, leave=False) as bar:
        result = compare.compare(
            scenario, who, seeds=seeds, baselines=baselines, done=lambda name: _count(bar)
        )
    report.show(result, console_for(sys.stdout))
    if args.output is not None:
        _write(args.output, "--output", json.dumps(result.to_json(), indent=1) + "\n")
    if args.figure is not None:
        try:
            report.draw(result, args.figure)
        except ImportError:
            raise UsageProblem('--figure needs matplotlib; pip install -e ".[bench]"') from None
        except (OSError, ValueError) as error:
            raise UsageProblem(f"--figure {args.figure}: {error}") from error
    return 0


def _count(bar: Any) -> None:
    bar.update()


def _write(path: Path, flag: str, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UsageProblem(f"{flag} {path}: {error}") from error


def main(argv: list[str] | None = None) -> int:
    """Reads flags, answers, and turns problems into one line and an exit code."""
    from copus_ext.cost_model.spec_file import SpecError
    from copus_ext.planner import request
    from copus_ext.simulate.contenders import UnknownPolicy
    from copus_ext.simulate.speeds import NoSpeed

    usage = (UsageProblem, UnknownPolicy, SpecError, request.UsageProblem)
    try:
        return answer(parser().parse_args(argv))
    except usage as error:
        tell("simulate.py", f"error: {error}")
        return 2
    except (InputProblem, request.InputProblem, NoSpeed) as error:
        tell("simulate.py", f"error: {error}")
        return 5
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
