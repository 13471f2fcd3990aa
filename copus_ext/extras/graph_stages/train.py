"""Trains a GPT decoder behind branches, whose stages are a graph: one rank for each stage of each
replica.

    torchrun --nproc-per-node 2 -m copus_ext.extras.graph_stages.train --text FILE --plan PLAN.json

The text is real: each sample is a window of its bytes. The first bytes are what the branches read,
as tokens or as grey levels of patches, and the decoder learns the bytes behind them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from copus_ext.extras.graph_stages.link import GraphLink
from copus_ext.extras.graph_stages.model import Batch, Branch, BranchedShape, build_nodes
from copus_ext.extras.graph_stages.schedule import GraphSchedule
from copus_ext.extras.graph_stages.stage_graph import StageGraph
from megatron.trainer.checkpoint.resume import merge_resume_config
from megatron.trainer.common.device import Device, use_device
from megatron.trainer.common.errors import TrainingFailure, UsageError
from megatron.trainer.common.outside import parse_json
from megatron.trainer.config import Config
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.layout import Layout
from megatron.trainer.distributed.process_groups import (
    build_groups,
    destroy_groups,
    init_distributed,
    random_seed_at,
)
from megatron.trainer.model.gpt import parameter_dtype

VOCAB_SIZE = 256
"""Every byte is a token."""
FLAGS = """--tokenizer-type NullTokenizer --vocab-size 255 --mock-data --eval-iters 0
--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --swiglu --normalization RMSNorm
--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
--hidden-dropout 0 --attention-dropout 0 --num-layers 1 --seq-length 1
--max-position-embeddings 1"""
"""Flags that a command line need not have. Lengths and layers are those of the shape."""


class TextWindows:
    """Samples of a text: bytes for the branches, and the text behind them.

    Args:
        text: bytes.

    Raises:
        UsageError: the text is shorter than a sample.
    """

    def __init__(self, text: bytes, shape: BranchedShape, *, seed: int) -> None:
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._shape, self._seed = shape, seed
        sizes = [
            b.seq_length * (shape.patch_size if b.reads == "patches" else 1) for b in shape.branches
        ]
        self._sizes = [*sizes, shape.seq_length + 1]
        if len(text) <= sum(self._sizes):
            raise UsageError(
                f"--text has {len(text)} bytes, and a sample takes {sum(self._sizes)}; take a "
                "longer text"
            )

    def batch(self, first: int, count: int) -> Batch:
        """A micro-batch, by the numbers of its samples."""
        samples = [self._sample(first + i) for i in range(count)]
        return {name: torch.stack([s[name] for s in samples]) for name in samples[0]}

    def _sample(self, number: int) -> Batch:
        room = len(self._bytes) - sum(self._sizes)
        start = random_seed_at(self._seed, number, "window") % room
        *inputs, text = self._bytes[start : start + sum(self._sizes)].split(self._sizes)
        found = {"tokens": text[:-1].long(), "labels": text[1:].long()}
        for branch, own in zip(self._shape.branches, inputs):
            if branch.reads == "patches":
                # Grey levels around 0, a patch for each row.
                rows = own.float().view(branch.seq_length, self._shape.patch_size)
                found[branch.name] = rows / 64.0 - 1.25
            else:
                found[branch.name] = own.long()
        return found


class BranchedTraining:
    """A model with branches on the ranks of the world, and Adam. The stages of a replica are ranks
    that follow each other.

    Building it is collective. Call `close` on all ranks at the end.

    Args:
        config: sizes of a layer, learning rate, seed; for one rank, as `config_of` gives it.
        graph: stages of the nodes of the shape.
        text: to train on.
        groups: from `whole_nodes`.
    """

    def __init__(
        self,
        config: Config,
        shape: BranchedShape,
        graph: StageGraph,
        text: bytes,
        device: Device,
        groups: ProcessGroupCollection,
    ) -> None:
        ranks, stages = dist.get_world_size(), graph.num_stages
        if ranks % stages:
            raise UsageError(f"{stages} stages need a multiple of so many ranks, not {ranks}")
        self.num_replicas = ranks // stages
        self._replica, stage = divmod(dist.get_rank(), stages)
        nodes = build_nodes(shape, config, groups, graph.order[stage])
        for node in nodes.values():
            node.to(device.torch_device)
        link = None
        if stages > 1:
            link = GraphLink(
                graph,
                stage,
                first_rank=self._replica * stages,
                lengths=shape.output_lengths(),
                width=config.model.hidden_size,
                dtype=parameter_dtype(config),
                device=device.torch_device,
            )
        # Each rank has part in making the groups of all stages.
        alike = [dist.new_group(list(range(r, ranks, stages))) for r in range(stages)]
        self._alike: Any = alike[stage]
        self.nodes, self._link, self._device = nodes, link, device.torch_device
        self._schedule = GraphSchedule(graph, stage, nodes, link)
        self._windows = TextWindows(text, shape, seed=config.runtime.seed)
        self._parameters = [p for n in sorted(nodes) for p in nodes[n].parameters()]
        self.optimizer = torch.optim.AdamW(
            self._parameters,
            lr=config.optim.lr,
            betas=(config.optim.adam_beta1, config.optim.adam_beta2),
            eps=config.optim.adam_eps,
            weight_decay=config.optim.weight_decay,
        )
        self.consumed_samples = 0

    def step(self, num_microbatches: int, micro_batch_size: int) -> float:
        """Takes a step.

        Returns:
            The mean loss of all its tokens, in nats, on every rank.
        """
        samples = num_microbatches * micro_batch_size
        first = self.consumed_samples + self._replica * samples
        starts = range(first, first + samples, micro_batch_size)
        batches = [
            {k: v.to(self._device) for k, v in self._windows.batch(s, micro_batch_size).items()}
            for s in starts
        ]
        self.optimizer.zero_grad()
        losses = self._schedule.run(batches, micro_batch_size=micro_batch_size)
        self._average_gradients()
        self.optimizer.step()
        self.consumed_samples += self.num_replicas * samples
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for loss in losses:
            total += loss.double()
        dist.all_reduce(total)
        return total.item() / (num_microbatches * self.num_replicas)

    def _average_gradients(self) -> None:
        """Gives all replicas of a stage the mean of their gradients."""
        if self.num_replicas == 1:
            return
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        together = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(together, group=self._alike)
        together /= self.num_replicas
        for g, mean in zip(gradients, together.split([g.numel() for g in gradients])):
            g.copy_(mean.view_as(g))

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        dist.destroy_process_group(self._alike)


def whole_nodes() -> ProcessGroupCollection:
    """Builds megatron-core's groups for ranks that each hold their nodes whole. Collective; end
    them with `destroy_groups`."""
    return build_groups(Layout(dp=dist.get_world_size()), timeout_minutes=10)


def config_of(flags: Sequence[str]) -> Config:
    """The configuration of a rank from flags such as `--hidden-size` and `--lr`; lengths and layers
    are those of the branches.

    Raises:
        UsageError: wrong flags.
    """
    config = resolve(parse_args([*FLAGS.split(), *flags]), 1)
    return merge_resume_config(config, None, vocab_size=VOCAB_SIZE)


@contextlib.contextmanager
def on_device(kind: str) -> Iterator[Device]:
    backend = "nccl" if kind == "cuda" else "gloo"
    with use_device(
        kind, local_rank=int(os.environ.get("LOCAL_RANK", "0")), backend=backend
    ) as device:
        init_distributed(device, timeout_minutes=10)
        yield device


def shape_of_json(raw: Any) -> BranchedShape:
    """A shape from a JSON object with the fields of `BranchedShape` and `Branch`.

    Raises:
        UsageError: it is none.
    """
    try:
        branches = tuple(Branch(**branch) for branch in raw["branches"])
        return BranchedShape(**{**raw, "branches": branches})
    except (TypeError, KeyError, ValueError) as error:
        raise UsageError(f"--shape: {error}") from error


def stages_of_plan(raw: Any) -> list[list[str]]:
    """Names of the nodes of every stage, from the JSON of `copus plan-graph`.

    Raises:
        UsageError: it is something else.
    """
    with contextlib.suppress(KeyError, TypeError):
        stages = [stage["nodes"] for stage in raw["graph"]["stages"]]
        if all(isinstance(nodes, list) for nodes in stages) and all(
            isinstance(name, str) for nodes in stages for name in nodes
        ):
            return stages
    raise UsageError("--plan is no answer of `copus plan-graph ... --json`")


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, and prints the loss of every step on rank 0."""
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    p.add_argument("--shape", type=Path, required=True, help="JSON: branches and decoder")
    words = "answer of `copus plan-graph ... --json`; without it one rank has all"
    p.add_argument("--plan", type=Path, help=words)
    p.add_argument("--text", type=Path, required=True, help="file whose bytes are trained on")
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--num-microbatches", type=int, default=4, help="of each replica")
    p.add_argument("--samples", type=int, default=2, help="of a micro-batch")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args, flags = p.parse_known_args(argv)
    try:
        shape = shape_of_json(parse_json(args.shape.read_bytes()))
        stages = [list(shape.nodes)]
        if args.plan is not None:
            stages = stages_of_plan(parse_json(args.plan.read_bytes()))
        graph = StageGraph(
            num_nodes=len(shape.nodes), edges=shape.edges, stage_of=shape.stage_of(stages)
        )
        config, text = config_of(flags), args.text.read_bytes()
        with on_device(args.device) as device:
            training = BranchedTraining(config, shape, graph, text, device, whole_nodes())
            for step in range(args.steps):
                loss = training.step(args.num_microbatches, args.samples)
                if dist.get_rank() == 0:
                    print(f"step {step + 1}: loss {loss:.6f}", flush=True)
            training.close()
            destroy_groups()
            dist.destroy_process_group()
    except (UsageError, TrainingFailure, ValueError, OSError) as error:
        # Once for all ranks, which find the same.
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"error: {error}\n")
        sys.exit(getattr(error, "exit_code", 2))


if __name__ == "__main__":
    main()
