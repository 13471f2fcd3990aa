"""The controller as a callback of the trainer: flags, measurements, decisions, changes."""
