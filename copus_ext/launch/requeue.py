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
from contextlib import suppress
from pathlib import Path
from typing import Any

from copus_ext.launch.slurm import handle_of, state_of
from copus_ext.reshard.checked import MAX_NUMBER, check_fields, check_number, read_value
from copus_ext.reshard.relaunch import REQUEST_FILE, Request, read_request
from megatron.training.checkpoint import files
from megatron.training.checkpoint.files import write_atomically
from megatron.training.common.control import STOP_FILE, Control
from megatron.training.common.signals import StopReason, kind_of_text

MOST = "COPUS_MAX_REQUEUES"
"""Environment variable: times without a new checkpoint; 0 never goes back."""
DEFAULT_MOST = 3
_AGAIN = (85, 138, 143)
"""The supervisor's wish, and what it leaves with when USR1 or TERM came before it could listen."""
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
    stop = Control(run_dir).stop_asked()
    if stop is not None and kind_of_text(stop) == "file":
        return False, f"stopped by hand ({STOP_FILE} is still there)"
    if state not in (None, "RUNNING"):
        return False, f"saved; not put back into the queue, as the job is {state}"
    most = env.get(MOST, "")
    return _count(run_dir, save, job, int(most) if most.isdecimal() else DEFAULT_MOST)


def _request_of(run_dir: Path, launches: str) -> Request | None:
    """The request of any launch of this start of the job."""
    launch = None
    with suppress(ValueError):
        launch = read_value(run_dir / REQUEST_FILE, lambda data: _text_of(data, "launch"))
    if launch is None or not launch.startswith(launches):
        return None
    return read_request(run_dir, launch=launch)


def _text_of(data: Any, name: str) -> str:
    if not (isinstance(data, dict) and isinstance(data.get(name), str)):
        raise ValueError(f"{name} is missing")
    return data[name]


def _counted(data: Any) -> dict[str, Any]:
    names = {"job", "iteration", "count"}
    check_number("count", check_fields(data, names, names)["count"], 0, MAX_NUMBER)
    return data


def _count(run_dir: Path, save: Path, job: str, most: int) -> tuple[bool, str]:
    try:
        latest = files.read_latest(save)
    except (OSError, ValueError) as error:
        return False, f"the checkpoints cannot be read: {error}"
    where = "no checkpoint yet" if latest is None else f"checkpoint of iteration {latest}"
    before = 0
    with suppress(ValueError):
        known = read_value(run_dir / _COUNT_FILE, _counted)
        if known is not None and known["job"] == job and known["iteration"] == latest:
            before = known["count"]
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
