"""A run in words and numbers: the head of a report, and its tables."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from copus_ext.goodput.inputs import DecisionInputs
from copus_ext.goodput.state import WINDOW_STEPS
from copus_ext.monitor.explain import (
    date,
    difference,
    explain,
    gain,
    headline,
    percent,
    predicted_speed,
    relayout_result,
    result,
    seconds,
    time_left,
)
from copus_ext.monitor.journal import ABANDONED, CALLED_OFF, DecisionRecord, OutcomeRecord, sizes_of
from copus_ext.monitor.liveness import liveness
from copus_ext.monitor.run_files import QUIET_EVENTS, Launch, RunHistory
from copus_ext.monitor.run_status import seconds_left
from copus_ext.monitor.time_saved import so_far
from copus_ext.monitor.values import FOREIGN, number, rows, table, text
from megatron.training.common.errors import counted

_TROUBLE = (
    "alert",
    "fault",
    "failure",
    "spike",
    "checkpoint.failed",
    "relayout.abandoned",
    "relayout.cancelled",
)


def verdict(run: RunHistory, *, t: float) -> str:
    """How the run stands and what its controller has brought, in a sentence."""
    signs = liveness(run, t=t)
    state = signs.why if signs.state == "empty" else signs.state
    steps = f" after {counted(run.steps[-1].iteration, 'step')}" if run.steps else ""
    line = so_far(run)[0]
    made = f"{counted(len(run.decisions.made), 'change')}; time saved: {line}"
    return f"{state[:1].upper()}{state[1:]}{steps}; {made if line else 'it has no controller'}."


def facts(run: RunHistory, *, t: float) -> dict[str, str]:
    """The head of a report; without what is unknown.

    Args:
        run: what was read.
        t: now, seconds since the epoch.
    """
    last = run.steps[-1] if run.steps else None
    left_s = seconds_left(run, t=t)
    found = {
        "State": _state(run, t),
        "Asked": "; ".join(run.asked),
        "Steps": _share(last.iteration, run.train_iterations) if last else "",
        "Samples": _share(last.samples, run.config.get("train_samples")) if last else "",
        "Loss": _losses(run),
        "Layout": " then ".join(_short([x.layout for x in run.layouts])),
        "Batch": " then ".join(_short(_batches(run))),
        "Controller": _controller(run),
        "Went by": _went_by(run),
        "So far": so_far(run)[0],
        "To gain": str(run.decisions.headroom or ""),
        "Time left": "" if left_s is None else time_left(left_s, run.decisions.headroom, t=t),
        "Began": "" if run.begin is None else f"{date(run.begin)} UTC",
        "Took": "" if (took_s := _between(run.begin, run.last)) is None else seconds(took_s),
        "Of this": "; ".join(_time_spent(run)),
        "Launches": str(sum(not x.entered for x in run.launches) or ""),
        "Ranks": " then ".join(_short(_ranks(run))),
        "Directory": text(run.path, 500),
    }
    return {label: value for label, value in found.items() if value}


def _state(run: RunHistory, t: float) -> str:
    """What the run does, or how it ended, as the status screen says it."""
    signs = liveness(run, t=t)
    words = f"{signs.state}: {signs.why}" if signs.why else signs.state
    if run.last is None or signs.state in ("done", "stopped"):
        return words
    return f"{words}; last record {date(run.last)} UTC"


def _time_spent(run: RunHistory) -> list[str]:
    """The time of the run by its use, as far as it is recorded."""
    in_steps = sum(step.seconds or 0.0 for step in run.steps)
    whole = _between(run.begin, run.last)
    share = f" ({percent(min(in_steps / whole, 1.0))})" if whole else ""
    parts = [
        (f"steps{share}", in_steps),
        ("steps that a restart did again", run.undone_s),
        ("changes of layout", sum(s.pause_s or 0.0 for s in run.decisions.relayouts)),
        ("checkpoints (part of it beside the steps if saved asynchronously)", sum(run.saves_s)),
        ("between launches", sum(_gaps(run.launches, goes_on=False))),
        ("recoveries and joins", sum(_gaps(run.launches, goes_on=True))),
    ]
    return [f"{seconds(value)} {name}" for name, value in parts if value > 0]


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


def _share(done: int, of: Any) -> str:
    if isinstance(of, int) and of > 0:
        return f"{done:,} of {of:,} ({percent(done / of)})"
    return f"{done:,}"


def _losses(run: RunHistory) -> str:
    losses = (s.finite_loss for s in run.steps[-WINDOW_STEPS:])
    known = [loss for loss in losses if loss is not None]
    loss = f"{sum(known) / len(known):.4f} over the last {WINDOW_STEPS} steps" if known else ""
    evaluated = (e.loss for e in reversed(run.evaluations) if e.split == "valid")
    valid = number(next(evaluated, None))
    last = "" if valid is None else f"{valid:.4f} at the last validation"
    return ", ".join(filter(None, [loss, last]))


def _batches(run: RunHistory) -> list[str]:
    sizes = [str(step.batch) for step in run.steps if step.batch is not None]
    return [size for size, _ in itertools.groupby(sizes)]


def _short(names: list[str], most: int = 8) -> list[str]:
    if len(names) <= most:
        return names
    left_out = len(names) - most
    return [*names[: most // 2], f"({left_out} more)", *names[-(most // 2) :]]


def _controller(run: RunHistory) -> str:
    decisions = run.decisions
    if not decisions.mode and not decisions.decided:
        return "off"
    policy = text(run.config.get("copus_policy"), 40)
    of = f", policy {policy}" if policy else ""
    num = counted(len(decisions.decided), "decision")
    return f"mode {decisions.mode or '?'}{of}: {num}, {counted(len(decisions.made), 'change')}"


def _went_by(run: RunHistory) -> str:
    """The critical batch sizes that decisions went by, by their source."""
    known = [d.account for d in run.decisions.standing if d.account is not None]
    known = [a for a in known if a.critical_batch_size is not None]
    bound = sum(a.is_bound for a in known)
    counts = [(bound, "a bound that needs no measurement"), (len(known) - bound, "the noise scale")]
    words = [f"{counted(n, 'decision')} by {what}" for n, what in counts if n]
    if not known:
        return ""
    return f"{' and '.join(words)}; the last one by {known[-1].critical_batch_size:.4g} samples"


CANDIDATE = (
    "layout",
    "batch",
    "micro-batch",
    "samples/s",
    "known by",
    "predicted goodput",
    "needed",
    "blocked by",
)
"""Columns of the candidates of a decision."""


def last_decision(decided: DecisionRecord, record: dict[str, Any]) -> list[str]:
    """Why a decision was made, sentence by sentence.

    Args:
        decided: its values.
        record: its whole record.
    """
    try:
        return explain(decided, DecisionInputs.from_json(table(record.get("situation"))))
    except FOREIGN:
        return [*explain(decided, None), "The record of this decision is damaged."]


def candidates(record: dict[str, Any]) -> list[list[str]]:
    """The configurations that a decision compared, each with what was for and against it.

    Args:
        record: whole record of the decision.
    """
    shown = []
    for candidate in rows(table(record.get("decision")).get("candidates")):
        row = table(candidate.get("row"))
        sizes, speed = sizes_of(row), number(row.get("samples_per_s"))
        share, needed = number(candidate.get("gain")), number(candidate.get("needed"))
        shown.append(
            [
                *(sizes.layout, _shown(sizes.batch), _shown(sizes.micro), _shown(speed)),
                text(row.get("source"), 20),
                "" if share is None else gain(share, number(candidate.get("gain_sd"))),
                "" if needed is None else percent(needed),
                text(candidate.get("blocked_reason"), 300) or "allowed",
            ]
        )
    return shown


CHANGE = (
    "step",
    "change",
    "goodput predicted",
    "samples/s before",
    "in steps",
    "samples/s predicted",
    "samples/s measured",
    "in steps",
    "measured over predicted",
    "loss per 1000 samples, before",
    "loss per 1000 samples, after",
    "steps judged",
)
"""Columns of what changes have brought."""


def change(o: OutcomeRecord) -> list[str]:
    """What a change was predicted to bring, and what was measured."""

    def steps(timed: tuple[int, int, int] | None) -> str:
        return "-" if timed is None else f"{timed[0]} to {timed[1]}"

    return [
        str(o.iteration),
        difference(o.before, o.after) + (" (loss spike)" if o.spiked else ""),
        gain(o.gain, o.gain_sd),
        _shown(o.speed_before),
        steps(o.timed_before),
        "-" if o.predicted is None else predicted_speed(o).removeprefix("the "),
        _shown(o.speed),
        steps(o.timed_after),
        percent(o.ratio),
        _shown(o.slope_before),
        _shown(o.slope),
        _shown(o.steps),
    ]


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
    for s in decisions.relayouts:
        if s.number not in tried and s.kind not in (CALLED_OFF, ABANDONED):  # these have a note
            what = f"Change of layout {s.start} to {s.to}"
            lines.append(JournalLine(s.t, s.iteration, "change", what, outcome=relayout_result(s)))
    for note in decisions.notes:
        what = note.line[:1].upper() + note.line[1:]
        lines.append(JournalLine(note.t, note.iteration, _group(note.kind), what))
    for event in run.events:
        if event.kind not in QUIET_EVENTS:
            where = event.t, event.iteration, _group(event.kind)
            lines.append(JournalLine(*where, event.kind.capitalize(), event.line))
    for launch in run.launches:
        what = f"Launch {launch.name} starts" + (f" on {launch.layout}" if launch.layout else "")
        why = f"goes on from {launch.loaded}" if launch.loaded else ""
        where = launch.t, launch.iteration, "run"
        lines.append(JournalLine(*where, what, why, outcome=launch.why))
    return sorted(lines, key=lambda line: (line.t is None, line.t or 0.0))


def _group(kind: str) -> str:
    return "trouble" if kind in _TROUBLE else "run"


def _decision_line(d: DecisionRecord) -> JournalLine:
    return JournalLine(
        t=d.t,
        iteration=d.iteration,
        group="change" if d.is_change else "stay",
        what=headline(d),
        why=d.reason,
        gain="" if d.gain is None else gain(d.gain, d.gain_sd),
        needed=d.needed,
        outcome=result(d),
    )
