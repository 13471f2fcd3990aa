"""The reader of a run's directory: `metrics.jsonl`, `journal.jsonl`, `config.json` and `control/`.

Every view of a run is made of the values that it gives. A step that a restart did again counts
once, as the newer launch did it. Torn lines are only counted, values of the wrong kind left out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from copus_ext.controller.decision_log import NAME as JOURNAL
from copus_ext.controller.decision_log import read_journal, version_problem
from copus_ext.monitor.journal import MOVED, DecisionHistory, RelayoutRecord, relayout_of
from copus_ext.monitor.values import measured, number, table, text, whole, written
from copus_ext.reshard.checked import read_value
from megatron.trainer.common.control import PAUSE_FILE, STOP_FILE
from megatron.trainer.common.errors import counted
from megatron.trainer.common.outside import parse_json
from megatron.trainer.logging.metrics import METRICS_FILE, committed_history
from megatron.trainer.logging.tail_reader import Tail

CONFIG_FILE = "config.json"
_OF_A_RUN = "micro_batch_size"
"""A flag that every run has, and no other program's `config.json`."""
GOES_ON = ("loss", "join", "resize")
"""Why a launch goes on with other ranks."""
END_BYTES = 1 << 26
"""Enough of the end of a file to know how a run stands: about a hundred thousand steps."""
_REQUEST = Path("control") / "request.json"
_MAX_NAME = 200
QUIET_EVENTS = (
    "checkpoint.begin",
    "checkpoint.commit",
    "layout",
    "numbers",
    "relayout",
    "relayout.begin",
    "relayout.commit",
    "run.start",
    "run.end",
)
"""Kinds that views show in another way than as events."""


def run_problem(run: Path, *, takes_journal: bool = False) -> str:
    """Why a path is not a run, in the words of all commands that read one; empty if it is one.

    Args:
        takes_journal: whether a journal that is left of a run stands for it.

    Raises:
        OSError: it cannot be read.
    """
    fix = "give the --run-dir (or --save) of a run"
    if not run.exists() and not run.is_symlink():
        return f"RUN {run} does not exist; {fix}"
    if not run.is_dir() and not takes_journal:
        return f"RUN {run} is not a directory; {fix}"
    journal = run / JOURNAL if run.is_dir() else run
    if journal.is_file() and (problem := version_problem(journal)):
        return problem
    if not run.is_dir():
        has_records = run.is_file() and next(read_journal(run), None) is not None
        return "" if has_records else f"RUN {run} holds no record of a run; {fix}, or its {JOURNAL}"
    files = (METRICS_FILE, JOURNAL, "control")
    is_run = any((run / name).exists() or (run / name).is_symlink() for name in files)
    # Models of other programs have a file of this name, too.
    is_run = is_run or _OF_A_RUN in _small_json(run / CONFIG_FILE)
    return "" if is_run else f"RUN {run} holds no record of a run; {fix}"


def unread_words(unread: Mapping[str, int]) -> str:
    """How many lines of which file are no records; empty if all are."""
    return ", ".join(f"{counted(n, 'line')} of {name}" for name, n in unread.items())


class Step(NamedTuple):
    """One step; None where the record does not say."""

    iteration: int
    samples: int
    """Consumed by the run, this step's included."""
    t: float | None
    """Seconds since the epoch."""
    launch: str
    loss: float | None
    """Nats per token; may be NaN."""
    batch: int | None
    micro: int | None
    seconds: float | None
    updated: bool
    """Whether the weights changed."""
    noise_status: str | None
    """None if the noise scale is not measured."""
    noise_measured: bool
    """Whether this step added a measurement to it."""
    phi: float | None
    """Noise scale, samples."""
    low: float | None
    high: float | None
    """95 % interval, samples; no upper end while it is unbounded."""
    train_iterations: int | None
    """Steps of the whole run, as estimated at this one."""
    seq_length: int | None = None
    """Tokens per sample where samples become longer; None: as the flags say."""

    @property
    def finite_loss(self) -> float | None:
        return number(self.loss)


class Evaluation(NamedTuple):
    iteration: int
    samples: int
    t: float | None
    loss: float | None
    split: str
    """`valid` or `test`."""


