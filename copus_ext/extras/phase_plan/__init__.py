"""Layouts of a run whose samples or batches grow, planned ahead."""
