"""Micro-batches of a replica that need not be equal."""
