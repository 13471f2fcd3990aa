"""One rank of a small model whose peak of memory is predicted and measured.

`worker_memory.py NUMBER OUTPUT` sums what torch's allocator gives and takes back during a step (its
profiler's memory events), on top of the tensors that live between steps. Without tensor
parallelism, as gloo keeps tensors of reductions alive for a while.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import sys
from pathlib import Path
from typing import Any

GPT2 = """--num-layers 8 --hidden-size 128 --num-attention-heads 8 --seq-length 256
--max-position-embeddings 256 --global-batch-size 16 --lr 1e-3 --tokenizer-type NullTokenizer
--vocab-size 4095 --mock-data --hidden-dropout 0 --attention-dropout 0 --eval-iters 0
--log-interval 1000 --lr-warmup-iters 0 --train-iters 3"""
LLAMA = f"""{GPT2} --num-attention-heads 4 --swiglu --normalization RMSNorm --disable-bias-linear
--position-embedding-type rope --untie-embeddings-and-output-weights"""
CASES: list[tuple[int, str, dict[str, Any]]] = [
    (2, LLAMA, {"pp": 2, "micro_batch": 2}),
    (1, LLAMA, {"micro_batch": 4, "recompute": "full"}),
    (4, LLAMA, {"pp": 2, "vpp": 2, "micro_batch": 1}),
    (1, LLAMA, {"micro_batch": 2}),
    (1, LLAMA, {"micro_batch": 2, "recompute": "block:3"}),
    (2, LLAMA, {"pp": 2, "micro_batch": 4, "recompute": "full"}),
    (4, LLAMA, {"pp": 4, "micro_batch": 2}),
    (2, LLAMA, {"micro_batch": 4}),
    (1, GPT2, {"micro_batch": 2}),
    (2, GPT2, {"pp": 2, "micro_batch": 2}),
    (4, GPT2, {"pp": 2, "micro_batch": 4, "recompute": "block:1"}),
    (4, GPT2, {"pp": 4, "vpp": 2, "micro_batch": 1}),
]


def watcher() -> Any:
    """A callback that finds the peak of the third step."""
    import torch

    from megatron.trainer.train.callbacks import Callback

    class Watch(Callback):
        """Bytes of tensors between steps, and at most on top of them."""

        step, resting, moving = 0, 0, 0
        profiler: Any = None

        def on_train_step_start(self, *args: Any, **kwargs: Any) -> None:
            self.step += 1
            if self.step == 3:
                gc.collect()
                tensors = (x for x in gc.get_objects() if isinstance(x, torch.Tensor))
                found = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
                self.resting = sum(s.nbytes() for s in found.values())
                activities = [torch.profiler.ProfilerActivity.CPU]
                self.profiler = torch.profiler.profile(activities=activities, profile_memory=True)
                self.profiler.__enter__()

        def on_train_step_end(self, *args: Any, **kwargs: Any) -> None:
            if self.step == 3:
                self.profiler.__exit__(None, None, None)
                events = self.profiler.profiler.kineto_results.events()
                changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
                now = 0
                for _, change in sorted(changes, key=lambda c: c[0]):
                    now += change
                    self.moving = max(self.moving, now)

    return Watch()


def worker(number: int, output: Path) -> None:
    """One case on this rank; rank 0 writes."""
    import torch
    import torch.distributed as dist

    from copus_ext.cost_model.cluster_spec import preset
    from copus_ext.cost_model.megatron_flags import spec_of_flags
    from copus_ext.cost_model.memory import memory
    from copus_ext.planner.configuration import Configuration
    from copus_ext.planner.space import Limits, enumerate_points, to_config_batch
    from megatron.trainer.config.arguments import parse_args, resolve
    from megatron.trainer.config.layout import Layout
    from megatron.trainer.train.pretrain import pretrain

    world, base, how = CASES[number]
    recompute, _, layers = how.get("recompute", "none").partition(":")
    pp, vpp = how.get("pp", 1), how.get("vpp", 1)
    c = Configuration(
        layout=Layout(tp=1, pp=pp, vpp=vpp, dp=world // pp),
        micro_batch_size=how["micro_batch"],
        global_batch_size=16,
        recompute=recompute,
        recompute_num_layers=int(layers or 0),
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    watch = watcher()
    flags = [*base.split(), *c.to_flags(), "--run-dir", str(output.with_suffix(""))]
    with contextlib.redirect_stdout(io.StringIO()):
        pretrain(resolve(parse_args(flags), world), [watch])
    spec = spec_of_flags(base.split())
    fixed = {"tp": 1, "pp": pp, "vpp": vpp, "micro_batch": c.micro_batch_size}
    limits = Limits(
        fixed={**fixed, "recompute_num_layers": c.recompute_num_layers}, recompute=(c.recompute,)
    )
    one = enumerate_points(spec, preset(f"cpu:{world}"), 16, limits).take([0])
    found = memory(to_config_batch(spec, preset(f"cpu:{world}"), one), context_bytes=0.0)
    stage = dist.get_rank() * pp // world
    parts = {k: float(v[stage, 0]) for k, v in found.stages.items() if k != "fragmentation"}
    measured = watch.resting + watch.moving
    row = {"stage": stage, "measured_bytes": measured, "resting_bytes": watch.resting, **parts}
    row["predicted_bytes"] = sum(parts.values())
    rows: list[Any] = [None] * world
    dist.all_gather_object(rows, row)
    if dist.get_rank() == 0:
        output.write_text(json.dumps({"configuration": str(c), "world_size": world, "ranks": rows}))
    dist.destroy_process_group()


if __name__ == "__main__":
    worker(int(sys.argv[1]), Path(sys.argv[2]))
