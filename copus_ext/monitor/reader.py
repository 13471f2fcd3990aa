"""Reads the directory of a run: whole, from the beginning, each record once; of what a crash had
done again the newer launch counts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from copus_ext.controller.decision_log import NAME as JOURNAL
from copus_ext.monitor.decisions import Decisions
from copus_ext.monitor.ends import CONFIG_FILE, Record
from copus_ext.monitor.history import Evaluation, Event, Launch, LayoutAt, RunHistory, Step
from copus_ext.monitor.lines import Lines, small_json
from copus_ext.monitor.pairing import add, slim
from copus_ext.monitor.signs import RunLiveness, read_signs
from copus_ext.monitor.values import number, table, text, whole
from megatron.training.common.control import PAUSE_FILE, STOP_FILE
from megatron.training.logging.metrics import METRICS_FILE, committed_history

_REQUEST = Path("control") / "request.json"
_LOSS = "lm loss"
_MOST_NAME = 200
_QUIET = ("checkpoint.begin", "checkpoint.commit", "layout", "run.start", "run.end")


class RunReader:
    """Reads a run again and again, each record once.

    Args:
        run: its directory; or a journal, if nothing else is left of it.
        name: to tell it from others.
    """

    def __init__(self, run: Path, *, name: str) -> None:
        is_journal = run.is_file()
        self.run, self.name = run, name
        self.journal = Lines(run.resolve() if is_journal else run / JOURNAL)
        self._metrics = Lines(run / METRICS_FILE)
        self._records: list[dict[str, Any]] = []
        self.decisions = Decisions()
        """What the journal tells."""
        self._num_lines = 0
        self._events: list[dict[str, Any]] = []
        self._last: dict[str, Any] = {}
        self._config: dict[str, Any] = {}
        self._stands: tuple[str, ...] = ()
        self.generation = 0
        """Grows when the files of the run have become others."""

    def refresh(self) -> bool:
        """Takes in what was written since; whether it was anything, or the run stands otherwise.

        Raises:
            OSError: a file of the run cannot be read.
        """
        before = len(self._records) + self._num_lines
        if self._metrics.is_another() or self.journal.is_another():
            before = -1
            self.generation += 1
            self._records, self.decisions, self._num_lines = [], Decisions(), 0
            self._events, self._last = [], {}
            self.journal = Lines(self.journal.path)
            self._metrics = Lines(self._metrics.path)
        for _, record in self._metrics.new():
            self._take(record)
        for place, record in self.journal.new():
            add(self.decisions, place, slim(record))
            self._num_lines += 1
        signs, stood = self._signs(), self._stands
        # That a run has fallen silent is seen when nothing comes.
        self._stands = (signs.state, signs.why, *_asked(self.run))
        return before != len(self._records) + self._num_lines or stood != self._stands

    def _signs(self) -> RunLiveness:
        record = Record(
            steps=(self._last,) if self._last else (),
            events=tuple(self._events),
            is_whole=True,
            config=self._known_config(),
        )
        return read_signs(self.run, record, self.decisions, t=time.time())

    def _known_config(self) -> dict[str, Any]:
        return self._config or small_json(self.run / CONFIG_FILE)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing of a run."""
        return not self._records and self.decisions.is_empty

    def _take(self, record: dict[str, Any]) -> None:
        kind = record.get("kind")
        if kind == "step":
            step = _step(record)
            if step is None:
                return
            value: Any = step
            names = ("kind", "launch", "t", "train_iterations")
            self._last = {name: record.get(name) for name in names}
        elif kind == "eval":
            value = _evaluation(record)
            self._events.append({name: record.get(name) for name in ("kind", "launch", "t")})
        else:
            value = {k: v for k, v in record.items() if k != "config"}
            self._events.append(value)
        if kind == "run.start" and table(record.get("config")):
            self._config = table(record.get("config"))
        names = ("kind", "launch", "iteration", "split")
        self._records.append({**{k: record[k] for k in names if k in record}, "value": value})

    def history(self) -> RunHistory:
        """What is known by now."""
        config = self._known_config()
        found = RunHistory(path=self.run, name=self.name, config=config, signs=self._signs())
        committed = committed_history(self._records)
        for record in committed:
            _add(found, record["kind"] if isinstance(record.get("kind"), str) else "", record)
        _follow(found.launches, self._records)
        found.undone_s = _seconds_of(self._records) - _seconds_of(committed)
        found.train_iterations = whole(self._last.get("train_iterations"))
        if not any(record.get("kind") == "layout" for record in self._records):
            found.layouts = _layouts_of(found, self.decisions.layouts) or found.layouts
        if not config:
            found.config = self.decisions.flags
        found.asked = _asked(self.run)
        return found


def _add(run: RunHistory, kind: str, record: dict[str, Any]) -> None:
    value = record["value"]
    if isinstance(value, Step):
        run.steps.append(value)
    elif isinstance(value, Evaluation):
        run.evaluations.append(value)
    else:
        _add_event(run, kind, value)


