"""The planner held against measured step times."""
