"""One HTML page of a run, with its charts inside: no script, and nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from copus_ext.goodput.belief import LEVEL_SD, MULTIPLIER_SD
from copus_ext.goodput.inputs import ADAPTIVE, DecisionInputs, belief_of
from copus_ext.goodput.state import WINDOW_STEPS
from copus_ext.monitor import facts
from copus_ext.monitor.chart import (
    NARROW,
    Chart,
    Clock,
    Column,
    Series,
    draw,
    running_mean,
    thinned,
    turns,
)
from copus_ext.monitor.explain import date, gain, headline, percent, result, why
from copus_ext.monitor.facts import JournalLine
from copus_ext.monitor.journal import DecisionRecord
from copus_ext.monitor.landscape import Landscape, landscape
from copus_ext.monitor.run_files import RunHistory, RunReader, Step
from copus_ext.monitor.run_status import changes_of, only_proposed, status_of
from copus_ext.monitor.terminal import cells, heads
from copus_ext.monitor.values import FOREIGN, number
from megatron.trainer.common.errors import counted

_SPLITS = {"valid": "second", "test": "third"}
"""Evaluations and their style."""
_MAX_LINES = 2000
"""Lines of the journal on a page."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The content of a page."""

    title: str
    made_t: float
    """Seconds since the epoch."""
    reload_s: float | None
    """Seconds after which the page loads itself again; None for one that stays."""
    verdict: str
    facts: dict[str, str]
    charts: Sequence[Chart]
    clock: Clock
    decision: str
    """The last decision that compared anything, and its reason."""
    landscape: Landscape | None
    """Of the last decision; None where it knew no critical batch size."""
    candidates: Sequence[Sequence[str]]
    """Those of the last decision; see `facts.CANDIDATE`."""
    changes: Sequence[Sequence[str]]
    """Under `terminal.heads`."""
    only_proposed: bool
    """Whether none of them was made."""
    journal: Sequence[JournalLine]


def report_of(reader: RunReader, *, reload_s: float | None = None) -> Report:
    """The report of a run.

    Args:
        reader: of the run; reads what is new.
        reload_s: seconds after which the page loads itself again while the run goes on.

    Raises:
        OSError: a file of the run cannot be read.
    """
    status = status_of(reader)
    run = reader.history()
    changes = changes_of(run, is_alive=status.is_alive)
    standing = run.decisions.standing
    last = [(d, reader.decision_at(d.place)) for d in standing[-2:]]
    # The one after the last step compares nothing.
    compared = [found for found in last if facts.candidates(found[1])]
    decided, record = (compared or last or [(None, {})])[-1]
    return Report(
        title=run.path.resolve().name,
        made_t=status.t,
        reload_s=None if status.is_over else reload_s,
        verdict=status.verdict,
        facts=facts.facts(status, run),
        charts=[
            *(_loss(run), _batch(run), *_layout(run)),
            *_noise(run, last[-1][1] if last else {}),
        ],
        clock=_clock(run),
        decision="" if decided is None else _decided(decided),
        landscape=None if decided is None else landscape(record, decided),
        candidates=facts.candidates(record),
        changes=[cells(change) for change in changes],
        only_proposed=only_proposed(changes),
        journal=facts.journal(run),
    )


def _clock(run: RunHistory) -> Clock:
    """When the samples of the steps that stand were trained, pauses and restarts included."""
    begin = run.begin
    known = [(s.samples, s.t - begin) for s in run.steps if begin is not None and s.t is not None]
    return known if known == sorted(known) and math.isfinite(sum(t for _, t in known)) else []


def _loss(run: RunHistory) -> Chart:
    losses = [step.finite_loss for step in run.steps]
    mean = running_mean(losses, WINDOW_STEPS)
    return Chart(
        title="Loss",
        caption="Nats per token of every step, thin, and the mean of the last "
        f"{WINDOW_STEPS} steps, thick.",
        unit="loss",
        series=[
            _line(run, "step", losses, style="faint"),
            _line(run, f"mean of the last {WINDOW_STEPS}", mean),
            *(_evaluations(run, split, style=style) for split, style in _SPLITS.items()),
        ],
    )


def _evaluations(run: RunHistory, split: str, *, style: str) -> Series:
    known = [e for e in run.evaluations if number(e.loss) is not None and e.split == split]
    return Series(
        name=split,
        x=[e.samples for e in known],
        y=[e.loss for e in known],
        tips=[f"{split} after step {e.iteration}: {e.loss:.4f}" for e in known],
        kind="points",
        style=style,
    )


