"""What a configuration is worth and whether to move to it; pure arithmetic, no torch."""
