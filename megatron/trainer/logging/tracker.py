"""What a run reports: the record always, other sinks beside it.

One rank holds a `Tracker`, the others a `NullTracker`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from megatron.trainer.logging.log_line import StepReport, perplexity
from megatron.trainer.logging.metrics import RecordFile

logger = logging.getLogger(__name__)

RECORD_VERSION = 1
DURABLE_KINDS = frozenset({"run.start", "checkpoint.commit", "checkpoint.failed", "run.end"})
"""Kinds that are on the disk, not only in the page cache, when `event` returns."""

SELDOM = "copus/"
"""Beginning of the tags that do not come with each step: they reach every sink, whatever its
interval."""
REPLACED_WITH = {
    "copus/decisions": ("copus/goodput", "copus/target-", "copus/next-"),
    "copus/changes": ("copus/samples-", "copus/predicted-", "copus/speed-"),
}
"""Tags of the controller hold until the next decision, or the next change or outcome of one: with
the tag on the left come those that begin as on the right, and take the place of all such that came
before."""
_RESERVED = ("v", "kind", "launch", "t", "m", "iteration", "consumed_samples")
_MAX_SINK_ERRORS = 3


class Sink(Protocol):
    """A place for scalars besides the record. May raise: the tracker catches and counts."""

    name: str
    """For messages."""
    interval: int
    """Steps between two writes of training scalars."""

    def scalars(
        self, values: Mapping[str, float], *, iteration: int, consumed_samples: int
    ) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class RecordSink(Protocol):
    """A sink that wants all records, too."""

    def record(self, record: Mapping[str, Any]) -> None: ...


class NullTracker:
    """What every rank but the writing one holds: the same calls, no effect."""

    run_dir: Path | None = None
    """Where the run is recorded."""

    def event(
        self,
        kind: str,
        iteration: int,
        consumed_samples: int,
        *,
        durable: bool | None = None,
        **fields: Any,
    ) -> None: ...

    def step(
        self, report: StepReport, *, extra: Mapping[str, float] | None = None, **fields: Any
    ) -> None: ...

    def evaluation(
        self,
        *,
        iteration: int,
        consumed_samples: int,
        losses: Mapping[str, float],
        split: str = "valid",
        **fields: Any,
    ) -> None: ...

    def numbers(
        self, values: Mapping[str, float], *, iteration: int, consumed_samples: int
    ) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> NullTracker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Tracker(NullTracker):
    """Writes the record and feeds the sinks. Never raises because of a disk or a sink."""

    def __init__(
        self,
        run_dir: Path,
        *,
        launch: str,
        sinks: Sequence[Sink] = (),
        timers_to_sinks: bool = False,
        ppl_to_sinks: bool = False,
    ) -> None:
        """Opens `<run_dir>/metrics.jsonl` for appending.

        Args:
            launch: see `metrics.launch_id`; marks every record.
            sinks: closed by `close`; see `sinks.open_sinks`.
            timers_to_sinks: `--log-timers-to-tensorboard`.
            ppl_to_sinks: `--log-validation-ppl-to-tensorboard`.

        Raises:
            OSError: the directory or file cannot be made.
        """
        self.launch = launch
        self.run_dir = run_dir
        self._record = RecordFile(run_dir)
        self._sinks = [_GuardedSink(sink) for sink in sinks]
        self._timers_to_sinks = timers_to_sinks
        self._ppl_to_sinks = ppl_to_sinks

    def event(
        self,
        kind: str,
        iteration: int,
        consumed_samples: int,
        *,
        durable: bool | None = None,
        **fields: Any,
    ) -> None:
        """Appends one record.

        Args:
            kind: `run.start`, `checkpoint.begin|commit|failed`, `signal`, `fault`, `run.end` ...
            durable: wait for the disk; None asks `DURABLE_KINDS`.
            fields: anything JSON can hold; NaN and infinities are kept, see `metrics.read_metrics`.
        """
        clash = [name for name in _RESERVED if name in fields]
        assert not clash, f"fields {clash} belong to the record itself"
        record = {
            "v": RECORD_VERSION,
            "kind": kind,
            "launch": self.launch,
            "t": round(time.time(), 6),
            "m": round(time.monotonic(), 6),
            "iteration": iteration,
            "consumed_samples": consumed_samples,
            **fields,
        }
        self._record.append(record, durable=kind in DURABLE_KINDS if durable is None else durable)
        for sink in self._sinks:
            sink.record(record)

    def step(
        self, report: StepReport, *, extra: Mapping[str, float] | None = None, **fields: Any
    ) -> None:
        """Records one step, and gives its scalars to the sinks whose interval has come; those whose
        tag begins with `SELDOM` wait until then, or for the end.

        Args:
            extra: further scalars by tag, such as `world-size`, for record and sinks.
            fields: further entries of the record alone.
        """
        known = {
            name: value
            for name, value in vars(report).items()
            if value is not None and name not in ("iteration", "consumed_samples")
        }
        if extra:
            known["extra"] = dict(extra)
        self.event(
            "step",
            iteration=report.iteration,
            consumed_samples=report.consumed_samples,
            **known,
            **fields,
        )
        for sink in self._sinks:
            sink.hold(extra or {}, report.iteration, report.consumed_samples)
        due = [sink for sink in self._sinks if report.iteration % sink.interval == 0]
        if due:
            timers = timer_scalars(report) if self._timers_to_sinks else {}
            values = {**step_scalars(report), **timers, **(extra or {})}
            self._feed(due, values, report.iteration, report.consumed_samples)

    def evaluation(
        self,
        *,
        iteration: int,
        consumed_samples: int,
        losses: Mapping[str, float],
        split: str = "valid",
        **fields: Any,
    ) -> None:
        """Records an evaluation.

        Args:
            losses: name (`lm loss`) to mean value per token.
            split: `valid` or `test`.
            fields: further entries of the record alone.
        """
        self.event(
            "eval",
            iteration=iteration,
            consumed_samples=consumed_samples,
            split=split,
            losses=dict(losses),
            **fields,
        )
        values = evaluation_scalars(losses, split, ppl=self._ppl_to_sinks)
        self._feed(self._sinks, values, iteration, consumed_samples)

    def numbers(
        self, values: Mapping[str, float], *, iteration: int, consumed_samples: int
    ) -> None:
        """Records scalars by tag that came after the last step, and gives them to all sinks."""
        self.event("numbers", iteration, consumed_samples, extra=dict(values))
        for sink in self._sinks:
            sink.hold(values, iteration, consumed_samples)
        self._feed(self._sinks, values, iteration, consumed_samples)

    def close(self) -> None:
        """Closes record and sinks; more than once is harmless."""
        for sink in self._sinks:
            sink.close()
        self._sinks = []
        self._record.close()

    @staticmethod
    def _feed(
        sinks: Iterable[_GuardedSink], values: Mapping[str, float], iteration: int, samples: int
    ) -> None:
        for sink in sinks:
            sink.scalars(values, iteration=iteration, consumed_samples=samples)


class _GuardedSink:
    """Keeps a sink's failures from the run: switched off after three, said once."""

    def __init__(self, sink: Sink) -> None:
        assert sink.interval > 0, f"{sink.name}: interval {sink.interval}"
        self.interval = sink.interval
        self._sink = sink
        self._take = sink.record if isinstance(sink, RecordSink) else None
        self._num_errors = 0
        self._held: dict[str, float] = {}
        self._held_at = 0, 0

    def hold(self, values: Mapping[str, float], iteration: int, consumed_samples: int) -> None:
        """Keeps what would be lost if the sink is not due."""
        seldom = {tag: value for tag, value in values.items() if str(tag).startswith(SELDOM)}
        if seldom:
            old = tuple(
                start for tag in REPLACED_WITH.keys() & seldom for start in REPLACED_WITH[tag]
            )
            kept = {tag: value for tag, value in self._held.items() if not tag.startswith(old)}
            self._held = kept | seldom
            self._held_at = iteration, consumed_samples

    def scalars(
        self, values: Mapping[str, float], *, iteration: int, consumed_samples: int
    ) -> None:
        held, self._held = self._held, {}
        self._try(
            lambda: self._sink.scalars(
                {**held, **values}, iteration=iteration, consumed_samples=consumed_samples
            )
        )

    def record(self, record: Mapping[str, Any]) -> None:
        if (take := self._take) is not None:
            self._try(lambda: take(record))

    def _try(self, act: Callable[[], None]) -> None:
        if self._num_errors >= _MAX_SINK_ERRORS:
            return
        try:
            act()
        except Exception as error:
            self._num_errors += 1
            if self._num_errors == _MAX_SINK_ERRORS:
                logger.warning(
                    "%s failed %d times and is switched off: %r",
                    self._sink.name,
                    self._num_errors,
                    error,
                )

    def close(self) -> None:
        if self._held:
            self.scalars({}, iteration=self._held_at[0], consumed_samples=self._held_at[1])
        try:
            self._sink.close()
        except Exception as error:
            logger.warning("%s could not be closed: %r", self._sink.name, error)


