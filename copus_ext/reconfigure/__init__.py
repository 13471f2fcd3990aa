"""Moving a run between layouts: who owns what."""
