"""Runs a step of a model whose stages are a graph, in the order that the planner simulates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from copus_ext.extras.graph_stages.link import GraphLink
from copus_ext.extras.graph_stages.stage_graph import Pass, StageGraph

Batch = dict[str, torch.Tensor]


class GraphSchedule:
    """The passes of one stage.

    A node is a module that takes a batch and a list of inputs, the outputs of `graph.producers` in
    order, and gives an output, or a loss if it has no consumer.

    Args:
        nodes: the modules of the stage, by number.
        link: carries messages; None where one stage holds all nodes.
    """

    def __init__(
        self,
        graph: StageGraph,
        stage: int,
        nodes: Mapping[int, torch.nn.Module],
        link: GraphLink | None,
    ) -> None:
        assert set(nodes) == set(graph.order[stage]), "a stage needs its own nodes"
        self.graph, self.stage, self.nodes, self.link = graph, stage, nodes, link
        segments = range(len(graph.segments[stage]))
        self._entering = [graph.entering(stage, k) for k in segments]
        self._leaving = [graph.leaving(stage, k) for k in segments]
        self._outputs: dict[tuple[int, int], torch.Tensor] = {}
        self._values: dict[tuple[int, int], torch.Tensor] = {}
        self._losses: list[torch.Tensor] = []

    def run(self, batches: Sequence[Batch], *, micro_batch_size: int) -> list[torch.Tensor]:
        """Runs all passes of a step. All stages take part.

        Gradients of the mean loss of all micro-batches are added to those of the parameters.

        Args:
            batches: the micro-batches in order, alike on all stages.

        Returns:
            The loss of every micro-batch, on the stage of the node that has it; else nothing.
        """
        self._losses = []
        count = len(batches)
        program = self.graph.program(self.stage, count)
        if self.link is not None:
            self.link.begin(count, micro_batch_size)
        for at, one in enumerate(program):
            # What the pass after this one needs may come while this one computes.
            for near in program[at : at + 2]:
                self._expect(near)
            if one.is_backward:
                self._backward(one, 1.0 / count)
            else:
                self._forward(one, batches[one.micro_batch])
        if self.link is not None:
            self.link.finish()
        assert not self._values and not self._outputs
        return self._losses

    def _expect(self, one: Pass) -> None:
        waits = self._leaving if one.is_backward else self._entering
        if self.link is not None:
            for i in waits[one.segment]:
                self.link.expect(i, one.micro_batch, is_gradient=one.is_backward)

    def _forward(self, one: Pass, batch: Batch) -> None:
        m = one.micro_batch
        for i in self._entering[one.segment]:
            assert self.link is not None
            value = self.link.receive(i, m, is_gradient=False)
            self._values[self.graph.messages[i].producer, m] = value.requires_grad_()
        for n in self.graph.segments[self.stage][one.segment]:
            inputs = [self._values[p, m] for p in self.graph.producers[n]]
            output = self.nodes[n](batch, inputs)
            self._outputs[n, m] = output
            if self.graph.consumers[n]:
                # A leaf of its own: every node has a backward pass of its own.
                self._values[n, m] = output.detach().requires_grad_()
            else:
                self._losses.append(output.detach())
        for i in self._leaving[one.segment]:
            assert self.link is not None
            value = self._values[self.graph.messages[i].producer, m]
            self.link.send(i, value, is_gradient=False)

    def _backward(self, one: Pass, share: float) -> None:
        m = one.micro_batch
        for i in self._leaving[one.segment]:
            assert self.link is not None
            gradient = self.link.receive(i, m, is_gradient=True)
            value = self._values[self.graph.messages[i].producer, m]
            value.grad = gradient if value.grad is None else value.grad + gradient
        for n in reversed(self.graph.segments[self.stage][one.segment]):
            output = self._outputs.pop((n, m))
            if self.graph.consumers[n]:
                gradient = self._values.pop((n, m)).grad
                if output.requires_grad:  # else all before it is frozen
                    torch.autograd.backward(output, gradient)
            else:
                torch.autograd.backward(output * share)
        for i in self._entering[one.segment]:
            assert self.link is not None
            gradient = self._values.pop((self.graph.messages[i].producer, m)).grad
            assert gradient is not None
            self.link.send(i, gradient, is_gradient=True)
