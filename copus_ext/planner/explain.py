"""Says in words why a configuration is not a candidate, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from copus_ext.cost_model.model_spec import ModelSpec, divisors
from copus_ext.cost_model.spec_file import SpecError
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.known_peaks import WORDS, known_of
from copus_ext.planner.plan import Rejected
from copus_ext.planner.space import REJECTION_CODES, extra_problems, points_of, to_config_batch
from megatron.trainer.common.program import other_command
from megatron.trainer.config.layout_rules import expert_problems

GIB = 2.0**30
_LOOKED_AT = 64
"""Configurations that were rejected for memory whose peaks are computed in full."""
RULES = {
    "heads": "tensor parallel size that does not divide the attention heads",
    "query_groups": "tensor parallel size that does not suit the query groups",
    "ffn": "tensor parallel size that does not divide the MLP",
    "sequence": "tensor parallel size that does not divide the tokens of a sample",
    "context": "context parallel size that does not divide the tokens of a sample",
    "context_heads": "too few heads for --cp-comm-type a2a",
    "layers": "pipeline size that does not divide the layers",
    "virtual": "virtual pipeline size that does not divide the layers of a stage",
    "batch": "replicas and micro-batch that do not divide the global batch",
    "interleave_microbatches": "interleaved pipeline with micro-batches that do not suit it",
    "extra": "refused by a feature that the flags turn on",
    "cross_node_tp": "tensor parallel group larger than a node",
    "experts": "expert parallel size that does not divide the experts",
    "expert_ffn": "expert tensor parallel size that does not divide the MLP of an expert",
    "shared_expert": "tensor parallel size that does not divide the shared expert",
    "expert_bias": "experts with biases that would be split",
    "expert_alltoall": "--moe-token-dispatcher-type alltoall over split experts on CPU ranks",
    "expert_copies": "copies of experts that --use-tp-pp-dp-mapping cannot number",
    "memory": "too large for the memory",
    "dominated": "never faster than another one",
}
"""What speaks against a configuration, by its code."""
EXPERT_RULES = (
    *("experts", "expert_ffn", "shared_expert", "expert_bias", "expert_alltoall"),
    "expert_copies",
)
"""Codes of rules that `layout.expert_problems` has."""


def reason(
    code: str,
    model: ModelSpec,
    c: Configuration,
    peak_bytes: float = 0.0,
    safe_bytes: float = 0.0,
    limit_bytes: float = 0.0,
    known: str = "",
) -> tuple[str, str]:
    """What speaks against a configuration.

    Args:
        code: one of `REJECTION_CODES`.
        model: what is trained.
        c: the configuration.
        peak_bytes: what it needs, with the code `memory`.
        safe_bytes: how much it may need, its doubt counted.
        limit_bytes: what there is.
        known: that it ran out of memory, in words, where a run says so.

    Returns:
        The numbers, and the fix.
    """
    at, heads, layers = c.layout, model.num_attention_heads, model.num_layers
    legal_tp = [t for t in divisors(heads) if model.ffn % t == 0]
    legal_pp = divisors(layers)
    replicas = f"data-parallel size {at.dp} times micro-batch {c.micro_batch_size}"
    texts = {
        "heads": (
            f"{heads} attention heads are not divisible by {at.tp}",
            f"legal: {_list(legal_tp)}",
        ),
        "query_groups": (
            f"{model.groups} query groups and tp={at.tp} do not divide each other",
            f"legal: {_list([t for t in legal_tp if _divide(model.groups, t)])}",
        ),
        "ffn": (
            f"the MLP's {model.ffn} columns are not divisible by {at.tp}",
            f"legal: {_list(legal_tp)}",
        ),
        "sequence": (
            f"{model.seq_length // at.cp} tokens are not divisible by {at.tp}",
            f"use a multiple of {at.tp * at.cp} tokens or another tp",
        ),
        "context": (
            f"{model.seq_length} tokens are not divisible into two chunks for each of {at.cp}",
            f"use a multiple of {2 * at.cp} tokens or another cp",
        ),
        "context_heads": (
            f"a2a cannot deal {heads // at.tp} heads and {max(model.groups // at.tp, 1)} query "
            f"groups to {at.cp}",
            "use --cp-comm-type p2p or all_gather, or another cp",
        ),
        "cross_node_tp": (f"tp={at.tp} spans nodes", "use a smaller tp or --allow-cross-node-tp"),
        "layers": (f"{layers} layers are not divisible by {at.pp}", f"legal: {_list(legal_pp)}"),
        "virtual": (
            f"{layers // at.pp} layers of a stage are not divisible by vpp={at.vpp}",
            f"legal: {_list(divisors(max(layers // at.pp, 1)))}",
        ),
        "batch": (
            f"{replicas} does not divide global batch {c.global_batch_size}",
            _nearest(c),
        ),
        "interleave_microbatches": (
            f"vpp={at.vpp},pp={at.pp} needs a multiple of {at.pp} micro-batches, global batch "
            f"{c.global_batch_size} gives {c.num_microbatches}",
            f"use --global-batch-size {_interleaved_batch(c)} or vpp=1",
        ),
    }
    if code in EXPERT_RULES:
        return _of_experts(code, model, c)
    if code == "extra":
        detail, _, fix = extra_problems(model, c)[0].partition("; ")
        return detail, fix
    if code == "dominated":
        less = f"{c}: less recomputation fits and is never slower"
        return less, f"`explain {c}` in front of your flags of model, cluster and batch prices it"
    if code == "memory":
        return _of_memory(c, peak_bytes, safe_bytes, limit_bytes, known)
    return texts[code]


def _of_memory(
    c: Configuration, peak_bytes: float, safe_bytes: float, limit_bytes: float, known: str
) -> tuple[str, str]:
    """The same of what needs more memory than there is, or may."""
    if known:
        told = f"{known} (predicted peak {peak_bytes / GIB:.1f} GiB: {c})"
        return told, "more is needed than there is; use more GPUs or memory"
    peak, safe = _told_apart(peak_bytes / GIB, safe_bytes / GIB)
    digits = len(peak.partition(".")[2])
    much = f"{float(peak) - float(safe):.{digits}f} GiB"
    what = "too much" if peak_bytes > limit_bytes else "more than is safe"
    loaded = " (busiest experts at twice the mean)" if c.layout.ep > 1 else ""
    less = f"{limit_bytes / GIB:.1f} GiB less the doubt of what this layout needs"
    return (
        f"predicted peak {peak} GiB{loaded}, safe up to {safe} GiB: {less} ({c})",
        f"{'on the edge' if peak == safe else f'{much} {what}'}; use more GPUs or memory",
    )


def _told_apart(one: float, other: float) -> tuple[str, str]:
    """Two numbers with as many digits as it takes to see which is larger, one or two."""
    texts = [(f"{one:.{n}f}", f"{other:.{n}f}") for n in (1, 2)]
    return next((pair for pair in texts if pair[0] != pair[1]), texts[-1])


def rejected(planner: Any, space: Any, mine: Any, every: bool = False) -> list[Rejected]:
    """What speaks against some points of a space, by code.

    Args:
        planner: the `Planner` that has judged them.
        space: its points with their peaks.
        mine: [n] bool, which are meant.
        every: name each of them.
    """
    points, peaks = space.points, space.peaks
    found = []
    for code, name in enumerate(REJECTION_CODES):
        at = np.flatnonzero(mine & (points.code == code))
        if not len(at):
            continue
        i, peak = int(at[0]), 0.0
        if name == "memory":
            # Of most only weights and optimizer were counted: look closer at the smallest.
            near = at[np.argsort(peaks[at], kind="stable")[:_LOOKED_AT]]
            rows = to_config_batch(planner.model, planner.cluster, points.take(near))
            needs, _ = planner.peaks_of(rows.unevenly_loaded())
            i, peak = int(near[np.argmin(needs)]), float(needs.min())
        elif name == "batch":
            # Those with fewest samples at once are nearest to the batch.
            i = int(at[np.argmin(points.dp[at] * points.micro_batch_size[at])])
        example = points.configuration(i)
        safe = planner.safe_bytes(example) if name == "memory" else 0.0
        known = ""
        if name == "memory":
            _, (source,) = known_of(planner, points_of([example]), [peak])
            known = WORDS[source]
        detail, fix = reason(name, planner.model, example, peak, safe, planner.limit_bytes, known)
        members = [points.configuration(int(j)) for j in at] if every else None
        found.append(
            Rejected(
                code=name, count=len(at), example=example, detail=detail, fix=fix, members=members
            )
        )
    return found


def _of_experts(code: str, model: ModelSpec, c: Configuration) -> tuple[str, str]:
    """What the trainer itself says of the layout of experts."""
    # `code` is the first rule that is broken, and this one is of gloo alone.
    is_gloo = code == "expert_alltoall"
    shape = replace(model.shape(), use_tp_pp_dp_mapping=c.use_tp_pp_dp_mapping)
    problems = expert_problems(
        c.layout, shape, sequence_parallel=True, only_allgather_over_both=is_gloo
    )
    detail, _, fix = problems[0].partition("; ")
    return detail, fix


def check_block(model: ModelSpec, c: Configuration) -> None:
    """Raises:
    SpecError: a chunk does not have so many layers to recompute.
    """
    layers = model.num_layers // (c.layout.pp * c.layout.vpp)
    if not 1 <= c.recompute_num_layers < layers:
        raise SpecError(
            f"recompute={c.recomputation}: a chunk has {layers} layers; use 1 to {layers - 1}, or "
            "recompute=full"
        )


def help_line(found: dict[str, tuple[float, Configuration]], *, use_tp_pp_dp_mapping: bool) -> str:
    """What a better machine would save.

    Args:
        found: of `better_machine.what_would_help`.
        use_tp_pp_dp_mapping: the order of ranks that was searched.
    """
    by_order = "the other order of ranks (--use-tp-pp-dp-mapping)"
    if use_tp_pp_dp_mapping:
        by_order = "the usual order of ranks (no --use-tp-pp-dp-mapping)"

    def respect(name: str) -> str:
        if name.startswith("--"):
            return f"{name}, which may cost loss,"
        return by_order if name == "order" else f"twice the {name}"

    words = [f"{respect(name)} would save {100 * s:.0f} % ({c})" for name, (s, c) in found.items()]
    return (
        "; ".join(words)
        or "neither twice the network, twice the memory nor another order of ranks would help"
    )


def timing_line(
    worth_timing: Sequence[Sequence[Configuration]],
    *,
    gpus_per_node: int,
    is_mixture: bool = False,
    yours: str = "FLAGS OF YOUR RUN",
) -> str:
    """Which two configurations to time for a surer answer, and the commands that do, which run on
    every node. `yours` are the flags of the run, but for its layout and batch."""
    found = next((some for some in worth_timing if some), None)
    if not found:
        return ""
    world_size, shares = found[0].layout.world_size, any(c.layout.cp > 1 for c in found)
    tool = other_command("profile_layouts.py")
    ranks, where = f"--nproc-per-node {min(world_size, gpus_per_node)}", ""
    if world_size > gpus_per_node:
        ranks = f"--nnodes {world_size // gpus_per_node} {ranks}"
        ranks += " --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500"
        where = " (on every node; with SLURM, scripts/slurm/profile.sbatch does it)"
    if world_size > 1:
        tool = f"torchrun {ranks} -m copus_ext.commands.main profile-layouts"
    both = " and ".join(map(str, found))
    own = "; put your own in place of words in capitals"
    lines = [f"to be surer of the other times, time {both}{where}{own}:"]
    for c in found:
        layout = c.layout
        fixed = f"tp={layout.tp},pp={layout.pp},vpp={layout.vpp},micro_batch={c.micro_batch_size}"
        fixed += f",ep={layout.ep},etp={layout.expert_tensor_parallel_size}" if is_mixture else ""
        fixed += f",cp={layout.cp}" if shares else ""
        more = ["--cp-comm-type", c.cp_comm_type] if c.cp_comm_type else []
        more += [] if c.overlap else ["--no-overlap"]
        more += [] if c.sequence_parallel or layout.tp == 1 else ["--no-sequence-parallel"]
        more += [] if c.use_distributed_optimizer else ["--no-distributed-optimizer"]
        batch = ["--global-batch-size", str(c.global_batch_size)]
        flags = " ".join(["--fix", fixed, *batch, "--recompute", c.recompute, *more])
        own = f" --logits-chunks {c.logits_chunks}" if c.logits_chunks > 1 else ""
        lines.append(f"{tool} --store profile.jsonl {flags} -- {yours}{own}")
    return "\n".join(lines)


def _divide(a: int, b: int) -> bool:
    return a % b == 0 or b % a == 0


def _list(values: list[int]) -> str:
    return ", ".join(map(str, values))


def _nearest(c: Configuration) -> str:
    unit = c.layout.dp * c.micro_batch_size
    if c.global_batch_size < unit:
        return f"use --global-batch-size {unit} or more, or fewer replicas"
    below = c.global_batch_size // unit * unit
    return f"use --global-batch-size {below} or {below + unit}"


def _interleaved_batch(c: Configuration) -> int:
    unit = c.layout.dp * c.micro_batch_size * c.layout.pp
    return -(-c.global_batch_size // unit) * unit
