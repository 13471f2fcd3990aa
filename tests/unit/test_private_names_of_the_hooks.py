"""Private names of megatron-core that the gradient hooks touch: a small job, a test per name."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.train.callbacks import Callback
from megatron.trainer.train.pretrain import pretrain
from tests.helpers.jobs import MOE
from tests.helpers.launch import ROOT, run_in_fork


class Look(Callback):
    """Asks about each name while a small job trains.

    Args:
        facts: filled with whether each is as the hooks rely on.
        names: filled with the names of all attributes there.
    """

    def __init__(self, facts: dict[str, bool], names: set[str]) -> None:
        self.facts, self.names = facts, names

    def look(self, name: str, question: Callable[[], Any]) -> None:
        try:
            self.facts[name] = bool(question())
        except (AttributeError, TypeError, KeyError, IndexError):
            self.facts[name] = False

    def on_setup_start(self, context: Any) -> None:
        look, chunk = self.look, context.model[0]
        self.param = param = next(chunk.parameters())
        look("ddp_config", lambda: chunk.ddp_config.use_distributed_optimizer is True)
        look("module", lambda: isinstance(chunk.module, torch.nn.Module))
        look("bucket_groups", lambda: len(chunk.bucket_groups) > 0)
        group = chunk.bucket_groups[0]
        look("start_grad_sync", lambda: "start_grad_sync" in vars(type(group)))
        look("grad_reduce_handle", lambda: group.grad_reduce_handle is None)
        look("buckets", lambda: len(group.buckets) > 0)
        look("params_list", lambda: all(isinstance(b.params_list, list) for b in group.buckets))
        look("buffers", lambda: param in chunk.buffers[0].param_index_map)
        buffer = chunk.buffers[0]
        entry = buffer.param_index_map[param]
        look(
            "param_index_map",
            lambda: (
                len(entry) == 3
                and entry[1] - entry[0] == param.numel()
                and 0 <= entry[2] < len(buffer.buckets)
            ),
        )
        expert = next(p for n, p in chunk.named_parameters() if ".mlp.experts." in n)
        look(
            "expert_parallel_buffers",
            lambda: (
                expert in chunk.expert_parallel_buffers[0].param_index_map
                and expert not in buffer.param_index_map
            ),
        )
        look("expert_parallel_bucket_groups", lambda: len(chunk.expert_parallel_bucket_groups) > 0)
        bucket = buffer.buckets[entry[2]]
        look("offset", lambda: 0 <= entry[0] - bucket.offset < bucket.grad_data.numel())

        def place() -> int:
            return bucket.grad_data[entry[0] - bucket.offset :].data_ptr()

        look("grad_data", lambda: place() == buffer.grad_data[entry[0] :].data_ptr())
        look("main_grad", lambda: place() == param.main_grad.data_ptr())
        for thing in (chunk, group, bucket, buffer):
            known = {*dir(torch.nn.Module()), *dir(torch.Tensor)}
            self.names.update(set(dir(thing)) - known)
        self.calls, start = [], group.start_grad_sync
        group.start_grad_sync = lambda *a, **k: (self.calls.append(1), start(*a, **k))[1]
        self.seen, self.behind = [], []
        param.register_hook(lambda g: self.seen.append((g + 0, param.main_grad + 0)))
        node = param.expand_as(param).grad_fn.next_functions[0][0]
        self.node = node
        node.register_hook(lambda *_: self.behind.append(param.main_grad + 0))

    def on_grads_ready(self, context: Any) -> None:
        self.facts["start_grad_sync is looked up on the instance"] = len(self.calls) == 1
        before = torch.zeros_like(self.param.main_grad)
        order, total = True, before
        for gradient, held in self.seen:
            order &= torch.equal(held, total)
            total = total + gradient
        self.facts["hook on the parameter"] = len(self.seen) == 8 and order
        # Behind the accumulation the buffer holds it.
        running, added = torch.zeros_like(before), True
        for (gradient, _), held in zip(self.seen, self.behind):
            running = running + gradient
            added &= torch.equal(held, running)
        self.facts["hook behind the accumulation"] = len(self.behind) == 8 and added


RELIED_ON = {
    "ddp_config": "DistributedDataParallel.ddp_config.use_distributed_optimizer tells the sharding",
    "module": "DistributedDataParallel.module is what it wraps",
    "buffers": "DistributedDataParallel.buffers holds the gradients",
    "expert_parallel_buffers": "DistributedDataParallel.expert_parallel_buffers holds those of "
    "experts, and nothing else does",
    "expert_parallel_bucket_groups": "DistributedDataParallel.expert_parallel_bucket_groups lists "
    "what of experts is reduced together",
    "bucket_groups": "DistributedDataParallel.bucket_groups lists what is reduced together",
    "start_grad_sync": "a bucket group's start_grad_sync starts the reduction",
    "start_grad_sync is looked up on the instance": "replacing start_grad_sync is noticed",
    "grad_reduce_handle": "a bucket group's grad_reduce_handle is None without a reduction",
    "buckets": "a bucket group's buckets",
    "params_list": "a bucket's params_list",
    "param_index_map": "a buffer's param_index_map gives (start, end, bucket)",
    "offset": "a bucket's offset in its buffer",
    "grad_data": "a bucket's grad_data is the buffer",
    "main_grad": "a parameter's main_grad is a view of the buffer",
    "hook on the parameter": "a parameter's hook is given each micro-batch before it is added",
    "hook behind the accumulation": "a hook of the accumulating node runs after it was added",
}


def train(run_dir: Path) -> tuple[dict[str, bool], set[str]]:
    facts: dict[str, bool] = {}
    names: set[str] = set()
    flags = f"{MOE} --use-distributed-optimizer --train-iters 1 --run-dir {run_dir}".split()
    pretrain(resolve(parse_args(flags), 1), [Look(facts, names)])
    return facts, names


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bool], set[str]]:
    return run_in_fork(train, tmp_path_factory.mktemp("tap"))


@pytest.mark.parametrize("name", RELIED_ON)
def test_the_hooks_find_what_they_touch(found: tuple[dict[str, bool], set[str]], name: str) -> None:
    why = f"megatron-core {name} moved: no longer true is: {RELIED_ON[name]}"
    assert found[0].get(name), why


def test_nothing_is_touched_that_is_not_tested(found: tuple[dict[str, bool], set[str]]) -> None:
    """Every attribute of megatron-core's wrappers, buffers and buckets that the hooks name."""
    named = {
        node.attr
        for node in ast.walk(ast.parse((ROOT / "copus_ext/gns/hooks.py").read_text()))
        if isinstance(node, ast.Attribute)
    }
    touched = named & found[1]
    assert touched and touched <= RELIED_ON.keys(), touched - RELIED_ON.keys()
