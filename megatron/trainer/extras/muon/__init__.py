"""Muon for matrices, Adam for the rest."""
