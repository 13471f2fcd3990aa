"""Decisions of a run beside its profiled steps."""
