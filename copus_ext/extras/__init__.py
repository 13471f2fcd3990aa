"""Abilities beside the core, one folder each. Nothing outside imports them."""