@dataclass(kw_only=True)
class Launch:
    name: str
    t: float | None
    iteration: int
    """Steps done before."""
    samples: int
    layout: str
    loaded: str
    """Checkpoint that it resumed."""
    why: str = ""
    """How it ended; empty if no end is recorded."""
    last_t: float | None = None
    launched_t: float | None = None
    """When its first process began, seconds since the epoch."""
    ranks: int | None = None
    """Of a launch whose ranks change."""
    entered: str = ""
    """Why the launch has other ranks from here on, one of `GOES_ON`."""


class Event(NamedTuple):
    kind: str
    t: float | None
    iteration: int | None
    about: dict[str, Any]
    """All its fields."""

    @property
    def line(self) -> str:
        named = (self.about.get(key) for key in ("line", "reason", "name", "alert", "fault"))
        return next((text(value) for value in named if value), "")


@dataclass(kw_only=True)
class RunHistory:
    """Everything that was read of a run; lists are in order."""

    path: Path
    """Its directory, or its journal."""
    is_whole: bool = True
    """Whether the record was read from its beginning."""
    has_whole_journal: bool = True
    """Whether the journal was read from its beginning."""
    unread: dict[str, int] = field(default_factory=dict)
    """Lines of a file, by its name, that are no records: cut short by a kill, or damaged."""
    config: dict[str, Any] = field(default_factory=dict)
    """Resolved flags of the last launch."""
    decisions: DecisionHistory = field(default_factory=DecisionHistory)
    steps: list[Step] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    layouts: list[tuple[int, str]] = field(default_factory=list)
    """Steps done and the layout from there on; each differs from the one before."""
    events: list[Event] = field(default_factory=list)
    relayouts: list[RelayoutRecord] = field(default_factory=list)
    """Changes of layout, those of the journal first: a schedule makes some without a controller."""
    undone_s: float = 0.0
    """Seconds of steps that a later launch did again."""
    saves_s: list[float] = field(default_factory=list)
    """Seconds of each committed checkpoint."""
    asked: list[str] = field(default_factory=list)
    """Requests in `control/`, in words."""
    last: float | None = None
    """When the last record was written, seconds since the epoch."""

    @property
    def tokens_per_sample(self) -> int | None:
        """Tokens of a sample in which the run counts; samples of a step may be longer."""
        length = whole(self.config.get("seq_length"))
        return length if length and length > 0 else None

    @property
    def train_iterations(self) -> int | None:
        """Steps of the whole run, as estimated at the last one."""
        return self.steps[-1].train_iterations if self.steps else None

    @property
    def begin(self) -> float | None:
        """When the run began, seconds since the epoch."""
        times = (x.t for x in [*self.launches[:1], *self.steps[:1]])
        return next((t for t in times if t is not None), None)

    @property
    def launch(self) -> str:
        """Name of the last launch; empty if unknown."""
        if self.launches:
            return self.launches[-1].name
        return self.steps[-1].launch if self.steps else ""

    @property
    def scheduled_moves(self) -> list[RelayoutRecord]:
        """Changes of layout that a schedule made: only those are in the record of steps."""
        events = (e for e in self.events if e.kind == "relayout")
        found = (relayout_of(event.about, event.kind, None) for event in events)
        return [move for move in found if move.kind == MOVED]

    @property
    def since_start(self) -> list[Event]:
        starts = [i for i, event in enumerate(self.events) if event.kind == "run.start"]
        return self.events[starts[-1] if starts else 0 :]

    def layout_at(self, iteration: int) -> str:
        """The layout after so many steps; empty if unknown."""
        i = bisect_right(self.layouts, iteration, key=lambda change: change[0])
        return self.layouts[i - 1][1] if i else ""


