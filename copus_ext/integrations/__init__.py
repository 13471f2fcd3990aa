"""The controller in trainers that are not ours."""
