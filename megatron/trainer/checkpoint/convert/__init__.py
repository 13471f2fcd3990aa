"""Checkpoints without a run: one CPU process, no process group, no model."""
