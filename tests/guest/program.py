"""Megatron-LM's own program as the tests start it, and what they read of its output."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers.launch import ROOT, RanksResult, run_ranks
from tests.helpers.text import text_prefix

HAS_PROGRAM = importlib.util.find_spec("megatron.training") is not None
"""Whether `PYTHONPATH` has it; see `versions.py`."""
RANK = ROOT / "tests" / "guest" / "rank.py"
MODEL = """--num-layers 4 --hidden-size 32 --ffn-hidden-size 128 --num-attention-heads 4
--seq-length 32 --max-position-embeddings 32 --swiglu --normalization RMSNorm
--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 8 --lr 2e-3
--min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 --tokenizer-type NullTokenizer
--vocab-size 127 --split 95,4,1 --eval-iters 1 --eval-interval 20 --log-interval 1
--save-interval 1000 --num-workers 0 --train-iters 40"""
ON_CPU = """--transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion
--no-persist-layer-norm --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
--no-bias-dropout-fusion --no-rope-fusion"""
SPLIT = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_STEP = re.compile(
    r"iteration +(\d+)/ *\d+ \| consumed samples: +(\d+) \|.*learning rate: (\S+) \| "
    r"global batch size: +(\d+) \| lm loss: (\S+) \|.*grad norm: (\S+) \|"
)
_EVALUATION = re.compile(r"(validation|test) set \| lm loss value: (\S+) \|")


class Runs(dict[str, Any]):
    """Runs by name, in a folder. Each is made when a test asks for it first, so that a part of the
    tests makes no more than it looks at."""

    def __init__(self, folder: Path, make: Callable[[Runs, str], Any]) -> None:
        super().__init__()
        self.folder, self._make = folder, make

    def __missing__(self, name: str) -> Any:
        self[name] = self._make(self, name)
        return self[name]


def train(folder: Path, name: str, kind: str, flags: str, *more: str, ranks: int) -> RanksResult:
    """Runs the program to its end; see `launch`."""
    return launch(folder, name, kind, flags, *more, ranks=ranks).check()


def launch(
    folder: Path,
    name: str,
    kind: str,
    flags: str,
    *more: str,
    ranks: int,
    start: Callable[..., RanksResult] = run_ranks,
) -> RanksResult:
    """Runs the program.

    Args:
        folder: of the data cache, and of the run's own `--save` folder.
        name: of that.
        kind: see `rank.py`.
        flags: behind those of the model.
        more: flags with spaces in them; a schedule of the batch takes the place of its size.
        ranks: on this machine.
        start: takes what `run_ranks` takes.
    """
    places = f"--data-path {text_prefix()} --data-cache-path {folder / 'cache'}"
    model = MODEL
    if "--step-batch-size-schedule" in more:
        model = model.replace("--global-batch-size 8", "")
    words = f"{model} {ON_CPU} {places} --save {folder / name} {flags}".split()
    return start([RANK, kind, *words, *more], ranks, timeout_s=360)


def steps(output: str) -> list[tuple[float, ...]]:
    """Iteration, samples, learning rate, batch, loss and gradient norm of every step."""
    return [tuple(map(float, row)) for row in _STEP.findall(output)]


def evaluations(output: str) -> list[tuple[str, float]]:
    """The losses at the end of a run."""
    return [(name, float(loss)) for name, loss in _EVALUATION.findall(output)]


def tensors(checkpoint: Path) -> dict[str, Any]:
    """All tensors of a `torch_dist` checkpoint by name, as torch reads them."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = FileSystemReader(checkpoint)
    entries = reader.read_metadata().state_dict_metadata
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(found, storage_reader=reader, no_dist=True)
    return found


def start_from(folder: Path, name: str, iteration: int) -> Path:
    """A `--load` folder with one checkpoint of a run, as if it had ended there."""
    start, own = folder / f"{name}_start", f"iter_{iteration:07d}"
    shutil.copytree(folder / name / own, start / own)
    (start / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return start
