"""The numbers of a run for Prometheus."""
