"""Saves and resumes where buckets have padding inside: three replicas, small buckets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    return results
