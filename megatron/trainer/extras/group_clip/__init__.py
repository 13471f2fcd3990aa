"""Gradients clipped by groups of samples, for runs with a few bad samples."""
