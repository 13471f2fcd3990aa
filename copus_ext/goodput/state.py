"""What a run did lately: step times by configuration, losses, and what came of each change.

The record is plain JSON types, changed in place, so that a checkpoint can hold it at no cost per
step.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from copus_ext.goodput.costs import new_costs
from copus_ext.goodput.inputs import ConfigThroughput, Decision
from copus_ext.goodput.lr_scaling import Ramp
from megatron.training.config.layout import Layout

VERSION = 1
WARM_UP_STEPS = 3
"""Steps after a change that are not timed."""
TIMED_STEPS = 20
"""Newest times that are kept of a configuration."""
MIN_TIMED_STEPS = 5
"""Times from which a configuration counts as measured."""
WINDOW_STEPS = 50
"""Steps before and after a change by which it is graded."""
_CHANGES_KEPT = 100
SPIKE_NATS, SPIKE_SD = 0.5, 6.0
"""Rise of the loss over its mean before that counts as a spike, nats and standard deviations."""


def new_record() -> dict[str, Any]:
    """The record of a run that has not begun."""
    return {
        "version": VERSION,
        "num_decisions": 0,
        "last_decision_samples": 0,
        "num_changes": 0,
        "last_change_samples": None,
        "ramp": None,
        "hold_growth_until_samples": 0,
        "spikes_in_a_row": 0,
        "small_since_samples": None,
        "answered_batch": None,
        "sizes": None,
        "noise_when_shrunk": None,
        "elapsed_s": 0.0,
        "since_change": 0,
        "times": {},
        "steps": [],
        "open": None,
        "changes": [],
        "layouts": new_costs(),
    }


def key_of(layout: str, micro_batch_size: int, global_batch_size: int) -> str:
    """Name of a configuration in the record."""
    return f"{layout} {micro_batch_size} {global_batch_size}"


class History:
    """Reads and fills the record.

    Args:
        record: from `new_record`, or of a checkpoint.

    Raises:
        ValueError: a record of another version.
    """

    def __init__(self, record: dict[str, Any]) -> None:
        if record.get("version") != VERSION:
            raise ValueError(f"controller record of version {record.get('version')}, not {VERSION}")
        # A checkpoint of before has no record of layouts.
        record.setdefault("layouts", new_costs())
        self.record = record
        self._since_launch = 0

    def add(
        self,
        *,
        key: str,
        consumed_samples: int,
        batch: int,
        loss: float,
        seconds: float,
        updated: bool = True,
    ) -> None:
        """Takes a finished step in.

        Args:
            key: of the configuration, from `key_of`.
            consumed_samples: samples of the run, this step's included.
            batch: its samples.
            loss: in nats per token.
            seconds: wall time on the slowest rank.
            updated: whether the weights changed.
        """
        r = self.record
        self._since_launch += 1
        r["elapsed_s"] += seconds
        r["since_change"] += 1
        steps = r["steps"]
        steps.append([consumed_samples, batch, loss, seconds, int(updated)])
        del steps[: -2 * WINDOW_STEPS]
        if min(r["since_change"], self._since_launch) > WARM_UP_STEPS:
            times = r["times"].setdefault(key, [])
            times.append(seconds)
            del times[:-TIMED_STEPS]

    def median_s(self, key: str) -> tuple[float, float, int] | None:
        """Median seconds of a configuration's steps, median absolute deviation, and their number;
        None before enough were timed."""
        times = self.record["times"].get(key, [])
        if len(times) < MIN_TIMED_STEPS:
            return None
        median = statistics.median(times)
        return median, statistics.median(abs(t - median) for t in times), len(times)

    @property
    def layouts(self) -> list[Layout]:
        """Layouts under which steps were timed."""
        names = {key.split()[0] for key in self.record["times"]}
        return [Layout.from_text(name) for name in sorted(names)]

    @property
    def skipped_steps(self) -> int:
        """Steps of the newest 100 that left the weights unchanged."""
        return sum(not s[4] for s in self.record["steps"])

    @property
    def steps_since_change(self) -> int | None:
        """Steps since the last change; None before the first."""
        return self.record["since_change"] if self.record["num_changes"] else None

    def is_due(
        self, *, consumed_samples: int, batch: int, scheduled: int | None, every_samples: float
    ) -> bool:
        """Whether to decide after a step.

        Args:
            consumed_samples: samples of the run, this step's included.
            batch: of the next step.
            scheduled: batch that a policy asks for by the position in the run alone.
            every_samples: samples between two decisions.
        """
        if scheduled not in (None, batch, self.record["answered_batch"]):
            return True
        return consumed_samples - self.record["last_decision_samples"] >= every_samples

    def decided(self, decision: Decision, *, consumed_samples: int) -> None:
        """Takes in that something was decided, be it to stay."""
        if decision.is_small and self.record["small_since_samples"] is None:
            self.record["small_since_samples"] = consumed_samples
        elif decision.candidates and not decision.is_small:
            self.record["small_since_samples"] = None

    def resize(
        self,
        to: ConfigThroughput,
        *,
        from_batch: int,
        consumed_samples: int,
        ramp: Ramp | None,
        critical_batch_size: float | None,
    ) -> None:
        """Takes in the sizes of the steps that follow a change.

        Args:
            to: the configuration.
            from_batch: batch before.
            consumed_samples: samples of the run.
            ramp: the learning rate's way to another batch.
            critical_batch_size: c times the noise scale, samples.
        """
        r = self.record
        if to.global_batch_size != from_batch:
            r["ramp"] = None if ramp is None else ramp.to_json()
            r["last_change_samples"] = consumed_samples
            r["small_since_samples"] = None
            if to.global_batch_size < from_batch:
                r["noise_when_shrunk"] = critical_batch_size
        r["sizes"] = [to.global_batch_size, to.micro_batch_size]

    def change(self, *, number: int, fields: dict[str, Any]) -> None:
        """Opens the account of a change that is about to be made.

        Args:
            number: of the decision.
            fields: what to remember of it: `from`, `to`, `predicted_samples_per_s`, `gain`, ...
        """
        before = self.record["steps"][-WINDOW_STEPS:]
        self.record["open"] = {
            "decision": number,
            **fields,
            "loss_before": _mean([s[2] for s in before[-TIMED_STEPS:]]),
            "loss_sd_before": _sd([s[2] for s in before[-TIMED_STEPS:]]),
            "slope_before": _slope(before),
            "samples_per_s_before": _speed(before),
        }
        self.record["since_change"] = 0
        self.record["num_changes"] += 1

    def is_spike(self) -> bool:
        """Whether the loss since a growth has risen like a spike, or is no number any more."""
        opened = self.record["open"]
        if opened is None or opened.get("spiked") or opened["loss_before"] is None:
            return False
        if opened["to_batch"] <= opened["from_batch"]:
            return False
        after = [s[2] for s in self.record["steps"][-self.record["since_change"] :]]
        if not all(map(math.isfinite, after)):
            return True
        rise = max(after, default=-math.inf) - opened["loss_before"]
        sd = opened["loss_sd_before"] or math.inf
        return rise > SPIKE_NATS or (rise > SPIKE_SD * sd and rise > SPIKE_NATS / 10)

    def close_if_due(self, *, now: bool = False) -> dict[str, Any] | None:
        """The outcome of the open change, once enough steps have followed it.

        Args:
            now: the run ends or changes again; take what there is.

        Returns:
            What was predicted and what came, or None while it is too early.
        """
        opened, since = self.record["open"], self.record["since_change"]
        if opened is None or (since < WINDOW_STEPS and not now):
            return None
        after = self.record["steps"][-since:] if since else []
        timed = after[WARM_UP_STEPS:]
        speed, predicted = _speed(timed), opened.get("predicted_samples_per_s")
        losses = [s[2] for s in after[:WINDOW_STEPS] if math.isfinite(s[2])]
        before = opened["loss_before"]
        first = after[0][3] if after else None
        median = statistics.median(s[3] for s in timed) if timed else None
        outcome = {
            **opened,
            "steps": since,
            "samples_per_s": speed,
            "speed_over_predicted": speed / predicted if speed and predicted else None,
            "loss_slope": _slope(after),
            "loss_rise": max(losses) - before if losses and before is not None else None,
            "pause_s": max(first - median, 0.0) if first is not None and median else None,
        }
        self.record["open"] = None
        self.record["changes"].append(outcome)
        del self.record["changes"][:-_CHANGES_KEPT]
        return outcome


def _mean(values: list[float]) -> float | None:
    finite = [x for x in values if math.isfinite(x)]
    return statistics.fmean(finite) if finite else None


def _sd(values: list[float]) -> float | None:
    finite = [x for x in values if math.isfinite(x)]
    return statistics.stdev(finite) if len(finite) > 1 else None


def _speed(steps: list[list[float]]) -> float | None:
    """Samples per second of the middle step."""
    return statistics.median(s[1] / max(s[3], 1e-9) for s in steps) if steps else None


def _slope(steps: list[list[float]]) -> float | None:
    """Loss per thousand samples, by least squares."""
    points = [(s[0] / 1000.0, s[2]) for s in steps if math.isfinite(s[2])]
    if len(points) < 3:
        return None
    x, y = zip(*points)
    return statistics.linear_regression(x, y).slope
