"""Writes decisions and changes of layout as a Chrome trace."""

from megatron.trainer.common.extras import Extra

EXTRA = Extra(title="trace of decisions", commands={"trace": "command"})
