"""Saves and resumes where buckets have padding inside: three replicas, small buckets. Also a
checkpoint whose optimizer megatron-core's own writer has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from megatron.trainer.checkpoint import files
from tests.helpers.checkpoints import edit_common
from tests.helpers.jobs import TINY_GPT2, layout_flags, run

SHAPE = "--num-layers 6 --hidden-size 96 --ffn-hidden-size 200 --kv-channels 12"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000"
BASE = f"{TINY_GPT2} {SHAPE} --global-batch-size 12 --use-distributed-optimizer {OVERLAP}"
BEFORE, AFTER = 3, 3


def main(output: Path) -> Any:
    """Returns the losses of an uninterrupted run and of resumed ones."""

    length = ["--train-iters", str(BEFORE + AFTER)]
    save = [*length, "--exit-interval", str(BEFORE), "--save", str(output / "saved")]
    load = [*length, "--load", str(output / "saved")]
    results: dict[str, list[float]] = {}
    for name, flags in [
        ("whole", length),
        ("first", save),
        ("same", load),
        ("pipeline", [*load, *layout_flags(1, 3, 1)]),
    ]:
        steps = run(flags, output / name, base=BASE)
        results[name] = [step["losses"]["lm loss"] for step in steps]
    save_as_upstream(output, length)
    run([*length, "--bf16", "--load", str(output / "upstream")], output / "told", base=BASE)
    return results


def save_as_upstream(output: Path, length: list[str]) -> None:
    """Saves what `--dist-ckpt-optim-fully-reshardable` of Megatron-LM does, without our marks."""

    def theirs(optimizer: Any, model: Any, groups: Any, **how: Any) -> Any:
        state, metadata = how["model_state"], how["metadata"]
        return optimizer.sharded_state_dict(state, is_loading=False, metadata=metadata)

    flags = [*length, "--bf16", "--exit-interval", str(BEFORE), "--save", str(output / "upstream")]
    with mock.patch("megatron.trainer.checkpoint.save.sharded_optimizer_state", theirs):
        run(flags, output / "theirs", base=BASE)
    if dist.get_rank() == 0:
        folder = files.folder_of(output / "upstream", BEFORE)
        (folder / files.MANIFEST).unlink()
        key = files.OUR_KEY
        edit_common(folder, lambda common: {k: v for k, v in common.items() if k != key})
    dist.barrier()
