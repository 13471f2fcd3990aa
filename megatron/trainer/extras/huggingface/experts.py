"""Mixtures of experts in Hugging Face models: fields of `config.json` and names of tensors."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.trainer.common.errors import Refused
from megatron.trainer.extras.huggingface.safetensors_files import SafetensorsFolder
from megatron.trainer.extras.inspect_checkpoint import contents


@dataclass(frozen=True, kw_only=True)
class ExpertFields:
    """How a family of mixtures writes down its experts."""

    count: tuple[str, ...]
    """Fields with the number of experts: the one that is written, and one that is read too."""
    width: str
    block: str
    """Name of the experts and their router in a layer."""
    projections: tuple[str, str, str]
    """Names of the gate, up and down projection of an expert."""
    has_shared: bool = False
    """Whether an expert behind a gate sees every token."""
    is_qwen: bool = True
    """Whether there are fields for dense layers and for scores that do not add up to 1."""

    @property
    def fields(self) -> frozenset[str]:
        """Fields of `config.json` that only this family reads."""
        own = {*self.count, "num_experts_per_tok", "router_aux_loss_coef"}
        own |= {self.width, *_QWEN} if self.is_qwen else set()
        own |= {_SHARED, "qkv_bias"} if self.has_shared else set()
        return frozenset(own - {"intermediate_size"})

    @property
    def in_layer(self) -> dict[str, tuple[str, ...]]:
        """Tensors of a layer: our key in it -> theirs, with a place for the expert."""
        gate, up, down = (f"{self.block}.experts.{{}}.{name}.weight" for name in self.projections)
        shared = f"{self.block}.shared_expert"
        gate_up = tuple(f"{shared}.{name}.weight" for name in self.projections[:2])
        return {
            "mlp.router.weight": (f"{self.block}.gate.weight",),
            f"{contents.EXPERTS}linear_fc1.weight": (gate, up),
            f"{contents.EXPERTS}linear_fc2.weight": (down,),
            "mlp.shared_experts.linear_fc1.weight": gate_up,
            "mlp.shared_experts.linear_fc2.weight": (f"{shared}.{self.projections[2]}.weight",),
            "mlp.shared_experts.gate_weight": (f"{shared}_gate.weight",),
            "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
        }


_SHARED = "shared_expert_intermediate_size"
_QWEN = ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
_QWEN_NAMES = {
    "width": "moe_intermediate_size",
    "block": "mlp",
    "projections": ("gate_proj", "up_proj", "down_proj"),
}
FAMILIES = {
    "mixtral": ExpertFields(
        count=("num_local_experts", "num_experts"),
        width="intermediate_size",
        block="block_sparse_moe",
        projections=("w1", "w3", "w2"),
        is_qwen=False,
    ),
    "qwen2_moe": ExpertFields(count=("num_experts",), has_shared=True, **_QWEN_NAMES),
    "qwen3_moe": ExpertFields(count=("num_experts", "num_local_experts"), **_QWEN_NAMES),
}
"""`model_type` -> its experts."""
EXPRESSIBLE: dict[str, tuple[Any, ...]] = {
    "add_bias_linear": (False,),
    "moe_router_score_function": (None, "softmax"),
    "moe_router_topk_scaling_factor": (None, 1.0),
    "moe_router_num_groups": (None,),
    "moe_router_group_topk": (None,),
    "moe_router_enable_expert_bias": (None, False),
    "moe_expert_capacity_factor": (None,),
}
"""Flag of a mixture -> the values that `config.json` can express."""
_POOLED = ("aux_loss", "global_aux_loss")


def with_one_count(config: Mapping[str, Any], family: ExpertFields) -> dict[str, Any]:
    """The configuration with the number of experts in one field.

    Raises:
        Refused: two fields say two numbers.
    """
    found = {name: config[name] for name in family.count if config.get(name) is not None}
    told = [*found.values()]
    if any(value != told[0] for value in told):
        text = " and ".join(f"{name} is {value!r}" for name, value in found.items())
        raise Refused(f"config.json: {text}; take out the wrong one")
    rest = {name: value for name, value in config.items() if name not in family.count}
    return {**rest, family.count[0]: told[0]} if told else rest


def arguments_of(config: Mapping[str, Any], family: ExpertFields) -> dict[str, Any]:
    """Flags of this trainer for the experts of a model.

    Args:
        config: with the family's values of absent fields; the number of experts in one field.

    Raises:
        Refused: names the field.
    """
    _check_kinds(config, family)
    count, topk = config[family.count[0]], config["num_experts_per_tok"]
    if topk > count:
        raise Refused(f"config.json: num_experts_per_tok is {topk}, of {count} experts")
    is_normalised = not family.is_qwen or bool(config.get("norm_topk_prob"))
    if is_normalised and topk == 1:
        raise Refused(
            "config.json: num_experts_per_tok is 1 and scores are divided by their sum, so that "
            "every score is 1; the trainer has no such router"
        )
    layers = _layers_with_experts(config)
    pooled = config.get("router_aux_loss_coef") or 0.0
    return {
        "num_experts": count,
        "moe_layer_freq": _text_of(layers),
        "moe_ffn_hidden_size": config[family.width],
        "moe_router_topk": topk,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not is_normalised,
        "moe_shared_expert_intermediate_size": config[_SHARED] if family.has_shared else None,
        "moe_shared_expert_gate": family.has_shared,
        "moe_router_load_balancing_type": ["aux_loss"],
        "moe_aux_loss_coeff": [_rounded(pooled * topk / sum(layers))],
        **({"add_qkv_bias": bool(config["qkv_bias"])} if family.has_shared else {}),
    }


def _check_kinds(config: Mapping[str, Any], family: ExpertFields) -> None:
    sizes = [family.count[0], family.width, "num_experts_per_tok"]
    sizes += ["decoder_sparse_step"] if family.is_qwen else []
    sizes += [_SHARED] if family.has_shared else []
    for name in sizes:
        value = config.get(name)
        if type(value) is not int or not 0 < value < 2**63:
            raise Refused(f"config.json: {name} is {value!r}, no number of anything")
    for name in ("norm_topk_prob", "qkv_bias"):
        if type(config.get(name, False)) is not bool:
            raise Refused(f"config.json: {name} is {config[name]!r}, neither true nor false")
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(number) is not int for number in dense):
        raise Refused(f"config.json: mlp_only_layers is {dense!r}, no list of layers")
    pooled = config.get("router_aux_loss_coef") or 0.0
    is_number = isinstance(pooled, (int, float)) and not isinstance(pooled, bool)
    if not is_number or not 0 <= pooled < math.inf:
        raise Refused(f"config.json: router_aux_loss_coef is {pooled!r}, no weight of a loss")


def _layers_with_experts(config: Mapping[str, Any]) -> list[int]:
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
    count = config["num_hidden_layers"]
    layers = [int((i + 1) % step == 0 and i not in dense) for i in range(count)]
    if not any(layers):
        raise Refused(
            f"config.json: decoder_sparse_step is {step} and mlp_only_layers is {dense}, so that "
            "no layer has experts"
        )
    return layers


def _text_of(layers: list[int]) -> str:
    """A value of `--moe-layer-freq`."""
    if all(layers):
        return "1"
    return "+".join(f"[{kind}]*{len(list(run))}" for kind, run in itertools.groupby(layers))


def config_of(arguments: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The fields of `config.json` for the experts of a model.

    Args:
        arguments: flags that `config.json` can express.
        kind: from `kind_of`.
    """
    family, layers = FAMILIES[kind], contents.experts_of_layers(arguments)
    assert layers is not None
    topk = arguments.get("moe_router_topk", 2)
    fields: dict[str, Any] = {
        family.count[0]: arguments["num_experts"],
        family.width: arguments.get("moe_ffn_hidden_size") or arguments["ffn_hidden_size"],
        "num_experts_per_tok": topk,
        "router_aux_loss_coef": _rounded(_balance_weight(arguments) * sum(layers) / topk),
    }
    if family.is_qwen:
        steps = range(1, len(layers) + 1)
        every = [n for n in steps if [(i + 1) % n == 0 for i in range(len(layers))] == [*layers]]
        dense = [] if every else [i for i, has_experts in enumerate(layers) if not has_experts]
        fields["norm_topk_prob"] = not arguments.get("moe_router_pre_softmax")
        fields["decoder_sparse_step"] = every[0] if every else 1
        fields["mlp_only_layers"] = dense
    if family.has_shared:
        fields[_SHARED] = arguments["moe_shared_expert_intermediate_size"]
        fields["qkv_bias"] = bool(arguments.get("add_qkv_bias"))
    return fields


