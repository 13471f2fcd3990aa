"""What an answer assumes of the software that will run, and what else would change the choice."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from copus_ext.cost_model.memory import peaks
from copus_ext.cost_model.model_spec import ATTENTION, ModelSpec
from copus_ext.cost_model.peak_correction import fit_probability
from copus_ext.cost_model.spec_file import SpecError
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.from_command import present
from copus_ext.planner.plan import Plan
from copus_ext.planner.request import UsageProblem, constants_of, megatron_flag, model_of
from copus_ext.planner.search import Planner
from copus_ext.planner.space import points_of, to_config_batch
from copus_ext.planner.suited import left_open, old_gpu, suited, will_not_run
from megatron.trainer.data.tokenizer import told_vocab_size

_LAYERS = {
    "te": "layers of Transformer Engine",
    "local": "local layers",
    "legacy": "layers of before megatron-core",
}
_KERNELS = {True: "flash attention", False: "unfused attention"}
_TELLING = 3.0
"""Times that measured memory is more likely otherwise, from which on an answer says so."""
_BESIDES = {"--gradient-bytes 2": " (whose optimizer keeps gradients in 4 bytes besides, split)"}
"""What is worth knowing of a flag."""
_ONE = {False: "it, give it", True: "one of them, give it"}
_OF_GPT2 = "GPT2BPETokenizer"
"""Megatron-LM's usual tokenizer, whose vocabulary is known."""


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """Something that nobody said."""

    text: str
    flag: str
    """What says it."""
    otherwise: tuple[str, dict[str, Any]] | None = None
    """The likeliest other way, as a flag and as fields of the model; None: not asked about."""
    has_bytes: bool = True
    """Whether measured memory may say that it is the other way."""


def assumptions(args: argparse.Namespace, planner: Planner) -> list[Assumption]:
    """What the answer takes for granted on GPUs: of the software, the most doubtful first, and of
    the network where nobody gave it."""
    found, cluster = _of_software(args, planner), planner.cluster
    known = args.nic is not None or cluster.nic_is_measured or cluster.links is not None
    known |= (args.cluster or "").endswith(".json")
    if known or cluster.is_gloo or cluster.num_nodes == 1:
        return found
    nic = cluster.nic_bytes_per_s / 1e9
    text = f"a network of {nic:.4g} GB/s for each node"
    return [*found, Assumption(text=text, flag="--nic", has_bytes=False)]


def _of_software(args: argparse.Namespace, planner: Planner) -> list[Assumption]:
    """What is taken for granted of the software, the most doubtful first. Flags of Megatron-LM say
    all but the kernel that its backend will choose."""
    model, overlap = planner.model, planner.limits.overlap
    if planner.cluster.is_gloo:
        return []
    old = old_gpu(planner.cluster)
    layers, kernel = (
        f"{text} ({old} has no {lacked})" if old and name in left_open(args) else text
        for name, text, lacked in (
            ("implementation", _LAYERS[model.implementation], "Transformer Engine"),
            ("attention", _KERNELS[model.fused_attention], "flash attention"),
        )
    )
    if args.megatron_args is not None:
        names = "attention_backend", "use_flash_attn"
        where = "--megatron-args" if args.launched is None else "--from-command"
        backend = any(megatron_flag(args, name) for name in names)
        vocabulary = _vocabulary(args, model)
        if model.precision == "fp32" and model.fused_attention:
            text = "fp32 with flash attention, which GPUs have in half precision alone"
            flag = f"--bf16 or --attention-backend unfused in {where}"
            return [*vocabulary, Assumption(text=text, flag=flag)]
        found = [] if backend else [Assumption(text=kernel, flag=f"--attention-backend in {where}")]
        if old and "implementation" in left_open(args):
            found.append(Assumption(text=layers, flag=f"--transformer-impl in {where}"))
        return [*vocabulary, *found]
    found = []
    if args.gradient_bytes is None and model.precision != "fp32":
        other = ("--gradient-bytes 2", {"gradient_bytes": 2})
        if model.gradient_bytes == 2:
            other = ("--gradient-bytes 4", {"gradient_bytes": 4})
        text = f"gradients of {model.gradient_bytes} bytes"
        found.append(Assumption(text=text, flag="--gradient-bytes", otherwise=other))
    if args.implementation is None:
        other = ("--implementation local", {"implementation": "local"})
        other = None if old else other
        found.append(Assumption(text=layers, flag="--implementation", otherwise=other))
    if args.norm is None:
        kind = model.norm or ("fused" if model.implementation == "te" else "torch's")
        found.append(Assumption(text=f"{kind} norms", flag="--norm"))
    if args.attention is None:
        other = ("--attention unfused", ATTENTION["unfused"])
        other = None if old else other
        found.append(Assumption(text=kernel, flag="--attention", otherwise=other))
    if overlap:
        found.append(Assumption(text="gradients travel while passes compute", flag="--no-overlap"))
    text = f"{model.precision} ({old} has no bf16)" if old else model.precision
    text += "" if model.dropout else " and no dropout"
    if model.num_experts is not None:
        text += f", the {model.moe_token_dispatcher_type} token dispatcher"
    return [*found, Assumption(text=text, flag="--from-command")]


def _vocabulary(args: argparse.Namespace, model: ModelSpec) -> list[Assumption]:
    """That of a tokenizer whose files nobody reads here, where Megatron's flags give no size."""
    kind = megatron_flag(args, "tokenizer_type")
    given = any(megatron_flag(args, name) for name in ("vocab_size", "padded_vocab_size"))
    if given or kind in (None, _OF_GPT2) or told_vocab_size(kind, None):
        return []
    twice = 2 * model.vocab_size
    other = f"--vocab-size {twice}", {"vocab_size": twice}
    text = f"a vocabulary of {model.vocab_size:,} tokens, which {kind} does not tell"
    flag = "--vocab-size or --padded-vocab-size"
    return [Assumption(text=text, flag=flag, otherwise=other, has_bytes=False)]


