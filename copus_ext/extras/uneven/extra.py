"""Clusters whose nodes or links differ: which node goes where, and which layers it has."""

from megatron.trainer.common.extras import Extra

EXTRA = Extra(
    title="uneven clusters",
    plan_commands={"order": "commands:Order", "nodes": "commands:Nodes"},
    needs=("layer_partition",),
)
