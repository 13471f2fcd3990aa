"""Under which layouts a checkpoint loads, by the rules of a launch and its stored flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.trainer.common import extras
from megatron.trainer.config.batch_schedule import make_schedule
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.layout_rules import layout_problems


def stored_layout(arguments: Mapping[str, Any]) -> Layout:
    return Layout.of_arguments(arguments)


def problems_of(arguments: Mapping[str, Any], layout: Layout, vocab: int) -> list[str]:
    """Why a model cannot be laid out this way; the sentences of a launch. A launch may choose other
    kernels, another way to exchange keys and values, and no extras, so the stored ones do not
    count."""
    arguments = extras.without_extras(arguments) | {"cp_comm_type": None, "transformer_impl": None}
    return layout_problems(
        layout,
        {**arguments, "padded_vocab_size": vocab},
        seq_length=arguments.get("seq_length") or arguments["max_position_embeddings"],
        sequence_parallel=is_sequence_parallel(arguments, layout),
    )


def is_sequence_parallel(arguments: Mapping[str, Any], layout: Layout) -> bool:
    """Whether a launch splits activations over the sequence; it does for every mixture."""
    asked = arguments.get("sequence_parallel") or arguments.get("num_experts")
    return bool(asked) and layout.tp > 1


def batch_problems_of(
    arguments: Mapping[str, Any], layout: Layout, *, keeps_extras: bool = False
) -> list[str]:
    """Why the stored batches cannot be cut this way; empty where the flags name none. Batches that
    an extra plans for the run count always, other rules of extras if a launch `keeps_extras`."""
    arguments = extras.as_given(arguments, arguments)
    batch, micro = arguments.get("global_batch_size"), arguments.get("micro_batch_size")
    if not batch or not micro:
        return []
    schedule = make_schedule(
        global_batch_size=batch,
        rampup_batch_size=arguments.get("rampup_batch_size"),
        step_batch_size_schedule=arguments.get("step_batch_size_schedule"),
        seq_length=arguments.get("seq_length") or arguments["max_position_embeddings"],
    )
    found = schedule.problems(
        layout,
        micro,
        uneven=bool(arguments.get("allow_uneven_micro_batches")),
        group_size=arguments.get("microbatch_group_size_per_vp_stage"),
        arguments=arguments if keeps_extras else {},
    )
    return found or extras.problems_of("schedule_problems", arguments, layout)