def half_precision_line(args: argparse.Namespace, planner: Planner, plan: Plan) -> str:
    """What half precision would make of the command's layout, or else of the first row, where
    Megatron's flags leave it out; empty where they do not, or nothing is priced."""
    if args.megatron_args is None or planner.model.precision != "fp32" or planner.cluster.is_gloo:
        return ""
    asked = argparse.Namespace(**vars(args))
    flag = "--bf16" if old_gpu(planner.cluster) is None else "--fp16"
    asked.megatron_args = f"{args.megatron_args} {flag}"
    c, whose = (plan.ranked[0].configuration if plan.ranked else None), "row 1"
    if args.launched is not None:
        try:
            size = planner.cluster.world_size
            c, whose = present(args, plan.global_batch_size, size), "your command"
        except UsageProblem:
            pass
    if c is None:
        return ""
    model = suited(asked, model_of(asked), planner.cluster)
    half = planner.on(planner.cluster, model=model)
    half.retime(())
    try:
        now, then = (one.priced(c).prediction.step_s for one in (planner, half))
    except SpecError:
        return ""
    return (
        f"without {flag} the run computes in fp32: {whose} takes {now:.4g} s a step, and with "
        f"{flag} {then:.4g} s"
    )


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
    """What measured peaks, and runs that ran out of memory, say of the assumptions: at most a line,
    with those that would explain them better the other way, the likeliest first."""
    now = _Told.by(planner, planner.model)
    some = (a.otherwise for a in assumed if a.otherwise is not None and a.has_bytes)
    found = [
        (f"{flag}{_BESIDES.get(flag, '')}", _Told.by(planner, replace(planner.model, **fields)))
        for flag, fields in some
    ]
    # Without a word in CONFIG the optimizer's state was taken to be split.
    if open_ := [c for text, c in args.reported if ":" in text and "zero=" not in text]:
        whole = _Told.by(planner, planner.model, unsplit=open_)
        found.append(("no distributed optimizer (zero=0 in CONFIG)", whole))
    # Another way that is only less sure explains nothing.
    better = [(then.likely - now.likely, what) for what, then in found if then.misses < now.misses]
    better = sorted((x for x in better if x[0] >= math.log(_TELLING)), reverse=True)
    if not better:
        return []

    def times(more: float) -> str:
        return f"{math.exp(more):.0f}" if more < math.log(1000.0) else "over 1000"

    (most, first), *others = better
    words = [f"{times(most)} times as likely with {first}"]
    words += [f"{times(more)} times with {what}" for more, what in others]
    return [f"the memory measured is {', '.join(words)}; if your run had {_ONE[bool(others)]}"]


@dataclass(frozen=True)
class _Told:
    """What measured memory says of a model."""

    likely: float
    """Logarithm of the likelihood."""
    misses: float
    """Bytes between prediction and measurement, of all runs; of one that ran out of memory, those
    that are lacking to what a GPU has."""

    @classmethod
    def by(cls, planner: Planner, model: ModelSpec, unsplit: Sequence[Configuration] = ()) -> _Told:
        """If the model is implemented so, and some of the runs did not split the optimizer."""
        peaked = [t for t in planner.timings if t.peak_bytes is not None]
        some = [*(t.configuration for t in peaked), *planner.too_large]
        some = [replace(c, use_distributed_optimizer=False) if c in unsplit else c for c in some]
        if not some:
            return cls(0.0, 0.0)
        peak, sd = peaks(to_config_batch(model, planner.cluster, points_of(some)))
        num, size = len(peaked), planner.cluster.gpu.memory_bytes
        measured = np.array([t.peak_bytes for t in peaked], dtype=float)
        far = (measured / peak[:num] - 1.0) / sd[:num]
        fits = fit_probability(peak[num:], size, sd[num:])
        density = -np.square(far) / 2 - np.log(sd[:num] * peak[:num] / measured)
        likely = density.sum() + np.log(np.maximum(1.0 - fits, 1e-6)).sum()
        misses = np.abs(measured - peak[:num]).sum() + np.maximum(size - peak[num:], 0.0).sum()
        return cls(float(likely), float(misses))


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


def untimed(args: argparse.Namespace, planner: Planner) -> list[str]:
    """What of an answer rests on no time of any GPU, or will not run on this one."""
    found = [_borrowed_constants(args, planner), will_not_run(args, planner.model, planner.cluster)]
    if planner.model.num_experts is not None and not planner.cluster.is_gloo:
        kind = planner.model.moe_token_dispatcher_type
        what = f"routing, the exchanges of the {kind} token dispatcher and products of few rows "
        what += "are assumptions"
        found.append(f"no GPU has timed a mixture of experts for this table: {what}")
    return [line for line in found if line]


def _borrowed_constants(args: argparse.Namespace, planner: Any) -> str:
    """Whose constants stand in for those of a device that was never timed; empty if it was, or if
    the user gave a file."""
    about, gpu = constants_of(args, planner), planner.cluster.gpu.name
    whose = about["fitted_on"]
    if about["residual"] is not None:
        kind = about["name"].split("-")[0]
        if args.constants is not None or kind in gpu.lower():
            return ""
        whose = f"those of {about['name']}"
    return f"constants of {gpu}: {whose}; --profile corrects them by measured times"
