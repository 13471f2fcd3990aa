"""What is done for a SLURM job beside its ranks.

While they train, the supervisor of the first node stops them in time before the job's limit, by
`<run>/control/stop`. It also publishes layout and batch as the job's comment. After the supervisors
have left, the batch script asks whether the job goes back into the queue:

python -m copus_ext.launch.slurm_job RUN SAVE CODE

RUN is the run's directory, SAVE the folder of its checkpoints, CODE the exit code of srun. The
answer is exit code 0 to requeue and 1 not to, with one line that says why. Beside a container the
Python that it asks may have no packages, so what the supervisor alone needs is imported late.

    <run>/control/requeues.json    requeues without a new checkpoint; replaced atomically
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from copus_ext.launch import slurm
from copus_ext.reshard.checked import MAX_NUMBER, check_fields, check_number, read_value
from copus_ext.reshard.relaunch import REQUEST_FILE, Request, read_request
from megatron.trainer.checkpoint import files
from megatron.trainer.checkpoint.files import write_atomically
from megatron.trainer.common.control import STOP_FILE, TIME_LIMIT, Control, write_stop
from megatron.trainer.common.program import tell
from megatron.trainer.common.signals import StopReason, kind_of_text
from megatron.trainer.logging.metrics import METRICS_FILE
from megatron.trainer.logging.tail_reader import Tail

SIGNAL_LEAD = "COPUS_SIGNAL_LEAD_S"
"""Environment variable: seconds that `--signal` gives, set by the batch script."""
MAX_REQUEUES = "COPUS_MAX_REQUEUES"
"""Environment variable: requeues without a new checkpoint; 0 for none."""
_DEFAULT_SAVE_S = 60.0
"""Assumed duration of a save before one was measured."""
_MARGIN_S = 60.0
_LOOK_EVERY_S, _ASK_EVERY_S, _LAST_ANSWER_S = 10.0, 60.0, 5.0
_RECENT_STEPS = 100
_ENDLESS = 1e9
_DEFAULT_REQUEUES = 3
_AGAIN = (85, 138, 143)
"""The supervisor asks for a requeue, or USR1 or TERM came before it could listen."""
_BY_HAND = f"stopped: {StopReason(kind='file')}"
"""Reason in the request of a run that found a stop file of an operator."""
_COUNT_FILE = Path("control") / "requeues.json"


@dataclass(kw_only=True)
class RunFacts:
    """What the files of a run say, as far as `SlurmWatch` needs it."""

    layout: str = ""
    """Of the ranks now; empty if unknown."""
    global_batch_size: int = 0
    """Of the last step; 0 if unknown."""
    save_s: float = 0.0
    """The longest measured save; 0 if none was measured."""
    relayout_s: float = 0.0
    """Time after which a change of layout counts as hung; 0 if there can be none."""
    steps_s: deque[float]
    """Seconds of the last steps."""
    started_at: float = 0.0
    """When the launch began, in seconds since the epoch."""

    @property
    def lead_s(self) -> float:
        """Seconds before the end of the job at which the run has to begin to stop: twice the
        longest save and step, a change of layout that hangs, and a margin."""
        save_s = self.save_s or _DEFAULT_SAVE_S
        return 2 * save_s + 2 * max(self.steps_s, default=0.0) + self.relayout_s + _MARGIN_S

    @property
    def comment(self) -> str:
        """Such as `tp2.pp1.dp4 B=256`; empty if unknown."""
        batch = self.global_batch_size
        return f"{self.layout} B={batch}" if self.layout and batch else ""

    def add_metric(self, record: Mapping[str, Any]) -> None:
        """Takes in a record of `metrics.jsonl`."""
        kind = record.get("kind")
        if kind == "run.start":
            self.layout = str(record.get("layout", ""))
            self.started_at = _positive(record.get("t"))
            config = record.get("config")
            config = config if isinstance(config, dict) else {}
            changes = config.get("copus") and config.get("copus_mode") == "act"
            changes = changes and config.get("copus_layouts") == "all"
            in_process = changes and config.get("copus_relayout") == "inprocess"
            self.relayout_s = _timeout_s(0.0) if in_process else 0.0
            self.steps_s.clear()
        elif kind == "layout":
            self.layout = str(record.get("layout", ""))
        elif kind == "step":
            batch = _positive(record.get("global_batch_size"))
            self.global_batch_size = int(batch) or self.global_batch_size
            self.steps_s.append(_positive(record.get("elapsed_per_iteration_ms")) / 1000)
        elif kind == "checkpoint.commit":
            self.save_s = max(self.save_s, _positive(record.get("seconds")))

    def add_decision(self, record: Mapping[str, Any]) -> None:
        """Takes in a record of `journal.jsonl`."""
        outcome = record.get("outcome")
        if _seconds_of_date(record.get("time")) < self.started_at:
            return
        if record.get("kind") == "relayout.requested" and self.relayout_s:
            wanted = _timeout_s(_positive(record.get("predicted_s")))
            self.relayout_s = max(self.relayout_s, wanted)
        moved = isinstance(outcome, dict) and outcome.get("kind") == "moved"
        if record.get("kind") == "relayout" and moved:
            self.layout = str(record.get("to", ""))


def _timeout_s(predicted_s: float) -> float:
    """Seconds after which a change of layout has failed."""
    from copus_ext.goodput.costs import timeout_s

    return timeout_s(predicted_s)


def _positive(value: Any) -> float:
    """A number above 0 that makes sense, else 0."""
    return float(value) if isinstance(value, (int, float)) and 0 < value < _ENDLESS else 0.0


def _seconds_of_date(text: Any) -> float:
    """Seconds since the epoch, 0 if it is not a date."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return 0.0


