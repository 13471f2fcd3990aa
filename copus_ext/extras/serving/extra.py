"""Plans for serving a trained model with fewer bits, and the export of one."""

from megatron.trainer.common.extras import Extra

_COMMANDS = {"plan-serving": "command"}
EXTRA = Extra(title="serving plans", commands=_COMMANDS, needs=("huggingface",))
