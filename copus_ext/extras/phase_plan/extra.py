"""Layouts of a run whose samples or batches grow: planned ahead, and taken."""

from megatron.trainer.common.extras import Extra

EXTRA = Extra(
    title="plans of runs that grow",
    commands={"plan-phases": "command"},
    callbacks="callbacks:callbacks",
    needs=("phases",),
    relaunch="relaunch:PhaseSchedule",
)
