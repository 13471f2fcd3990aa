"""Which callbacks a run of several phases has, and what its controller cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.layout import Layout
from megatron.trainer.extras.phases.flags import flags_of
from megatron.trainer.extras.phases.schedule import has_lengths

if TYPE_CHECKING:
    from copus_ext.controller.callback import Controller
    from copus_ext.controller.flags import CopusConfig
    from megatron.trainer.config import Config
    from megatron.trainer.train.callbacks import Callback


def callbacks(config: Config, controller: Controller | None) -> list[Callback]:
    """See `Extra.callbacks`.

    Raises:
        UsageError: the controller cannot follow the phases.
    """
    phases = flags_of(config)
    if not phases.phase_starts:
        return []
    if controller is not None and controller.flags.copus_mode == "act":
        _check(controller.flags, config)
    if not phases.phase_layouts:
        return []
    from copus_ext.extras.phase_plan.layouts import PhaseLayouts

    return [PhaseLayouts(controller)]


def _check(flags: CopusConfig, config: Config) -> None:
    from copus_ext.controller.rules import BLIND_TO_EXPERTS

    if flags.copus_layouts == "all" and flags.copus_relayout == "relaunch":
        why = "--seq-length-schedule, whose flags count batches in samples of the first phase"
        if not has_lengths(flags_of(config).seq_length_schedule):
            why = "--layout-schedule, which has the layout of every launch"
        raise UsageError(
            f"--copus-relayout relaunch does not go with {why}; use --copus-relayout inprocess"
        )
    for layout in map(Layout.from_text, dict.fromkeys(flags_of(config).phase_layouts)):
        if config.moe.num_experts is not None and not layout.experts_see_whole_samples:
            raise UsageError(
                f"{BLIND_TO_EXPERTS}: --layout-schedule has {layout}; make the ranks that share "
                f"an expert, {layout.ep} x {layout.expert_tensor_parallel_size}, a multiple of "
                f"tensor x context, {layout.tp} x {layout.cp}, or use --copus-mode observe"
            )
