"""Runs on a virtual clock: the shipped decisions under known noise and loss."""