def _line(run: RunHistory, name: str, values: Column, *, style: str = "first") -> Series:
    chosen = thinned(values)
    x, y = [run.steps[i].samples for i in chosen], [values[i] for i in chosen]
    return Series(name=name, x=x, y=y, style=style)


def _stairs(run: RunHistory, name: str, values: Column, *, style: str = "first") -> Series:
    """Values that hold from the begin of each step."""
    if not run.steps:
        return Series(name=name, x=[], y=[])
    first, last = run.steps[0], run.steps[-1]
    begins = [first.samples - (first.batch or 0), *(s.samples for s in run.steps)]
    chosen = turns(values)
    x, y = [begins[i] for i in chosen], [values[i] for i in chosen]
    return Series(name=name, x=[*x, last.samples], y=[*y, values[-1]], kind="stairs", style=style)


def _batch(run: RunHistory) -> Chart:
    batch, micro = [s.batch for s in run.steps], [s.micro for s in run.steps]
    made = [d for d in run.decisions.made if d.samples is not None]
    return Chart(
        title="Batch",
        caption="Samples of a batch and of a micro-batch, dotted. Points are the changes that were "
        f"made; each says why, as the journal below.{_first_words(made)}",
        unit="samples",
        is_log=True,
        series=[
            _stairs(run, "batch", batch),
            _stairs(run, "micro-batch", micro, style="first dotted"),
            Series(
                name="change",
                x=[d.samples or 0 for d in made],
                y=[d.to.batch for d in made],
                tips=[_why(d) for d in made],
                kind="points",
                style="second",
            ),
        ],
    )


def _first_words(made: Sequence[DecisionRecord]) -> str:
    """What the first change went by, where that was nothing that the run had measured."""
    if not made or "by the published law alone" not in made[0].reason:
        return ""
    return (
        " The first change came before a noise scale was known: a published law says about how "
        "large the critical batch size is at that point of a run."
    )


def _decided(d: DecisionRecord) -> str:
    came = result(d)
    outcome = f". Outcome: {came}" if came else ""
    return f"Decision {d.number} after step {d.iteration}. {headline(d)}: {why(d)}{outcome}."


def _why(d: DecisionRecord) -> str:
    share = "" if d.gain is None else f", {gain(d.gain, d.gain_sd)} goodput expected"
    return f"after step {d.iteration}: {headline(d)}{share}: {why(d)}"


def _layout(run: RunHistory) -> list[Chart]:
    """The layout of every step; nothing where all steps have the same."""
    layouts = [run.layout_at(s.iteration - 1) for s in run.steps]
    names = sorted({name for name in layouts if name})
    places = [names.index(name) if name else None for name in layouts]
    chart = Chart(
        title="Layout",
        caption="Parallel layout of every step.",
        unit="",
        names=names,
        height=90 + 34 * len(names),
        series=[_stairs(run, "layout", places)],
    )
    return [chart] if len(names) > 1 else []


def _noise(run: RunHistory, record: Mapping[str, Any]) -> list[Chart]:
    """The noise scale with its interval, the batch, and what decisions went by, the last of which
    has the record."""
    known = [s for s in run.steps if s.noise_status is not None]
    columns = [[getattr(s, name) for s in known] for name in ("phi", "low", "high")]
    shown = [known[i] for i in sorted({i for c in columns for i in thinned(c, 500)})]
    used = [d for d in run.decisions.standing if d.account and d.account.critical_batch_size]
    used = [d for d in used if d.samples is not None]
    used = [used[i] for i in thinned([_used(d) for d in used], 400)]
    if not known and not used:
        return []
    believed: list[Series] = []
    words = ["The smoothed noise scale with its 95 % interval; the batch, dotted."]
    words = words if known else ["No step with a noise scale is recorded."]
    try:
        last = DecisionInputs.from_json(record["situation"])
        believed, words = _believed(used, last), [*words, *_used_words(last)]
    except FOREIGN:  # no decision, or a damaged one
        pass
    chart = Chart(
        title="Gradient noise scale",
        caption=" ".join([*words, *_open_words(known)]),
        unit="samples",
        is_log=True,
        series=[
            *believed,
            Series(
                name="95 % interval",
                x=[s.samples for s in shown],
                y=[None if s.high is None else s.low for s in shown],
                high=[s.high for s in shown],
                kind="band",
            ),
            Series(
                name="no upper end",
                x=[s.samples for s in shown],
                y=[s.low or 0.0 if s.high is None else None for s in shown],
                high=[None for _ in shown],
                kind="band",
                style="open",
            ),
            Series(name="noise scale", x=[s.samples for s in shown], y=[s.phi for s in shown]),
            _stairs(run, "batch", [s.batch for s in run.steps], style="third dotted"),
            Series(
                name="critical batch size",
                x=[d.samples or 0 for d in used],
                y=[_used(d) for d in used],
                tips=[f"step {d.iteration}: {_used(d):.4g}{_range(d)}" for d in used],
                kind="points",
                style="second",
            ),
        ],
    )
    return [chart]


