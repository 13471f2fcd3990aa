"""A run, and several runs beside each other, as tables of words and numbers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from copus_ext.cost_model.megatron_flags import spec_of_arguments
from copus_ext.goodput.state import WINDOW_STEPS
from copus_ext.monitor.downsample import running_mean
from copus_ext.monitor.explain import (
    date,
    difference,
    gain,
    headline,
    percent,
    predicted_speed,
    relayout_result,
    result,
    seconds,
    time_left,
)
from copus_ext.monitor.journal import ABANDONED, CALLED_OFF, DecisionRecord, OutcomeRecord
from copus_ext.monitor.liveness import liveness
from copus_ext.monitor.run_files import QUIET_EVENTS, Launch, RunHistory
from copus_ext.monitor.run_status import seconds_left
from copus_ext.monitor.time_saved import so_far
from copus_ext.monitor.values import number, text
from megatron.training.common.errors import counted


def amount(value: float | None) -> str:
    """A number with its unit prefix, such as `1.2 M`; `-` if unknown."""
    if value is None:
        return "-"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.3g} {letter}"
    return f"{value:,.6g}"


def state(run: RunHistory) -> str:
    """What the run does, or how it ended, as the status screen says it."""
    signs = liveness(run, t=time.time())
    words = f"{signs.state}: {signs.why}" if signs.why else signs.state
    if run.last is None or signs.state in ("done", "stopped"):
        return words
    return f"{words}; last record {date(run.last)} UTC"


def facts(run: RunHistory) -> list[list[str]]:
    """The head of a report, label and value."""
    last = run.steps[-1] if run.steps else None
    c = run.config
    lines = [
        ["State", state(run)],
        ["Steps", _share(last.iteration, run.train_iterations) if last else ""],
        ["Samples", _share(last.samples, c.get("train_samples")) if last else ""],
        ["Tokens", amount(_tokens(run))],
        ["Loss", _losses(run)],
        ["Experts", _experts(run)],
        ["Model", model(c)],
        ["Layout", " then ".join(_short([x.layout for x in run.layouts])) or "-"],
        ["Batch", " then ".join(_short(_batches(run))) or "-"],
        ["Controller", _controller(run)],
        ["Went by", _went_by(run)],
        ["So far", so_far(run)[0]],
        ["To gain", str(run.decisions.headroom or "")],
        ["Time left", _left(run)],
        ["Began", f"{date(run.begin)} UTC" if run.begin is not None else ""],
        ["Took", seconds(_between(run.begin, run.last))],
        ["Of this", "; ".join(time_spent(run))],
        ["Launches", str(sum(not x.entered for x in run.launches) or "")],
        ["Ranks", " then ".join(_short(_ranks(run)))],
        ["Directory", text(run.path, 500)],
    ]
    if run.asked:
        lines.insert(1, ["Asked", "; ".join(run.asked)])
    skipped = sum(not step.updated for step in run.steps)
    if skipped:
        lines.insert(5, ["Skipped steps", f"{skipped:,}"])
    return [[label, value] for label, value in lines if value not in ("", "-")]


def _left(run: RunHistory) -> str:
    t = time.time()
    left_s = seconds_left(run, t=t)
    return "" if left_s is None else time_left(left_s, run.decisions.headroom, t=t)


def model(config: dict[str, Any]) -> str:
    try:
        size = spec_of_arguments(SimpleNamespace(**config)).num_parameters
    except (AttributeError, TypeError, ValueError, ArithmeticError):
        return ""
    c = config
    shape = f"{c['num_layers']} layers of width {c['hidden_size']}"
    heads, length = c["num_attention_heads"], c["seq_length"]
    return f"{amount(size)} parameters: {shape}, {heads} heads, sequences of {length} tokens"


def time_spent(run: RunHistory) -> list[str]:
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


def _tokens(run: RunHistory) -> float | None:
    length = run.tokens_per_sample
    return run.steps[-1].samples * length if length and run.steps else None


def _share(done: int, of: Any) -> str:
    if isinstance(of, int) and of > 0:
        return f"{done:,} of {of:,} ({percent(done / of)})"
    return f"{done:,}"


def final_loss(run: RunHistory) -> float | None:
    losses = (s.finite_loss for s in run.steps[-WINDOW_STEPS:])
    known = [loss for loss in losses if loss is not None]
    return sum(known) / len(known) if known else None


def _losses(run: RunHistory) -> str:
    loss, evaluated = final_loss(run), _evaluated(run)
    parts = [] if loss is None else [f"{loss:.4f} over the last {WINDOW_STEPS} steps"]
    if evaluated is not None:
        parts.append(f"{evaluated:.4f} at the last validation")
    return ", ".join(parts)


def _experts(run: RunHistory) -> str:
    loads = [s.expert_load for s in run.steps[-WINDOW_STEPS:] if s.expert_load is not None]
    if not loads:
        return ""
    mean = sum(loads) / len(loads)
    return f"the busiest has {mean:.2f} times the mean load over the last {WINDOW_STEPS} steps"


def _evaluated(run: RunHistory) -> float | None:
    found = (e.loss for e in reversed(run.evaluations) if e.split == "valid")
    return number(next(found, None))


def _batches(run: RunHistory) -> list[str]:
    found: list[str] = []
    for step in run.steps:
        if step.batch is not None and (not found or found[-1] != str(step.batch)):
            found.append(str(step.batch))
    return found


def _short(names: list[str], most: int = 8) -> list[str]:
    if len(names) <= most:
        return names
    left_out = len(names) - most
    return [*names[: most // 2], f"({left_out} more)", *names[-(most // 2) :]]


def _controller(run: RunHistory) -> str:
    decisions = run.decisions
    if not decisions.mode and not decisions.decided:
        return "off"
    made = len(decisions.made)
    policy = text(run.config.get("copus_policy"), 40)
    of = f", policy {policy}" if policy else ""
    done = f"{counted(len(decisions.decided), 'decision')}, {counted(made, 'change')}"
    return f"mode {decisions.mode or '?'}{of}: {done}"


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


def launches(run: RunHistory) -> list[list[str]]:
    """Every launch: name, begin, first step, layout, what it loaded, how it ended."""
    return [
        [x.name, date(x.t), str(x.iteration), str(x.last_iteration), x.layout, x.loaded, x.why]
        for x in run.launches
    ]


def flags(config: dict[str, Any]) -> list[list[str]]:
    """Name and value of every flag that is set."""
    lines = []
    for name, value in sorted(config.items()):
        if value is None or value is False or value == [] or isinstance(value, dict):
            continue
        words = " ".join(map(text, value)) if isinstance(value, list) else text(value)
        lines.append([f"--{text(name, 100).replace('_', '-')}", text(words)])
    return lines


def differing_flags(runs: Sequence[RunHistory]) -> list[list[str]]:
    """Flags that differ between the runs: name, and the value of each run."""
    named = [dict(flags(run.config)) for run in runs]
    names = sorted({name for values in named for name in values})
    lines = [[name, *(values.get(name, "-") for values in named)] for name in names]
    return [line for line in lines if len(set(line[1:])) > 1]


COMPARED = (
    "run",
    "state",
    "steps",
    "tokens",
    "time",
    "last loss",
    "last validation",
    "time to common loss",
    "tokens to common loss",
    "changes",
    "pauses",
    "last batch",
    "last layout",
)
"""Columns of `compare`."""


def compare(runs: Sequence[RunHistory]) -> tuple[float | None, list[list[str]]]:
    """Compares several runs.

    Returns:
        The lowest loss (mean of 50 steps) that all of them reached, and a line for each.
    """
    means = [running_mean([s.finite_loss for s in run.steps], WINDOW_STEPS) for run in runs]
    # Of fewer steps than the mean takes in, the first are no mean.
    ripe = [column[WINDOW_STEPS - 1 :] or column[-1:] for column in means]
    lowest = [min((v for v in column if v is not None), default=None) for column in ripe]
    reached = [value for value in lowest if value is not None]
    common = max(reached) if reached and len(reached) == len(runs) else None
    return common, [_line(run, column, common) for run, column in zip(runs, means)]


def _line(run: RunHistory, mean: Sequence[float | None], common: float | None) -> list[str]:
    last = run.steps[-1] if run.steps else None
    first = min(WINDOW_STEPS, len(mean)) - 1
    hit = None
    if common is not None:
        after = (i for i, v in enumerate(mean) if i >= first and v is not None and v <= common)
        hit = next(after, None)
    at = None if hit is None else run.steps[hit]
    length = run.tokens_per_sample
    loss, evaluated = final_loss(run), _evaluated(run)
    return [
        run.name,
        liveness(run, t=time.time()).state,
        f"{last.iteration:,}" if last else "0",
        amount(_tokens(run)),
        seconds(_between(run.begin, run.last)),
        "-" if loss is None else f"{loss:.4f}",
        "-" if evaluated is None else f"{evaluated:.4f}",
        seconds(_between(run.begin, at.t)) if at else "-",
        amount(at.samples * length) if at and length else "-",
        str(len(run.decisions.made)),
        seconds(sum(s.pause_s or 0.0 for s in run.decisions.relayouts)),
        str(last.batch) if last and last.batch is not None else "-",
        run.layouts[-1].layout if run.layouts else "-",
    ]


CHANGED = (
    "run",
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
"""Columns of `changes`."""


def changes(runs: Sequence[RunHistory]) -> list[list[str]]:
    return [_change(run, o) for run in runs for o in run.decisions.outcomes]


def _change(run: RunHistory, o: OutcomeRecord) -> list[str]:
    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}"

    def steps(timed: tuple[int, int, int] | None) -> str:
        return "-" if timed is None else f"{timed[0]} to {timed[1]}"

    return [
        run.name,
        str(o.iteration),
        difference(o.before, o.after) + (" (loss spike)" if o.spiked else ""),
        gain(o.gain, o.gain_sd),
        shown(o.speed_before),
        steps(o.timed_before),
        "-" if o.predicted is None else predicted_speed(o).removeprefix("the "),
        shown(o.speed),
        steps(o.timed_after),
        percent(o.ratio),
        shown(o.slope_before),
        shown(o.slope),
        "-" if o.steps is None else str(o.steps),
    ]


def journal(index: int, run: RunHistory) -> list[list[Any]]:
    """Every line of the journal and every event of the record, in order of time: run, seconds since
    the epoch, step, samples, group, what, why, gain, needed, outcome."""
    decisions = run.decisions
    lines = [[index, *_journal_line(d)] for d in decisions.decided]
    tried = {d.relayout.number for d in decisions.decided if d.relayout is not None}
    for s in decisions.relayouts:
        if s.number not in tried and s.kind not in (CALLED_OFF, ABANDONED):  # these have a note
            what = f"Change of layout {s.start} to {s.to}"
            where = [index, s.t, s.iteration, s.samples, "change"]
            lines.append([*where, what, "", "", None, relayout_result(s)])
    for note in decisions.notes:
        group = "trouble" if note.kind in _TROUBLE else "run"
        samples, _ = run.at(note.iteration) if note.iteration is not None else (None, None)
        where = [index, note.t, note.iteration, samples, group]
        lines.append([*where, note.line[:1].upper() + note.line[1:], "", "", None, ""])
    for event in run.events:
        if event.kind in QUIET_EVENTS:
            continue
        group = "trouble" if event.kind in _TROUBLE else "run"
        where = [index, event.t, event.iteration, event.samples, group]
        lines.append([*where, event.kind.capitalize(), event.line, "", None, ""])
    for launch in run.launches:
        of = f"Launch {launch.name} starts" + (f" on {launch.layout}" if launch.layout else "")
        where = [index, launch.t, launch.iteration, launch.samples, "run"]
        reason = f"goes on from {launch.loaded}" if launch.loaded else ""
        lines.append([*where, of, reason, "", None, launch.why])
    return sorted(lines, key=lambda line: (line[1] is None, line[1] or 0.0))


_TROUBLE = (
    "alert",
    "fault",
    "failure",
    "spike",
    "checkpoint.failed",
    "relayout.abandoned",
    "relayout.cancelled",
)


def _journal_line(d: DecisionRecord) -> list[Any]:
    group = "change" if d.is_change else "stay"
    where = [d.t, d.iteration, d.samples, group]
    expected = "" if d.gain is None else gain(d.gain, d.gain_sd)
    return [*where, headline(d), d.reason, expected, d.needed, result(d)]
