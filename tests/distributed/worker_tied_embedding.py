"""Trains with the tied embedding exchanged whole and by shards, in the same processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.helpers.jobs import TINY_GPT2, run

PP2 = "--pipeline-model-parallel-size 2 --use-distributed-optimizer"
CASES = {
    "dp2": PP2,
    "dp2 overlap": f"{PP2} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000",
    "cp2": f"{PP2} --context-parallel-size 2",
    "vpp2": f"{PP2} --num-virtual-stages-per-pipeline-rank 2",
}
"""Name -> flags of the layout, of four ranks."""
STEPS = 4


def main(output: Path) -> Any:
    """Returns losses, gradient norms and elements exchanged between the ends of the pipeline."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron.trainer.model import gpt

    every: list[int] = []
    real = dist.all_reduce

    def counted(tensor: Any, *args: Any, group: Any = None, **more: Any) -> Any:
        if group is not None and group is parallel_state.get_embedding_group(False):
            every.append(tensor.numel())
        return real(tensor, *args, group=group, **more)

    def whole(finalize: Any, *_: Any) -> Any:
        return finalize

    rows = {}
    for name, flags in CASES.items():
        for way in ("whole", "shards"):
            every.clear()
            by = whole if way == "whole" else gpt.exchanging_own_shard
            with (
                patch.object(dist, "all_reduce", counted),
                patch.object(gpt, "exchanging_own_shard", by),
            ):
                folder = output / f"{name} {way}".replace(" ", "_")
                more = f"{flags} --train-iters {STEPS} --log-interval 1".split()
                steps = run(more, folder, base=TINY_GPT2)
            rows[f"{name} {way}"] = {
                "numbers": [[s["losses"]["lm loss"], s["grad_norm"]] for s in steps],
                # The first exchange makes the copies of the initial weights equal.
                "elements": sum(every[1:]) / STEPS,
            }
    return rows
