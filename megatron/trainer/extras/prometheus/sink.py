"""A run's numbers as a text file for Prometheus's node_exporter, named as in the record."""

from __future__ import annotations

import importlib
import re
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.trainer.logging.tracker import REPLACED_WITH, SELDOM

_UNNAMED = ("v", "kind", "launch", "m", "pid")
_COUNTED = ("alert", "fault", "signal", "layout", "eval", "checkpoint.commit", "checkpoint.failed")
_CONFIG = ("log_interval", "save_interval", "train_samples", "seq_length")
_STEPS = 50
_OTHER = re.compile(r"[^a-zA-Z0-9_]")

Labels = tuple[tuple[str, str], ...]


def metric_name(field: str) -> str:
    """The metric of a field or tag: of `noise-scale/phi-samples` it is
    `copus_noise_scale_phi_samples`."""
    name = _OTHER.sub("_", field)
    return name if name.startswith("copus_") else f"copus_{name}"


class PrometheusSink:
    """Rewrites the file at the interval, at the start and at the end of a run; a reader finds a
    whole one.

    A step's fields keep their names behind `copus_`, its time is `copus_step_t`; fields of other
    records stand behind their kind, as `copus_checkpoint_commit_iteration`; scalars by tag as
    `metric_name` says.
    """

    name = "Prometheus"

    def __init__(self, path: Path, *, run: str, interval: int = 1) -> None:
        """Writes the file, so that a wrong path shows at once.

        Args:
            path: `--prometheus-textfile`, in the directory that node_exporter collects.

        Raises:
            ImportError: prometheus_client is not installed.
            OSError: the file cannot be written.
        """
        self.interval = interval
        self._client = importlib.import_module("prometheus_client")
        self._core = importlib.import_module("prometheus_client.core")
        self._path, self._run = path, run
        self._values: dict[str, dict[Labels, float]] = {}
        self._totals: dict[str, dict[Labels, float]] = {}
        self._of_step: set[str] = set()
        self._times_ms: deque[float] = deque(maxlen=_STEPS)
        self._registry = self._client.CollectorRegistry()
        self._registry.register(self)
        for kind in _COUNTED:
            self._count("events_total", 0, kind=kind)
        for name in ("skipped_iterations_total", "nan_iterations_total"):
            self._count(name, 0)
        self._write()

    def record(self, record: Mapping[str, Any]) -> None:
        """Takes a record in; the start and the end of a run are written at once."""
        kind = str(record.get("kind"))
        if kind == "step":
            self._take_step(record)
            return
        if kind == "numbers":
            self._take_scalars(record)
            return
        self._take_fields(record, kind)
        layout: dict[Labels, float] = {(("layout", str(record.get("layout"))),): 1.0}
        # A change that was taken back ends in the layout that was there.
        is_back = kind == "layout" and self._values.get(metric_name("layout")) == layout
        if kind in _COUNTED and not is_back:
            self._count("events_total", 1, kind=kind)
        if kind == "alert":
            self._count("alerts_total", 1, alert=str(record.get("alert")))
        if kind in ("run.start", "layout"):
            self._values[metric_name("layout")] = layout
        if kind == "run.start":
            self._take_start(record)
        if kind in ("run.start", "run.end"):
            self._set("running", float(kind == "run.start"))
            self._write()

    def scalars(
        self, values: Mapping[str, float], *, iteration: int, consumed_samples: int
    ) -> None:
        self._write()

    def close(self) -> None:
        """Leaves the file: it says how the run ended, or that it did not say so."""

    def collect(self) -> Iterator[Any]:
        """What prometheus_client asks for when it writes."""
        kinds = (
            (self._core.GaugeMetricFamily, self._values),
            (self._core.CounterMetricFamily, self._totals),
        )
        for family, named in kinds:
            # Copies, as a thread may record an alert meanwhile.
            for name, values in named.copy().items():
                labels = [label for label, _ in next(iter(values))]
                metric = family(name, "see docs/monitoring.md of COPUS", labels=["run", *labels])
                for known, value in values.copy().items():
                    metric.add_metric([self._run, *(text for _, text in known)], value)
                yield metric

    def _take_step(self, record: Mapping[str, Any]) -> None:
        before, self._of_step = self._of_step, set()
        self._of_step |= self._take_fields(record)
        self._of_step |= self._take_scalars(record)
        for name in before - self._of_step:
            self._values.pop(name, None)
        for count in ("skipped_iterations", "nan_iterations"):
            self._count(f"{count}_total", record.get(count) or 0)
        if (ms := record.get("elapsed_per_iteration_ms")) is not None:
            self._times_ms.append(ms)
            self._set("elapsed_per_iteration_ms_median", statistics.median(self._times_ms))

    def _take_scalars(self, record: Mapping[str, Any]) -> set[str]:
        """Takes the scalars by tag of a record in; the names of those that hold for its step."""
        names, extra = set[str](), record.get("extra") or {}
        for tag in REPLACED_WITH.keys() & extra.keys():
            starts = tuple(map(metric_name, REPLACED_WITH[tag]))
            for name in [name for name in self._values if name.startswith(starts)]:
                self._values.pop(name)
        for tag, value in extra.items():
            name = self._set(tag, value)
            if not tag.startswith(SELDOM):
                names.add(name)
        return names

    def _take_start(self, record: Mapping[str, Any]) -> None:
        config = record.get("config") or {}
        for name in _CONFIG:
            self._set(f"config_{name}", config.get(name) or 0)
        # Until there is one, the age of the last checkpoint counts from here.
        self._set("checkpoint_commit_iteration", record.get("iteration"))

    def _take_fields(self, record: Mapping[str, Any], *prefix: str) -> set[str]:
        """Takes the numbers of a record in; their names."""
        names = set()
        for field, value in record.items():
            if field in _UNNAMED:
                continue
            if field == "losses" and isinstance(value, Mapping):
                split = (("split", str(record["split"])),) if "split" in record else ()
                for name, loss in value.items():
                    labels = ("name", str(name)), *split
                    names.add(self._set("_".join((*prefix, field)), loss, *labels))
            else:
                # Without its kind the time of a step would be anybody's.
                of = prefix or ("step",) * (field == "t")
                names.add(self._set("_".join((*of, field)), value))
        return names

    def _set(self, field: str, value: Any, *labels: tuple[str, str]) -> str:
        name = metric_name(field)
        if isinstance(value, (int, float)):
            self._values.setdefault(name, {})[labels] = float(value)
        return name

    def _count(self, name: str, more: float, **labels: str) -> None:
        values = self._totals.setdefault(metric_name(name), {})
        key = tuple(labels.items())
        values[key] = values.get(key, 0.0) + more

    def _write(self) -> None:
        self._client.write_to_textfile(str(self._path), self._registry)
