"""The flags that a checkpoint was saved with, read by a process of its own: the supervisor needs no
torch, and a damaged file cannot take it along.

python -m copus_ext.launch.stored FOLDER [ITERATION]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from copus_ext.reconfigure.checked import one_line
from megatron.training import checkpoint_files as files

_WAIT_S = 600.0
_MOST_BYTES = 1 << 22
_TRIES = 3


def stored_arguments(save: Path) -> dict[str, Any]:
    """The flags of the latest checkpoint that can be read. Takes the seconds that torch needs to be
    imported.

    Raises:
        ValueError: one line: there is none, none can be read, or another trainer wrote it.
    """
    latest = files.read_latest(save)
    older = [i for i in reversed(files.complete_iterations(save)) if i != latest]
    problem = f"{save} holds no checkpoint"
    for iteration in [i for i in (latest, *older) if i is not None][:_TRIES]:
        try:
            return _arguments_of(save, iteration)
        except ValueError as error:
            problem = str(error)
    raise ValueError(problem)


def _arguments_of(save: Path, iteration: int) -> dict[str, Any]:
    command = [sys.executable, "-m", __name__, str(save), str(iteration)]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_WAIT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"the checkpoint in {save} cannot be read: {error}") from error
    if done.returncode != 0 or len(done.stdout) > _MOST_BYTES:
        said = done.stderr.decode(errors="replace").strip().split("\n")[-1]
        raise ValueError(one_line(said) or f"the checkpoint in {save} cannot be read")
    try:
        stored = json.loads(done.stdout.decode(errors="replace").strip().split("\n")[-1])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the checkpoint in {save} cannot be read") from error
    if not isinstance(stored, dict) or "data_parallel_size" not in stored:
        raise ValueError(f"the checkpoint in {save} does not say its layout")
    return stored


def main(argv: list[str]) -> int:
    """Prints the flags of a checkpoint as one line of JSON."""
    from megatron.training.errors import TrainingFailure
    from megatron.training.guard import set_process_defaults

    set_process_defaults()
    from megatron.training.restore import read_arguments

    folder, iteration = argv
    try:
        stored = read_arguments(Path(folder), step=int(iteration))
    except TrainingFailure as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(stored, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
