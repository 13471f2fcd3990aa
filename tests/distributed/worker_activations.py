"""The bytes that autograd saves of one layer under several layouts, and the prediction."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

from tests.helpers.jobs import MOE, TINY, TINY_GPT2, layout_flags, run

_BASES = {"llama": TINY, "gpt2": TINY_GPT2, "moe": MOE}
IN_TORCH = "--bf16 --attention-backend unfused --no-masked-softmax-fusion"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
CASES = [
    ("llama", 1, 1, ""),
    ("llama", 1, 2, "--bf16"),
    ("llama", 2, 2, "--sequence-parallel"),
    ("llama", 4, 1, ""),
    ("llama", 2, 1, "--attention-backend unfused"),
    ("llama", 2, 1, "--recompute-activations --group-query-attention --num-query-groups 2"),
    ("llama", 1, 2, "--hidden-dropout 0.1 --attention-dropout 0.1"),
    ("gpt2", 1, 1, "--micro-batch-size 2"),
    ("gpt2", 4, 1, "--sequence-parallel"),
    ("gpt2", 2, 2, "--attention-backend unfused"),
    ("gpt2", 2, 1, "--hidden-dropout 0.1 --attention-dropout 0.1"),
    ("gpt2", 1, 2, "--hidden-dropout 0.1 --attention-dropout 0.1 --recompute-activations"),
    ("moe", 1, 1, "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate"),
    ("moe", 1, 2, "--micro-batch-size 2 --num-experts 16 --moe-router-topk 4"),
    ("moe", 2, 1, "--sequence-parallel --recompute-activations"),
    ("moe", 2, 2, "--sequence-parallel --moe-token-dispatcher-type allgather"),
    ("moe", 2, 1, "--sequence-parallel --expert-tensor-parallel-size 1"),
    ("moe", 1, 1, "--expert-model-parallel-size 2"),
    ("llama", 1, 1, "--context-parallel-size 2"),
    ("llama", 1, 1, "--context-parallel-size 4 --micro-batch-size 2"),
    ("llama", 2, 1, "--context-parallel-size 2 --sequence-parallel"),
    ("llama", 1, 1, "--context-parallel-size 2 --recompute-activations"),
    ("llama", 1, 2, "--context-parallel-size 2 --cp-comm-type a2a"),
    ("llama", 1, 1, "--context-parallel-size 4 --cp-comm-type a2a --micro-batch-size 2"),
    ("gpt2", 1, 1, "--context-parallel-size 2"),
    ("gpt2", 1, 1, "--context-parallel-size 2 --cp-comm-type a2a"),
    ("llama", 2, 1, f"{IN_TORCH} --attention-softmax-in-fp32"),
    ("llama", 2, 1, IN_TORCH),
    ("gpt2", 1, 2, f"{IN_TORCH} --attention-softmax-in-fp32 {DROPOUT}"),
    ("gpt2", 2, 1, f"{IN_TORCH} --attention-softmax-in-fp32 --recompute-activations"),
]


def counter() -> Any:
    """A callback that counts distinct storages, parameters aside, which the first layer saves in
    its first training pass."""
    import torch

    from megatron.trainer.train.callbacks import Callback, CallbackContext

    class Count(Callback):
        """Bytes of the first layer of this rank."""

        num_bytes: int | None = None

        def on_setup_start(self, context: CallbackContext) -> None:
            model: Any = context.model[0]
            while hasattr(model, "module"):
                model = model.module
            own = {p.untyped_storage().data_ptr() for p in model.parameters()}
            # Which experts were chosen; in a dense layer only the causal mask is such a tensor.
            is_moe = hasattr(model.decoder.layers[0].mlp, "router")
            # Kept, so that no storage is freed and its address used again.
            saved: dict[int, torch.Tensor] = {}
            running: list[Any] = []

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                storage = tensor.untyped_storage()
                # Others are alike in every layer: the causal mask, a counter of checkpoints.
                if (
                    self.num_bytes is None
                    and (tensor.is_floating_point() or (is_moe and tensor.dtype == torch.bool))
                    and storage.data_ptr() not in own
                ):
                    saved.setdefault(storage.data_ptr(), tensor)
                return tensor

            def before(module: Any, args: Any, kwargs: Any) -> None:
                if module.training and self.num_bytes is None:
                    hooks: Any = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
                    hooks.__enter__()
                    running.append(hooks)

            def after(module: Any, args: Any, output: Any) -> None:
                if running:
                    running.pop().__exit__(None, None, None)
                    self.num_bytes = sum(t.untyped_storage().nbytes() for t in saved.values())
                    saved.clear()

            layer = model.decoder.layers[0]
            layer.register_forward_pre_hook(before, with_kwargs=True)
            layer.register_forward_hook(after)

    return Count()


def main(output: Path, step: str) -> Any:
    """Returns counted and predicted bytes of every case and rank."""
    import numpy as np
    import torch.distributed as dist

    from copus_ext.cost_model.cluster_spec import preset
    from copus_ext.cost_model.megatron_flags import spec_of_flags
    from copus_ext.cost_model.memory import layer_bytes
    from copus_ext.planner.space import Limits, enumerate_points, to_config_batch

    world = dist.get_world_size()
    rows = []
    for number, (name, tp, pp, more) in enumerate(CASES[:: int(step)]):
        base = _BASES[name]
        flags = [*layout_flags(tp, pp, 1), *more.split(), "--train-iters", "1"]
        count = counter()
        for kind in ("FLASH", "FUSED", "UNFUSED"):
            # megatron-core sets these for a process, once.
            os.environ.pop(f"NVTE_{kind}_ATTN", None)
        run([*flags, "--lr-warmup-iters", "0"], output / str(number), [count], base=base)
        every: list[Any] = [None] * world
        dist.all_gather_object(every, count.num_bytes)
        spec = spec_of_flags([*base.split(), *more.split()])
        way = "selective" if "--recompute-activations" in more else "none"
        micro = 2 if "--micro-batch-size 2" in more else 1
        words = dict(itertools.pairwise(more.split()))
        form = words.get("--cp-comm-type", "all_gather")
        limits = Limits(
            cp_comm_types=(form,),
            fixed={
                **{"tp": tp, "pp": pp, "vpp": 1, "micro_batch": micro},
                "cp": int(words.get("--context-parallel-size", 1)),
                "ep": 2 if "--expert-model-parallel-size 2" in more else 1,
                "etp": 1 if "--expert-tensor-parallel-size 1" in more else tp,
            },
            recompute=(way,),
        )
        cluster = preset(f"cpu:{world}")
        points = enumerate_points(spec, cluster, 8, limits).take(np.array([0]))
        change = {"sequence_parallel": "--sequence-parallel" in more}
        one = to_config_batch(spec, cluster, points).change(**change)
        if one.experts is not None:
            # The mean over the ranks, whichever of them had more rows.
            one = one.change(experts=dataclasses.replace(one.experts, load=1.0))
        predicted = float(layer_bytes(one.full())[0][0])
        rows.append({"case": f"{name} {tp} {pp} {more}", "counted": every, "predicted": predicted})
    return rows
