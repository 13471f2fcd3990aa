"""The goodput of configurations and the decision to change; arithmetic without torch."""
