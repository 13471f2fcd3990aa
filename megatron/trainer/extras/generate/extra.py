"""Loads the model of a checkpoint into one process, and generates text with it."""

from megatron.trainer.common.extras import Extra

EXTRA = Extra(title="text generation", commands={"generate": "command"})
