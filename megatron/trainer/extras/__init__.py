"""Abilities of the plain trainer beside the core, one folder each. Nothing outside imports them."""
