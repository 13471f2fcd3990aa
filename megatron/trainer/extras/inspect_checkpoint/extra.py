"""Reads checkpoints without a run: what they hold, and whether they are complete."""

from megatron.trainer.common.extras import Extra

EXTRA = Extra(title="inspection of checkpoints", commands={"inspect-checkpoint": "command"})
