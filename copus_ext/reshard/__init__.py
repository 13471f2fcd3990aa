"""Changing the layout of a running job: who holds what, what moves, and the move."""