def kind_of(arguments: Mapping[str, Any]) -> str:
    """The `model_type` of a mixture with these flags.

    Raises:
        Refused: no family has this network; names the flag.
    """
    shared = arguments.get("moe_shared_expert_intermediate_size")
    qk_norm, qkv_bias = arguments.get("qk_layernorm"), arguments.get("add_qkv_bias")

    def refuse(name: str, why: str) -> Refused:
        have = arguments.get(name)
        return Refused(f"{name} is {have!r}, which config.json cannot express {why}")

    balancing = arguments.get("moe_router_load_balancing_type") or ()
    if "sinkhorn" in balancing:
        raise refuse("moe_router_load_balancing_type", "because it chooses experts in another way")
    if shared:
        if qk_norm:
            raise refuse("qk_layernorm", "beside a shared expert")
        if not arguments.get("moe_shared_expert_gate"):
            raise refuse("moe_shared_expert_gate", "beside a shared expert")
        return "qwen2_moe"
    if qkv_bias:
        raise refuse("add_qkv_bias", "in a mixture without a shared expert")
    if qk_norm:
        return "qwen3_moe"
    why = "in a mixture without qk_layernorm or a shared expert"
    if arguments.get("moe_router_pre_softmax"):
        raise refuse("moe_router_pre_softmax", why)
    if not all(contents.experts_of_layers(arguments) or ()):
        raise refuse("moe_layer_freq", why)
    return "mixtral"


