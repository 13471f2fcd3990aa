"""Checkpoints from and to Hugging Face models."""

from megatron.trainer.common.extras import Extra

EXTRA = Extra(
    title="Hugging Face models",
    model_format="format:HuggingFace",
    needs=("convert", "inspect_checkpoint"),
)
