"""Checkpoints from and to Hugging Face models."""
