"""The planner's answer as a table, as JSON, as flags, as a figure."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from copus_ext import __version__
from copus_ext.cost_model.cluster_spec import ClusterSpec
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.explain import GIB
from copus_ext.planner.partition.layers import Repartition, lines
from copus_ext.planner.partition.micro_batches import UnequalMicroBatches
from copus_ext.planner.plan import Addition, Plan, Ranked

SCHEMA, EXPLAINED = "copus.plan/1", "copus.explain/1"
_WIDE = 500
"""Characters of a line that is not for a terminal."""
_COLUMNS = ["rank", "B", "tp", "sp", "pp", "vpp", "dp", "b", "M", "recompute", "zero", "step,s"]
_COLUMNS += ["tokens/s/GPU", "MFU,%", "bubble,%", "peak,GiB", "fit,%", "+-,%"]
_OF_EXPERTS = ["ep", "etp"]
"""Columns of a mixture of experts, after `vpp`."""
_OF_SHARING = ["cp", "exchange"]
"""Columns of context parallelism, after `tp`."""
_OF_LOGITS = ["chunks"]
"""Column of the parts of the tokens for the logits, after `recompute`."""
_NO_SPLIT = ("unequal micro-batches make nothing shown here faster",)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What `copus plan` found for every batch; None for what was not asked for."""

    plans: Sequence[Plan]
    """The ranking."""
    partitions: Sequence[Sequence[Repartition]] | None = None
    """The fastest layer partition of the ranked pipelines."""
    micro_batches: Sequence[Sequence[UnequalMicroBatches]] | None = None
    """The best unequal micro-batches of ranked layouts without a pipeline."""
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
    warnings: Sequence[str] = (),
    elapsed_s: float | None = None,
    headroom: dict[str, Any] | None = None,
    first_batch: dict[str, Any] | None = None,
    weight_decay: dict[str, Any] | None = None,
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
            }
            for plan in plans
        ],
    }
    for record, some in zip(answer["plans"], found.partitions or []):
        record["cuts"] = [x.to_json() for x in some]
    for record, some in zip(answer["plans"], found.worth_timing or []):
        record["worth_timing"] = [str(c) for c in some]
    for record, addition in zip(answer["plans"], found.additions or []):
        if addition is not None:
            addition.add_to(record)
    for record, some in zip(answer["plans"], found.micro_batches or []):
        record["micro_splits"] = [x.to_json() for x in some]
    if headroom is not None:
        answer["headroom"] = headroom
    if first_batch is not None:
        answer["first_batch"] = first_batch
    if weight_decay is not None:
        answer["weight_decay"] = weight_decay
    if elapsed_s is not None:
        answer["elapsed_s"] = round(elapsed_s, 3)
    return answer


_ALIKE = 0.01
"""Share of a step below which rows that differ in their chunks alone are one row of the table."""


def folded(ranked: Sequence[Ranked]) -> list[tuple[int, Ranked, str]]:
    """Rows of the table: rank, the first of rows that differ in nothing but the chunks of a stage
    and hardly in time, and the text for its chunks with those of the others in brackets."""
    rows: dict[Any, list[tuple[int, Ranked]]] = {}
    for rank, answer in enumerate(ranked, 1):
        c = answer.configuration
        key = dataclasses.replace(c, layout=dataclasses.replace(c.layout, vpp=1))
        kin = rows.setdefault(key, [])
        most = (1 + _ALIKE) * kin[0][1].prediction.step_s if kin else 0.0
        if kin and answer.prediction.step_s > most:
            kin = rows.setdefault((key, rank), [])
        kin.append((rank, answer))
    found = []
    for (rank, first), *others in rows.values():
        also = sorted(answer.configuration.layout.vpp for _, answer in others)
        own = str(first.configuration.layout.vpp)
        found.append((rank, first, f"{own} ({','.join(map(str, also))})" if also else own))
    return sorted(found, key=lambda row: row[0])


def shares_samples(found: Answer) -> bool:
    """Whether ranks share samples in any row."""
    return any(r.configuration.layout.cp > 1 for plan in found.plans for r in plan.ranked)


def cells(
    rank: int,
    answer: Ranked,
    vpp: str = "",
    *,
    is_mixture: bool = False,
    shows_cp: bool = False,
    shows_chunks: bool = False,
) -> list[str]:
    """One line of the table; `vpp` in place of the chunks of a stage."""
    c, p = answer.configuration, answer.prediction
    sharing = [str(c.layout.cp), c.cp_comm_type or "-"] if shows_cp else []
    experts = [c.layout.ep, c.layout.expert_tensor_parallel_size] if is_mixture else []
    return [
        str(rank),
        str(c.global_batch_size),
        str(c.layout.tp),
        *sharing,
        "yes" if c.sequence_parallel else "no",
        str(c.layout.pp),
        vpp or str(c.layout.vpp),
        *map(str, experts),
        *(str(x) for x in (c.layout.dp, c.micro_batch_size, c.num_microbatches)),
        c.recomputation,
        *([str(c.logits_chunks)] if shows_chunks else []),
        "yes" if c.use_distributed_optimizer else "no",
        f"{p.step_s:.4g}",
        f"{p.tokens_per_s / c.layout.world_size:.0f}",
        f"{100 * p.mfu:.1f}",
        f"{100 * p.time_s['bubble'] / p.step_s:.1f}",
        f"{p.peak_bytes / GIB:.1f}",
        f"{100 * p.fit_probability:.0f}",
        f"{100 * p.step_rel_sd:.0f}",
    ]


