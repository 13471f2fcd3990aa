"""Saves and resumes where buckets have padding inside: three replicas, buckets of 5,000 elements.

worker_padding.py OUTPUT_DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.helpers.jobs import TINY_GPT2, join, layout_flags, run

SHAPE = "--num-layers 6 --hidden-size 96 --ffn-hidden-size 200 --kv-channels 12"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000"
BASE = f"{TINY_GPT2} {SHAPE} --global-batch-size 12 --use-distributed-optimizer {OVERLAP}"
BEFORE, AFTER = 3, 3


def main(output: Path) -> None:
    """Writes the losses of an uninterrupted run and of resumed ones."""
    join()
    import torch.distributed as dist

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
    if dist.get_rank() == 0:
        (output / "result.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
