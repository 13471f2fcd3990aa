"""Gradients clipped by groups of samples, for runs with a few bad samples."""

from megatron.training.common.extras import Extra

EXTRA = Extra(
    title="clipping groups of samples",
    flags="flags:GroupClipConfig",
    check="flags:check_group_clipping",
    batch_problems="flags:batch_problems",
    feature="clip:group_clip_of",
)
