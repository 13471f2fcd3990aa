"""Shorter messages where links are slow: 8 bits, low rank, PowerSGD."""
