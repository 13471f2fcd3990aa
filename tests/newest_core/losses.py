"""Prints the release of megatron-core and the losses of small runs on it, on one rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.helpers import jobs

BALANCE = """--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
--moe-z-loss-coeff 1e-3"""
MODELS = {
    "llama": jobs.TINY,
    "gpt2": jobs.TINY_GPT2,
    "latent attention and a further token": jobs.FURTHER,
    "mixture": f"{jobs.TINY} {jobs.EIGHT} {BALANCE}",
}
STEPS = 20


def main(folder: Path) -> None:
    """Trains each model, and writes what came of it into `losses.json`."""
    jobs.join()
    from megatron.core import package_info

    found: dict[str, Any] = {"version": package_info.__version__}
    for number, (name, flags) in enumerate(MODELS.items()):
        steps = jobs.run(["--train-iters", str(STEPS)], folder / str(number), base=flags)
        found[name] = [[*step["losses"].values(), step["grad_norm"]] for step in steps]
    (folder / "losses.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
