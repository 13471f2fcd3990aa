"""Wrong inputs of this extra for `tests.helpers.bad_inputs`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from copus_ext.cost_model.spec_file import SpecError
from copus_ext.extras.graph_stages.graph_file import read_graph
from copus_ext.extras.graph_stages.train import shape_of_json, stages_of_plan
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.outside import parse_json
from tests.helpers import spoil


def graph(rng: random.Random, folder: Path) -> str | None:
    """The graph of a model with branches."""
    whole = {
        "num_stages": 3,
        "num_microbatches": 8,
        "memory_gib": 80,
        "link_bytes_per_s": 25e9,
        "costs": {"vit": {"forward_s": 0.004, "backward_s": 0.008, "message_bytes": 4e6}},
        "nodes": [
            {"name": "image", "cost": "vit", "layers": 2},
            {"name": "decoder", "forward_s": 0.01},
        ],
        "edges": [["image", "decoder"]],
    }
    path = folder / "graph.json"
    path.write_bytes(spoil.spoiled_json(rng, whole))
    return spoil.problem_of(lambda: read_graph(path), SpecError, OSError)


def branches(rng: random.Random, folder: Path) -> str | None:
    """The shape of a model with branches, as its trainer reads it."""
    branch = {"name": "image", "num_layers": 2, "seq_length": 16, "nodes": 2}
    shape = {"branches": [branch], "decoder_layers": 2, "seq_length": 16}
    nodes = [["image.0"], ["image.1", "decoder"]]
    stages = {"graph": {"stages": [{"nodes": names} for names in nodes]}}
    told, planned = spoil.spoiled_json(rng, shape), json.dumps(stages).encode()
    if rng.random() < 0.5:
        told, planned = json.dumps(shape).encode(), spoil.spoiled_json(rng, stages)

    def read() -> None:
        found = shape_of_json(parse_json(told))
        found.stage_of(stages_of_plan(parse_json(planned)))
        assert found.nodes and found.edges

    return spoil.problem_of(read, UsageError, ValueError)


KINDS: dict[str, Callable[[random.Random, Path], str | None]] = {
    "graph": graph,
    "branches": branches,
}
"""What can be wrong, and its check."""
