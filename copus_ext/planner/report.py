"""The planner's answer as a table and as JSON."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.table import Table

from copus_ext import __version__
from copus_ext.cost_model.cluster_spec import ClusterSpec
from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.equals import difference, longer, may_fit
from copus_ext.planner.explain import GIB, RULES
from copus_ext.planner.known_peaks import WORDS
from copus_ext.planner.plan import Addition, Plan, Prediction, Ranked, Rejected

if TYPE_CHECKING:
    from copus_ext.planner.search import Planner

SCHEMA, EXPLAINED = "copus.plan/1", "copus.explain/1"
_WIDE = 500
"""Characters of a line that is not for a terminal."""
_COLUMNS = ["rank", "B", "tp", "sp", "pp", "vpp", "dp", "b", "M", "recompute", "zero", "step,s"]
_COLUMNS += ["tokens/s/GPU", "MFU,%", "bubble,%", "peak,GiB", "fit,%", "+-,%"]
_SOURCES = {
    "profiled": "it was timed",
    "corrected": "corrected by times of others",
    "predicted": "predicted",
}
"""Where the seconds of a step come from, in words."""
_OF_PEAKS = {"measured": " measured"}
"""What stands behind a peak that a run had."""
_SHOWN = 3
"""Equals of a row that a line names."""
_LEGEND = (
    "b: samples of a micro-batch; M: micro-batches of a replica; vpp: chunks of a stage; zero: "
    "distributed optimizer; sp: sequence parallel; fit: probability that it fits into memory",
    "as fast: predicted within 3 % of the row, too near to tell which is faster; rows that near "
    "are in the order of how common they are",
)
_OF_BATCHES = (
    "rows have batches (B) of their own, by --decrease-batch-size-if-needed: compare tokens/s/GPU, "
    "as all shares here do, and not seconds of a step"
)
_LEGEND_OF_TRIES = (
    "try: faster than row 1 and not sure to fit; an out-of-memory shows in the first steps, and "
    "--fix with its text and --format flags prints what starts it"
)
_LEGEND_OF_CHUNKS = (
    "logits-chunks: parts of the tokens whose logits exist at once; a flag of COPUS, which "
    "Megatron-LM does not have: for Megatron-LM plan with --logits-chunks 1"
)
_LEGEND_OF_CP = (
    "cp: ranks that share the tokens of each sample; exchange: of their keys and values, as "
    "--cp-comm-type has it",
)
_PARTS = {
    "compute": "layers, embedding and logits",
    "recompute": "layers computed again in the backward pass",
    "bubble": "waiting in the pipeline",
    "tp": "collectives of tensor parallelism that nothing hides",
    "pp": "messages between stages that nothing hides",
    "dp": "gradients and weights on their way that nothing hides",
    "optimizer": "norm of the gradients, and Adam",
    "host": "fixed time of a step",
    "ep": "rows on their way to experts and back",
    "cp": "keys and values on their way that nothing hides",
}
"""What the parts of a step are."""
_OF_EXPERTS = ["ep", "etp"]
"""Columns of a mixture of experts, after `vpp`."""
_OF_SHARING = ["cp", "exchange"]
"""Columns of context parallelism, after `tp`."""
_OF_LOGITS = ["logits-chunks"]
"""Column of the parts of the tokens for the logits, after `recompute`."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What `copus plan` found for every batch; None for what was not asked for."""

    plans: Sequence[Plan]
    """The ranking."""
    additions: Sequence[Addition | None] | None = None
    """What the command of an extra says about each batch."""
    worth_timing: Sequence[Sequence[Configuration]] | None = None
    """Two of the ranking whose times would say most of the others."""