def notes_on(arguments: Mapping[str, Any]) -> list[str]:
    """What the user should know about losses and noise of a mixture: they act in training only."""
    if not arguments.get("num_experts"):
        return []
    layers, topk = contents.experts_of_layers(arguments) or (), arguments.get("moe_router_topk", 2)
    weight, notes = _balance_weight(arguments), []
    if weight:
        pooled = _rounded(weight * sum(layers) / topk)
        notes.append(
            f"router_aux_loss_coef {pooled} is --moe-aux-loss-coeff {weight}: transformers counts "
            f"each of the {topk} choices of a token, and takes the mean over layers with experts"
        )
    kinds = _listed(arguments.get("moe_router_load_balancing_type"))
    left = [name for name in ("moe_z_loss_coeff", "moe_input_jitter_eps") if arguments.get(name)]
    left += [kind for kind in kinds if kind == "seq_aux_loss"]
    if left:
        notes.append(f"{', '.join(left)} acts in training only and has no field in config.json")
    return notes


def _balance_weight(arguments: Mapping[str, Any]) -> float:
    """Weight in each layer of the losses that transformers has one of the same form for."""
    kinds = _listed(arguments.get("moe_router_load_balancing_type"))
    weights = _listed(arguments.get("moe_aux_loss_coeff"))
    return float(sum(w for kind, w in zip(kinds, weights) if kind in _POOLED))


def _listed(value: Any) -> list[Any]:
    """The values of a flag that Megatron-LM stores alone where there is one."""
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def _rounded(value: float) -> float:
    """Without the last digits, which a way there and back would change."""
    return float(f"{value:.12g}")


_STACKED = re.compile(r"(model\.layers\.\d+\.)mlp\.experts\.(gate_up_proj|down_proj)")


class UnstackedExperts:
    """A folder in which experts of a layer share tensors, as newer releases of transformers keep
    them in memory, under the names that files with a tensor for each expert have.
    """

    def __init__(self, stored: SafetensorsFolder, family: ExpertFields) -> None:
        self._stored, self.folder = stored, stored.folder
        # Name -> stored tensor, expert, first and last row.
        self._parts: dict[str, tuple[str, int, int, int]] = {}
        self._plain: dict[str, str] = {}
        gate, up, down = family.projections
        for name in stored.names:
            found = _STACKED.fullmatch(name)
            if found is None:
                layer = re.match(r"model\.layers\.\d+\.", name)
                start = f"{layer[0]}mlp." if layer else "-"
                own = name.replace(start, f"{layer[0]}{family.block}.") if layer else name
                self._plain[own] = name
                continue
            _, shape = stored.describe(name)
            if len(shape) != 3:
                raise Refused(f"{name} in {stored.folder} has the shape {shape}, not three axes")
            rows = [(gate, 0, shape[1] // 2), (up, shape[1] // 2, shape[1])]
            rows = rows if found[2] == "gate_up_proj" else [(down, 0, shape[1])]
            for expert, (part, first, last) in itertools.product(range(shape[0]), rows):
                key = f"{found[1]}{family.block}.experts.{expert}.{part}.weight"
                self._parts[key] = name, expert, first, last

    @property
    def names(self) -> set[str]:
        return {*self._parts, *self._plain}

    def describe(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        if name not in self._parts:
            return self._stored.describe(self._plain[name])
        stored, _, first, last = self._parts[name]
        dtype, shape = self._stored.describe(stored)
        return dtype, (last - first, shape[2])

    def read(self, name: str) -> torch.Tensor:
        """As `SafetensorsFolder`; reads no other expert."""
        if name not in self._parts:
            return self._stored.read(self._plain[name])
        return self._stored.read_rows(*self._parts[name])


def unstacked(
    stored: SafetensorsFolder, arguments: Mapping[str, Any]
) -> SafetensorsFolder | UnstackedExperts:
    """The folder of a model with a name for each expert, whichever way its experts are stored."""
    if not arguments.get("num_experts") or not any(map(_STACKED.fullmatch, stored.names)):
        return stored
    return UnstackedExperts(stored, FAMILIES[kind_of(arguments)])
