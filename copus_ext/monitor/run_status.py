"""How a run stands: one value, from what its files say."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.spec_file import SpecError
from copus_ext.goodput.state import WINDOW_STEPS
from copus_ext.launch.restart_policy import CrashLimits
from copus_ext.monitor.controller_status import ControllerStatus, controller_status
from copus_ext.monitor.journal import MOVED, DecisionHistory
from copus_ext.monitor.liveness import RunLiveness, State, is_paused, latest_checkpoint, liveness
from copus_ext.monitor.run_files import END_BYTES, GOES_ON, RunHistory, RunReader, Step
from copus_ext.monitor.values import LINE, text, whole
from megatron.training.config.layout import Layout
from megatron.training.config.model_shape import ModelShape
from megatron.training.model.flops import training_flops_per_sample

SLOW_STEPS = 10
"""Medians without a step that are worth an alarm."""
MANY_RELAYOUTS = 3
"""Changes of layout an hour up to which there is no alarm."""
FAR_OFF = 0.2
"""Relative error of a predicted throughput that is worth an alarm, if it is more than two standard
deviations."""
_HOUR_S = 3600.0
_STEPS = 100
"""Last steps that are looked at."""
_ALARMS = 5
_MAX_FLOPS = 1e21
"""A peak above is an error."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The gradient noise scale after the last step."""

    status: str
    """`ok`, `lower_bound_only` or `none`."""
    phi_samples: float | None
    low_samples: float | None
    high_samples: float | None
    """95 % interval; no upper end when unbounded."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    iteration: int
    age_s: float
    """Seconds since it was committed."""
    steps_ago: int | None


@dataclass(frozen=True, kw_only=True)
class Alarm:
    name: str
    line: str
    iteration: int | None = None
    """Steps done when it was recorded; None if it holds now."""
    age_s: float | None = None
    """Seconds since; None if it holds now."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """How a run stands. What is unknown is None."""

    run: str
    """Its directory."""
    t: float
    """When this was read, seconds since the epoch."""
    state: State
    why: str
    """Why it is over, or what else to know."""
    silent_s: float | None
    """Seconds since the last sign of life."""
    launch: str
    """Name of the last launch."""
    launches: int
    launches_at_least: bool
    """Whether there may be more, before what was read of the record."""
    crashes: int
    """Launches that recorded no end and were followed by another."""
    iteration: int | None
    train_iterations: int | None
    """Steps of the whole run, as estimated at the last one."""
    consumed_samples: int | None
    train_samples: int | None
    share_done: float | None
    left_s: float | None
    """Seconds to the end of the run at the pace of the last steps, pauses included."""
    loss: float | None
    """Of the last step, nats per token."""
    valid_loss: float | None
    valid_iteration: int | None
    learning_rate: float | None
    grad_norm: float | None
    expert_load: float | None
    """Tokens of the busiest expert over the mean; None in a dense model."""
    skipped: int
    """Of the last hundred steps, those that left the weights unchanged."""
    step_s: float | None
    """Median seconds of the last steps of the current configuration."""
    samples_per_s: float | None
    """Throughput of all ranks."""
    tokens_per_s: float | None
    tflops_per_gpu: float | None
    """Arithmetic of the model, TFLOP/s of a rank."""
    mfu: float | None
    """That over the peak of the rank."""
    global_batch_size: int | None
    micro_batch_size: int | None
    layout: str
    """Such as `tp1.pp2.dp4`; empty if unknown."""
    noise: Noise | None
    """None without --copus."""
    controller: ControllerStatus | None
    """None without a journal."""
    paused: bool
    """Whether an operator has paused the controller."""
    saved: Saved | None
    """None before the first checkpoint."""
    alarms: tuple[Alarm, ...]
    """Newest last."""


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
    pace = _pace(run, steps, entered_t=entered_t, layout=layout)
    wall_samples_per_s = pace.pop("wall_samples_per_s", None)
    num_launches, crashes = _launches(run)
    valid = next((e for e in reversed(run.evaluations) if e.split == "valid"), None)
    measured = next((s for s in reversed(steps) if s.noise_status is not None), None)
    current = (layout, last and last.micro, last and last.batch)
    return RunStatus(
        run=text(run.path),
        t=t,
        state=signs.state,
        why=signs.why,
        silent_s=signs.silent_s,
        launch=run.launch,
        launches=num_launches,
        launches_at_least=not run.is_whole,
        crashes=len(crashes),
        train_iterations=last and last.train_iterations,
        loss=last and last.loss,
        valid_loss=valid and valid.loss,
        valid_iteration=valid and valid.iteration,
        learning_rate=last and last.rate,
        grad_norm=last and last.grad_norm,
        expert_load=last and last.expert_load,
        skipped=sum(not step.updated for step in steps),
        global_batch_size=last and last.batch,
        micro_batch_size=last and last.micro,
        layout=layout,
        noise=measured and _noise(measured),
        controller=controller_status(reader, run, current=current),
        paused=is_paused(run.path),
        saved=_saved(run, last, t),
        alarms=(
            *_recorded_alarms(run, t=t),
            *_alarms(run, signs, step_s=pace.get("step_s"), last=last, crashes=crashes, t=t),
        ),
        **_position(run, last, signs.is_alive, wall_samples_per_s),
        **pace,
    )


def seconds_left(run: RunHistory, *, t: float) -> float | None:
    """Seconds to the end of a run at the pace of its last steps; None if unknown, or if it is over.

    Args:
        run: what was read.
        t: now, seconds since the epoch.
    """
    steps = _last_steps(run)
    if not steps:
        return None
    entered_t, layout = _layout(run)
    pace = _pace(run, steps, entered_t=entered_t, layout=layout).get("wall_samples_per_s")
    return _position(run, steps[-1], liveness(run, t=t).is_alive, pace)["left_s"]


def _last_steps(run: RunHistory) -> list[Step]:
    """The last steps of the last launch; of the one before until it has one."""
    steps = run.steps[-_STEPS:]
    return [step for step in steps if step.launch == run.launch] or steps


def _noise(step: Step) -> Noise:
    return Noise(
        status=step.noise_status or "",
        phi_samples=step.phi,
        low_samples=step.low,
        high_samples=step.high,
    )


def _layout(run: RunHistory) -> tuple[float, str]:
    """When the current layout was entered, seconds since the epoch, and its name; 0 and the layout
    of the last decision or of the flags if the record does not say."""
    known = [
        (event.t or 0.0, text(event.about.get("layout")))
        for event in run.since_start
        if event.kind in ("run.start", "layout")
    ]
    known += [(s.t or 0.0, s.to) for s in run.decisions.relayouts if s.kind == MOVED]
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


def _position(
    run: RunHistory, last: Step | None, is_alive: bool, samples_per_s: float | None
) -> dict[str, Any]:
    """How far the run is, and how long it has to go."""
    source = last or (run.launches[-1] if run.launches else None)
    consumed, total = source and source.samples, whole(run.config.get("train_samples"))
    is_known = bool(total) and consumed is not None
    left = max(total - consumed, 0) if is_known and total and consumed is not None else None
    return {
        "iteration": source and source.iteration,
        "consumed_samples": consumed,
        "train_samples": total,
        "share_done": consumed / total if is_known and total and consumed is not None else None,
        "left_s": left / samples_per_s if is_alive and left is not None and samples_per_s else None,
    }


def _pace(
    run: RunHistory, steps: Sequence[Step], *, entered_t: float, layout: str
) -> dict[str, Any]:
    """Speed of the last steps of one configuration; `wall_samples_per_s` counts the time between
    them too.

    Args:
        run: what was read.
        steps: the last ones.
        entered_t: when the layout was entered, seconds since the epoch.
        layout: the current one.
    """
    names = ("step_s", "samples_per_s", "tokens_per_s", "tflops_per_gpu", "mfu")
    found: dict[str, Any] = dict.fromkeys(names)
    steps = _of_one_configuration(steps, entered_t)
    batch = steps[-1].batch if steps else None
    times = [step.seconds for step in steps if step.seconds is not None and step.seconds > 0]
    if not batch or not times:
        return found
    step_s = statistics.median(times)
    samples_per_s = batch / step_s
    wall_s = (steps[-1].t or 0.0) - (steps[0].t or 0.0)
    found |= {"step_s": step_s, "samples_per_s": samples_per_s}
    wall_samples_per_s = (len(steps) - 1) * batch / wall_s if wall_s > 0 else samples_per_s
    counted = run.tokens_per_sample
    length = steps[-1].seq_length or counted
    if length is not None:
        found["tokens_per_s"] = length * samples_per_s
    # What is left is counted in samples of the first length.
    ratio = length / counted if length and counted else 1.0
    found["wall_samples_per_s"] = wall_samples_per_s * ratio
    flops = _flops_of_a_rank({**run.config, "seq_length": length}, layout, samples_per_s)
    if flops is not None:
        found["tflops_per_gpu"] = flops / 1e12
        peak = _peak_flops(run)
        found["mfu"] = None if peak is None else flops / peak
    return found


def _of_one_configuration(steps: Sequence[Step], entered_t: float) -> list[Step]:
    """The last steps of one batch and layout; until the layout has one, those before."""
    found: list[Step] = []
    for step in reversed(steps):
        last = steps[-1]
        is_other = (step.batch, step.micro, step.seq_length) != (
            last.batch,
            last.micro,
            last.seq_length,
        )
        if is_other or (step.t or 0.0) < entered_t <= (steps[-1].t or 0.0):
            break
        found.append(step)
    return found[::-1]


def _flops_of_a_rank(config: Mapping[str, Any], layout: str, samples_per_s: float) -> float | None:
    """Arithmetic of the model per second; None where the flags do not tell."""
    names = ["num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"]
    names += ["num_query_groups", "kv_channels", "seq_length", "padded_vocab_size"]
    if not all(whole(config.get(name)) for name in names):
        return None
    try:
        flops = training_flops_per_sample(ModelShape.of(config), config["seq_length"])
        return flops * samples_per_s / Layout.from_text(layout).world_size
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return None


def _peak_flops(run: RunHistory) -> float | None:
    """Of a rank, as the controller recorded it, or of the machine that the flags name. No file that
    the flags name is opened: its path is one of the machine that trains."""
    known = run.decisions.peak_flops
    if known is not None and 0 < known < _MAX_FLOPS:
        return known
    kind = text(run.config.get("copus_cluster")).partition(":")[0]
    try:
        gpu = preset(f"{kind}:1").gpu
    except SpecError:
        return None
    half = run.config.get("bf16") is True or run.config.get("fp16") is True
    return gpu.peak("bf16" if half else "fp32")


def _saved(run: RunHistory, last: Step | None, t: float) -> Saved | None:
    commits = [
        (event.iteration, event.t or 0.0)
        for event in run.events
        if event.kind == "checkpoint.commit" and event.iteration is not None
    ]
    known = commits[-1] if commits else latest_checkpoint(run.path)
    if known is None:
        return None
    iteration, then = known
    since = None if last is None else max(last.iteration - iteration, 0)
    return Saved(iteration=iteration, age_s=max(t - then, 0.0), steps_ago=since)


def _launches(run: RunHistory) -> tuple[int, list[float]]:
    """Number of launches, and when those began that followed a crash."""
    crashes: list[float] = []
    is_open = False
    for event in run.events:
        if event.kind == "run.start":
            # Where a launch goes on with other ranks, there is a start and no new launch.
            goes_on = event.about.get("why") in GOES_ON
            crashes += [event.t or 0.0] if is_open and not goes_on else []
            is_open = True
        elif event.kind == "run.end":
            is_open = False
    return sum(not launch.entered for launch in run.launches), crashes


def _recorded_alarms(run: RunHistory, *, t: float) -> list[Alarm]:
    """The last alarms that the last launch recorded."""
    found = []
    for event in run.since_start:
        if event.kind in ("alert", "fault"):
            name = text(event.about.get("alert") or event.about.get("fault"), LINE)
            line = text(event.about.get("line"), LINE) or name
            age_s = max(t - (event.t or 0.0), 0.0)
            found.append(Alarm(name=name, line=line, iteration=event.iteration, age_s=age_s))
    return found[-_ALARMS:]


def _alarms(
    run: RunHistory,
    signs: RunLiveness,
    *,
    step_s: float | None,
    last: Step | None,
    crashes: Sequence[float],
    t: float,
) -> list[Alarm]:
    """What holds now.

    Args:
        run: what was read.
        signs: of life.
        step_s: median step.
        last: step.
        crashes: when launches began that followed a crash.
        t: now, seconds since the epoch.
    """
    lines: dict[str, str] = {}
    age_s = None if last is None else t - (last.t or 0.0)
    if signs.state == "training" and step_s and age_s and age_s > max(SLOW_STEPS * step_s, 10.0):
        lines["no step"] = f"no step for {age_s:.0f} s, {age_s / step_s:.0f} times the median"
    ratio, doubt = _last_ratio(run.decisions) or (1.0, 0.0)
    if abs(ratio - 1) > max(FAR_OFF, 2.0 * doubt):
        off = f"{100 * (ratio - 1):+.0f} %"
        lines["prediction"] = f"the last change runs {off} off the predicted throughput"
    if signs.is_alive:
        switched = [s.t for s in run.decisions.relayouts if s.kind == MOVED and s.t]
        lately = sum(t - then < _HOUR_S for then in switched)
        if lately > MANY_RELAYOUTS:
            lines["many changes"] = f"the layout changed {lately} times within an hour"
        limits = CrashLimits()
        lately = sum(t - then < _HOUR_S for then in crashes)
        if 2 * lately >= limits.per_hour or 2 * len(crashes) >= limits.per_run:
            lines["restarts"] = (
                f"{lately} crashes within an hour, {len(crashes)} in all; by default a supervisor "
                f"allows {limits.per_hour} and {limits.per_run}"
            )
    return [Alarm(name=name, line=line) for name, line in lines.items()]


def _last_ratio(decisions: DecisionHistory) -> tuple[float, float] | None:
    """Measured over predicted throughput of the last change that was measured long enough, and the
    relative standard deviation of the prediction."""
    known = (d.outcome for d in reversed(decisions.made) if d.outcome is not None)
    ratios = ((o.ratio, o.predicted_sd or 0.0) for o in known if (o.steps or 0) >= WINDOW_STEPS)
    return next(((ratio, sd) for ratio, sd in ratios if ratio is not None), None)
