"""A package that a checkout has of its own."""
