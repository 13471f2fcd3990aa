"""Exact clocks of a pipeline whose stages are a directed graph.

A stage does its passes in the order of `StageGraph.program` and begins each once all its messages
are there. Messages leave when they are made. Those of one stage go one after the other, whatever
their targets, as in the interleaved schedule (`copus_ext.cost_model.schedule`); nobody waits for
the receiver. So a chain of equal stages without time for messages has the clocks of plain 1F1B, and
any other chain is no slower.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from copus_ext.extras.graph_stages.stage_graph import Pass, StageGraph


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When every pass and message of a step began and ended."""

    passes: tuple[tuple[Pass, float, float], ...]
    """With the seconds of its start and of its end."""
    sent: dict[tuple[int, int, bool], tuple[float, float]]
    """Number of the message, micro-batch, whether it is the gradient -> seconds at which it takes
    the link of its sender and at which it is there."""
    stage_s: tuple[float, ...]
    """Clock of every stage behind its last pass."""

    @property
    def step_s(self) -> float:
        """Seconds until all stages are done."""
        return max(self.stage_s)


def simulate(
    graph: StageGraph,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    message_s: Sequence[float],
    num_microbatches: int,
) -> Timeline:
    """Plays a step.

    Args:
        forward_s: of every node and one micro-batch.
        backward_s: the same of the backward pass, recomputation included.
        message_s: seconds that the output of every node, or its gradient, holds the sender's link.
    """
    work, enters, leaves, seconds = _tables(graph, forward_s, backward_s, message_s)
    programs = [graph.program(r, num_microbatches) for r in range(graph.num_stages)]
    at, clock, link = [0] * len(programs), [0.0] * len(programs), [0.0] * len(programs)
    sent: dict[tuple[int, int, bool], tuple[float, float]] = {}
    done: list[tuple[Pass, float, float]] = []
    total = sum(map(len, programs))
    while len(done) < total:
        before = len(done)
        for r, program in enumerate(programs):
            while at[r] < len(program):
                p = program[at[r]]
                key = r, p.segment
                waits, gives = (leaves, enters) if p.is_backward else (enters, leaves)
                needed = [(i, p.micro_batch, p.is_backward) for i in waits[key]]
                if any(one not in sent for one in needed):
                    break
                start = max([clock[r], *(sent[one][1] for one in needed)])
                clock[r] = start + work[key][p.is_backward]
                done.append((p, start, clock[r]))
                for i in gives[key]:
                    begin = max(link[r], clock[r])
                    link[r] = begin + seconds[i]
                    sent[i, p.micro_batch, p.is_backward] = begin, link[r]
                at[r] += 1
        if len(done) == before:
            raise AssertionError("the schedule waits for itself")
    return Timeline(passes=tuple(done), sent=sent, stage_s=tuple(clock))


_Key = tuple[int, int]


def _tables(
    graph: StageGraph,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    message_s: Sequence[float],
) -> tuple[
    dict[_Key, tuple[float, float]], dict[_Key, list[int]], dict[_Key, list[int]], list[float]
]:
    """By stage and segment its seconds there and back, messages that enter and that leave; and the
    seconds of every message."""
    work, enters, leaves = {}, {}, {}
    for r, segments in enumerate(graph.segments):
        for k, nodes in enumerate(segments):
            there = sum(forward_s[n] for n in nodes)
            work[r, k] = there, sum(backward_s[n] for n in reversed(nodes))
            enters[r, k], leaves[r, k] = graph.entering(r, k), graph.leaving(r, k)
    return work, enters, leaves, [message_s[m.producer] for m in graph.messages]


def problems(timeline: Timeline, graph: StageGraph, num_microbatches: int) -> list[str]:
    """What is wrong with a timeline; empty where it is a valid step.

    Every node passes every micro-batch once there and once back, no stage does two things at once,
    no link carries two messages at once, and nothing begins before all that it needs is there.
    """
    found: list[str] = []
    start: dict[tuple[int, int, bool], float] = {}
    end: dict[tuple[int, int, bool], float] = {}
    by_stage: dict[int, list[tuple[float, float]]] = {}
    for p, begun, ended in timeline.passes:
        by_stage.setdefault(p.stage, []).append((begun, ended))
        for node in graph.segments[p.stage][p.segment]:
            key = node, p.micro_batch, p.is_backward
            if key in start:
                found.append(f"{key} runs twice")
            start[key], end[key] = begun, ended
    if len(start) != 2 * graph.num_nodes * num_microbatches:
        found.append(f"{len(start)} passes of nodes")
    for stage, spans in by_stage.items():
        spans.sort()
        if any(b[0] < a[1] for a, b in itertools.pairwise(spans)):
            found.append(f"stage {stage} does two things at once")
    for i, message in enumerate(graph.messages):
        for m in range(num_microbatches):
            for back in (False, True):
                makes, takes = message.leaves, message.enters
                makes, takes = (takes, makes) if back else (makes, takes)
                leaves, there = timeline.sent[i, m, back]
                if leaves < end[makes, m, back] or start[takes, m, back] < there:
                    found.append(f"message {i} of micro-batch {m} is too late")
    for a, b in graph.edges:
        for m in range(num_microbatches):
            if graph.stage_of[a] != graph.stage_of[b] and (
                start[b, m, False] < end[a, m, False] or start[a, m, True] < end[b, m, True]
            ):
                found.append(f"micro-batch {m} does not wait along {a}-{b}")
    for stage in range(graph.num_stages):
        spans = sorted(
            span
            for (i, _, back), span in timeline.sent.items()
            if (graph.messages[i].target if back else graph.messages[i].source) == stage
        )
        if any(b[0] < a[1] for a, b in itertools.pairwise(spans)):
            found.append(f"the link of stage {stage} carries two messages at once")
    return found