def table(
    found: Answer,
    console: Console,
    *,
    is_mixture: bool = False,
    shows_cp: bool = False,
) -> None:
    """Prints all plans with what was found for each; every row is one line. Sizes of experts are
    columns for a mixture only, those of context parallelism and of logits in parts where a row has
    some."""
    chunks = (r.configuration.logits_chunks for plan in found.plans for r in plan.ranked)
    shows_chunks = any(number > 1 for number in chunks)
    shows_cp = shows_cp or shares_samples(found)
    at, after = _COLUMNS.index("tp") + 1, _COLUMNS.index("vpp") + 1
    names = [*_COLUMNS[:at], *(_OF_SHARING if shows_cp else ()), *_COLUMNS[at:after]]
    names += [*(_OF_EXPERTS if is_mixture else ()), *_COLUMNS[after:]]
    if shows_chunks:
        names[names.index("zero") : names.index("zero")] = _OF_LOGITS
    for number, plan in enumerate(found.plans):
        if number:
            console.print()
        if plan.ranked:
            shown = Table(box=None, header_style="bold", pad_edge=False)
            for name in names:
                shown.add_column(name, justify="right", no_wrap=True)
            for rank, answer, vpp in folded(plan.ranked):
                row = cells(
                    rank,
                    answer,
                    vpp,
                    is_mixture=is_mixture,
                    shows_cp=shows_cp,
                    shows_chunks=shows_chunks,
                )
                shown.add_row(*row, style="green" if rank == 1 else None)
            console.print(shown)
            if (addition := plan.ranked[0].addition) is not None:
                addition.show(console)
        else:
            console.print(f"global batch {plan.global_batch_size}: {plan.status}")
        for line in lines(found.partitions[number]) if found.partitions is not None else []:
            console.print(line, highlight=False, markup=False)
        if found.micro_batches is not None:
            for text in map(str, found.micro_batches[number] or _NO_SPLIT):
                console.print(text, highlight=False, markup=False)
        addition = found.additions[number] if found.additions is not None else None
        if addition is not None:
            addition.show(console)
        console.print(
            f"{plan.num_ranked} configurations ranked for global batch {plan.global_batch_size}",
            highlight=False,
        )
        for r in plan.rejected:
            line = f"{r.count} rejected, {r.code}: such as {r.detail}; {r.fix}"
            console.print(line, style="dim", highlight=False, markup=False)
            for c in r.members or []:
                console.print(f"  {c}", style="dim", highlight=False, markup=False)


def console_for(file: TextIO) -> Console:
    """A console that never folds or cuts a line; with colours on a terminal only."""
    if file.isatty():
        return Console(file=file, width=_WIDE, soft_wrap=True)
    return Console(file=file, width=_WIDE, soft_wrap=True, force_terminal=False, color_system=None)


def breakdown(answer: Ranked) -> str:
    """One configuration, part by part."""
    c, p = answer.configuration, answer.prediction
    lines = [
        f"{c}, global batch {c.global_batch_size}, {c.num_microbatches} micro-batches",
        f"step {p.step_s:.4g} s +- {100 * p.step_rel_sd:.0f} % ({p.source}), "
        f"{p.tokens_per_s:.0f} tokens/s, {p.tflops_per_gpu:.1f} TFLOP/s/GPU, "
        f"MFU {100 * p.mfu:.1f} %",
        "seconds along the stage that finishes last:",
    ]
    for name, seconds in p.time_s.items():
        lines.append(f"  {name:10s} {seconds:10.4f} s  {100 * seconds / p.step_s:5.1f} %")
    lines.append(
        f"memory: peak {p.peak_bytes / GIB:.1f} of {p.limit_bytes / GIB:.1f} GiB on stage "
        f"{p.worst_stage}, fits with probability {100 * p.fit_probability:.0f} %"
    )
    names = list(p.stage_bytes[0])
    lines.append("  GiB    " + "".join(f"{name:>14s}" for name in names))
    shown = sorted({0, 1, p.worst_stage, len(p.stage_bytes) - 1} & set(range(len(p.stage_bytes))))
    for stage in shown:
        values = "".join(f"{p.stage_bytes[stage][n] / GIB:14.2f}" for n in names)
        lines.append(f"  stage {stage:<2d}{values[1:]}")
    if answer.addition is not None:
        text = io.StringIO()
        answer.addition.show(console_for(text))
        lines += text.getvalue().splitlines()
    lines.append("flags: " + " ".join(c.to_flags()))
    return "\n".join(lines)


def dump(answer: dict[str, Any]) -> str:
    """JSON text, the same for the same answer."""
    return json.dumps(answer, indent=1, sort_keys=True)
