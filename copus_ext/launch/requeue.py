"""Whether a SLURM job goes back into the queue after its supervisors have left; asked by the batch
script on the first node.

python -m copus_ext.launch.requeue RUN SAVE CODE

RUN is the run's directory, SAVE where its checkpoints are, CODE what srun left with. Leaves with 0
to requeue and 1 not to, and says why in one line.

    <run>/control/requeues.json    how often without a new checkpoint; replaced atomically
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from copus_ext.launch.slurm import handle_of, state_of
from copus_ext.reconfigure.relaunch import REQUEST_FILE, Request, read_request
from megatron.training import checkpoint_files as files
from megatron.training.checkpoint_files import write_atomically
from megatron.training.control import STOP_FILE
from megatron.training.signals import StopReason

MOST = "COPUS_MAX_REQUEUES"
"""Environment variable: times without a new checkpoint; 0 never goes back."""
DEFAULT_MOST = 3
_AGAIN = (85, 143)
"""The supervisor's wish, and what it leaves with when a TERM came before there was a run."""
_BY_HAND = f"stopped: {StopReason(kind='file')}"
"""Reason of a run that found a stop file which nobody wrote on account of the job's end."""
_COUNT_FILE = Path("control") / "requeues.json"


def decide(
    run_dir: Path, save: Path, code: int, env: Mapping[str, str], state: str | None
) -> tuple[bool, str]:
    """What to do, and why. Counts the times that a job goes back.

    Args:
        run_dir: directory of the run.
        save: where its checkpoints are.
        code: what srun left with; launchers flatten codes, so a request of the run wins.
        env: environment of the batch script.
        state: of the job, None if unknown.
    """
    job = env.get("SLURM_JOB_ID", "")
    try:
        request = _request_of(run_dir, f"{job}.{env.get('SLURM_RESTART_COUNT') or 0}.")
    except ValueError as error:
        return False, str(error)
    kind = "none" if request is None else request.kind
    if kind in ("done", "abort") or (kind != "requeue" and code not in _AGAIN):
        return False, f"left with {code}"
    if request is not None and request.reason == _BY_HAND:
        return False, f"saved and stopped by hand ({STOP_FILE})"
    if state not in (None, "RUNNING"):
        return False, f"saved; not put back into the queue, as the job is {state}"
    most = env.get(MOST, "")
    return _count(run_dir, save, job, int(most) if most.isdecimal() else DEFAULT_MOST)


def _request_of(run_dir: Path, launches: str) -> Request | None:
    """The request of any launch of this start of the job."""
    try:
        data = json.loads((run_dir / REQUEST_FILE).read_bytes()[: 1 << 16])
        launch = data["launch"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        launch = None
    if not isinstance(launch, str) or not launch.startswith(launches):
        return None
    return read_request(run_dir, launch=launch)


def _count(run_dir: Path, save: Path, job: str, most: int) -> tuple[bool, str]:
    try:
        latest = files.read_latest(save)
    except (OSError, ValueError) as error:
        return False, f"the checkpoints cannot be read: {error}"
    where = "no checkpoint yet" if latest is None else f"checkpoint of iteration {latest}"
    before = 0
    try:
        known = json.loads((run_dir / _COUNT_FILE).read_bytes()[: 1 << 16])
        if known["job"] == job and known["iteration"] == latest:
            before = int(known["count"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        before = 0
    if before >= most:
        return False, f"not put back into the queue: {where}, as {before} times before ({MOST})"
    record = {"job": job, "iteration": latest, "count": before + 1}
    try:
        (run_dir / _COUNT_FILE).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(run_dir / _COUNT_FILE, json.dumps(record) + "\n")
    except OSError as error:
        return False, f"not put back into the queue: {error}"
    return True, f"goes back into the queue, {where}"


def main(argv: list[str]) -> int:
    """Decides for the job of this environment."""
    run_dir, save, code = argv
    handle = handle_of(os.environ)
    again, why = decide(Path(run_dir), Path(save), int(code), os.environ, state_of(handle))
    if code != "0":
        print(f"job {handle}: {why}", file=sys.stderr, flush=True)
    return 0 if again else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
