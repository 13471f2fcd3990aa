"""Phases of longer samples."""