def to_json(
    model: ModelSpec,
    cluster: ClusterSpec,
    found: Answer,
    *,
    constants: dict[str, Any],
    seq_length_from: str,
    assumed: Sequence[str] = (),
    otherwise: dict[str, Any] | None = None,
    warnings: Sequence[str] = (),
) -> dict[str, Any]:
    """The answer of `copus plan --json`, as `docs/plan.schema.json` describes it.

    A change of meaning changes `SCHEMA`.
    """
    plans = found.plans
    rejected: dict[str, int] = {}
    for plan in plans:
        for r in plan.rejected:
            rejected[r.code] = rejected.get(r.code, 0) + r.count
    ranked = sum(plan.num_ranked for plan in plans)
    answer: dict[str, Any] = {
        "schema": SCHEMA,
        "version": __version__,
        "inputs": {
            "model": model.to_json(),
            "seq_length_from": seq_length_from,
            "cluster": cluster.to_json(),
            "constants": constants,
            "assumed": list(assumed),
            **({} if otherwise is None else {"otherwise": otherwise}),
            "warnings": list(warnings),
        },
        "counts": {
            "enumerated": ranked + sum(rejected.values()),
            "ranked": ranked,
            "rejected": rejected,
        },
        "plans": [
            {
                "global_batch_size": plan.global_batch_size,
                "status": plan.status,
                "ranked": [r.to_json(i + 1) for i, r in enumerate(plan.ranked)],
                "rejected": [r.to_json() for r in plan.rejected],
                **({"common_rel_sd": plan.common_sd} if plan.common_sd is not None else {}),
                **({"fastest": _of_fastest(*plan.fastest)} if plan.fastest is not None else {}),
                **({"better_batch": plan.better_batch.to_json()} if plan.better_batch else {}),
                **({"try_first": [r.to_json(0) for r in plan.tries]} if plan.tries else {}),
            }
            for plan in plans
        ],
    }
    for record, some in zip(answer["plans"], found.worth_timing or []):
        record["worth_timing"] = [str(c) for c in some]
    for record, addition in zip(answer["plans"], found.additions or []):
        if addition is not None:
            addition.add_to(record)
    return answer


def _of_fastest(c: Configuration, step_s: float) -> dict[str, Any]:
    return {"configuration": str(c), "step_s": step_s}


def shares_samples(found: Answer) -> bool:
    """Whether ranks share samples in any row."""
    rows = (r for plan in found.plans for r in (*plan.tries, *plan.ranked))
    return any(r.configuration.layout.cp > 1 for r in rows)


def cells(
    rank: str,
    answer: Ranked,
    *,
    is_mixture: bool = False,
    shows_cp: bool = False,
    shows_chunks: bool = False,
) -> list[str]:
    """One line of the table."""
    c, p = answer.configuration, answer.prediction
    sharing = [str(c.layout.cp), c.cp_comm_type or "-"] if shows_cp else []
    experts = [c.layout.ep, c.layout.expert_tensor_parallel_size] if is_mixture else []
    return [
        rank,
        str(c.global_batch_size),
        str(c.layout.tp),
        *sharing,
        "yes" if c.sequence_parallel else "no",
        str(c.layout.pp),
        str(c.layout.vpp),
        *map(str, experts),
        *(str(x) for x in (c.layout.dp, c.micro_batch_size, c.num_microbatches)),
        c.recomputation,
        *([str(c.logits_chunks)] if shows_chunks else []),
        "yes" if c.use_distributed_optimizer else "no",
        f"{p.step_s:.4g}",
        f"{p.tokens_per_s / c.layout.world_size:.0f}",
        f"{100 * p.mfu:.1f}",
        f"{100 * p.time_s['bubble'] / p.step_s:.1f}",
        f"{p.peak_bytes / GIB:.1f}{_OF_PEAKS.get(p.peak_source, '')}",
        f"{100 * p.fit_probability:.0f}",
        f"{100 * answer.over_first_sd:.0f}" if answer.over_first_sd else "-",
    ]


def _equals_of(answer: Ranked) -> str:
    """The fastest equals of a row in words."""
    others = sorted(answer.equals, key=lambda other: -other.prediction.samples_per_s)
    words = [difference(answer, other) for other in others[:_SHOWN]]
    more = len(others) - _SHOWN
    return "; ".join([*words, f"{more} more"] if more > 0 else words)