def step_scalars(report: StepReport) -> dict[str, float]:
    """Returns Megatron's TensorBoard tags for a training step."""
    values: dict[str, float | None] = {
        "learning-rate": report.learning_rate,
        "batch-size": report.global_batch_size,
        **report.losses,
        "loss-scale": report.loss_scale,
        "grad-norm": report.grad_norm,
        "num-zeros": report.num_zeros,
        "params-norm": report.params_norm,
        "skipped-train-samples": report.skipped_samples or None,
    }
    return {tag: value for tag, value in values.items() if value is not None}


def timer_scalars(report: StepReport) -> dict[str, float]:
    """Returns the tags of `--log-timers-to-tensorboard`: seconds per step, TFLOP/s per device."""
    values = {"iteration-time": report.elapsed_per_iteration_ms / 1000.0}
    if report.throughput_tflops_per_gpu is not None:
        values["throughput"] = report.throughput_tflops_per_gpu
    return values


def evaluation_scalars(losses: Mapping[str, float], split: str, *, ppl: bool) -> dict[str, float]:
    """Returns Megatron's tags `<name> validation` and, if asked, `<name> validation ppl`."""
    word = "validation" if split == "valid" else split
    values = {}
    for name, loss in losses.items():
        values[f"{name} {word}"] = loss
        if ppl:
            values[f"{name} {word} ppl"] = perplexity(loss)
    return values
