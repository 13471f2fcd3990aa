"""Gradients clipped by groups of samples, for runs with a few bad samples."""

from megatron.trainer.common.extras import Extra

EXTRA = Extra(
    title="clipping groups of samples",
    flags="flags:GroupClipConfig",
    check="flags:check_group_clipping",
    planned="flags:planned",
    layout_problems="flags:layout_problems",
    batch_problems="flags:batch_problems",
    controller_problems="flags:controller_problems",
    cost_terms="planner:cost_terms",
    feature="clip:group_clip_of",
)