def table(
    found: Answer,
    console: Console,
    *,
    is_mixture: bool = False,
    shows_cp: bool = False,
    now: Configuration | None = None,
) -> None:
    """Prints all plans with what was found for each; every row is one line, and one below the table
    where others are as fast. Sizes of experts are
    columns for a mixture only, those of context parallelism and of logits in parts where a row has
    some. `now` is in use."""
    every = [r for plan in found.plans for r in (*plan.tries, *plan.ranked)]
    shows_chunks = chunks_line(every) != ""
    shows_cp = shows_cp or shares_samples(found)
    at, after = _COLUMNS.index("tp") + 1, _COLUMNS.index("vpp") + 1
    names = [*_COLUMNS[:at], *(_OF_SHARING if shows_cp else ()), *_COLUMNS[at:after]]
    names += [*(_OF_EXPERTS if is_mixture else ()), *_COLUMNS[after:]]
    if shows_chunks:
        names[names.index("zero") : names.index("zero")] = _OF_LOGITS
    options = {"is_mixture": is_mixture, "shows_cp": shows_cp, "shows_chunks": shows_chunks}
    for number, plan in enumerate(found.plans):
        if number:
            console.print()
        for line in (*tries_lines(plan, now), *fastest_lines(plan)):
            console.print(line, style="yellow", highlight=False, markup=False)
        if plan.tries or plan.ranked:
            shown = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
            for name in names:
                shown.add_column(name, justify="right", no_wrap=True)
            for try_, one in enumerate(plan.tries, 1):
                shown.add_row(*cells(f"try {try_}", one, **options), style="yellow")
            for rank, one in enumerate(plan.ranked, 1):
                shown.add_row(
                    *cells(str(rank), one, **options), style="green" if rank == 1 else None
                )
            console.print(shown)
            for rank, one in enumerate(plan.ranked, 1):
                if words := _equals_of(one):
                    line = f"as fast as row {rank}, with: {words}"
                    console.print(line, highlight=False, markup=False)
            if (
                len({one.configuration.global_batch_size for one in (*plan.tries, *plan.ranked)})
                > 1
            ):
                console.print(_OF_BATCHES, highlight=False, markup=False)
        if plan.common_sd is not None:
            more = _LEGEND_OF_CP if shows_cp else ()
            more += (_LEGEND_OF_CHUNKS,) if shows_chunks else ()
            more += (_LEGEND_OF_TRIES,) if any(one.tries for one in found.plans) else ()
            legend = (*_LEGEND, *more) if number == 0 else ()
            for line in (_doubt_line(plan.common_sd), *legend):
                console.print(line, highlight=False, markup=False)
        if plan.ranked and (addition := plan.ranked[0].addition) is not None:
            addition.show(console)
        addition = found.additions[number] if found.additions is not None else None
        if addition is not None:
            addition.show(console)
        if plan.better_batch is not None:
            line = plan.better_batch.line(plan.global_batch_size)
            console.print(line, highlight=False, markup=False)
        console.print(
            f"{plan.num_ranked} configurations ranked for global batch {plan.global_batch_size}",
            highlight=False,
        )
        for r in plan.rejected:
            example = "the one that needs least:" if r.code == "memory" else "for example"
            line = f"{r.count} rejected, {RULES[r.code]}: {example} {r.detail}; {r.fix}"
            console.print(line, style="dim", highlight=False, markup=False)
            for c in r.members or []:
                console.print(f"  {c}", style="dim", highlight=False, markup=False)


def _doubt_line(common_sd: float) -> str:
    return (
        f"all times may be {100 * common_sd:.0f} % longer or shorter together (one standard "
        "deviation), which leaves the order as it is; +- is how far the time of a row over that of "
        "row 1 may be off"
    )


