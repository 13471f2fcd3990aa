"""Stages as a graph, for models with branches."""
