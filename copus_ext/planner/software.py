"""What an answer assumes of the software that will run, and what else would change the choice."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from copus_ext.cost_model.memory import peaks
from copus_ext.cost_model.model_spec import ATTENTION, ModelSpec
from copus_ext.cost_model.peak_correction import fit_probability
from copus_ext.planner.plan import Plan
from copus_ext.planner.request import megatron_flag
from copus_ext.planner.search import Planner
from copus_ext.planner.space import points_of, to_config_batch

_LAYERS = {
    "te": "layers of Transformer Engine",
    "local": "local layers",
    "legacy": "layers of before megatron-core",
}
_KERNELS = {True: "flash attention", False: "unfused attention"}
_TELLING = 3.0
"""Times that measured memory is more likely otherwise, from which on an answer says so."""


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """Something that nobody said."""

    text: str
    flag: str
    """What says it."""
    otherwise: tuple[str, dict[str, Any]] | None = None
    """The likeliest other way, as a flag and as fields of the model; None: not asked about."""


def assumptions(args: argparse.Namespace, planner: Planner) -> list[Assumption]:
    """What the answer takes for granted on GPUs, the most doubtful first. Flags of Megatron-LM say
    all but the kernel that its backend will choose."""
    model, overlap = planner.model, planner.limits.overlap
    if planner.cluster.is_gloo:
        return []
    if args.megatron_args is not None:
        names = "attention_backend", "use_flash_attn"
        backend = any(megatron_flag(args, name) for name in names)
        text = _KERNELS[model.fused_attention]
        if model.precision == "fp32" and model.fused_attention:
            text = "fp32 with flash attention, which GPUs have in half precision alone"
            return [Assumption(text=text, flag="--bf16 or --attention-backend unfused")]
        return [] if backend else [Assumption(text=text, flag="--attention-backend")]
    found = []
    if args.gradient_bytes is None and model.precision != "fp32":
        other = ("--gradient-bytes 2", {"gradient_bytes": 2})
        text = f"gradients of {model.gradient_bytes} bytes"
        found.append(Assumption(text=text, flag="--gradient-bytes", otherwise=other))
    if args.implementation is None:
        other = ("--implementation local", {"implementation": "local"})
        text = _LAYERS[model.implementation]
        found.append(Assumption(text=text, flag="--implementation", otherwise=other))
    if args.norm is None:
        kind = model.norm or ("fused" if model.implementation == "te" else "torch's")
        found.append(Assumption(text=f"{kind} norms", flag="--norm"))
    if args.attention is None:
        other = ("--attention unfused", ATTENTION["unfused"])
        found.append(Assumption(text=_KERNELS[True], flag="--attention", otherwise=other))
    if overlap:
        found.append(Assumption(text="gradients travel while passes compute", flag="--no-overlap"))
    return found


def otherwise(planner: Planner, plan: Plan, assumed: list[Assumption]) -> dict[str, Any] | None:
    """What would be chosen if the most doubtful assumption did not hold: what it is, the flag, the
    configuration, its seconds, and whether the choice changes. None where nothing is in doubt, or
    nothing fits either way."""
    doubtful = next((a for a in assumed if a.otherwise is not None), None)
    if doubtful is None or doubtful.otherwise is None or planner.is_corrected:
        return None
    flag, fields = doubtful.otherwise
    other = planner.on(planner.cluster, model=replace(planner.model, **fields))
    found = other.rank([plan.global_batch_size], top=1, reasons=False)[0]
    now, then = plan.ranked[:1], found.ranked[:1]
    if not (now or then):
        return None
    return {
        "assumed": doubtful.text,
        "flag": flag,
        "configuration": str(then[0].configuration) if then else None,
        "step_s": then[0].prediction.step_s if then else None,
        "changes": [r.configuration for r in now] != [r.configuration for r in then],
    }


def fits_better(args: argparse.Namespace, planner: Planner, assumed: list[Assumption]) -> list[str]:
    """What measured peaks, and runs that ran out of memory, say of the assumptions: a line for each
    that would explain them better the other way."""
    now = _log_likelihood(planner, planner.model)
    found = [
        (flag, "give it", _log_likelihood(planner, replace(planner.model, **fields)))
        for flag, fields in (a.otherwise for a in assumed if a.otherwise is not None)
    ]
    told = [x for x in args.measured if ":" in x]
    # Without a word in CONFIG the optimizer's state was taken to be split.
    if told and len(told) == len(args.measured) and not any("zero=" in x for x in told):
        whole = _log_likelihood(planner, planner.model, use_distributed_optimizer=False)
        fix = "if the run had none, write zero=0 in its CONFIG"
        found.append(("no distributed optimizer", fix, whole))
    lines = []
    for what, fix, then in found:
        if (more := then - now) >= math.log(_TELLING):
            times = f"{math.exp(more):.0f}" if more < math.log(1000.0) else "over 1000"
            lines.append(f"the memory measured is {times} times as likely with {what}; {fix}")
    return lines


def _log_likelihood(planner: Planner, model: ModelSpec, **options: bool) -> float:
    """Of the measured memory, if the model is implemented so, and the runs had these options."""
    peaked = [t for t in planner.timings if t.peak_bytes is not None]
    some = [*(t.configuration for t in peaked), *planner.too_large]
    some = [replace(c, **options) for c in some]
    if not some:
        return 0.0
    peak, sd = peaks(to_config_batch(model, planner.cluster, points_of(some)))
    num = len(peaked)
    measured = np.array([t.peak_bytes for t in peaked], dtype=float)
    far = (measured / peak[:num] - 1.0) / sd[:num]
    fits = fit_probability(peak[num:], planner.cluster.gpu.memory_bytes, sd[num:])
    density = -np.square(far) / 2 - np.log(sd[:num] * peak[:num] / measured)
    return float(density.sum() + np.log(np.maximum(1.0 - fits, 1e-6)).sum())


def assumed_lines(assumed: list[Assumption], other: dict[str, Any] | None) -> list[str]:
    """Both in at most two lines."""
    if not assumed:
        return []
    flags = ", ".join(a.flag for a in assumed)
    lines = [f"assumed: {', '.join(a.text for a in assumed)}; change it with {flags}"]
    if other is not None:
        if other["configuration"] is None:
            choice = "nothing would fit"
        elif other["changes"]:
            choice = f"row 1 would be {other['configuration']}, {other['step_s']:.4g} s"
        else:
            choice = f"row 1 would stay the same, {other['step_s']:.4g} s"
        lines.append(f"most doubtful: {other['assumed']}; with {other['flag']} {choice}")
    return lines