def tries_lines(plan: Plan, now: Configuration | None = None) -> list[str]:
    """What to try before the first row, or where nothing is sure to fit; `now` is in use."""
    best, found = plan.ranked[0].prediction if plan.ranked else None, []
    for number, one in enumerate(plan.tries, 1):
        p = one.prediction
        faster = f"{100 * longer(best, p):.0f} % faster than row 1, " if best else ""
        yours = " (your command)" if one.configuration == now else ""
        found.append(
            f"try {number}: {faster}fits with probability {p.fit_probability:.2f}: "
            f"{one.configuration}{yours}"
        )
    return found


def fastest_lines(plan: Plan) -> list[str]:
    """The fastest layout where the first row is not it, but the most common of those that are as
    fast; at most a line."""
    if not plan.ranked or plan.fastest is None:
        return []
    (c, step_s), p = plan.fastest, plan.ranked[0].prediction
    if p.samples_per_s * step_s >= c.global_batch_size:
        return []
    rounded = c.global_batch_size != plan.ranked[0].configuration.global_batch_size
    batch = f" for a batch of {c.global_batch_size}" if rounded else ""
    return [
        f"row 1 is the most common layout within 3 % of the fastest time: {p.step_s:.4g} s; the "
        f"fastest is {c}, {step_s:.4g} s{batch}"
    ]


def chunks_line(rows: Sequence[Ranked]) -> str:
    """That printed flags have one which Megatron-LM lacks; empty where they have not."""
    return _LEGEND_OF_CHUNKS if any(r.configuration.logits_chunks > 1 for r in rows) else ""


def row_line(one: Ranked) -> str:
    """What is predicted of a row whose flags stand alone."""
    p = one.prediction
    fits = WORDS[p.peak_source] or f"fits with probability {p.fit_probability:.2f}"
    return (
        f"the layout: {one.configuration}: {p.step_s:.4g} s a step +- {100 * p.step_rel_sd:.0f} % "
        f"(one standard deviation, {_SOURCES[p.source]}), peak {p.peak_bytes / GIB:.1f} of "
        f"{p.limit_bytes / GIB:.1f} GiB, {fits}"
    )


def console_for(file: TextIO) -> Console:
    """A console that never folds or cuts a line; with colours on a terminal only."""
    if file.isatty():
        return Console(file=file, width=_WIDE, soft_wrap=True)
    return Console(file=file, width=_WIDE, soft_wrap=True, force_terminal=False, color_system=None)


def machine_line(cluster: ClusterSpec, constants: Constants) -> str:
    """What an answer holds for: GPUs, their memory, and what their links are taken to have."""
    per_node = cluster.gpus_per_node
    gpus = Counter([node.gpu for node in cluster.nodes] or [cluster.gpu] * cluster.num_nodes)
    line = "on " + " and ".join(
        f"{per_node * count:,} {gpu.name} of {gpu.memory_bytes / GIB:.4g} GiB"
        for gpu, count in gpus.items()
    )
    inside = f"{cluster.intra_bytes_per_s / 1e9:.4g} GB/s from one to another"
    if cluster.num_nodes == 1:
        return f"{line} in one node, {inside}"
    line = f"{line}, {per_node} to a node; {inside} in a node; between nodes"
    links = cluster.links
    nic = cluster.nic_bytes_per_s * (1.0 if links is None else links.duplex)
    line = f"{line} {nic / 1e9:.4g} GB/s of each node"
    if cluster.nic_is_measured or links is not None:
        return f"{line}, as measured"
    return f"{line}, of which messages are taken to reach {100 * constants.nic_efficiency:.0f} %"


def peak_line(cluster: ClusterSpec, precision: str) -> str:
    """Of which peak the MFU of an fp32 run is a share; else empty. GPUs that round products to TF32
    have half of their bf16 peak then."""
    if precision != "fp32" or cluster.is_gloo:
        return ""
    peak = cluster.gpu.peak(precision)
    line = f"fp32: MFU is a share of {peak / 1e12:.4g} TFLOP/s of a GPU"
    if peak < 0.4 * cluster.gpu.peak_flops:
        return line
    return (
        f"{line}, in TF32; torch computes in TF32 where it is told to, as in NVIDIA's containers, "
        "and else with the plain fp32 peak, several times lower, so that steps are longer than here"
    )


