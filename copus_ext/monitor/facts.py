"""A run in words and numbers: the head of a report, and its tables."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from copus_ext.goodput.lr_scaling import decay_timescale, decay_words
from copus_ext.monitor.explain import (
    date,
    gain,
    headline,
    percent,
    relayout_result,
    result,
    seconds,
    why,
)
from copus_ext.monitor.journal import (
    ABANDONED,
    CALLED_OFF,
    SCHEDULED,
    SEGMENT,
    DecisionRecord,
    phase_words,
    sizes_of,
)
from copus_ext.monitor.run_files import QUIET_EVENTS, Launch, RunHistory, first_step
from copus_ext.monitor.run_status import RunStatus
from copus_ext.monitor.terminal import alarms, rows
from copus_ext.monitor.values import number, table, text
from copus_ext.monitor.values import rows as objects

_NAMED = 0.01
"""Share of the time from which it is named though nothing is recorded of it."""
_TROUBLE = (
    "alert",
    "fault",
    "failure",
    "spike",
    "checkpoint.failed",
    "relayout.abandoned",
    "relayout.cancelled",
)


def facts(status: RunStatus, run: RunHistory) -> dict[str, str]:
    """The head of a report: what the status says but for the verdict, which stands above it, and
    what else is known of the whole run."""
    took_s = _between(run.begin, run.last)
    found = {
        **dict(rows(status, on_page=True)) | {"verdict": ""},
        "asked": "; ".join(run.asked),
        "alarms": "; ".join(alarms(status, on_page=True)),
        "layouts": " then ".join(_short([layout for _, layout in run.layouts])),
        "batches": " then ".join(_short(_batches(run))),
        "began": "" if run.begin is None else f"{date(run.begin)} UTC",
        "last record": "" if run.last is None else f"{date(run.last)} UTC",
        "took": "" if took_s is None else seconds(took_s),
        "of this": "; ".join(_time_spent(run)),
        "ranks": " then ".join(_short(_ranks(run))),
        "weight decay": _weight_decay(run),
    }
    return {label: value for label, value in found.items() if value}


def _weight_decay(run: RunHistory) -> str:
    """The timescale of the weight decay of Adam, which every batch keeps where the decay per token
    stays; empty where the flags do not tell it."""
    config = run.config
    samples = number(config.get("train_samples"))
    lr, decay = number(config.get("lr")), number(config.get("weight_decay"))
    batch = number(config.get("copus_reference_batch_size"))
    batch = batch or number(config.get("initial_global_batch_size"))
    if config.get("optimizer") != "adam" or not (samples and lr and decay and batch):
        return ""
    tau = decay_timescale(batch, lr=lr, weight_decay=decay, samples=samples)
    return f"{decay_words(tau)} at batch {batch:,.0f}"


def _time_spent(run: RunHistory) -> list[str]:
    """The time of the run by its use, as far as it is recorded."""
    in_steps = sum(step.seconds or 0.0 for step in run.steps)
    whole = _between(run.begin, run.last)
    share = f" ({percent(min(in_steps / whole, 1.0))})" if whole else ""
    parts = [
        (f"steps{share}", in_steps),
        ("steps that a restart did again", run.undone_s),
        ("evaluations", _evaluating_s(run)),
        ("changes of layout", sum(s.pause_s or 0.0 for s in run.relayouts)),
        ("checkpoints (part of it beside the steps if saved asynchronously)", sum(run.saves_s)),
        ("building data and model", _building_s(run)),
        ("between launches", sum(_gaps(run.launches, goes_on=False))),
        ("recoveries and joins", sum(_gaps(run.launches, goes_on=True))),
    ]
    other = 0.0 if whole is None else whole - sum(value for _, value in parts)
    if whole and other > _NAMED * whole:
        parts.append(("other (deciding, measuring, records)", other))
    return [f"{seconds(value)} {name}" for name, value in parts if value > 0]


def _evaluating_s(run: RunHistory) -> float:
    """Seconds of evaluations, each since the record before it."""
    known = [*run.steps, *run.evaluations, *run.events]
    times = sorted({x.t for x in known if x.t is not None})
    before = dict(zip(times[1:], times))
    return sum(e.t - before.get(e.t, e.t) for e in run.evaluations if e.t is not None)


def _building_s(run: RunHistory) -> float:
    """Seconds from the begin of each launch's record to its first step."""
    begun = ((launch.t, first_step(run, launch)[0]) for launch in run.launches)
    return sum(max(b - a, 0.0) for a, b in begun if a is not None and b is not None)


def _ranks(run: RunHistory) -> list[str]:
    """The ranks of a run over its time, and why they changed."""
    words = {"loss": " after a loss", "join": " after a join", "resize": " as asked for"}
    return [f"{x.ranks}{words.get(x.entered, '')}" for x in run.launches if x.ranks is not None]


