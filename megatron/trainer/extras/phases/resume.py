"""The phases of a run that goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.draft import flag_of
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.relayout import with_layout
from megatron.trainer.extras.phases.flags import (
    flags_of,
    in_phase,
    number_at,
    phase_of,
    phases_of,
)
from megatron.trainer.extras.phases.schedule import (
    has_lengths,
    parse_lengths,
    parse_phase_data,
    parse_positions,
    planned_starts,
    with_planned_starts,
)

if TYPE_CHECKING:
    from megatron.trainer.checkpoint.load import Stored
    from megatron.trainer.config import Config

_MUST_MATCH = ("seq_length_schedule", "rotary_base_schedule", "phase_data_path")


def as_given(stored: Mapping[str, Any], now: Mapping[str, Any]) -> Mapping[str, Any]:
    """See `Extra.as_given`: rotary base and micro-batch that are stored are those of the phase of
    the checkpoint, and flags give the first."""
    first = {}
    if micros := stored.get("phase_micro_batch_sizes"):
        first["micro_batch_size"] = micros[0]
    # A program that makes text has no schedule, and wants the base of the checkpoint.
    if (bases := stored.get("phase_rotary_bases")) and now.get("seq_length_schedule") is not None:
        first["rotary_base"] = bases[0]
    return {**stored, **first}


def settle(config: Config, stored: Stored | None) -> Config:
    """See `Extra.settle`: the configuration in the phase where a checkpoint stands, and with the
    layout that this one asks for. Phases that the checkpoint knows begin where it has planned them,
    whatever batch the flags give now.

    Raises:
        UsageError: the phases do not suit the checkpoint or the layouts.
    """
    if stored is not None:
        _check_same(config, stored)
        config = _resumed(config, stored)
    if phases := phases_of(config):
        for phase in phases[flags_of(config).present_phase + 1 :]:
            in_layout_of_phase(in_phase(config, phase.number))
    return config


def _check_same(config: Config, stored: Stored) -> None:
    now = config.flat()
    for name in _MUST_MATCH:
        if name == "phase_data_path" and stored.data is not None and now[name]:
            continue  # by contents: they may lie elsewhere
        then = stored.arguments.get(name)
        if _meaning(name, now[name]) != _meaning(name, then):
            raise UsageError(
                f"{flag_of(name)} is {now[name]!r} but checkpoint {stored.folder} was trained with "
                f"{then!r}; give the same value, or --finetune to start another run from it"
            )


def _meaning(name: str, value: Any) -> Any:
    """A value in the form in which values that mean the same are equal."""
    if name == "phase_data_path":
        return parse_phase_data(value)
    if value is None:
        return None
    if name == "rotary_base_schedule":
        return parse_positions(value, flag_of(name))
    lengths = parse_lengths(value)
    return lengths if len(lengths) > 1 else None


def _resumed(config: Config, stored: Stored) -> Config:
    flags = flags_of(config)
    if not flags.phase_starts or stored.lengths is None:
        return config
    total, then = config.batch.train_samples, stored.arguments["train_samples"]
    if has_lengths(flags.seq_length_schedule) and total != then:
        raise UsageError(
            f"training of {then} samples cannot become {total} with --seq-length-schedule, whose "
            "last phase has a frozen order of samples; drop --override-opt-param-scheduler, or "
            "give --finetune to start another run"
        )
    config = with_planned_starts(config, planned_starts(stored.arguments))
    number = number_at(flags_of(config).phase_starts, stored.state.consumed_samples)
    return in_layout_of_phase(in_phase(config, number))


def in_layout_of_phase(config: Config) -> Config:
    """The same run under the layout that its phase asks for, if that asks for one.

    Raises:
        UsageError: the model cannot be laid out this way; one line that names --layout-schedule.
    """
    phase = phase_of(config)
    if phase.layout is None:
        return config
    try:
        return with_layout(config, Layout.from_text(phase.layout))
    except UsageError as error:
        problems = str(error).replace("\n", "; ")
        raise UsageError(
            f"--layout-schedule: phase {phase.number} cannot take {phase.layout}: {problems}"
        ) from error