def refusal(
    found: Rejected,
    batch: int,
    planner: Planner,
    flags: Sequence[str],
    common_sd: float | None = None,
) -> str:
    """Why one configuration is no candidate, and part by part what one takes that does not fit or
    is never faster, with the flags that say it."""
    problem = {"memory": "does not fit", "dominated": "never faster"}.get(found.code, "not legal")
    p = planner.priced(found.example).prediction if found.code == "memory" else None
    if p is not None and may_fit(p.fit_probability, p.peak_bytes, p.limit_bytes):
        problem = "may not fit"
    line = f"{found.example}, global batch {batch}: {problem}: {found.detail}; {found.fix}"
    if found.code != "memory":
        return line
    return f"{line}\n{breakdown(planner.priced(found.example), flags, common_sd)}"


def _memory_lines(p: Prediction) -> list[str]:
    """The bytes of some stages by kind."""
    of = f"of {p.limit_bytes / GIB:.1f} GiB on stage {p.worst_stage}"
    fits = WORDS[p.peak_source] or f"fits with probability {100 * p.fit_probability:.0f} %"
    fits += "; by kind as predicted" if p.peak_source == "measured" else ""
    lines = [f"memory: peak {p.peak_bytes / GIB:.1f} {of}, {fits}"]
    names = list(p.stage_bytes[0])
    lines.append("  GiB    " + "".join(f"{name:>14s}" for name in names))
    shown = sorted({0, 1, p.worst_stage, len(p.stage_bytes) - 1} & set(range(len(p.stage_bytes))))
    for stage in shown:
        values = "".join(f"{p.stage_bytes[stage][n] / GIB:14.2f}" for n in names)
        lines.append(f"  stage {stage:<2d}{values[1:]}")
    return lines


def breakdown(answer: Ranked, flags: Sequence[str], common_sd: float | None = None) -> str:
    """One configuration, part by part, and the flags that say it.

    Args:
        answer: what is predicted for it.
        flags: that say it.
        common_sd: relative uncertainty that its step shares with those of a ranking, if it is
            known.
    """
    c, p = answer.configuration, answer.prediction
    lines = [
        f"{c}, global batch {c.global_batch_size}, {c.num_microbatches} micro-batches",
        f"step {p.step_s:.4g} s +- {_doubt_of(p, common_sd)} ({_SOURCES[p.source]}), "
        f"{p.tokens_per_s:.0f} tokens/s, {p.tflops_per_gpu:.1f} TFLOP/s/GPU, "
        f"MFU {100 * p.mfu:.1f} %",
        "seconds along the stage that finishes last:",
    ]
    for name, seconds in p.time_s.items():
        share = f"{100 * seconds / p.step_s:5.1f} %"
        lines.append(f"  {name:10s} {seconds:10.4f} s  {share}  {_PARTS[name]}")
    lines += _memory_lines(p)
    if answer.addition is not None:
        text = io.StringIO()
        answer.addition.show(console_for(text))
        lines += text.getvalue().splitlines()
    lines += filter(None, [chunks_line([answer])])
    lines.append("flags: " + " ".join(flags))
    return "\n".join(lines)


def _doubt_of(p: Prediction, common_sd: float | None) -> str:
    """The doubt of a step, and what all of a ranking share of it."""
    whole = f"{100 * p.step_rel_sd:.0f} %"
    if common_sd is None or common_sd >= p.step_rel_sd:
        return whole
    own = math.sqrt(p.step_rel_sd**2 - common_sd**2)
    return f"{whole}, {100 * common_sd:.0f} of all layouts together and {100 * own:.0f} of its own"


def dump(answer: dict[str, Any]) -> str:
    """JSON text, the same for the same answer."""
    return json.dumps(answer, indent=1, sort_keys=True)