def _gaps(launches: Sequence[Launch], *, goes_on: bool) -> list[float]:
    """Seconds between launches, or within launches that go on with other ranks."""
    pairs = [(a, b) for a, b in itertools.pairwise(launches) if bool(b.entered) is goes_on]
    gaps = (_between(a.last_t, b.t) for a, b in pairs)
    return [gap for gap in gaps if gap is not None and gap > 0]


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


def _batches(run: RunHistory) -> list[str]:
    sizes = [str(step.batch) for step in run.steps if step.batch is not None]
    return [size for size, _ in itertools.groupby(sizes)]


def _short(names: list[str], most: int = 8) -> list[str]:
    if len(names) <= most:
        return names
    left_out = len(names) - most
    return [*names[: most // 2], f"({left_out} more)", *names[-(most // 2) :]]


CANDIDATE = (
    "layout",
    "batch",
    "micro-batch",
    "samples/s",
    "known by",
    "predicted goodput",
    "limit",
    "blocked by",
)
"""Columns of the candidates of a decision."""
_KNOWN_BY = {"profiled": "timed before"}
"""Words for a source: `profiled` is whatever was timed before, also without a profile."""


def candidates(record: dict[str, Any]) -> list[list[str]]:
    """The configurations that a decision compared, each with what was for and against it."""
    shown = []
    for candidate in objects(table(record.get("decision")).get("candidates")):
        row = table(candidate.get("row"))
        sizes, speed = sizes_of(row), number(row.get("samples_per_s"))
        share, needed = number(candidate.get("gain")), number(candidate.get("needed"))
        shown.append(
            [
                *(sizes.layout, _shown(sizes.batch), _shown(sizes.micro), _shown(speed)),
                _KNOWN_BY.get(source := text(row.get("source"), 20), source),
                "" if share is None else gain(share, number(candidate.get("gain_sd"))),
                "" if needed is None else percent(needed),
                text(candidate.get("blocked_reason"), 300) or "allowed",
            ]
        )
    return shown


def _shown(value: float | None) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.4g}"


class JournalLine(NamedTuple):
    t: float | None
    """Seconds since the epoch."""
    iteration: int | None
    group: str
    """`change`, `stay`, `trouble` or `run`."""
    what: str
    why: str = ""
    gain: str = ""
    """Predicted goodput of a choice, or of the best alternative."""
    needed: float | None = None
    """Gain required to switch there."""
    outcome: str = ""


def journal(run: RunHistory) -> list[JournalLine]:
    """Every line of the journal and every event of the record, in order of time."""
    decisions = run.decisions
    lines = [_decision_line(d) for d in decisions.decided]
    tried = {d.relayout.number for d in decisions.decided if d.relayout is not None}
    for s in run.relayouts:
        if s.number not in tried and s.kind not in (CALLED_OFF, ABANDONED):  # these have a note
            what = f"Change of layout {s.start} to {s.to}"
            told = SCHEDULED if s in run.scheduled_moves else ""
            where = s.t, s.iteration, "change"
            lines.append(JournalLine(*where, what, told, outcome=relayout_result(s)))
    told = {event.iteration for event in run.events if event.kind == "phase"}
    for note in decisions.notes:
        if note.kind == SEGMENT and note.iteration in told:
            continue
        what = note.line[:1].upper() + note.line[1:]
        lines.append(JournalLine(note.t, note.iteration, _group(note.kind), what))
    for event in run.events:
        if event.kind not in QUIET_EVENTS:
            where = event.t, event.iteration, _group(event.kind)
            what = phase_words(event.about) if event.kind == "phase" else event.kind
            what = f"{what[:1].upper()}{what[1:]}".replace(".", " ")
            lines.append(JournalLine(*where, what, event.line))
    for launch in run.launches:
        what = f"Launch {launch.name} started" + (f" on {launch.layout}" if launch.layout else "")
        told = f"went on from {launch.loaded}" if launch.loaded else ""
        where = launch.t, launch.iteration, "run"
        lines.append(JournalLine(*where, what, told, outcome=launch.why))
    return sorted(lines, key=lambda line: (line.t is None, line.t or 0.0))


def _group(kind: str) -> str:
    return "trouble" if kind in _TROUBLE else "run"


def _decision_line(d: DecisionRecord) -> JournalLine:
    return JournalLine(
        t=d.t,
        iteration=d.iteration,
        group="change" if d.is_change else "stay",
        what=headline(d),
        why=why(d),
        gain="" if d.gain is None else gain(d.gain, d.gain_sd),
        needed=d.needed,
        outcome=result(d),
    )
