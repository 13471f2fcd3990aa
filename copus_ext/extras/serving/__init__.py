"""Serving a trained model: bits of every layer, stages and micro-batches, and the export."""
