"""Checkpoints converted to another layout, vocabulary, number format or optimizer."""
