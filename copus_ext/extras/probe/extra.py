"""Times the links between all nodes, for the planner."""

from megatron.training.common.extras import Extra

EXTRA = Extra(title="probe of links", commands={"probe-links": "command"})
