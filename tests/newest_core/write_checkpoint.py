"""Writes the checkpoint of the newest megatron-core that the tests of the pinned one read.

    PYTHONPATH=$PWD:$(python -m tests.newest_core.prepare) \\
        python -m tests.newest_core.write_checkpoint tests/unit/data/core_0.19.2

It is small, of weights that were hardly trained, on made-up data: what counts is its format.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

FLAGS = """--num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2
--seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2
--train-iters 2
--tokenizer-type NullTokenizer --vocab-size 31 --mock-data --swiglu --normalization RMSNorm
--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
--hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --use-distributed-optimizer
--make-vocab-size-divisible-by 2 --save c --save-interval 2 --run-dir run"""
PROMPT = [3, 1, 4, 1, 5]


def scores(load: Path) -> list[float]:
    """What the model of a checkpoint expects after `PROMPT`, one number a token."""
    from tests.helpers.of_extras import of_extra

    generate = of_extra("megatron.trainer.extras.generate.model")
    with generate.open_model(load, device="cpu") as opened:
        (chunk,) = opened.model.chunks
        tokens = torch.tensor([PROMPT])
        positions = torch.arange(len(PROMPT))[None]
        with torch.no_grad():
            logits: Any = chunk(tokens, positions, None)
        return logits[0, -1].float().tolist()


def main(target: Path) -> None:
    """Trains two steps, and keeps the checkpoint and what its model expects."""
    from tests.helpers import jobs

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = "29411"
    target = target.resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # so that no path of this machine is among the flags
        jobs.join()
        jobs.run([], Path("run"), base=FLAGS)
        torch.distributed.destroy_process_group()
        found = scores(Path("c"))
        os.rename("c", target)
    (target / "expected.json").write_text(json.dumps({"prompt": PROMPT, "scores": found}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