class RunReader:
    """Reads a run again and again, each record once.

    Args:
        run: its directory; or a journal, if nothing else is left of it.
        max_bytes: read this much of the end of each file; None reads everything.
    """

    def __init__(self, run: Path, *, max_bytes: int | None = None) -> None:
        self.run = run
        # A journal that the user names may be a link.
        journal = run.resolve() if run.is_file() else run / JOURNAL
        self._metrics = Tail(run / METRICS_FILE, max_bytes=max_bytes)
        self._journal = Tail(journal, max_bytes=max_bytes)
        self._forget()

    def _forget(self) -> None:
        self._records: list[dict[str, Any]] = []
        self._decisions = DecisionHistory()
        self._config: dict[str, Any] = {}
        self._launch_ends: dict[str, float | None] = {}
        self._unread: dict[str, int] = {}
        self._last: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is recorded."""
        return not self._records and self._decisions.is_empty

    def refresh(self) -> None:
        """Reads what was written since the last call.

        Raises:
            OSError: a file of the run cannot be read.
        """
        if self._metrics.is_replaced() or self._journal.is_replaced():
            self._forget()
            self._metrics = Tail(self._metrics.path, max_bytes=None)
            self._journal = Tail(self._journal.path, max_bytes=None)
        for _, record in self._read(self._metrics):
            self._take(record)
        for place, record in self._read(self._journal):
            self._decisions.add(place, record)

    def _read(self, tail: Tail) -> Iterator[tuple[int, dict[str, Any]]]:
        """The new records with their offsets; what is none is counted."""
        for place, line in tail.lines():
            record = _record_of(line)
            if record is not None and "kind" in record:
                yield place, record
            elif line.strip() and (tail.is_whole or place > tail.begun_at):
                self._unread[tail.path.name] = self._unread.get(tail.path.name, 0) + 1

    def decision_at(self, place: int) -> dict[str, Any]:
        """The journal's whole record at an offset; empty if it is no longer there."""
        return _record_of(self._journal.line_at(place)) or {}

    def history(self) -> RunHistory:
        config = self._config or _small_json(self.run / CONFIG_FILE) or self._decisions.flags
        found = RunHistory(path=self.run, config=config)
        found.decisions, found.last = self._decisions, self._last
        found.is_whole = self._metrics.is_whole
        found.has_whole_journal = self._journal.is_whole
        found.unread = dict(self._unread)
        committed = committed_history(self._records)
        for record in committed:
            _add(found, record["value"])
        planned = [relayout_of(e.about, e.kind, None) for e in found.events if e.kind == "relayout"]
        found.relayouts = [*self._decisions.relayouts, *planned]
        for launch in found.launches:
            launch.last_t = self._launch_ends.get(launch.name)
        found.undone_s = _seconds_of(self._records) - _seconds_of(committed)
        if not any(event.kind == "layout" for event in found.events):
            told: list[tuple[int, str]] = []
            for iteration, layout in found.decisions.layouts:
                _enter_layout(told, iteration, layout)
            found.layouts = told or found.layouts
        found.asked = _asked(self.run)
        return found

    def _take(self, record: dict[str, Any]) -> None:
        kind, t = record.get("kind"), written(record)
        launch = text(record.get("launch"), _MAX_NAME)
        if kind == "step":
            value: Any = _step(record, launch)
            if value is None:
                return
        elif kind == "eval":
            value = _evaluation(record)
        elif isinstance(kind, str):
            value = Event(
                kind=text(kind, 60),
                t=t,
                iteration=whole(record.get("iteration")),
                about={name: field for name, field in record.items() if name != "config"},
            )
        else:
            return
        if kind == "run.start":
            self._config = table(record.get("config")) or self._config
        self._launch_ends[launch] = self._launch_ends.get(launch) if t is None else t
        self._last = self._last if t is None else t
        names = ("kind", "launch", "iteration", "split")
        self._records.append({**{k: record[k] for k in names if k in record}, "value": value})


def _record_of(line: bytes) -> dict[str, Any] | None:
    """The object on a line; None if it is torn or something else."""
    try:
        record = parse_json(line.decode(errors="replace"))
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _small_json(path: Path) -> dict[str, Any]:
    """The object in a small file that anybody may have written; empty if there is none."""
    try:
        return table(read_value(path, lambda value: value, max_bytes=1 << 20))
    except ValueError:
        return {}