class SlurmWatch:
    """Watches the time left of a job; one for all its launches, on the first node alone. A tick
    never waits or raises, reads at most two megabytes, and asks SLURM at most once a minute.

    Args:
        job: its name in SLURM's commands.
        granted_s: seconds that `--signal` gives, or None if unknown.
        say: prints one line.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        job: str,
        run_dir: Path,
        *,
        granted_s: float | None = None,
        say: Callable[[str], None] = lambda line: tell("supervisor", line),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from copus_ext.controller.decision_log import NAME

        self.facts = RunFacts(steps_s=deque(maxlen=_RECENT_STEPS))
        self.is_ending = False
        """The job's time is up: no launch should follow."""
        self._job, self._run_dir, self._granted_s = job, run_dir, granted_s
        self._say, self._clock = say, clock
        self._metrics, self._journal = Tail(run_dir / METRICS_FILE), Tail(run_dir / NAME)
        self._next_look_s = self._next_ask_s = self._next_comment_s = -math.inf
        self._ends_s: float | None = None
        self._max_lead_s = math.inf
        self._commands = ThreadPoolExecutor(2, "slurm")
        self._asking: Future[str | None] | None = None
        self._publishing: Future[str | None] | None = None
        self._published = ""
        self._said: set[str] = set()

    @property
    def left_s(self) -> float | None:
        """Seconds left of the job, None if unknown."""
        return None if self._ends_s is None else self._ends_s - self._clock()

    @property
    def lead_s(self) -> float:
        """Seconds before the end of the job at which the run stops. At most half of the job, so
        that a short one gets somewhere."""
        return min(self.facts.lead_s, self._max_lead_s)

    def tick(self) -> None:
        """Call about once a second."""
        now = self._clock()
        if now >= self._next_look_s:
            self._next_look_s = now + _LOOK_EVERY_S
            self._look()
        self._ask(now)
        self._publish(now)
        left = self.left_s
        if left is not None and left < self.lead_s:
            self._stop(left)

    def close(self) -> None:
        """Publishes the last comment, within seconds."""
        self._look()
        self._next_comment_s = -math.inf
        for _ in range(2):  # the one under way, and the last
            if self._publishing is not None:
                wait([self._publishing], _LAST_ANSWER_S)
            self._publish(self._clock())
        self._commands.shutdown(wait=False, cancel_futures=True)
        slurm.stop_asking()  # Python waits for these threads before it leaves

    def _look(self) -> None:
        for record in self._metrics.records():
            self.facts.add_metric(record)
        for record in self._journal.records():
            self.facts.add_decision(record)
        granted, lead = self._granted_s, self.facts.lead_s
        if granted is not None and granted < lead:
            self._say_once(
                "lead",
                f"--signal gives {granted:.0f} s to save and stop, which may take {lead:.0f} s; "
                f"submit with --signal=B:USR1@{lead:.0f} and {SIGNAL_LEAD}={lead:.0f}",
            )

    def _ask(self, now: float) -> None:
        if self._asking is None and now >= self._next_ask_s:
            self._next_ask_s = now + _ASK_EVERY_S
            command = ["squeue", "-h", "-j", self._job, "-o", "%L"]
            self._asking = self._commands.submit(slurm.answer, command)
        elif self._asking is not None and self._asking.done():
            left = slurm.seconds_of(self._asking.result())
            self._asking = None
            if left is not None:
                self._check_first_answer(left)
                self._ends_s = now + left

    def _check_first_answer(self, left_s: float) -> None:
        if self._ends_s is not None:
            return
        self._max_lead_s = left_s / 2
        if self._granted_s is not None and self._granted_s >= left_s:
            self._say(
                f"--signal={self._granted_s:.0f} s before the end is at once, as job {self._job} "
                f"has {left_s:.0f} s: submit with a longer --time or a shorter --signal"
            )

    def _publish(self, now: float) -> None:
        if self._publishing is not None and self._publishing.done():
            self._publishing = None
        text = self.facts.comment
        is_new = text and text != self._published
        if is_new and self._publishing is None and now >= self._next_comment_s:
            self._next_comment_s, self._published = now + _ASK_EVERY_S, text
            command = ["scontrol", "update", f"JobId={self._job}", f"Comment={text}"]
            self._publishing = self._commands.submit(slurm.answer, command)

    def _stop(self, left_s: float) -> None:
        if self.is_ending:
            return
        try:
            write_stop(self._run_dir, TIME_LIMIT)
        except OSError as error:
            self._say_once("stop", f"{self._run_dir / STOP_FILE} cannot be written: {error}")
            return
        self.is_ending = True
        self._say(
            f"{max(left_s, 0):.0f} s are left of job {self._job}, saving and stopping may take "
            f"{self.lead_s:.0f} s: the run stops"
        )

    def _say_once(self, topic: str, line: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            self._say(line)


def watch_of(
    step: slurm.Step | None, run_dir: Path, env: Mapping[str, str] | None = None
) -> SlurmWatch | None:
    """The watch of this supervisor; None outside SLURM and on other nodes than the first."""
    if step is None or step.node_rank != 0:
        return None
    text = (os.environ if env is None else env).get(SIGNAL_LEAD, "")
    return SlurmWatch(step.handle, run_dir, granted_s=float(text) if text.isdecimal() else None)


def should_requeue(
    run_dir: Path, save: Path, code: int, env: Mapping[str, str], state: str | None
) -> tuple[bool, str]:
    """Whether the job goes back into the queue, and why. Counts the times that it does.

    Args:
        code: exit code of srun. Launchers flatten codes, so a request of the run wins.
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
    most = env.get(MAX_REQUEUES, "")
    return _count(run_dir, save, job, int(most) if most.isdecimal() else _DEFAULT_REQUEUES)


def _request_of(run_dir: Path, prefix: str) -> Request | None:
    """The request of any launch whose name begins so."""

    def launch_of(data: Any) -> str:
        return data["launch"] if isinstance(data, dict) else ""

    launch: Any = None
    with contextlib.suppress(ValueError, KeyError):
        launch = read_value(run_dir / REQUEST_FILE, launch_of)
    if not isinstance(launch, str) or not launch.startswith(prefix):
        return None
    return read_request(run_dir, launch=launch)


def _count(run_dir: Path, save: Path, job: str, most: int) -> tuple[bool, str]:
    """Counts a requeue, unless there were `most` without a new checkpoint."""

    def parse(data: Any) -> dict[str, Any]:
        names = {"job", "iteration", "count"}
        check_number("count", check_fields(data, names, names)["count"], 0, MAX_NUMBER)
        return data

    path = run_dir / _COUNT_FILE
    try:
        latest = files.read_latest(save)
    except (OSError, ValueError) as error:
        return False, f"the checkpoints cannot be read: {error}"
    where = "no checkpoint yet" if latest is None else f"checkpoint of iteration {latest}"
    before = 0
    with contextlib.suppress(ValueError):
        known = read_value(path, parse)
        if known is not None and known["job"] == job and known["iteration"] == latest:
            before = known["count"]
    if before >= most:
        return False, (
            f"not put back into the queue: {where}, as {before} times before ({MAX_REQUEUES})"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"job": job, "iteration": latest, "count": before + 1}
        write_atomically(path, json.dumps(record) + "\n")
    except OSError as error:
        return False, f"not put back into the queue: {error}"
    return True, f"goes back into the queue, {where}"


def main(argv: list[str]) -> int:
    """Decides on a requeue of the job of this environment."""
    run_dir, save, code = argv
    handle = slurm.handle_of(os.environ)
    state = slurm.state_of(handle)
    again, why = should_requeue(Path(run_dir), Path(save), int(code), os.environ, state)
    if code != "0":
        print(f"job {handle}: {why}", file=sys.stderr, flush=True)
    return 0 if again else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
