"""Uneven clusters: the order of nodes, uneven stages, mixed hardware."""
