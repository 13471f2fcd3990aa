"""Plans for serving a trained model with fewer bits, and the export of one."""

from megatron.trainer.common.extras import Extra

EXTRA = Extra(
    title="serving plans",
    commands={"plan-serving": "command"},
    needs=("convert", "generate", "huggingface", "inspect_checkpoint"),
)