def _believed(used: Sequence[DecisionRecord], last: DecisionInputs) -> list[Series]:
    """The belief of the critical batch size at some decisions, and what the law alone says."""
    if last.rules.policy != ADAPTIVE:
        return []
    law, ratio = belief_of(last.rules, (), last.total_samples), last.rules.length_ratio
    ranges = [d.account.critical_range for d in used if d.account]
    x = [d.samples or 0 for d in used]
    return [
        Series(
            name="believed range",
            x=x,
            y=[r and r[0] for r in ranges],
            high=[r and r[1] for r in ranges],
            kind="band",
            style="second",
        ),
        Series(
            name="law alone",
            x=x,
            y=[number(law.interval(at / ratio)[0]) for at in x],
            style="second dashed",
        ),
    ]


def _used_words(last: DecisionInputs) -> list[str]:
    """What decisions used of the chart of the noise scale."""
    multiplier = last.rules.noise_scale_multiplier
    if last.rules.policy != ADAPTIVE:
        used = f"Circles are {multiplier:g} times the noise scale at each decision."
        return [f"{used} The policy was {last.rules.policy}."]
    evidence = "No noise scale was good enough to be followed."
    if last.looks:
        factor = f"{math.exp(MULTIPLIER_SD):.0f}"
        evidence = (
            f"It followed the noise scale, taken {multiplier:g} times and good to a factor of "
            f"{factor}."
        )
    return [
        "Circles are the critical batch size that decisions believed in, with one standard "
        "deviation. The belief began with a published law, dashed, good to a factor of "
        f"{math.exp(LEVEL_SD):.0f}. {evidence}",
        f"At the last decision: {last.critical_batch_size_words}.",
    ]


def _open_words(steps: Sequence[Step]) -> list[str]:
    """Where the interval of the noise scale has no upper end, or nothing is known of it."""
    without = sum(s.phi is None and s.low is None for s in steps)
    is_open = sum(s.high is None for s in steps) - without
    words = [(is_open, "the interval had no upper end"), (without, "nothing was known of it")]
    parts = [f"in {num} of {counted(len(steps), 'step')} {what}" for num, what in words if num]
    return [f"Grey: {', '.join(parts)}."] if parts else []


def _used(d: DecisionRecord) -> float:
    """The critical batch size that a decision went by."""
    assert d.account is not None and d.account.critical_batch_size is not None
    return d.account.critical_batch_size


def _range(d: DecisionRecord) -> str:
    found = None if d.account is None else d.account.critical_range
    return "" if found is None else f" ({found[0]:.4g} to {found[1]:.4g})"


def render(report: Report) -> str:
    """The page. What a run says is escaped everywhere."""
    env = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    until = max((x for c in report.charts for s in c.series for x in s.x), default=0.0)
    page = (files("copus_ext.monitor") / "templates" / "report.html").read_text(encoding="utf-8")
    css = (files("copus_ext.monitor") / "templates" / "report.css").read_text(encoding="utf-8")
    return env.from_string(page).render(
        report=report,
        made=date(report.made_t),
        css=Markup(css),
        charts=[
            (c, draw(c, until, clock=report.clock), draw(c, until, NARROW, report.clock))
            for c in report.charts
            if any(s.x for s in c.series)
        ],
        candidate=facts.CANDIDATE,
        change=heads(only_proposed=report.only_proposed),
        lines=report.journal[-_MAX_LINES:],
        date=date,
        percent=percent,
    )
