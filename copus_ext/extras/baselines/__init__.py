"""Policies of others, as baselines."""
