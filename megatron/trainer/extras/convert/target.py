"""What a checkpoint becomes: checked by the rules of a launch, then put into its common state."""

from __future__ import annotations

import copy
import math
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.trainer.checkpoint.files import OUR_KEY
from megatron.trainer.common.errors import Refused, UsageError
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.relayout import UNEVEN_FIELDS, layout_fields
from megatron.trainer.extras.inspect_checkpoint import contents
from megatron.trainer.extras.inspect_checkpoint.checks import Contents, optimizers_of
from megatron.trainer.extras.inspect_checkpoint.layouts import (
    batch_problems_of,
    is_sequence_parallel,
    problems_of,
    stored_layout,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

LAYOUT_FLAGS = ("tp", "cp", "pp", "vpp", "dp", "ep", "etp")
"""Fields of `Changes` that name a layout."""
_LEVELS = "hierarchical_context_parallel_sizes"


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What the user asked for; None keeps what is stored.

    Raises:
        UsageError: a size below 1.
    """

    tp: int | None = None
    cp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    dp: int | None = None
    ep: int | None = None
    etp: int | None = None
    vocab: int | None = None
    true_vocab: int | None = None
    """Tokens of the tokenizer, where the stored flags do not tell."""
    dtype: str | None = None
    """Number format of the weights: fp32, bf16 or fp16."""
    optimizer: str | None = None
    """`distributed`, `plain` or `none`."""

    def __post_init__(self) -> None:
        for name in (*LAYOUT_FLAGS, "vocab", "true_vocab"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise UsageError(f"--{name.replace('_', '-')} {size} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Target:
    layout: Layout
    """Layout its flags name."""
    vocab: int
    dtype: torch.dtype
    """Number format of the weights."""
    optimizer: str
    """`distributed`, `plain` or `none`."""
    notes: tuple[str, ...] = ()


def requested_layout(arguments: Mapping[str, Any], changes: Changes) -> Layout:
    """The stored layout with what was asked for instead.

    Raises:
        UsageError: a virtual pipeline without a pipeline, or experts that the ranks of a stage
            cannot share.
    """
    stored = stored_layout(arguments)
    pp = changes.pp or stored.pp
    vpp = changes.vpp or (stored.vpp if pp > 1 else 1)
    if vpp > 1 and pp == 1:
        raise UsageError(f"--vpp {vpp} needs a pipeline; give --pp of at least 2")
    is_kept = (pp, vpp) == (stored.pp, stored.vpp)
    sizes = {name: getattr(changes, name) or getattr(stored, name) for name in LAYOUT_FLAGS}
    sizes |= {"pp": pp, "vpp": vpp}
    try:
        return Layout(**sizes, layer_partition=stored.layer_partition if is_kept else None)
    except ValueError as error:
        raise UsageError(f"{error}; change --cp, --dp, --ep or --etp") from error


def target_of(arguments: Mapping[str, Any], found: Contents, changes: Changes) -> Target:
    """Decides what the checkpoint becomes.

    Raises:
        UsageError: changes that make no sense.
        Refused: a target that would not load.
    """
    layout = requested_layout(arguments, changes)
    vocab, notes = _vocabulary(arguments, changes)
    problems = problems_of(arguments, layout, vocab) + batch_problems_of(arguments, layout)
    if problems:
        raise Refused(
            f"the target {layout} would not load: {'; '.join(problems)}; here --tp, --cp, --pp, "
            "--vpp, --dp, --ep, --etp and --vocab change it"
        )
    if changes.optimizer not in (None, "none") and found.optimizer == "none":
        raise Refused(
            f"--optimizer {changes.optimizer} needs the moments of Adam, which it does not hold; "
            "drop the flag and start from the weights with --finetune"
        )
    if changes.optimizer == "distributed" and found.matrices:
        raise Refused(
            "--optimizer distributed is for Adam alone, and it holds Muon's momenta; drop the flag"
        )
    return Target(
        layout=layout,
        vocab=vocab,
        dtype=DTYPES[changes.dtype] if changes.dtype else found.dtype,
        optimizer=changes.optimizer or found.optimizer,
        notes=tuple(notes),
    )


def check_vocabulary(arguments: Mapping[str, Any], changes: Changes) -> int | None:
    """Proves that no row of a token would go.

    Returns:
        How many rows are tokens, None if neither flags nor changes say it.

    Raises:
        UsageError: rows would go, and nothing says how many are tokens.
        Refused: a token's row would go.
    """
    rows, told = changes.vocab, changes.true_vocab
    stored, known = int(arguments["padded_vocab_size"]), contents.true_vocab_size(arguments)
    if told is not None and known is not None and told < known:
        raise Refused(f"--true-vocab {told}: the stored flags say {known}; drop it")
    true = told or known
    if rows is None or rows >= stored:
        return true
    if true is None:
        raise UsageError(
            f"--vocab {rows} drops rows, and the stored flags do not say how many tokens the "
            "tokenizer has; say it with --true-vocab"
        )
    if rows < min(true, stored):
        raise Refused(
            f"--vocab {rows} would drop tokens: the tokenizer has {true}; give at least that"
        )
    return true


def _vocabulary(arguments: Mapping[str, Any], changes: Changes) -> tuple[int, list[str]]:
    stored = int(arguments["padded_vocab_size"])
    check_vocabulary(arguments, changes)
    rows = changes.vocab or stored
    if rows == stored:
        return stored, []
    kind = "rows of padding are dropped" if rows < stored else "rows of zeros are added"
    change = abs(rows - stored)
    return rows, [f"{change} {kind}; they take part in the softmax, so the loss changes at once"]


def common_of(common: Mapping[str, Any], found: Contents, target: Target) -> dict[str, Any]:
    """The common state of the target: what is stored, with layout, vocabulary, number format and
    optimizer rewritten."""
    new = copy.deepcopy(dict(common))
    arguments = vars(new["args"])
    arguments.update(arguments_of(arguments, target))
    if found.dtype != target.dtype:
        _set_dtype(arguments, target.dtype)
    if target.optimizer != "none":
        arguments["use_distributed_optimizer"] = target.optimizer == "distributed"
        if target.optimizer == "plain":
            arguments["overlap_param_gather"] = False
        if (found.dtype, found.optimizer) != (target.dtype, target.optimizer):
            state = new["optimizer"]
            made = [_optimizer_state(part, arguments, target) for part in optimizers_of(state)]
            is_chain = optimizers_of(state)[0] is not state
            new["optimizer"] = dict(zip(state, made, strict=True)) if is_chain else made[0]
    else:
        new.pop("optimizer", None)
    if OUR_KEY in new:
        new[OUR_KEY]["layout"] = target.layout.to_json()
    if target.optimizer == "distributed":
        content = new.get("content_metadata") or {}
        new["content_metadata"] = {**content, "distrib_optim_sharding_type": "fully_reshardable"}
    new["args"] = Namespace(**arguments)
    return new


def arguments_of(arguments: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """Flags that name the layout and the vocabulary of the target."""
    layout = target.layout
    values = layout_fields(layout, arguments.get("mtp_num_layers") or 0)
    if layout.vpp == 1 and arguments.get("virtual_pipeline_model_parallel_size") is None:
        # Megatron-LM writes None where there is no virtual pipeline, this trainer writes 1.
        values["virtual_pipeline_model_parallel_size"] = None
    values = {n: v for n, v in values.items() if n in arguments or n not in UNEVEN_FIELDS}
    levels = arguments.get(_LEVELS)
    if levels and math.prod(levels) != layout.cp:
        values[_LEVELS] = None
    return {
        **values,
        "overlap_p2p_comm": layout.vpp > 1,
        "world_size": layout.world_size,
        "sequence_parallel": is_sequence_parallel(arguments, layout),
        "padded_vocab_size": target.vocab,
    }


def _set_dtype(arguments: dict[str, Any], dtype: torch.dtype) -> None:
    name = next(name for name, value in DTYPES.items() if value == dtype)
    arguments["bf16"], arguments["fp16"] = name == "bf16", name == "fp16"
    is_ours = isinstance(arguments.get("params_dtype", name), str)
    arguments["params_dtype"] = name if is_ours else dtype
    reduce_in_half = bool(arguments.get("grad_reduce_in_bf16"))
    arguments["accumulate_allreduce_grads_in_fp32"] = name == "bf16" and not reduce_in_half
    if name != "bf16":
        arguments["grad_reduce_in_bf16"] = False


def _without_emptied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Without the entries that a mixture leaves behind where its tensors were."""
    emptied = ("state", "param_state")
    return {key: value for key, value in state.items() if value or key not in emptied}


def _optimizer_state(
    state: Mapping[str, Any], arguments: Mapping[str, Any], target: Target
) -> dict[str, Any]:
    """The optimizer's part of the common state in the shape its class writes.

    The fp32 optimizer writes its parameter groups bare. The half-precision and the distributed one
    wrap them, with a loss scale for fp16. The distributed one adds how its tensors are stored.

    Raises:
        Refused: the stored shape is none of these.
    """
    inner = state if "param_groups" in state else state.get("optimizer", {})
    state, inner = _without_emptied(state), _without_emptied(inner)
    known = {"param_groups", "optimizer", "grad_scaler", "param_state_sharding_type"}
    strange = sorted(set(state) - known) or sorted(set(inner) - {"param_groups"})
    if strange or "param_groups" not in inner:
        raise Refused(
            f"the optimizer's common state holds {', '.join(strange) or 'no parameter groups'}, "
            "which is unknown; --optimizer none keeps the weights alone"
        )
    if target.optimizer == "plain" and target.dtype == torch.float32:
        return dict(inner)
    new: dict[str, Any] = {"optimizer": dict(inner)}
    if target.dtype == torch.float16:
        new["grad_scaler"] = state.get("grad_scaler") or {
            "scale": torch.tensor([float(arguments.get("initial_loss_scale") or 2**32)]),
            "growth_tracker": 0,
            "hysteresis_tracker": arguments.get("hysteresis") or 2,
        }
    if target.optimizer == "distributed":
        new["param_state_sharding_type"] = "fully_reshardable"
    return new
