"""The flags of a row beside those of the run that has them: what they replace, add and leave."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Collection, Sequence

from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.run_flags import SEARCHED, parsed_flags, specs

_OF_A_ROW = (
    *SEARCHED,
    *("cp_comm_type", "logits_chunks", "overlap_grad_reduce", "overlap_param_gather"),
    *("use_tp_pp_dp_mapping", "microbatch_group_size_per_vp_stage"),
)
"""Fields that a row says, also by the absence of their flags."""


def _flag(name: str) -> str:
    """The flag of a field, as it is usually written."""
    return next(spec.strings[0] for spec in specs().values() if spec.dest == name)


def given_of(args: argparse.Namespace) -> frozenset[str]:
    """Fields that the flags of a run set, as far as they are known."""
    if args.megatron_args is None:
        return frozenset()
    return parsed_flags(args.megatron_args).explicit_flags


def flags_of_row(
    c: Configuration,
    model: ModelSpec,
    given: Collection[str] = (),
    software: Sequence[str] = (),
) -> list[str]:
    """Flags that say a configuration whole, so that they win behind those of the run: sizes of 1
    where these name the size, and those of experts for any mixture.

    Args:
        c: the configuration.
        model: what is trained.
        given: fields that the run's own flags set.
        software: flags that come before (`suited.software_flags`).
    """
    flags, is_mixture = [*software, *c.to_flags()], model.num_experts is not None
    for name, size, is_needed in (
        ("context_parallel_size", c.layout.cp, False),
        ("expert_model_parallel_size", c.layout.ep, is_mixture),
        ("expert_tensor_parallel_size", c.layout.expert_tensor_parallel_size, is_mixture),
        ("logits_chunks", c.logits_chunks, False),
    ):
        if (is_needed or name in given) and _flag(name) not in flags:
            flags += [_flag(name), str(size)]
    return flags


def to_remove(flags: Sequence[str], given: Collection[str]) -> list[str]:
    """Flags of the run that contradict a row, and that none of the row's own unsets.

    Args:
        flags: of `flags_of_row`.
        given: fields that the run's own flags set.
    """
    return [flag for name in _OF_A_ROW if name in given and (flag := _flag(name)) not in flags]


def merged(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The flags of a run with those of its layout and batch replaced by a row's, which come last.

    Args:
        words: the run's own, word by word.
        flags: of the row.
    """
    kept: list[str] = []
    keeps = True
    for word in words:
        if word.startswith("--"):
            spec = specs().get(word.partition("=")[0])
            keeps = spec is None or spec.dest not in _OF_A_ROW
        kept += [word] if keeps else []
    return [*kept, *flags]


def line_of(words: Sequence[str]) -> str:
    """Words as a shell reads them back, in which its variables still stand."""
    return " ".join(f'"{word}"' if "$" in word else shlex.quote(word) for word in words)
