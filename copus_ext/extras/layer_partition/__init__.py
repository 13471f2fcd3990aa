"""Uneven pipeline stages: which layers each stage has."""
