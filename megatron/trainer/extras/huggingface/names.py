"""Names of files and folders of Hugging Face models."""

CONFIG, GENERATION = "config.json", "generation_config.json"
SIDE = "hugging_face"
"""Folder of a checkpoint directory with the files of the model that it was imported from."""
CONFIG_BYTES = 1 << 24
"""More than any `config.json` has."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*")
