"""Runs policies on a virtual clock, with the controller's own decisions."""

from megatron.trainer.common.extras import Extra

EXTRA = Extra(title="simulator", commands={"simulate": "command"})
