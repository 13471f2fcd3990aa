"""How a run and its controller stand: one value, from what the files of the run say.

What is unknown is None or empty; `_s` are seconds, `_sd` of a gain is the standard deviation of the
logarithm of 1 plus the gain.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from copus_ext.goodput.headroom import Headroom
from copus_ext.goodput.inputs import DecisionInputs
from copus_ext.monitor.journal import MOVED, SCHEDULED, DecisionRecord, RelayoutRecord
from copus_ext.monitor.liveness import OVER, RunLiveness, State, is_paused, liveness
from copus_ext.monitor.run_files import (
    END_BYTES,
    GOES_ON,
    RunHistory,
    RunReader,
    Step,
    first_step,
)
from copus_ext.monitor.time_saved import TimeSaved, so_far
from copus_ext.monitor.values import FOREIGN, LINE, text, whole
from copus_ext.monitor.verdict import verdict
from megatron.trainer.config.layout import Layout
from megatron.trainer.resilience.lock import STALE_S

SLOW_STEPS = 10
"""Medians without a step that are worth an alarm."""
_STEPS = 100
"""Last steps that are looked at."""
_ALARMS = 5
OBSERVED = "only observed"
"""State of a change that was only proposed."""
_CHANGES = 8
"""Last changes that are shown."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The gradient noise scale after the last step, with its 95 % interval."""

    status: str
    """`ok`, `lower_bound_only` or `none`."""
    phi_samples: float | None
    low_samples: float | None
    high_samples: float | None
    """None while it is unbounded."""
    measured_at: int | None
    """The last step that was measured; None: none of the record."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """From the begin of the last launch to the end of its first step, seconds."""

    processes_s: float
    """For processes, imports and rendezvous, until the record began."""
    building_s: float
    """For data, model and checkpoint."""
    step_s: float


@dataclass(frozen=True, kw_only=True)
class Saved:
    iteration: int
    age_s: float
    steps_ago: int | None


@dataclass(frozen=True, kw_only=True)
class Alarm:
    name: str
    line: str
    iteration: int | None = None
    """Steps done when it was recorded; None if it holds now."""
    age_s: float | None = None
    """None if it holds now."""


@dataclass(frozen=True, kw_only=True)
class ChangeStatus:
    """A decision to change something, and its outcome."""

    number: int | None
    """Of the decision."""
    iteration: int | None
    kind: str
    """`batch`, or `relayout` if the layout changes too."""
    to: str
    gain: float | None
    """Predicted gain in goodput."""
    gain_sd: float | None
    samples_per_s_before: float | None
    predicted_samples_per_s: float | None
    """None where nothing had told how fast this machine is."""
    predicted_sd: float | None
    samples_per_s: float | None
    """Measured; None before it is known."""
    speed_over_predicted: float | None
    pause_s: float | None
    state: str
    """`measured`, `being measured`, `OBSERVED`, `under way`, `scheduled`, or why it was not
    made; after the end of a run also `not measured` and `not finished`."""


@dataclass(frozen=True, kw_only=True)
class ControllerStatus:
    mode: str
    """`act` or `observe`."""
    policy: str
    iteration: int | None = None
    """Step of the last decision."""
    kind: str = ""
    """Of the last decision: `stay`, `batch` or `relayout`."""
    reason: str = "nothing decided yet"
    """Why the last decision came out as it did, or why there is none."""
    critical_batch_size: float | None = None
    """What the last decision went by, samples."""
    critical_batch_size_source: str = ""
    """That size and what it comes from, in words."""
    headroom: Headroom | None = None
    """What there is to gain in the rest of the run."""
    so_far: str = ""
    """What was gained so far against staying at the start, or why that is not known."""
    time_saved: TimeSaved | None = None
    changes: tuple[ChangeStatus, ...] = ()
    """The last eight, newest last."""
    num_changes: int = 0
    """Of the whole run, as far as it was read."""
    num_proposals: int = 0
    """Of a controller that only observed; equal ones count once."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    run: str
    t: float
    """When this was read, seconds since the epoch."""
    state: State
    why: str
    """Why it is over, or what else to know."""
    verdict: str
    """What the controller did and whether the run was sooner for it, in a sentence."""
    silent_s: float | None
    """Since the last sign of life."""
    launch: str
    launches: int
    launches_at_least: bool
    """Whether there may be more, before what was read of the record."""
    start: Start | None
    """Of the last launch; None before its first step, or where the record does not tell."""
    crashes: int
    """Launches that recorded no end and were followed by another."""
    losses: int
    """Times that launches went on with the ranks that were left."""
    iteration: int | None
    train_iterations: int | None
    """Of the whole run, as estimated at the last step."""
    consumed_samples: int | None
    train_samples: int | None
    share_done: float | None
    left_s: float | None
    """To the end of the run at the pace of the last steps, pauses included."""
    loss: float | None
    """Of the last step, nats per token."""
    valid_loss: float | None
    valid_iteration: int | None
    skipped: int
    """Of the last hundred steps, those that left the weights unchanged."""
    step_s: float | None
    """Median of the last steps of the current configuration."""
    samples_per_s: float | None
    """Of all ranks."""
    tokens_per_s: float | None
    global_batch_size: int | None
    micro_batch_size: int | None
    layout: str
    noise: Noise | None
    """None without --copus."""
    controller: ControllerStatus | None
    """None without a journal."""
    paused: bool
    """Whether an operator has paused the controller."""
    saved: Saved | None
    unread: dict[str, int]
    """Lines of a file, by its name, that are no records, as far as it was read."""
    alarms: tuple[Alarm, ...]
    """Newest last."""

    @property
    def is_alive(self) -> bool:
        """Whether the run goes on, as far as can be seen."""
        return RunLiveness(state=self.state, why=self.why, silent_s=self.silent_s).is_alive

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come. One that was stopped or has failed may be started again,
        by its supervisor at once, and counts after two minutes of silence."""
        is_silent = self.silent_s is not None and self.silent_s > STALE_S
        return self.state == "done" or (self.state in OVER and is_silent)


def read_status(run: Path, *, t: float | None = None) -> RunStatus:
    """How a run stands; see `status_of`."""
    return status_of(RunReader(run, max_bytes=END_BYTES), t=t)


def status_of(reader: RunReader, *, t: float | None = None) -> RunStatus:
    """How a run stands.

    Args:
        reader: of the run; reads what is new.
        t: now, seconds since the epoch; None asks the clock.

    Raises:
        OSError: a file of the run cannot be read.
    """
    t = time.time() if t is None else t
    reader.refresh()
    run = reader.history()
    steps = _last_steps(run)
    last = steps[-1] if steps else None
    signs = liveness(run, t=t)
    entered_t, layout = _layout(run)
    regular = _regular(run, steps)
    pace = _pace(run, regular, entered_t)
    valid = next((e for e in reversed(run.evaluations) if e.split == "valid"), None)
    noisy = next((s for s in reversed(steps) if s.noise_status is not None), None)
    source = last or (run.launches[-1] if run.launches else None)
    consumed, total = source and source.samples, whole(run.config.get("train_samples"))
    line, saved = so_far(run)
    return RunStatus(
        run=text(run.path),
        t=t,
        state=signs.state,
        why=signs.why,
        verdict=verdict(signs, run, line, saved),
        silent_s=signs.silent_s,
        launch=run.launch,
        launches=sum(not launch.entered for launch in run.launches),
        launches_at_least=not run.is_whole,
        start=_start(run),
        crashes=_crashes(run),
        losses=sum(launch.entered == "loss" for launch in run.launches),
        iteration=source and source.iteration,
        train_iterations=last and last.train_iterations,
        consumed_samples=consumed,
        train_samples=total,
        share_done=consumed / total if total and consumed is not None else None,
        left_s=seconds_left(run, t=t),
        loss=last and last.loss,
        valid_loss=valid and valid.loss,
        valid_iteration=valid and valid.iteration,
        skipped=sum(not step.updated for step in steps),
        step_s=pace.step_s,
        samples_per_s=pace.samples_per_s,
        tokens_per_s=pace.tokens_per_s,
        global_batch_size=regular[-1].batch if regular else None,
        micro_batch_size=regular[-1].micro if regular else None,
        layout=layout,
        noise=noisy and _noise(noisy, run.steps),
        controller=_controller(reader, run, signs, line, saved),
        paused=is_paused(run.path),
        saved=_saved(run, last, t),
        unread=run.unread,
        alarms=_alarms(run, t=t, step_s=pace.step_s if signs.state == "training" else None),
    )


def seconds_left(run: RunHistory, *, t: float) -> float | None:
    """Seconds to the end of a run at the pace of its last steps; None if unknown, or if it is over.

    Args:
        run: what was read.
        t: now, seconds since the epoch.
    """
    steps, total = _last_steps(run), whole(run.config.get("train_samples"))
    pace = _pace(run, steps, _layout(run)[0]).wall_samples_per_s
    if not (steps and total and pace and liveness(run, t=t).is_alive):
        return None
    return max(total - steps[-1].samples, 0) / pace


def _last_steps(run: RunHistory) -> list[Step]:
    """The last steps of the last launch; of the one before until it has one."""
    steps = run.steps[-_STEPS:]
    return [step for step in steps if step.launch == run.launch] or steps


def _regular(run: RunHistory, steps: list[Step]) -> list[Step]:
    """Without a last step of the samples that were left over, which no configuration chose."""
    total = whole(run.config.get("train_samples"))
    is_rest = len(steps) > 1 and total is not None and steps[-1].samples >= total
    is_rest = is_rest and (steps[-1].batch or 0) < (steps[-2].batch or 0)
    return steps[:-1] if is_rest else steps


def _start(run: RunHistory) -> Start | None:
    launch = run.launches[-1] if run.launches else None
    if launch is None or launch.t is None or launch.launched_t is None:
        return None
    built_t, first = first_step(run, launch)
    if built_t is None or first is None:
        return None
    return Start(
        processes_s=max(launch.t - launch.launched_t, 0.0),
        building_s=max(built_t - launch.t, 0.0),
        step_s=first.seconds or 0.0,
    )


def _noise(step: Step, steps: Sequence[Step]) -> Noise:
    return Noise(
        status=step.noise_status or "",
        phi_samples=step.phi,
        low_samples=step.low,
        high_samples=step.high,
        measured_at=next((s.iteration for s in reversed(steps) if s.noise_measured), None),
    )


def _layout(run: RunHistory) -> tuple[float, str]:
    """When the current layout was entered, seconds since the epoch, and its name; 0 and the layout
    of the last decision or of the flags if the record does not say."""
    known = [
        (event.t or 0.0, text(event.about.get("layout")))
        for event in run.since_start
        if event.kind in ("run.start", "layout")
    ]
    known += [(s.t or 0.0, s.to) for s in run.relayouts if s.kind == MOVED]
    if known:
        return max(known)
    standing = run.decisions.standing
    return 0.0, (standing[-1].now.layout if standing else "") or _layout_of_flags(run.config)


def _layout_of_flags(config: Mapping[str, Any]) -> str:
    needed = ("tensor_model", "pipeline_model", "data")
    if not all(whole(config.get(f"{name}_parallel_size")) for name in needed):
        return ""
    try:
        return str(Layout.of_arguments(config))
    except (TypeError, ValueError):
        return ""


class _Pace(NamedTuple):
    """Speed of the last steps of one configuration."""

    step_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    wall_samples_per_s: float | None = None
    """With the time between the steps, in samples in which the run counts."""


def _pace(run: RunHistory, steps: Sequence[Step], entered_t: float) -> _Pace:
    """The pace of the last steps in a layout that was entered then."""
    steps = _of_one_configuration(steps, entered_t)
    batch = steps[-1].batch if steps else None
    times = [step.seconds for step in steps if step.seconds is not None and step.seconds > 0]
    if not batch or not times:
        return _Pace()
    step_s = statistics.median(times)
    wall_s = (steps[-1].t or 0.0) - (steps[0].t or 0.0)
    wall = (len(steps) - 1) * batch / wall_s if wall_s > 0 else batch / step_s
    counted = run.tokens_per_sample
    length = steps[-1].seq_length or counted
    tokens_per_s = None if length is None else length * batch / step_s
    return _Pace(
        step_s, batch / step_s, tokens_per_s, wall * (length / counted if length and counted else 1)
    )


def _of_one_configuration(steps: Sequence[Step], entered_t: float) -> list[Step]:
    """The last steps of one batch and layout; until the layout has one, those before."""
    found: list[Step] = []
    for step in reversed(steps):
        last = steps[-1]
        sizes = (step.batch, step.micro, step.seq_length)
        is_other = sizes != (last.batch, last.micro, last.seq_length)
        if is_other or (step.t or 0.0) < entered_t <= (last.t or 0.0):
            break
        found.append(step)
    return found[::-1]


def _saved(run: RunHistory, last: Step | None, t: float) -> Saved | None:
    commits = [event for event in run.events if event.kind == "checkpoint.commit"]
    iteration = commits[-1].iteration if commits else None
    if iteration is None:
        return None
    since = None if last is None else max(last.iteration - iteration, 0)
    age_s = max(t - (commits[-1].t or 0.0), 0.0)
    return Saved(iteration=iteration, age_s=age_s, steps_ago=since)


def _crashes(run: RunHistory) -> int:
    """Launches that recorded no end and were followed by another."""
    num, is_open = 0, False
    for event in run.events:
        if event.kind == "run.start":
            # Where a launch goes on with other ranks, there is a start and no new launch.
            num += is_open and event.about.get("why") not in GOES_ON
            is_open = True
        elif event.kind == "run.end":
            is_open = False
    return num


def _alarms(run: RunHistory, *, t: float, step_s: float | None) -> tuple[Alarm, ...]:
    """The last alarms that the last launch recorded; and, of a run that trains at a median step,
    whether one is overdue."""
    found = []
    for event in run.since_start:
        if event.kind in ("alert", "fault"):
            name = text(event.about.get("alert") or event.about.get("fault"), LINE)
            line = text(event.about.get("line"), LINE) or name
            age_s = max(t - (event.t or 0.0), 0.0)
            found.append(Alarm(name=name, line=line, iteration=event.iteration, age_s=age_s))
    late_s = t - (run.steps[-1].t or 0.0) if run.steps else 0.0
    if step_s and late_s > max(SLOW_STEPS * step_s, 10.0):
        line = f"no step for {late_s:.0f} s, {late_s / step_s:.0f} times the median"
        found.append(Alarm(name="no step", line=line))
    return tuple(found[-_ALARMS:])


# The controller.


def _controller(
    reader: RunReader, run: RunHistory, signs: RunLiveness, line: str, saved: TimeSaved | None
) -> ControllerStatus | None:
    """The controller of a run; None without a journal."""
    decisions, standing = run.decisions, run.decisions.standing
    if decisions.is_empty:
        return None
    changes = changes_of(run, is_alive=signs.is_alive)
    known: dict[str, Any] = {}
    if standing:
        try:
            known = _last_decision(reader.decision_at(standing[-1].place))
        except FOREIGN:
            known["reason"] = "the record of this decision is damaged"
    if decisions.failure:
        known |= {"kind": "", "reason": f"controller disabled: {text(decisions.failure, LINE)}"}
    mode, policy = decisions.mode, text(decisions.flags.get("copus_policy"), LINE)
    if not mode:  # the start of the launch is not among the lines that were read
        mode, policy = (text(run.config.get(f"copus_{name}")) for name in ("mode", "policy"))
    return ControllerStatus(
        so_far=line,
        time_saved=saved,
        mode=mode or "act",
        policy=policy,
        headroom=decisions.headroom,
        changes=tuple(changes[-_CHANGES:]),
        num_changes=sum(change.state != OBSERVED for change in changes),
        num_proposals=sum(change.state == OBSERVED for change in changes),
        **known,
    )


def _last_decision(record: Mapping[str, Any]) -> dict[str, Any]:
    s = DecisionInputs.from_json(record["situation"])
    return {
        "iteration": s.iteration,
        "kind": text(record["decision"]["kind"], LINE),
        "reason": text(record["decision"]["reason"], LINE),
        "critical_batch_size": s.critical_batch_size,
        "critical_batch_size_source": s.critical_batch_size_words,
    }


def changes_of(run: RunHistory, *, is_alive: bool) -> list[ChangeStatus]:
    """Every decision to change something that no restart has undone, each once: a launch that goes
    on from there may decide it again. Of equal proposals the last stands for all. Moves of
    --layout-schedule stand among them."""
    chosen = {(d.number, d.iteration): d for d in run.decisions.standing if d.is_change}
    last = {(d.now, d.to): d for d in chosen.values() if d.is_proposal}
    kept = [d for d in chosen.values() if not d.is_proposal or last[d.now, d.to] is d]
    changes = [_change(d, is_alive=is_alive) for d in kept]
    changes += map(_scheduled, run.scheduled_moves)
    return sorted(changes, key=lambda change: change.iteration or 0)


def only_proposed(changes: Sequence[ChangeStatus]) -> bool:
    """Whether there are changes, and all of them were only observed."""
    return bool(changes) and all(change.state == OBSERVED for change in changes)


def _scheduled(move: RelayoutRecord) -> ChangeStatus:
    """A move of --layout-schedule, of which nothing is predicted or measured."""
    return ChangeStatus(
        number=None,
        iteration=move.iteration,
        kind="relayout",
        to=f"{move.to}, {SCHEDULED}",
        gain=None,
        gain_sd=None,
        samples_per_s_before=None,
        predicted_samples_per_s=None,
        predicted_sd=None,
        samples_per_s=None,
        speed_over_predicted=None,
        pause_s=move.pause_s,
        state="scheduled",
    )


def _change(d: DecisionRecord, *, is_alive: bool) -> ChangeStatus:
    outcome, relayout = d.outcome, d.relayout
    to = d.to if outcome is None else outcome.after
    changes_layout = d.kind == "relayout" or relayout is not None
    changes_layout |= outcome is not None and outcome.before.layout != outcome.after.layout
    words = [f"batch {to.batch} in {to.micro}"] if to.batch and to.micro else []
    pause_s = None if outcome is None else outcome.pause_s
    if changes_layout:
        words.append(to.layout or (relayout.to if relayout is not None else ""))
        pause_s = None if relayout is None else relayout.pause_s
    told = d if outcome is None or outcome.gain is None else outcome
    predicted = d if outcome is None else outcome
    return ChangeStatus(
        number=d.number,
        iteration=d.iteration,
        kind="relayout" if changes_layout else "batch",
        to=" on ".join(filter(None, words)),
        gain=told.gain,
        gain_sd=told.gain_sd,
        samples_per_s_before=outcome and outcome.speed_before,
        predicted_samples_per_s=predicted.predicted,
        predicted_sd=predicted.predicted_sd,
        samples_per_s=outcome and outcome.speed,
        speed_over_predicted=outcome and outcome.ratio,
        pause_s=pause_s,
        state=_state(d, is_alive=is_alive),
    )


def _state(d: DecisionRecord, *, is_alive: bool) -> str:
    if d.outcome is not None:
        return "measured"
    if not d.applied:
        return OBSERVED
    if d.relayout is not None and not d.was_made:
        return f"not done: {text(d.relayout.reason or d.relayout.kind, LINE)}"
    if is_alive:
        return "being measured" if d.was_made else "under way"
    return "not measured" if d.was_made else "not finished"
