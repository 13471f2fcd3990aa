"""What the supervisor of the head node does for a SLURM job while its ranks train: stops them in
time before the job's limit, and keeps the job's comment up to date.

    <run>/control/stop    written when the time left falls under the lead time

A tick never waits, never raises, reads at most two megabytes, and asks SLURM at most once a minute.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from copus_ext.controller.decision_log import NAME as JOURNAL
from copus_ext.goodput import costs
from copus_ext.launch import slurm
from copus_ext.launch.say import say as to_operator
from megatron.training.common.control import STOP_FILE, TIME_LIMIT, write_stop
from megatron.training.logging.metrics import METRICS_FILE
from megatron.training.logging.tail_reader import Tail

SIGNAL_LEAD = "COPUS_SIGNAL_LEAD_S"
"""Environment variable: seconds that `--signal` gives, set by the batch script."""
UNMEASURED_SAVE_S = 60.0
"""A save is taken to last so long before one was measured."""
_MARGIN_S = 60.0
_LOOK_EVERY_S, _ASK_EVERY_S, _ANSWER_S, _LAST_WORD_S = 10.0, 60.0, 20.0, 5.0
_MAX_BYTES = 1 << 20
_RECENT_STEPS = 100
_ENDLESS = 1e9


@dataclass(kw_only=True)
class Facts:
    """What the files of a run say, as far as the watch needs it."""

    layout: str = ""
    """Of the ranks now; empty if unknown."""
    batch: int = 0
    """Samples of the last step; 0 if unknown."""
    save_s: float = 0.0
    """The longest save that was measured; 0 if none was."""
    switch_s: float = 0.0
    """After so long a change of layout counts as hung; 0 if there can be none."""
    steps_s: deque[float]
    """Seconds of the last steps."""
    started_at: float = 0.0
    """When the launch began, in seconds since the epoch."""

    @property
    def lead_s(self) -> float:
        """Seconds before the end of the job at which it has to begin to stop: a step and a save
        that take twice as long as the longest known, a change of layout that hangs, and a
        margin."""
        save = self.save_s or UNMEASURED_SAVE_S
        return 2 * save + 2 * max(self.steps_s, default=0.0) + self.switch_s + _MARGIN_S

    @property
    def comment(self) -> str:
        """Such as `tp2.pp1.dp4 B=256`; empty if unknown."""
        return f"{self.layout} B={self.batch}" if self.layout and self.batch else ""

    def take_metric(self, record: Mapping[str, Any]) -> None:
        """Takes in a record of `metrics.jsonl`."""
        kind = record.get("kind")
        if kind == "run.start":
            self.layout = str(record.get("layout", ""))
            self.started_at = _positive(record.get("t"))
            config = record.get("config")
            config = config if isinstance(config, dict) else {}
            moves = config.get("copus") and config.get("copus_mode") == "act"
            moves = moves and config.get("copus_layouts") == "all"
            in_place = moves and config.get("copus_relayout") == "inprocess"
            self.switch_s = costs.timeout_s(0.0) if in_place else 0.0
            self.steps_s.clear()
        elif kind == "layout":
            self.layout = str(record.get("layout", ""))
        elif kind == "step":
            batch = _positive(record.get("global_batch_size"))
            self.batch = int(batch) or self.batch
            self.steps_s.append(_positive(record.get("elapsed_per_iteration_ms")) / 1000)
        elif kind == "checkpoint.commit":
            self.save_s = max(self.save_s, _positive(record.get("seconds")))

    def take_decision(self, record: Mapping[str, Any]) -> None:
        """Takes in a record of `journal.jsonl`."""
        outcome = record.get("outcome")
        if _seconds_of_date(record.get("time")) < self.started_at:
            return
        if record.get("kind") == "switch.requested" and self.switch_s:
            wanted = costs.timeout_s(_positive(record.get("predicted_s")))
            self.switch_s = max(self.switch_s, wanted)
        moved = isinstance(outcome, dict) and outcome.get("kind") == "moved"
        if record.get("kind") == "switch" and moved:
            self.layout = str(record.get("to", ""))


def _positive(value: Any) -> float:
    """The value if it is a number above 0 that makes sense, else 0."""
    return float(value) if isinstance(value, (int, float)) and 0 < value < _ENDLESS else 0.0


def _seconds_of_date(text: Any) -> float:
    """Seconds since the epoch, 0 if it is no date."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return 0.0


