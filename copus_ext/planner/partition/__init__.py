"""Which stage runs which layers, and which micro-batches a replica runs."""
