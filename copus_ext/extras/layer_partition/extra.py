"""Finds the fastest partition of the layers over the stages of a pipeline."""

from megatron.trainer.common.extras import Extra

EXTRA = Extra(title="layer partition", plan_commands={"partition": "command:Partition"})
