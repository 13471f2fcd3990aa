"""Holds the planner against a table of measured step times."""

from megatron.trainer.common.extras import Extra

EXTRA = Extra(title="planner validation", commands={"validate-planner": "command"})