class Asking:
    """A command under way in the background."""

    def __init__(self, command: Sequence[str], now_s: float) -> None:
        """Starts it; one that cannot be started has no answer."""
        self._deadline_s = now_s + _ANSWER_S
        self._process: subprocess.Popen[str] | None = None
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                errors="replace",
            )

    def is_done(self, now_s: float) -> bool:
        """Whether it has ended; it is ended when it takes too long."""
        if self._process is None or self._process.poll() is not None:
            return True
        if now_s > self._deadline_s:
            self.end()
            return True
        return False

    def wait(self, seconds: float) -> None:
        """Gives it time to end."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)

    def answer(self) -> str | None:
        """What it printed, or None if it failed."""
        if self._process is None or self._process.stdout is None:
            return None
        with self._process.stdout as out:
            text = out.read(_MAX_BYTES)
        return text if self._process.returncode == 0 else None

    def end(self) -> None:
        """Ends it if it is still there."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class Watch:
    """Ticks beside a launch; one for all launches of a job, on the head node alone.

    Args:
        job: what SLURM's commands know it by.
        run_dir: directory of the run.
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
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.facts = Facts(steps_s=deque(maxlen=_RECENT_STEPS))
        self.is_ending = False
        """Whether the job's time is up: no launch should follow."""
        self._job, self._run_dir, self._granted_s = job, run_dir, granted_s
        self._say, self._clock = say or to_operator, clock
        self._metrics, self._journal = Tail(run_dir / METRICS_FILE), Tail(run_dir / JOURNAL)
        self._next_look_s = self._next_ask_s = self._next_comment_s = -math.inf
        self._ends_s: float | None = None
        self._most_lead_s = math.inf
        self._asking: Asking | None = None
        self._publishing: Asking | None = None
        self._published = ""
        self._said: set[str] = set()

    @property
    def left_s(self) -> float | None:
        """Seconds left of the job, None if unknown."""
        return None if self._ends_s is None else self._ends_s - self._clock()

    @property
    def lead_s(self) -> float:
        """Seconds before the end of the job at which the run stops: those of `Facts`, but at most
        half of the job, which shall get somewhere."""
        return min(self.facts.lead_s, self._most_lead_s)

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
        """Publishes what came last, within seconds, and ends what is under way."""
        self._look()
        self._next_comment_s = -math.inf
        for _ in range(2):  # what is under way, and the last
            if self._publishing is not None:
                self._publishing.wait(_LAST_WORD_S)
            self._publish(self._clock())
        for asking in (self._asking, self._publishing):
            if asking is not None:
                asking.end()
                asking.answer()
        self._asking = self._publishing = None

    def _look(self) -> None:
        for record in self._metrics.records():
            self.facts.take_metric(record)
        for record in self._journal.records():
            self.facts.take_decision(record)
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
            self._asking = Asking(slurm.time_left_command(self._job), now)
        elif self._asking is not None and self._asking.is_done(now):
            left = slurm.seconds_of(self._asking.answer())
            self._asking = None
            if left is not None:
                self._took_in(left)
                self._ends_s = now + left

    def _took_in(self, left_s: float) -> None:
        """Compares the first answer with what was asked of SLURM."""
        if self._ends_s is not None:
            return
        self._most_lead_s = left_s / 2
        if self._granted_s is not None and self._granted_s >= left_s:
            self._say(
                f"--signal={self._granted_s:.0f} s before the end is at once, as job {self._job} "
                f"has {left_s:.0f} s: submit with a longer --time or a shorter --signal"
            )

    def _publish(self, now: float) -> None:
        if self._publishing is not None and self._publishing.is_done(now):
            self._publishing.answer()
            self._publishing = None
        text = self.facts.comment
        is_new = text and text != self._published
        if is_new and self._publishing is None and now >= self._next_comment_s:
            self._next_comment_s, self._published = now + _ASK_EVERY_S, text
            self._publishing = Asking(slurm.comment_command(self._job, text), now)

    def _stop(self, left_s: float) -> None:
        if self.is_ending:
            return
        path = self._run_dir / STOP_FILE
        try:
            write_stop(self._run_dir, TIME_LIMIT)
        except OSError as error:
            self._say_once("stop", f"{path} cannot be written: {error}")
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
) -> Watch | None:
    """The watch of this supervisor; None outside SLURM and on other nodes than the first.

    Args:
        step: of this process.
        run_dir: directory of the run.
        env: environment; None takes that of the process.
    """
    if step is None or step.node_rank != 0:
        return None
    text = (os.environ if env is None else env).get(SIGNAL_LEAD, "")
    return Watch(step.handle, run_dir, granted_s=float(text) if text.isdecimal() else None)
