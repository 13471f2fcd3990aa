"""Runs of `pretrain_gpt.py` that checks start, on real text, and what is read of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from copus_ext.extras.accept.finding import Failed, OutOfTime
from copus_ext.extras.accept.observer import VARIABLE
from megatron.trainer.common.outside import parse_json
from megatron.trainer.logging.metrics import read_metrics

_ROOT = Path(__file__).resolve().parents[3]
_TRAINER = ["-m", "copus_ext.commands.pretrain"]
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
ALONE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""What a launcher would set for the only rank; this shell may be that of a job of several."""
_TAIL = 25
"""Lines of a failed run's output that are kept."""
_TICK_S, _GRACE_S = 0.1, 10.0

_COMMON = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
--tokenizer-type ByteLevelTokenizer --split 100,0,0 --eval-iters 0 --log-interval 1
--use-distributed-optimizer --lr 1e-3 --min-lr 1e-4 --num-workers 0"""
SIZES = {
    "small": {
        "model": """--num-layers 4 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 8
            --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1
            --global-batch-size 8""",
        # Its micro-batch makes a difference to the memory.
        "fast": """--num-layers 4 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 8
            --seq-length 256 --max-position-embeddings 256 --micro-batch-size 8
            --global-batch-size 16 --bf16""",
        "large": "",
    },
    "full": {
        # 10M parameters, besides the table.
        "model": """--num-layers 6 --hidden-size 384 --ffn-hidden-size 1024 --num-attention-heads 8
            --seq-length 256 --max-position-embeddings 256 --micro-batch-size 1
            --global-batch-size 8""",
        # 350M.
        "fast": """--num-layers 24 --hidden-size 1024 --ffn-hidden-size 2736
            --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024
            --micro-batch-size 8 --global-batch-size 64 --bf16""",
        # 1.3B. At a higher rate roundings of bf16 grow too far within the steps of a walk.
        "large": """--num-layers 24 --hidden-size 2048 --ffn-hidden-size 5504
            --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048
            --micro-batch-size 1 --global-batch-size 32 --bf16 --lr 1e-4 --min-lr 1e-5""",
    },
}
"""Size of the checks -> name of a model -> its flags; an empty one is as `model`. `fast` is for one
rank."""


@dataclass(frozen=True)
class RunResult:
    """A run that has ended well."""

    steps: list[dict[str, Any]]
    """Of every step, what `metrics.jsonl` has."""
    ranks: list[dict[str, Any]]
    """Of every rank, what the observer says; empty without a task."""
    output: str
    """What it printed."""
    folder: Path

    @property
    def losses(self) -> list[float]:
        return [step["losses"]["lm loss"] for step in self.steps]

    @property
    def norms(self) -> list[float]:
        """Gradient norms before clipping."""
        return [step["grad_norm"] for step in self.steps]

    def step_s(self, first: int = 4) -> float:
        """Seconds of the median step from the first one that counts."""
        took = sorted(step["elapsed_per_iteration_ms"] / 1e3 for step in self.steps[first:])
        return took[len(took) // 2]


@dataclass
class Bench:
    """Where checks run.

    Args:
        device: `cpu` or `cuda`.
        ranks: how many this machine gives.
        size: of the models; a key of `SIZES`.
        megatron_lm: folder of a Megatron-LM checkout to compare with, or None.
    """

    folder: Path
    device: str
    ranks: int
    size: str
    megatron_lm: Path | None = None
    has_engine: bool = False
    deadline_s: float = float("inf")
    """On the monotonic clock, of the check that runs."""
    known: dict[tuple[str, ...], RunResult] = field(default_factory=dict)
    """Runs of one rank that several checks read, by their flags."""

    def text(self) -> Path:
        """The prefix of a data set: the sources of Python's standard library, byte by byte."""
        prefix = self.folder / "data" / "stdlib"
        if not prefix.with_name("stdlib_text_document.bin").exists():
            tool = [sys.executable, "-m", "copus_ext.commands.preprocess_data", "--python-stdlib"]
            tool += ["--output-prefix", str(prefix), "--append-eod"]
            prefix.parent.mkdir(parents=True, exist_ok=True)
            code, output = self.run(tool, prefix.with_name("output.txt"), {})
            if code:
                raise Failed("the data set cannot be made", output)
        return prefix.with_name("stdlib_text_document")

    def flags(self, model: str = "model") -> list[str]:
        """Of a model, with the flags that all runs have."""
        sizes = SIZES[self.size]
        words = f"{_COMMON} {sizes[model] or sizes['model']} --device {self.device}".split()
        backend = ["--transformer-impl", "transformer_engine" if self.has_engine else "local"]
        return [*words, *backend, "--data-path", str(self.text())]

    def train(
        self,
        name: str,
        flags: Sequence[str],
        *,
        ranks: int = 1,
        task: dict[str, Any] | None = None,
        supervisor: Sequence[str] | None = None,
        code: int = 0,
    ) -> RunResult:
        """Runs the program of this repository to its end.

        Args:
            name: of the folder of the run; one that is there is gone on with.
            flags: behind those of `flags`.
            ranks: how many.
            supervisor: flags of `copus launch`, which then starts the ranks.
            code: the exit code that it must have.

        Raises:
            Failed: it ended with another code.
            OutOfTime: the time of the check is over.
        """
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        env = {}
        if task is not None:
            file = folder / "task.json"
            file.write_text(json.dumps({**task, "folder": str(folder)}))
            env[VARIABLE] = str(file)
        own = [*flags, "--run-dir", str(folder)]
        count = ["--nproc-per-node", str(ranks)]
        if supervisor is not None:
            start = ["copus_ext.launch.supervisor", *count, *supervisor]
            words = ["-m", *start, "--", "pretrain_gpt.py", *own]
        elif ranks == 1:  # torchrun would import torch once more
            words, env = [*_TRAINER, *own], env | ALONE
        else:
            words = ["-m", "torch.distributed.run", "--standalone", *count, *_TRAINER, *own]
        ended, output = self.run([sys.executable, *words], folder / "output.txt", env)
        if ended != code:
            message = f"the run {name} ended with code {ended}, not {code}"
            raise Failed(message, last_lines(output))
        files = [folder / f"rank{rank}.json" for rank in range(ranks)]
        rows = [parse_json(file.read_text()) for file in files if file.exists()]
        steps = [row for row in read_metrics(folder) if row["kind"] == "step"]
        return RunResult(steps=steps, ranks=rows, output=output, folder=folder)

    def once(self, name: str, flags: Sequence[str]) -> RunResult:
        """As `train` of one rank, without sums; a run with the same flags is not repeated."""
        key = tuple(flags)
        if key not in self.known:
            self.known[key] = self.train(name, flags, task={"sums": False})
        return self.known[key]

    def peak_of_rank(self, name: str, flags: Sequence[str]) -> dict[str, int]:
        """What `peak_of_rank.py` measures of the only rank of a run.

        Raises:
            Failed: it ended with an error.
        """
        words = [sys.executable, "-m", "copus_ext.extras.accept.peak_of_rank", "1", "0", *flags]
        code, output = self.run(words, self.folder / f"{name}.txt", {})
        found = [line for line in output.splitlines() if line.startswith("PEAK ")]
        if code or not found:
            raise Failed(f"{name} ended with code {code}", last_lines(output))
        return parse_json(found[-1].removeprefix("PEAK "))

    def run(self, words: Sequence[str], log: Path, env: dict[str, str]) -> tuple[int, str]:
        """Runs a command until the check's time is over.

        Returns:
            Its exit code and what it printed.

        Raises:
            OutOfTime: it was still running.
        """
        with log.open("w") as file:
            # Not where the user is: `python -m` finds what lies there first.
            child = _start(words, file, env, self.folder)
            try:
                while child.poll() is None and time.monotonic() < self.deadline_s:
                    time.sleep(_TICK_S)
                if child.poll() is None:
                    raise OutOfTime(
                        "ran past its limit", last_lines(log.read_text(errors="replace"))
                    )
            finally:
                _end(child)
        return child.returncode, log.read_text(errors="replace")

    def forget(self, *names: str) -> None:
        """Deletes the folders of runs, whose checkpoints are large."""
        for name in names:
            shutil.rmtree(self.folder / name, ignore_errors=True)


def _start(
    words: Sequence[str], file: IO[str], env: dict[str, str], folder: Path
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        words,
        stdout=file,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=_environment() | env,
        cwd=folder,
        start_new_session=True,
    )


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    # NVIDIA's container and Transformer Engine have products of fp32 round their factors to TF32,
    # by more than losses of two layouts may be apart.
    plain = {"OMP_NUM_THREADS": "1", "NVIDIA_TF32_OVERRIDE": "0"}
    return {**plain, **os.environ, "PYTHONPATH": path}


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a command, with all that it has started."""
    for number, grace_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        if child.poll() is not None:
            break
        _signal(child, number)
        until = time.monotonic() + grace_s
        while child.poll() is None and time.monotonic() < until:
            time.sleep(_TICK_S)
    _signal(child, signal.SIGKILL)


def _signal(child: subprocess.Popen[bytes], number: int) -> None:
    send: Callable[[int, int], None] = os.killpg
    try:
        send(child.pid, number)
    except ProcessLookupError:
        return


def last_lines(output: str) -> str:
    """The end of what a run has printed, for the file."""
    return "\n".join(output.splitlines()[-_TAIL:])
