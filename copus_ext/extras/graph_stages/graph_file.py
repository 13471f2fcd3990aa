"""Reads the graph of a model with branches from a JSON file, and tells what stages suit it.

    {
      "num_stages": 5, "num_microbatches": 8, "memory_gib": 80, "link_bytes_per_s": 25e9,
      "costs": {"vit": {"forward_s": 0.004, "backward_s": 0.008, "message_bytes": 4e6}},
      "nodes": [{"name": "image", "cost": "vit", "layers": 12}, {"name": "decoder", ...}],
      "edges": [["image", "decoder"]]
    }

A node has seconds and bytes of its own, or the name of a cost. A cost has them, too, or it is part
of a model on a cluster: {"model": "llama-3.2-3b", "part": "layer", "cluster": "a100-80g:8"}. A node
with "layers" is a chain of so many, each at that cost. Only `forward_s` is needed; a backward pass
takes twice as long if nothing is said.
"""

from __future__ import annotations

import heapq
import json
from pathlib import Path
from typing import Any

from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.models import PRESETS
from copus_ext.cost_model.spec_file import SpecError, read_json
from copus_ext.extras.graph_stages.search import GIB, GraphPartition, GraphProblem
from copus_ext.extras.layer_partition.blocks import costs_by_block
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.space import points_of, to_config_batch
from megatron.trainer.config.layout import Layout

SCHEMA = "copus.graph/1"
_OF_NODE = ("forward_s", "backward_s", "parameters", "static_bytes", "saved_bytes")
_OF_NODE += ("working_bytes", "message_s")
_OF_COST = (*_OF_NODE, "message_bytes")
_OF_MODEL = (
    *("model", "part", "cluster", "micro_batch_size", "seq_length", "recompute"),
    "message_bytes",
)
_OF_FILE = ("num_stages", "num_microbatches", "memory_gib", "link_bytes_per_s")
_OF_FILE += ("costs", "nodes", "edges")
_PARTS = ("embedding", "layer", "head")
_MAX, _LARGEST = 1 << 12, 1e30
"""Largest whole number, such as of layers, and largest number of a file."""
_SHOWN = 9
"""Passes of a stage in the table."""


def read_graph(path: Path, **given: Any) -> GraphProblem:
    """The problem in a file.

    Args:
        given: `num_stages`, `num_microbatches` or `memory_gib` in place of those of the file; None
            keeps them.

    Raises:
        SpecError: one line that says what is wrong with it.
        OSError: the file cannot be read.
    """
    try:
        raw = read_json(path)
    except ValueError as error:
        raise SpecError(f"{path}: no JSON: {error}") from error
    try:
        return problem_of_json(raw, **given)
    except (ValueError, TypeError) as error:
        raise SpecError(f"{path}: {error}") from error


def problem_of_json(raw: Any, **given: Any) -> GraphProblem:
    """The problem that the contents of a file describe; see `read_graph`.

    Raises:
        ValueError: one line that says what is wrong.
    """
    _check_keys(raw, _OF_FILE, "the file")
    raw = raw | {name: value for name, value in given.items() if value is not None}
    for name in ("num_stages", "num_microbatches", "nodes"):
        if name not in raw:
            raise ValueError(f'"{name}" is missing')
    speed, memory = raw.get("link_bytes_per_s"), raw.get("memory_gib")
    speed = None if speed is None else _number(speed, '"link_bytes_per_s"')
    if not isinstance(raw.get("costs", {}), dict):
        raise ValueError('"costs" must be an object of costs by name')
    for name in ("nodes", "edges"):
        if not isinstance(raw.get(name, []), list):
            raise ValueError(f'"{name}" must be a list')
    costs = {
        name: _cost(cost, f'cost "{name}"', speed) for name, cost in raw.get("costs", {}).items()
    }
    names: list[str] = []
    values: list[dict[str, float]] = []
    ends: dict[str, tuple[int, int]] = {}
    edges: list[tuple[int, int]] = []
    for node in raw["nodes"]:
        name, layers, own = _node(node, costs, speed)
        if name in ends:
            raise ValueError(f'two nodes have the name "{name}"')
        first = len(names)
        names += [f"{name}.{i}" for i in range(layers)] if layers > 1 else [name]
        values += [own] * layers
        edges += [(n, n + 1) for n in range(first, len(names) - 1)]
        ends[name] = first, len(names) - 1
    for edge in raw.get("edges", []):
        is_pair = isinstance(edge, list) and len(edge) == 2
        if not is_pair or any(not isinstance(end, str) or end not in ends for end in edge):
            raise ValueError(f"edge {json.dumps(edge)[:60]} must have the names of two nodes")
        edges.append((ends[edge[0]][1], ends[edge[1]][0]))
    order = _in_order(names, edges)
    at = {n: i for i, n in enumerate(order)}
    own: dict[str, Any] = {x: [values[n].get(x, 0.0) for n in order] for x in _OF_NODE}
    return GraphProblem(
        names=tuple(names[n] for n in order),
        edges=tuple(sorted({(at[a], at[b]) for a, b in edges})),
        num_stages=_whole(raw["num_stages"], "num_stages"),
        num_microbatches=_whole(raw["num_microbatches"], "num_microbatches"),
        limit_bytes=float("inf") if memory is None else _number(memory, '"memory_gib"') * GIB,
        **own,
    )


