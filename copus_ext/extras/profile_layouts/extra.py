"""Times layouts on the ranks of this machine, for the planner and the controller."""

from megatron.trainer.common.extras import Extra

EXTRA = Extra(title="profile of layouts", commands={"profile-layouts": "command"})
