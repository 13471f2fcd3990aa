"""Stages as a graph, for models with branches."""

from megatron.trainer.common.extras import Extra

EXTRA = Extra(
    title="stages as a graph", commands={"plan-graph": "plan"}, needs=("layer_partition",)
)
