"""The record of a run of a checkout, for `copus status` and `copus report`: what our own trainer
writes into `metrics.jsonl`, in the folder of the run."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from megatron.trainer.common.control import HEARTBEATS
from megatron.trainer.common.step_settings import StepInfo
from megatron.trainer.logging.log_line import StepReport
from megatron.trainer.logging.metrics import launch_id, previous_launches
from megatron.trainer.logging.tracker import NullTracker, Tracker

logger = logging.getLogger(__name__)

_TOUCH_S = 10.0


class RunRecord:
    """Writes on the rank that has a folder; does nothing on others. A disk that fails ends the
    record, not the run.

    Args:
        run_dir: of the run; None elsewhere.
        flags: of the controller, by field name.
    """

    def __init__(
        self,
        run_dir: Path | None,
        args: Any,
        *,
        layout: str,
        train_samples: int,
        flags: dict[str, Any],
    ) -> None:
        self._tracker, self._beat = NullTracker(), None
        self._at = args.iteration, args.consumed_train_samples
        if run_dir is None:
            return
        try:
            now = datetime.now(timezone.utc)
            launch = launch_id(os.environ, now, previous_launches(run_dir))
            self._tracker = Tracker(run_dir, launch=launch)
        except OSError as error:
            logger.warning("nothing is recorded for copus status: %s", error)
            return
        plain = {name: x for name, x in vars(args).items() if _is_plain(x)}
        self._tracker.event(
            "run.start",
            *self._at,
            config={**plain, **flags, "train_samples": train_samples},
            layout=layout,
            loaded=str(args.load) if args.iteration else None,
            has_lock=False,
            pid=os.getpid(),
        )
        self._beat = _Heartbeat(run_dir, launch)

    def step(
        self, info: StepInfo, *, iterations: int, scalars: dict[str, float], fields: dict[str, Any]
    ) -> None:
        """Records a step.

        Args:
            iterations: of the whole run, as planned now.
        """
        self._at = info.iteration, info.consumed_samples
        report = StepReport(
            iteration=info.iteration,
            train_iterations=iterations,
            consumed_samples=info.consumed_samples,
            elapsed_per_iteration_ms=1e3 * info.elapsed_s,
            learning_rate=info.learning_rate,
            global_batch_size=info.global_batch_size,
            losses=info.losses,
            grad_norm=info.grad_norm,
        )
        sizes = {"micro_batch_size": info.micro_batch_size, "updated": info.updated}
        sizes["num_microbatches"] = info.num_microbatches
        self._tracker.step(report, extra=scalars, **sizes, **fields)

    def layout(self, layout: str) -> None:
        """Records that training goes on under a layout."""
        self._tracker.event("layout", *self._at, layout=layout)

    def numbers(self, scalars: dict[str, float]) -> None:
        """Records what is known only after the last step, by tag."""
        if scalars:
            iteration, samples = self._at
            self._tracker.numbers(scalars, iteration=iteration, consumed_samples=samples)

    def saved(self) -> None:
        """Records a checkpoint. The last one comes after the end."""
        self._tracker.event("checkpoint.commit", *self._at, durable=False)

    def end(self, why: str, *, fault: str = "") -> None:
        """Records the end of training.

        Args:
            why: `done`, or what ended it; not used where it failed.
            fault: what failed, in one line.
        """
        if fault:
            self._tracker.event("fault", *self._at, fault="error", line=fault, durable=True)
        else:
            self._tracker.event("run.end", *self._at, why=why)
        if self._beat is not None:
            self._beat.close()


class _Heartbeat:
    """Says every ten seconds that the process lives."""

    def __init__(self, run_dir: Path, launch: str) -> None:
        self._path, self._launch = run_dir / HEARTBEATS / "0", launch
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="copus-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        text = json.dumps({"launch": self._launch, "doing": "training", "pid": os.getpid()})
        while True:
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.write_text(text)
            if self._ended.wait(_TOUCH_S):
                return

    def close(self) -> None:
        self._ended.set()
        self._thread.join(_TOUCH_S)
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
            self._path.parent.rmdir()


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(x) for x in value)
    return value is None or isinstance(value, (bool, int, float, str))
