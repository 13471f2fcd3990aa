"""Private names of megatron-core that the gradient tap touches: a small job, a test per name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.jobs import TINY
from tests.helpers.launch import ROOT

LOOK = """
import json, math, sys
import torch
from megatron.training.arguments import parse_args, resolve
from megatron.training.callbacks import Callback
from megatron.training.pretrain import pretrain

facts = {}

class Look(Callback):
    def on_setup_start(self, context):
        chunk = context.model[0]
        self.param = param = next(chunk.parameters())
        facts["ddp_config"] = chunk.ddp_config.use_distributed_optimizer is True
        facts["bucket_groups"] = len(chunk.bucket_groups) > 0
        group = chunk.bucket_groups[0]
        facts["start_grad_sync"] = "start_grad_sync" in vars(type(group))
        facts["grad_reduce_handle"] = group.grad_reduce_handle is None
        facts["buckets"] = facts["params_list"] = all(
            isinstance(b.params_list, list) and b.params_list for b in group.buckets)
        buffer = chunk.buffers[0]
        entry = buffer.param_index_map[param]
        facts["param_index_map"] = (
            len(entry) == 3 and entry[1] - entry[0] == param.numel()
            and 0 <= entry[2] < len(buffer.buckets))
        bucket = buffer.buckets[entry[2]]
        offset = entry[0] - bucket.offset
        facts["offset"] = facts["grad_data"] = facts["main_grad"] = (
            bucket.grad_data[offset:].data_ptr() == param.main_grad.data_ptr())
        self.calls, start = [], group.start_grad_sync
        group.start_grad_sync = lambda *a, **k: (self.calls.append(1), start(*a, **k))[1]
        self.seen, self.behind = [], []
        param.register_hook(lambda g: self.seen.append((g + 0, param.main_grad + 0)))
        node = param.expand_as(param).grad_fn.next_functions[0][0]
        self.node = node
        node.register_hook(lambda *_: self.behind.append(param.main_grad + 0))

    def on_grads_ready(self, context):
        facts["start_grad_sync is looked up on the instance"] = len(self.calls) == 1
        before = torch.zeros_like(self.param.main_grad)
        order, total = True, before
        for gradient, held in self.seen:
            order &= torch.equal(held, total)
            total = total + gradient
        facts["hook on the parameter"] = len(self.seen) == 8 and order
        # Behind the accumulation the buffer holds it.
        running, added = torch.zeros_like(before), True
        for (gradient, _), held in zip(self.seen, self.behind):
            running = running + gradient
            added &= torch.equal(held, running)
        facts["hook behind the accumulation"] = len(self.behind) == 8 and added

with torch.random.fork_rng():
    pretrain(resolve(parse_args(sys.argv[1:]), 1), [Look()])
print(json.dumps(facts))
"""
RELIED_ON = {
    "ddp_config": "DistributedDataParallel.ddp_config.use_distributed_optimizer tells the sharding",
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


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bool]:
    folder: Path = tmp_path_factory.mktemp("tap")
    flags = f"{TINY} --use-distributed-optimizer --train-iters 1 --run-dir {folder}".split()
    command = [sys.executable, "-c", LOOK, *flags]
    got = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=ROOT)
    assert got.returncode == 0, got.stderr[-2000:]
    return json.loads(got.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", RELIED_ON)
def test_the_tap_finds_what_it_touches(facts: dict[str, bool], name: str) -> None:
    assert facts.get(name), f"megatron-core {name} moved: no longer true is: {RELIED_ON[name]}"


def test_nothing_is_looked_at_that_is_not_tested(facts: dict[str, bool]) -> None:
    assert facts.keys() == RELIED_ON.keys()
