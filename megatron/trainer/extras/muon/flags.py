"""The flags of Muon, as megatron-core names them, and their checks."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from megatron.trainer.common.core_version import since
from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.draft import Draft, Environment, flag_of
from megatron.trainer.config.fields import option
from megatron.trainer.config.layout import Layout

OPTIMIZERS = ("muon", "dist_muon")
_INSTALL = "pip install emerging-optimizers==0.3.0"


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Flags of the extra. Those that megatron-core's `OptimizerConfig` has go there."""

    muon_momentum: float = option(0.9)
    """Decay of the running mean of gradients, of --optimizer muon."""
    muon_split_qkv: bool = option(True, "--muon-no-split-qkv")
    """Queries, keys and values are orthogonalized each by themselves; with the flag as one matrix,
    as --tensor-model-parallel-size above --num-query-groups needs it."""
    muon_nesterov: bool = option(False, "--muon-nesterov", "--muon-use-nesterov")
    """Nesterov's form of the momentum."""
    muon_scale_mode: str = option(
        "spectral", choices=("spectral", "unit_rms_norm", "shape_scaling")
    )
    """How the size of an update follows from the shape of its matrix."""
    muon_fp32_matmul_prec: str = option("medium", choices=("low", "medium", "high"))
    """Precision of the products of Newton-Schulz steps: medium rounds their factors to bf16."""
    muon_coefficient_type: str = option("quintic")
    """Coefficients of the Newton-Schulz steps; the names are those of emerging-optimizers."""
    muon_num_ns_steps: int = option(5)
    """Newton-Schulz steps."""
    muon_tp_mode: str = option("duplicated", choices=("blockwise", "duplicated", "distributed"))
    """How a matrix that tensor-parallel ranks share is orthogonalized. With blockwise each part is
    taken for a matrix of its own, so that the result depends on --tensor-model-parallel-size."""
    muon_extra_scale_factor: float = option(1.0)
    """Factor of all updates. 0.2 gives them about the size of Adam's."""
    muon_scalar_optimizer: str = option("adam", choices=("adam", "lion"))
    """Optimizer of word embeddings, output layer, biases and norms. Only adam is supported."""


def check_muon(draft: Draft, environment: Environment) -> None:
    """Notes what Muon does not go with; see `Extra.check`."""
    given = [name for name in MuonConfig.__dataclass_fields__ if name in draft.explicit]
    if draft["optimizer"] != "muon":
        if given:
            flags = ", ".join(map(flag_of, given))
            draft.notes.append(f"without --optimizer muon there is no effect of {flags}")
        return
    draft.require(
        since("0.18"),
        "--optimizer muon needs megatron-core 0.18 or later, and so Python 3.12; use --optimizer "
        "adam, or set up an environment of Python 3.12",
    )
    draft.stop_if_problems()
    _check_package(draft)
    draft.require(not draft["fp16"], "--optimizer muon excludes --fp16; use --bf16")
    draft.require(
        not draft["decoupled_lr"],
        "--optimizer muon excludes --decoupled-lr: embeddings are Adam's, and nobody has run both "
        "together; drop it",
    )
    draft.require(
        draft["muon_scalar_optimizer"] == "adam",
        f"--muon-scalar-optimizer {draft['muon_scalar_optimizer']} is not supported; use adam",
    )
    draft.problems += _value_problems(draft.values)


def _value_problems(values: Mapping[str, Any]) -> list[str]:
    """Why no launch takes some of the numbers among the flags."""
    steps, momentum = values["muon_num_ns_steps"], values["muon_momentum"]
    factor = values["muon_extra_scale_factor"]
    broken = {
        f"--muon-num-ns-steps {steps} must be at least 1": steps < 1,
        f"--muon-momentum {momentum:g} must be at least 0 and below 1": not 0 <= momentum < 1,
        f"--muon-extra-scale-factor {factor:g} must be above 0 and finite": not 0 < factor < inf,
    }
    return [line for line, is_broken in broken.items() if is_broken]


def _check_package(draft: Draft) -> None:
    """Megatron-core leaves the package out silently where it cannot import it."""
    core: Any = importlib.import_module("megatron.core.optimizer.emerging_optimizers")
    # Else each rank says on every launch that it rounds to bf16.
    logging.getLogger("absl").setLevel(logging.WARNING)

    is_there = core.HAVE_EMERGING_OPTIMIZERS
    draft.require(is_there, f"--optimizer muon needs a package that is not there; {_INSTALL}")
    known = core.get_supported_coefficient_types() if is_there else ()
    wanted = draft["muon_coefficient_type"]
    draft.require(
        not is_there or (wanted in known and wanted != "custom"),
        f"--muon-coefficient-type {wanted} is not known; use one of "
        f"{', '.join(name for name in known if name != 'custom')}",
    )


def planned(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """See `Extra.planned`."""
    if not _is_on(arguments):
        return {}
    if problems := _value_problems(arguments):
        raise UsageError(problems[0])
    return {name: arguments[name] for name in ("muon_num_ns_steps", "muon_split_qkv")}


def _is_on(arguments: Mapping[str, Any]) -> bool:
    """The planner keeps numbers alone, and those of this extra only where Muon is on."""
    if "optimizer" in arguments:
        return arguments["optimizer"] in OPTIMIZERS
    return "muon_num_ns_steps" in arguments


def layout_problems(arguments: Mapping[str, Any], layout: Layout) -> list[str]:
    """See `Extra.layout_problems`. A launch drops the flag before it asks."""
    if not _is_on(arguments):
        return []
    problems = []
    if arguments.get("use_distributed_optimizer"):
        problems.append("--optimizer muon excludes --use-distributed-optimizer; drop it")
    groups = arguments.get("num_query_groups")
    if arguments.get("muon_split_qkv", True) and groups and layout.tp > groups:
        # Megatron-core would silently take them as one, and differ from every smaller layout.
        problems.append(
            f"--optimizer muon cannot tell queries, keys and values apart where --num-query-groups "
            f"{groups} is below --tensor-model-parallel-size {layout.tp}; lower the latter, or add "
            "--muon-no-split-qkv, with which all layouts orthogonalize them as one matrix"
        )
    return problems


def controller_problems(arguments: Mapping[str, Any], moves: bool) -> list[str]:
    """See `Extra.controller_problems`."""
    if _is_on(arguments) and moves and arguments["muon_tp_mode"] == "blockwise":
        return [
            "--muon-tp-mode blockwise makes updates depend on the layout, which --copus changes; "
            "use duplicated, or --copus-layouts current"
        ]
    return []