def _step(record: dict[str, Any], launch: str) -> Step | None:
    iteration, samples = whole(record.get("iteration")), whole(record.get("consumed_samples"))
    if iteration is None or samples is None:
        return None
    noise, elapsed = record.get("noise"), number(record.get("elapsed_per_iteration_ms"))
    known = table(noise)
    return Step(
        iteration=iteration,
        samples=samples,
        t=written(record),
        launch=launch,
        loss=_loss(record),
        batch=whole(record.get("global_batch_size")),
        micro=whole(record.get("micro_batch_size")),
        seconds=None if elapsed is None else elapsed / 1000.0,
        updated=record.get("updated") is not False,
        noise_status=text(known.get("status"), 40) if isinstance(noise, dict) else None,
        noise_measured=known.get("measured") is True,
        phi=number(known.get("phi_samples")),
        low=number(known.get("low_samples")),
        high=number(known.get("high_samples")),
        train_iterations=whole(record.get("train_iterations")),
        seq_length=whole(record.get("seq_length")),
    )


def _evaluation(record: dict[str, Any]) -> Evaluation:
    return Evaluation(
        iteration=whole(record.get("iteration")) or 0,
        samples=whole(record.get("consumed_samples")) or 0,
        t=written(record),
        loss=_loss(record),
        split=text(record.get("split"), 20) or "valid",
    )


def _loss(record: dict[str, Any]) -> float | None:
    losses = table(record.get("losses"))
    return measured(losses.get("lm loss", next(iter(losses.values()), None)))


def _seconds_of(records: list[dict[str, Any]]) -> float:
    steps = (r["value"] for r in records if isinstance(r["value"], Step))
    # Whole microseconds, so that a sum is never less than its parts.
    return sum(round(1e6 * (step.seconds or 0.0)) for step in steps) / 1_000_000


def _add(run: RunHistory, value: Step | Evaluation | Event) -> None:
    if isinstance(value, Step):
        run.steps.append(value)
        return
    if isinstance(value, Evaluation):
        run.evaluations.append(value)
        return
    run.events.append(value)
    kind, about = value.kind, value.about
    if kind == "run.start":
        members, entered = about.get("members"), text(about.get("why"), 20)
        run.launches.append(
            Launch(
                name=text(about.get("launch"), _MAX_NAME),
                t=value.t,
                iteration=value.iteration or 0,
                samples=whole(about.get("consumed_samples")) or 0,
                layout=text(about.get("layout"), 100),
                loaded=text(about.get("loaded"), 300),
                launched_t=number(about.get("launched_t")),
                ranks=len(members) if isinstance(members, list) else None,
                entered=entered if entered in GOES_ON else "",
            )
        )
    if kind in ("run.start", "layout"):
        _enter_layout(run.layouts, value.iteration or 0, text(about.get("layout"), 100))
    elif kind == "checkpoint.commit":
        run.saves_s.append(number(about.get("seconds")) or 0.0)
    elif kind == "run.end" and run.launches:
        run.launches[-1].why = text(about.get("why"), 200) or "ended"


def _enter_layout(layouts: list[tuple[int, str]], iteration: int, layout: str) -> None:
    """A layout from here on. Layouts beyond here were undone by a restart."""
    while layouts and layouts[-1][0] >= iteration:
        layouts.pop()
    if layout and (not layouts or layouts[-1][1] != layout):
        layouts.append((iteration, layout))


def first_step(run: RunHistory, launch: Launch) -> tuple[float | None, Step | None]:
    """When the first step of a launch began, seconds since the epoch, and that step; None where
    they are not recorded."""
    own = (s for s in run.steps if s.launch == launch.name and s.iteration == launch.iteration + 1)
    first = next(own, None)
    if first is None or first.t is None:
        return None, first
    return first.t - (first.seconds or 0.0), first


def _asked(run: Path) -> list[str]:
    """What the files of `control/` ask of the run."""
    words = []
    if (run / STOP_FILE).exists():
        words.append("to save and stop (control/stop is there)")
    if (run / PAUSE_FILE).exists():
        words.append("to pause the controller (control/pause is there)")
    request = _small_json(run / _REQUEST)
    if request:
        words.append(f"of its supervisor: {text(request.get('kind'), 40)}")
        if reason := text(request.get("reason"), 300):
            words[-1] += f", because {reason}"
    return words
