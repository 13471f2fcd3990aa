"""Runs policies on a virtual clock, with the controller's own decisions."""

from megatron.training.common.extras import Extra

EXTRA = Extra(title="simulator", commands={"simulate": "command"})
