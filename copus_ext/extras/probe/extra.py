"""Times the links between all nodes, for the planner."""

from megatron.trainer.common.extras import Extra

EXTRA = Extra(title="probe of links", commands={"probe-links": "command"})
