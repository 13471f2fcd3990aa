"""Nodes that are not all alike: other GPUs, other speeds, other memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from copus_ext.cost_model.gpus import GpuSpec, checked, gpu_named, is_positive, quantity
from copus_ext.cost_model.model_spec import SpecError

_KEYS = ("count", "gpu", "speed", "memory_bytes", "constants")
_MOST = 1 << 20


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """One node; all of its GPUs are alike."""

    gpu: GpuSpec
    """What its ranks run on."""
    speed: float = 1.0
    """Work per second over what such a GPU usually does."""
    constants: str | None = None
    """Name of the fitted constants of its kind; None: those of the cluster."""

    def __post_init__(self) -> None:
        if not is_positive(self.speed) or not 1e-3 <= self.speed <= 1e3:
            raise SpecError(f"nodes.speed {str(self.speed)[:60]!r} must be from 0.001 to 1000")


def nodes_from_json(data: Any, usual: GpuSpec) -> tuple[NodeSpec, ...]:
    """Reads the `nodes` of a cluster file.

    Args:
        data: a list of objects, each for `count` (1) nodes one after the other: `gpu`, a name or a
            description, `speed`, `memory_bytes`, `constants`; what is left out is as usual.
        usual: the cluster's GPU.

    Raises:
        SpecError: an unknown key or a bad value.
    """
    if data is None:
        return ()
    if not isinstance(data, list) or not all(isinstance(one, dict) for one in data):
        raise SpecError('cluster.nodes must be a list of objects such as {"count": 2, "speed": 1}')
    found: list[NodeSpec] = []
    for one in data:
        if unknown := sorted(set(one) - set(_KEYS)):
            raise SpecError(f"unknown nodes keys: {', '.join(unknown)}; known: {', '.join(_KEYS)}")
        count = one.get("count", 1)
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= _MOST:
            raise SpecError(f"nodes.count {str(count)[:60]} must be a whole number from 1")
        if len(found) + count > _MOST:
            raise SpecError(f"nodes describes more than {_MOST} nodes")
        found += [_node(one, usual)] * count
    return tuple(found)


def _node(one: dict[str, Any], usual: GpuSpec) -> NodeSpec:
    gpu = one.get("gpu")
    if gpu is None:
        spec = usual
    elif isinstance(gpu, str):
        spec = gpu_named(gpu)
    elif isinstance(gpu, dict):
        spec = GpuSpec(**checked(GpuSpec, gpu, "nodes.gpu"))
    else:
        raise SpecError("nodes.gpu must name a GPU or describe one")
    memory = one.get("memory_bytes")
    if memory is not None:
        spec = replace(spec, memory_bytes=quantity(memory) if isinstance(memory, str) else memory)
    constants = one.get("constants")
    if constants is not None and not isinstance(constants, str):
        raise SpecError(f"nodes.constants {str(constants)[:60]} must be a name")
    return NodeSpec(gpu=spec, speed=one.get("speed", 1.0), constants=constants)


def nodes_to_json(nodes: Sequence[NodeSpec]) -> list[dict[str, Any]]:
    """What `nodes_from_json` reads."""
    told = []
    for node, same in itertools.groupby(nodes):
        record = {"count": len(list(same)), "gpu": asdict(node.gpu), "speed": node.speed}
        told.append(record | ({"constants": node.constants} if node.constants else {}))
    return told
