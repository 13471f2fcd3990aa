"""Step time and memory of a configuration: predicted from physics, fitted, measured."""