def _whole(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX:
        found = f"a whole number of at least 1 and at most {_MAX}, not {_short_of(value)}"
        raise ValueError(f'"{name}" must be {found}')
    return value


def _number(value: Any, what: str) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _LARGEST:
        raise ValueError(f"{what} must be a number of at least 0, not {_short_of(value)}")
    return float(value)


def _short_of(value: Any) -> str:
    """The start of a value that may be anything; a number may have too many digits to show."""
    is_long = isinstance(value, int) and abs(value) > _LARGEST
    return "a number as large as that" if is_long else repr(value)[:60]


def _check_keys(raw: Any, known: tuple[str, ...], what: str) -> None:
    if not isinstance(raw, dict):
        raise ValueError(f"{what} must be a JSON object")
    if unknown := sorted(set(raw) - set(known)):
        raise ValueError(f"{what} has {', '.join(unknown)}; use some of {', '.join(known)}")


def _node(
    raw: Any, costs: dict[str, dict[str, float]], speed: float | None
) -> tuple[str, int, dict[str, float]]:
    _check_keys(raw, ("name", "cost", "layers", *_OF_COST), "a node")
    name = raw.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("a node has no name")
    layers = _whole(raw.get("layers", 1), "layers")
    own = {key: value for key, value in raw.items() if key in _OF_COST}
    if not isinstance(raw.get("cost", ""), str):
        raise ValueError(f'"cost" of node "{name}" must be a name')
    if "cost" not in raw:
        return name, layers, _cost(own, f'node "{name}"', speed)
    if raw["cost"] not in costs:
        raise ValueError(f'node "{name}" has the cost "{raw["cost"]}", which "costs" lacks')
    return name, layers, _cost(costs[raw["cost"]] | own, f'node "{name}"', speed)


def _cost(raw: Any, what: str, speed: float | None) -> dict[str, float]:
    """Seconds and bytes of a node; those of a model where that is asked for."""
    if isinstance(raw, dict) and "model" in raw:
        _check_keys(raw, _OF_MODEL, what)
        own = _of_model(raw, what)
    else:
        _check_keys(raw, _OF_COST, what)
        own = dict(raw)
    for key, value in own.items():
        own[key] = _number(value, f"{key} of {what}")
    if "forward_s" not in own:
        raise ValueError(f'{what} has no "forward_s" and no "cost"')
    own.setdefault("backward_s", 2 * own["forward_s"])
    sent = own.pop("message_bytes", None)
    if sent is not None and "message_s" not in own:
        if not speed:
            raise ValueError('"message_bytes" needs "link_bytes_per_s"')
        own["message_s"] = sent / speed
    return own


def _of_model(raw: dict[str, Any], what: str) -> dict[str, float]:
    name, part = raw["model"], raw.get("part", "layer")
    if name not in PRESETS:
        raise ValueError(f"{what}: model {name!r} is none of {', '.join(PRESETS)}")
    if part not in _PARTS:
        raise ValueError(f"{what}: part {part!r} is none of {', '.join(_PARTS)}")
    cluster, size = preset(raw.get("cluster", "h100-80g:8")), raw.get("micro_batch_size", 1)
    # The messages and the optimizer of a stage are not those of a part: two stages give its bytes.
    c = Configuration(
        layout=Layout(pp=2),
        micro_batch_size=_whole(size, "micro_batch_size"),
        global_batch_size=2 * size,
        recompute=raw.get("recompute", "none"),
    )
    model = PRESETS[name]
    if "seq_length" in raw:
        length = raw["seq_length"]
        if type(length) is not int:
            raise ValueError(f"seq_length of {what} must be a whole number, not {length!r:.60}")
        model = model.with_seq_length(length)
    rows = to_config_batch(model, cluster, points_of([c]))
    costs = costs_by_block(rows, cluster.load_constants(), context_bytes=0.0)
    at = {"embedding": 0, "layer": 1, "head": -1}[part]
    found = {
        key: float(getattr(costs.blocks, key)[..., at].ravel()[0])
        for key in _OF_NODE
        if key != "message_s"
    }
    sent = {"message_bytes": raw["message_bytes"]} if "message_bytes" in raw else {}
    return found | (sent or {"message_s": float(costs.p2p_time_s[0])})


def _in_order(names: list[str], edges: list[tuple[int, int]]) -> list[int]:
    """Nodes so that each comes behind what it needs, else in the order of the file."""
    waiting = [0] * len(names)
    for _, b in set(edges):
        waiting[b] += 1
    ready = [n for n in range(len(names)) if not waiting[n]]
    order: list[int] = []
    while ready:
        n = heapq.heappop(ready)
        order.append(n)
        for b in sorted({b for a, b in edges if a == n}):
            waiting[b] -= 1
            if not waiting[b]:
                heapq.heappush(ready, b)
    if len(order) < len(names):
        left = sorted(set(range(len(names))) - set(order))
        raise ValueError(f"{', '.join(names[n] for n in left[:6])} need each other in a circle")
    return order


def lines(problem: GraphProblem, found: GraphPartition, plain: GraphPartition | None) -> list[str]:
    """The answer as text.

    Args:
        problem: that was solved.
        found: stages as a graph.
        plain: the plain pipeline; None where none fits.
    """
    timeline, count = problem.timeline(found.graph), problem.num_microbatches
    rows = [["stage", "passes ahead", "in flight", "peak GiB", "busy %", "order", "nodes"]]
    for r, nodes in enumerate(found.stages):
        own = [p for p, _, _ in timeline.passes if p.stage == r]
        busy = sum(end - start for p, start, end in timeline.passes if p.stage == r)
        rows.append(
            [
                str(r),
                str(found.graph.ahead[r]),
                str(found.graph.in_flight(count)[r]),
                f"{found.peak_bytes[r] / GIB:.2f}",
                f"{100 * busy / timeline.step_s:.0f}",
                _turns(own),
                _short(nodes),
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    text = ["  ".join(f"{x:{w}}" for x, w in zip(row, widths)).rstrip() for row in rows]
    surely = "" if found.proved else f"; no partition takes less than {found.min_step_s:.4g} s"
    text.append(f"as a graph: {found.step_s:.4g} s a step{surely}")
    if plain is None:
        return [*text, "as a plain pipeline: no partition fits"]
    stages = " | ".join(_short(nodes) for nodes in plain.stages)
    text.append(f"as a plain pipeline: {plain.step_s:.4g} s a step ({stages})")
    kept = max(plain.graph.in_flight(count)), max(found.graph.in_flight(count))
    return [
        *text,
        f"the graph is {plain.step_s / found.step_s:.2f} times as fast, and its first stages keep "
        f"{kept[1]} micro-batches instead of {kept[0]}",
    ]


def _turns(own: list[Any]) -> str:
    """Passes of a stage such as `F1 F2 B1 F3 B2 ...`, micro-batches counted from 1."""
    turns = dict.fromkeys(f"{'FB'[p.is_backward]}{p.micro_batch + 1}" for p in own)
    return " ".join(list(turns)[:_SHOWN]) + (" ..." if len(turns) > _SHOWN else "")


def _short(nodes: list[str]) -> str:
    """Names of nodes, with runs of layers such as `image.0-11`."""
    runs: list[tuple[str, list[int]]] = []
    for node in nodes:
        stem, _, number = node.rpartition(".")
        if not stem or not number.isdecimal():
            runs.append((node, []))
        elif runs and runs[-1][0] == stem and runs[-1][1][-1] + 1 == int(number):
            runs[-1][1].append(int(number))
        else:
            runs.append((stem, [int(number)]))
    words = []
    for stem, numbers in runs:
        ends = sorted({*numbers[:1], *numbers[-1:]})
        words.append(f"{stem}.{'-'.join(map(str, ends))}" if numbers else stem)
    return " ".join(words)


def to_json(
    problem: GraphProblem, found: GraphPartition, plain: GraphPartition | None
) -> dict[str, Any]:
    """The answer in plain JSON types; arguments as for `lines`."""
    return {
        "schema": SCHEMA,
        "num_stages": problem.num_stages,
        "num_microbatches": problem.num_microbatches,
        "graph": _partition_json(problem, found),
        "sequential": None if plain is None else _partition_json(problem, plain),
        "times_faster": None if plain is None else plain.step_s / found.step_s,
    }


def _partition_json(problem: GraphProblem, found: GraphPartition) -> dict[str, Any]:
    graph, timeline = found.graph, problem.timeline(found.graph)
    return {
        "step_s": found.step_s,
        "min_step_s": found.min_step_s,
        "proved": found.proved,
        "stages": [
            {
                "nodes": nodes,
                "passes_ahead": graph.ahead[r],
                "in_flight": graph.in_flight(problem.num_microbatches)[r],
                "peak_bytes": found.peak_bytes[r],
                "passes": [
                    {
                        "nodes": [found.names[n] for n in graph.segments[r][p.segment]],
                        "micro_batch": p.micro_batch,
                        "direction": "backward" if p.is_backward else "forward",
                        "start_s": start,
                        "end_s": end,
                    }
                    for p, start, end in timeline.passes
                    if p.stage == r
                ],
            }
            for r, nodes in enumerate(found.stages)
        ],
    }
