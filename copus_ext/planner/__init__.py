"""Which configurations are legal, which fit, and which is fastest."""
