"""The flags that a checkpoint was saved with: from the record of the run, else from the checkpoint.

A process of its own reads the latter, so that the supervisor needs no torch and a damaged file
cannot crash it:

python -m copus_ext.launch.checkpoint_flags FOLDER ITERATION [--ckpt-trust-unverified]
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from copus_ext.reshard.checked import one_line
from megatron.trainer.checkpoint import files
from megatron.trainer.common.outside import parse_json
from megatron.trainer.config.layout import Layout
from megatron.trainer.logging.metrics import METRICS_FILE, decode
from megatron.trainer.logging.tail_reader import last_lines

TRUST = "--ckpt-trust-unverified"
_WAIT_S = 600.0
"""For all tries together."""
_POLL_S = 0.1
_MAX_BYTES = 1 << 22
_TRIES = 3
_MAX_RECORD_BYTES = 1 << 28
"""Searched for the few events that tell how a checkpoint was saved."""
_SAVING = (b"run.start", b"layout", b"checkpoint.commit")


def recorded_flags(run_dir: Path, save: Path, iteration: int) -> dict[str, Any] | None:
    """The flags that a checkpoint was saved with, if the record of the run tells; this spares
    reading the checkpoint.
    """
    now: dict[str, Any] | None = None
    found: dict[str, Any] | None = None
    for record in _records_of_saving(run_dir / METRICS_FILE):
        kind, layout = record.get("kind"), None
        if kind == "run.start":
            config = record.get("config")
            folder = config.get("save") if isinstance(config, dict) else None
            is_there = isinstance(folder, str) and Path(folder).resolve() == save.resolve()
            now = config if is_there else None
        if kind in ("run.start", "layout"):
            with contextlib.suppress(ValueError):
                layout = Layout.from_text(str(record.get("layout")))
        if now is not None and layout is not None:
            now = {**now, **layout.to_arguments()}
        elif kind == "checkpoint.commit" and record.get("iteration") == iteration:
            consumed = record.get("consumed_samples")
            found = None if now is None else {**now, "consumed_train_samples": consumed}
    return found


def _records_of_saving(path: Path) -> Iterator[dict[str, Any]]:
    """From the whole record, which may begin days before its last steps."""
    for line in last_lines(path, _MAX_RECORD_BYTES):
        if any(kind in line for kind in _SAVING):
            record = decode(line.decode(errors="replace"))
            if record is not None:
                yield record


def stored_flags(
    save: Path, tick: Callable[[], None] = lambda: None, *, trust_unverified: bool = False
) -> dict[str, Any]:
    """The flags of the latest checkpoint that can be read. Takes some seconds, since the process
    imports torch.

    Raises:
        ValueError: one line: there is none, none can be read, or another trainer wrote it.
    """
    latest = files.read_latest(save)
    older = [i for i in reversed(files.complete_iterations(save)) if i != latest]
    problem, deadline_s = f"{save} holds no checkpoint", time.monotonic() + _WAIT_S
    for iteration in [i for i in (latest, *older) if i is not None][:_TRIES]:
        try:
            return _flags_of(save, iteration, deadline_s, tick, trust_unverified=trust_unverified)
        except ValueError as error:
            problem = str(error)
    raise ValueError(problem)


def _flags_of(
    save: Path,
    iteration: int,
    deadline_s: float,
    tick: Callable[[], None],
    *,
    trust_unverified: bool,
) -> dict[str, Any]:
    command = [sys.executable, "-m", "copus_ext.launch.checkpoint_flags", str(save), str(iteration)]
    command += [TRUST] * trust_unverified
    try:
        code, output, errors = _run(command, deadline_s, tick)
    except OSError as error:
        raise ValueError(f"the checkpoint in {save} cannot be read: {error}") from error
    if code != 0 or len(output) > _MAX_BYTES:
        said = errors.decode(errors="replace").strip().split("\n")[-1]
        raise ValueError(one_line(said) or f"the checkpoint in {save} cannot be read")
    try:
        stored = parse_json(output.decode(errors="replace").strip().split("\n")[-1])
    except ValueError as error:
        raise ValueError(f"the checkpoint in {save} cannot be read") from error
    if not isinstance(stored, dict) or "data_parallel_size" not in stored:
        raise ValueError(f"the checkpoint in {save} does not say its layout")
    return stored


def _run(
    command: list[str], deadline_s: float, tick: Callable[[], None]
) -> tuple[int, bytes, bytes]:
    """Exit code, output and errors of a process. They go to files, so that a full pipe cannot stop
    it.

    Raises:
        OSError: it cannot be started, or takes too long.
    """
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        try:
            while (code := child.poll()) is None:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"not within {_WAIT_S:g} s")
                tick()
                time.sleep(_POLL_S)
        finally:
            if child.returncode is None:
                child.kill()
        for file in (out, err):
            file.seek(0)
        return code, out.read(_MAX_BYTES + 1), err.read(_MAX_BYTES)


def main(argv: list[str]) -> int:
    """Prints the flags of a checkpoint as one line of JSON."""
    from megatron.trainer.common.errors import TrainingFailure
    from megatron.trainer.resilience.env_checks import import_core, set_process_defaults

    set_process_defaults()
    import_core()
    from megatron.trainer.checkpoint.load import read_arguments

    folder, iteration, *trust = argv
    try:
        stored = read_arguments(Path(folder), step=int(iteration), trust_unverified=TRUST in trust)
    except TrainingFailure as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(stored, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
