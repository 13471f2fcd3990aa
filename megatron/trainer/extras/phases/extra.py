"""Phases of a run with samples, layouts and micro-batches of their own."""

from megatron.trainer.common.extras import Extra

EXTRA = Extra(
    title="phases of longer samples",
    flags="flags:PhaseConfig",
    check="schedule:check_phases",
    schedule_problems="schedule:schedule_problems",
    segment="flags:segment_of",
    as_given="resume:as_given",
    settle="resume:settle",
    run_data="run_data:build_phase_data",
    feature="feature:phases_of_job",
)
