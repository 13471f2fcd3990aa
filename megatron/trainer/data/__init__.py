"""From text to the batches that a rank reads."""
