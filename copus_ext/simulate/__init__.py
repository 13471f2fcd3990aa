"""Runs on a virtual clock: the shipped decisions over a known course of noise and loss."""
