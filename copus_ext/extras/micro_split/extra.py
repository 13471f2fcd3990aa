"""Finds the micro-batches that make the passes of a replica shortest."""

from megatron.trainer.common.extras import Extra

EXTRA = Extra(title="uneven micro-batches", plan_commands={"micro-batches": "command:MicroBatches"})