def _follow(launches: list[Launch], records: list[dict[str, Any]]) -> None:
    """How far each launch came, by all that it wrote: also what a later one did again."""
    by_name = {launch.name: launch for launch in launches}
    for record in records:
        launch, value = by_name.get(text(record.get("launch"), _MOST_NAME)), record["value"]
        if launch is None:
            continue
        t = number(value.get("t")) if isinstance(value, dict) else value.t
        launch.last_t = launch.last_t if t is None else t
        if isinstance(value, Step):
            launch.last_iteration = value.iteration


def _seconds_of(records: list[dict[str, Any]]) -> float:
    """Of all steps among them."""
    steps = (r["value"] for r in records if isinstance(r["value"], Step))
    # Of fractions of milliseconds no sum is short of its parts.
    return sum(round(1e6 * (step.seconds or 0.0)) for step in steps) / 1_000_000


def _add_event(run: RunHistory, kind: str, record: dict[str, Any]) -> None:
    if kind == "run.start":
        run.launches.append(_launch(record))
    if kind in ("run.start", "layout"):
        _enter(run.layouts, record, text(record.get("layout"), 100), number(record.get("t")))
    elif kind == "checkpoint.commit":
        run.saves_s.append(number(record.get("seconds")) or 0.0)
    elif kind == "run.end" and run.launches:
        run.launches[-1].why = text(record.get("why"), 200) or "ended"
    if kind not in _QUIET:
        run.events.append(_event(kind, record))


def _step(record: dict[str, Any]) -> Step | None:
    iteration, samples = whole(record.get("iteration")), whole(record.get("consumed_samples"))
    if iteration is None or samples is None:
        return None
    noise, elapsed = table(record.get("noise")), number(record.get("elapsed_per_iteration_ms"))
    return Step(
        iteration=iteration,
        samples=samples,
        t=number(record.get("t")),
        loss=_loss(record),
        rate=number(record.get("learning_rate")),
        batch=whole(record.get("global_batch_size")),
        micro=whole(record.get("micro_batch_size")),
        seconds=None if elapsed is None else elapsed / 1000.0,
        updated=record.get("updated") is not False,
        phi=number(noise.get("phi_samples")),
        low=number(noise.get("low_samples")),
        high=number(noise.get("high_samples")),
    )


def _evaluation(record: dict[str, Any]) -> Evaluation:
    return Evaluation(
        iteration=whole(record.get("iteration")) or 0,
        samples=whole(record.get("consumed_samples")) or 0,
        t=number(record.get("t")),
        loss=_loss(record),
        split=text(record.get("split"), 20) or "valid",
    )


def _loss(record: dict[str, Any]) -> float | None:
    losses = table(record.get("losses"))
    return number(losses.get(_LOSS, next(iter(losses.values()), None)))


def _launch(record: dict[str, Any]) -> Launch:
    iteration = whole(record.get("iteration")) or 0
    return Launch(
        name=text(record.get("launch"), _MOST_NAME),
        t=number(record.get("t")),
        iteration=iteration,
        samples=whole(record.get("consumed_samples")) or 0,
        layout=text(record.get("layout"), 100),
        loaded=text(record.get("loaded"), 300),
        last_iteration=iteration,
    )


def _event(kind: str, record: dict[str, Any]) -> Event:
    named = (record.get(name) for name in ("line", "reason", "name", "alert", "fault"))
    return Event(
        kind=text(kind, 60),
        t=number(record.get("t")),
        iteration=whole(record.get("iteration")),
        samples=whole(record.get("consumed_samples")),
        line=next((text(value) for value in named if value), ""),
    )


def _enter(layouts: list[LayoutAt], record: dict[str, Any], layout: str, t: float | None) -> None:
    """A layout from here on. What was done beyond here before is no part of the run any more."""
    iteration = whole(record.get("iteration")) or 0
    while layouts and layouts[-1].iteration >= iteration:
        layouts.pop()
    if layout and (not layouts or layouts[-1].layout != layout):
        samples = whole(record.get("consumed_samples")) or 0
        layouts.append(LayoutAt(iteration, samples, t, layout))


def _layouts_of(run: RunHistory, told: list[tuple[int, str]]) -> list[LayoutAt]:
    """What the journal tells, for a record that does not."""
    layouts: list[LayoutAt] = []
    for iteration, layout in told:
        samples, t = run.at(iteration)
        _enter(layouts, {"iteration": iteration, "consumed_samples": samples}, layout, t)
    return layouts


def _asked(run: Path) -> list[str]:
    words = []
    if (run / STOP_FILE).exists():
        words.append("to save and stop (control/stop is there)")
    if (run / PAUSE_FILE).exists():
        words.append("to decide nothing (control/pause is there)")
    request = small_json(run / _REQUEST)
    if request:
        words.append(f"of its supervisor: {text(request.get('kind'), 40)}")
        if reason := text(request.get("reason"), 300):
            words[-1] += f", because {reason}"
    return words
