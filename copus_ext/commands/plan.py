"""Plans a training run before it is launched: which layout, will it fit, how fast.

python tools/plan.py --model gpt3-175b --cluster a100-80g:1024 --global-batch-size 1536

Exit codes: 0 every batch has a configuration, 2 wrong flags, 3 some batch has no legal one, 4 some
batch has legal ones but none fits, 5 an input file cannot be used.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import sys
import time
from pathlib import Path
from typing import Any

from copus_ext.planner.request import (
    InputProblem,
    UsageProblem,
    batches,
    cluster_of,
    is_number,
    model_of,
    parser,
    sizes,
    timings_of,
)
from megatron.training.common.program import close_output, tell

_PLOTTED = 200
"""Configurations of a batch that a figure looks at."""
_AT_ONCE = 16
"""Batches searched together: enough to share work, few enough for the memory."""


def planner_of(args: argparse.Namespace) -> Any:
    """The planner with all limits."""
    from copus_ext.cost_model.constants import Constants
    from copus_ext.planner.configuration import RECOMPUTE
    from copus_ext.planner.search import Planner
    from copus_ext.planner.space import Limits

    kinds = tuple(args.recompute.split(","))
    if not set(kinds) <= set(RECOMPUTE):
        raise UsageProblem(f"--recompute {args.recompute}: use some of {', '.join(RECOMPUTE)}")
    if not 0 <= args.memory_margin < 1:
        raise UsageProblem(f"--memory-margin {args.memory_margin} must be from 0 to below 1")
    if args.top < 1:
        raise UsageProblem(f"--top {args.top} must be at least 1")
    if args.rejected and (args.format == "flags" or args.explain is not None):
        raise UsageProblem("--rejected goes with a table or --json of a search; drop one")
    if args.cuts and (args.format == "flags" or args.explain is not None):
        raise UsageProblem("--cuts goes with a table or --json of a search; drop one")
    if args.micro_split and (args.format == "flags" or args.explain is not None):
        raise UsageProblem("--micro-split goes with a table or --json of a search; drop one")
    if args.order and args.format == "flags":
        raise UsageProblem("--order goes with a table, --json or --explain; drop --format flags")
    if args.uneven and (args.format == "flags" or args.explain is not None):
        raise UsageProblem("--uneven goes with a table or --json of a search; drop one")
    if args.uneven and args.order:
        raise UsageProblem("--uneven searches the order of nodes, too; drop --order")
    if args.hostfile is not None and not (args.order or args.uneven):
        raise UsageProblem("--hostfile goes with --order or --uneven; add one")
    constants = None
    if args.constants is not None:
        try:
            constants = Constants.load(args.constants)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputProblem(f"--constants {args.constants}: {error}") from error
    model = model_of(args)
    limits = Limits(
        fixed=sizes("--fix", args.fix),
        largest=sizes("--max", args.max),
        recompute=kinds,
        cross_node_tp=args.allow_cross_node_tp,
        round_down=args.decrease_batch_size_if_needed,
    )
    cluster = cluster_of(args)
    if args.order and cluster.links is None:
        raise UsageProblem('--order needs measured "links" in --cluster FILE.json; add them')
    if args.uneven and cluster.links is None and not cluster.nodes:
        raise UsageProblem(
            '--uneven needs "links" or "nodes" in --cluster FILE.json; without, all nodes are alike'
        )
    hosts = cluster.links.hosts if cluster.links is not None else ()
    if args.hostfile is not None and not hosts:
        raise UsageProblem('--hostfile needs "hosts", the names of the nodes, in "links"; add them')
    return Planner(
        model,
        cluster,
        timings=timings_of(args.profile, model, cluster) if args.profile is not None else (),
        constants=constants,
        limits=limits,
        memory_margin=args.memory_margin,
    )


def explained(args: argparse.Namespace, planner: Any, batch: int) -> tuple[Any, int]:
    """What the configuration asked for gives, or why it is none; and the exit code."""
    from copus_ext.planner.configuration import RECOMPUTE, Configuration
    from copus_ext.planner.plan import Ranked
    from megatron.training.config.layout import Layout

    given = sizes("--explain", args.explain, ("recompute", "sp", "zero"))
    tp, pp, world = given.get("tp", 1), given.get("pp", 1), planner.cluster.world_size
    dp = world // (tp * pp)
    if world % (tp * pp) or given.get("dp", dp) != dp:
        raise UsageProblem(f"--explain {args.explain}: tp x pp x dp is not {world} GPUs")
    recompute, _, layers = given.get("recompute", "none").partition(":")
    if recompute not in RECOMPUTE or (recompute == "block") != is_number(layers):
        ways = ", ".join(f"{r}:LAYERS" if r == "block" else r for r in RECOMPUTE)
        raise UsageProblem(f"--explain {args.explain}: recompute is one of {ways}")
    if given.get("sp", str(int(tp > 1))) != str(int(tp > 1)):
        raise UsageProblem(
            f"--explain {args.explain}: sp goes with tp, which is {tp}; leave it out"
        )
    try:
        layout = Layout(tp=tp, pp=pp, vpp=given.get("vpp", 1), dp=dp)
    except ValueError as error:
        raise UsageProblem(f"--explain {args.explain}: {error}") from error
    configuration = Configuration(
        layout=layout,
        micro_batch_size=given.get("micro_batch", 1),
        global_batch_size=batch,
        recompute=recompute,
        recompute_num_layers=int(layers or 0),
        sequence_parallel=tp > 1,
        use_distributed_optimizer=given.get("zero", "1") != "0",
    )
    found = planner.explain(configuration)
    if isinstance(found, Ranked):
        return found, 0
    return found, 4 if found.code == "memory" else 3


def explain(args: argparse.Namespace, planner: Any, wanted: list[int]) -> int:
    """Prices the configuration asked for at every batch."""
    from copus_ext.planner import report

    answers = [explained(args, planner, batch) for batch in wanted]
    answers = [(ordered(args, planner, a), code) if code == 0 else (a, code) for a, code in answers]
    write_hosts(args, [a for a, code in answers if code == 0])
    if args.format == "json":
        records = [a.to_json(1) if code == 0 else a.to_json() for a, code in answers]
        _put(report.dump({"schema": report.EXPLAINED, "explained": records}), args.output)
    else:
        texts = [
            report.breakdown(a)
            if code == 0
            else f"{a.example}, global batch {b}: {a.code}: {a.detail}; {a.fix}"
            for (a, code), b in zip(answers, wanted)
        ]
        _put("\n\n".join(texts), args.output)
    return max(code for _, code in answers)


def ordered(args: argparse.Namespace, planner: Any, found: Any) -> Any:
    """The same answer with the order of nodes, if that is asked for."""
    from copus_ext.planner.placement.node_order import order_for

    if not args.order:
        return found
    order = order_for(planner.model, planner.cluster, found.configuration, planner.constants)
    return dataclasses.replace(found, order=order)


def write_hosts(args: argparse.Namespace, found: list[Any]) -> None:
    """The hosts in the order of the first answer, where a file is asked for."""
    from copus_ext.planner.placement.uneven_nodes import FittedLayout

    if args.hostfile is None or not found:
        return
    orders = [x.names if isinstance(x, FittedLayout) else list(x.order.hosts) for x in found]
    hosts = orders[0]
    if any(other != hosts for other in orders):
        raise UsageProblem("--hostfile: the batches want different orders; ask for one batch")
    try:
        args.hostfile.write_text("".join(f"{host}\n" for host in hosts))
    except OSError as error:
        raise UsageProblem(f"--hostfile {args.hostfile}: {error}") from error


def failure(plan: Any, planner: Any) -> str:
    """One line on a batch that has no configuration."""
    from copus_ext.planner.search import min_gpus

    where = f"global batch {plan.global_batch_size}"
    if plan.status == "no_legal":
        worst = min(plan.rejected, key=lambda r: (r.code == "memory", -r.count))
        return f"{where}: {worst.detail}; {worst.fix}"
    memory = next(r for r in plan.rejected if r.code == "memory")
    needed = min_gpus(planner, plan.global_batch_size)
    more = f"needs about {needed} GPUs of this kind" if needed else "more of these GPUs do not help"
    return f"{where}: {memory.count} legal configurations, none fits: {memory.detail}; {more}"


def answer(args: argparse.Namespace) -> int:
    """Searches, prints and writes; returns the exit code."""
    from copus_ext.planner import report

    started = time.monotonic()
    planner = planner_of(args)
    wanted = batches(args.global_batch_size)
    if args.explain is not None:
        return explain(args, planner, wanted)
    plotted = ranked(args, planner, wanted)
    plans = [dataclasses.replace(p, ranked=p.ranked[: args.top]) for p in plotted]
    for plan in plans:
        plan.ranked[:1] = [ordered(args, planner, first) for first in plan.ranked[:1]]
    fitted = fitted_of(args, planner, plans)
    firsts = [plan.ranked[0] for plan in plans if plan.ranked]
    write_hosts(args, firsts if fitted is None else [best[0] for best in fitted if best])
    recut, resplit = cuts_of(args, planner, plans), splits_of(args, planner, plans)
    if args.format == "json":
        about = constants_of(args, planner)
        missing = f"no measured step times of its own behind constants {about['name']}"
        record = report.to_json(
            planner.model,
            planner.cluster,
            plans,
            constants=about,
            warnings=[missing] if about["residual"] is None else [],
            elapsed_s=None if args.output else time.monotonic() - started,
            repartitions=recut,
            fitted=fitted,
            unequal_micro_batches=resplit,
            top=args.top,
        )
        _put(report.dump(record), args.output)
    elif args.format == "flags":
        lines = [" ".join(p.ranked[0].configuration.to_flags()) for p in plans if p.ranked]
        _put("\n".join(lines), args.output)
    else:
        text = io.StringIO()
        console = report.console_for(sys.stdout if args.output is None else text)
        report.table(plans, console, recut, fitted, resplit, top=args.top)
        if args.output is not None:
            _put(text.getvalue().rstrip("\n"), args.output)
    fits = [bool(best) for best in fitted] if fitted is not None else [False] * len(plans)
    failed = [plan for plan, also in zip(plans, fits) if plan.status != "ok" and not also]
    for plan in failed:
        tell("plan.py", f"error: {failure(plan, planner)}")
    if args.plot is not None:
        try:
            report.plot(plotted, args.plot)
        except ImportError:
            raise UsageProblem('--plot needs plotly; run: pip install -e ".[report]"') from None
        except OSError as error:
            raise UsageProblem(f"--plot {args.plot}: {error}") from error
    if len(plans) < len(wanted):
        return 130
    if any(plan.status == "no_legal" for plan in failed):
        return 3
    return 4 if failed else 0


def ranked(args: argparse.Namespace, planner: Any, wanted: list[int]) -> list[Any]:
    """The plans of all batches, a few at a time, or those before an interrupt."""
    from tqdm import tqdm

    plans: list[Any] = []
    # No thread for one bar: a program that uses this function may mind signals.
    tqdm.monitor_interval = 0
    with tqdm(total=len(wanted), unit="batch", delay=2, leave=False) as bar:
        for start in range(0, len(wanted), _AT_ONCE):
            some = wanted[start : start + _AT_ONCE]
            try:
                top = max(args.top, _PLOTTED if args.plot else 0)
                plans += planner.rank(some, top=top, list_rejected=args.rejected)
            except KeyboardInterrupt:
                if not plans:
                    raise
                tell("plan.py", "interrupted; the batches ranked so far follow")
                break
            bar.update(len(some))
    return plans


def cuts_of(args: argparse.Namespace, planner: Any, plans: list[Any]) -> list[Any] | None:
    """The fastest cuts of every plan, if they were asked for."""
    if not args.cuts:
        return None
    from copus_ext.planner.partition.layers import repartitions

    return [repartitions(planner, plan) for plan in plans]


def splits_of(args: argparse.Namespace, planner: Any, plans: list[Any]) -> list[Any] | None:
    """The best unequal micro-batches of every plan, if they were asked for."""
    if not args.micro_split:
        return None
    from copus_ext.planner.partition.micro_batches import unequal_micro_batches

    return [unequal_micro_batches(planner, plan) for plan in plans]


def fitted_of(args: argparse.Namespace, planner: Any, plans: list[Any]) -> list[Any] | None:
    """Every plan over links and nodes as they are, if that was asked for."""
    if not args.uneven:
        return None
    from copus_ext.planner.placement.uneven_nodes import rank_on_nodes

    return [
        rank_on_nodes(planner, p.global_batch_size) if p.status != "no_legal" else [] for p in plans
    ]


def constants_of(args: argparse.Namespace, planner: Any) -> dict[str, Any]:
    """Where the constants come from, and what they are."""
    from copus_ext.cost_model.constants import describe

    file = args.constants or planner.cluster.constants_file
    return {**describe(file), "values": planner.constants.to_json()}


def _put(text: str, output: Path | None) -> None:
    if output is None:
        print(text)
        return
    try:
        output.write_text(text + "\n")
    except OSError as error:
        raise UsageProblem(f"--output {output}: {error}") from error


def main(argv: list[str] | None = None) -> int:
    """Reads flags, answers, and turns problems into one line and an exit code."""
    from copus_ext.cost_model.spec_file import SpecError
    from megatron.training.common.errors import UsageError

    try:
        return answer(parser((__doc__ or "").splitlines()[0]).parse_args(argv))
    except (UsageProblem, SpecError, UsageError) as error:
        tell("plan.py", f"error: {error}")
        return 2
    except InputProblem as error:
        tell("plan.py", f"error: {error}")
        return 5
    except BrokenPipeError:
        close_output()
        return 0
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
