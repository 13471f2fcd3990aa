"""Converts checkpoints without a run."""

from megatron.trainer.common.extras import Extra

EXTRA = Extra(
    title="conversion of checkpoints",
    commands={"convert-checkpoint": "command"},
    needs=("inspect_checkpoint",),
)
