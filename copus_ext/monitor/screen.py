"""How a run stands, for a person: one screen, from 60 columns on, or plain lines in a pipe."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from copus_ext.monitor.deciding import Change, ControllerStatus
from copus_ext.monitor.now import RunStatus
from copus_ext.monitor.signs import State
from megatron.training.common.errors import counted

_STYLES: dict[State, str] = {
    "starting": "cyan",
    "training": "bold green",
    "evaluating": "cyan",
    "saving": "cyan",
    "changing layout": "bold magenta",
    "done": "bold blue",
    "stopped": "yellow",
    "failed": "bold red",
    "lost": "bold red",
}
_LABEL = "dim"


def screen(now: RunStatus) -> RenderableType:
    """All of it. Texts of the run are shown as they are: nothing in them is markup."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style=_LABEL, no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in _rows(now):
        grid.add_row(Text(label), Text(value) if isinstance(value, str) else value)
    parts: list[RenderableType] = [grid]
    if now.deciding is not None and now.deciding.changes:
        parts.append(_changes(now.deciding))
    for alarm in now.alarms:
        when = "" if alarm.age_s is None else f" ({duration(alarm.age_s)} ago)"
        parts.append(Text(f"! {alarm.line}{when}", style="red"))
    return Group(*parts)


def _rows(now: RunStatus) -> Iterator[tuple[str, RenderableType]]:
    state = Text(now.state, style=_STYLES.get(now.state, ""))
    if now.why:
        state.append(f": {now.why}", style="default")
    yield "run", now.run
    yield "state", state
    if now.state not in ("empty", "training") and now.silent_s is not None:
        label = "ended" if now.state in ("done", "stopped") else "last sign"
        yield label, f"{duration(now.silent_s)} ago"
    if now.launch:
        yield "launch", _launches(now)
    if now.iteration is not None:
        yield "step", _step(now)
    if now.share_done is not None:
        yield "", ProgressBar(total=1.0, completed=min(now.share_done, 1.0), width=40)
    if now.left_s is not None:
        yield "time left", duration(now.left_s)
    if now.loss is not None or now.valid_loss is not None:
        yield "loss", _loss(now)
    if now.step_s is not None:
        yield "speed", _speed(now)
    if now.batch is not None:
        yield "now", f"{_sizes(now.batch, now.micro_batch)} on {now.layout or 'an unknown layout'}"
    if now.noise is not None:
        yield "noise scale", _noise(now)
    if now.deciding is not None:
        yield from _decisions(now.deciding, paused=now.paused)
    yield "checkpoint", _saved(now)


def _launches(now: RunStatus) -> str:
    if now.launches_at_least and not now.launches:
        return f"{now.launch}, restarts unknown: it began long ago"
    least = "at least " if now.launches_at_least else ""
    crashes = "1 crash" if now.crashes == 1 else f"{now.crashes} crashes"
    again = counted(max(now.launches - 1, 0), "restart")
    return f"{now.launch}, {least}{again}, {crashes}"


def _step(now: RunStatus) -> str:
    of = "" if now.train_iterations is None else f" of {now.train_iterations:,}"
    share = "" if now.share_done is None else f", {100 * now.share_done:.1f} %"
    samples = "" if now.consumed_samples is None else f", {now.consumed_samples:,} samples"
    skipped = f", {now.skipped} of the last steps skipped" if now.skipped else ""
    return f"{now.iteration:,}{of}{share}{samples}{skipped}"


def _loss(now: RunStatus) -> str:
    parts = [] if now.loss is None else [f"{now.loss:.4f}"]
    if now.valid_loss is not None:
        where = "" if now.valid_iteration is None else f" at step {now.valid_iteration:,}"
        parts.append(f"validation {now.valid_loss:.4f}{where}")
    if now.learning_rate is not None:
        parts.append(f"learning rate {now.learning_rate:.3g}")
    return ", ".join(parts)


def _speed(now: RunStatus) -> str:
    parts = []
    if now.tokens_per_s is not None:
        parts.append(f"{_short(now.tokens_per_s)} tokens/s")
    if now.step_s is not None:
        parts.append(f"{_short(now.step_s)} s a step")
    if now.tflops_per_gpu is not None:
        parts.append(f"{_short(now.tflops_per_gpu)} TFLOP/s a rank")
    if now.mfu is not None:
        parts.append(f"MFU {100 * now.mfu:.1f} %")
    return ", ".join(parts)


def _noise(now: RunStatus) -> str:
    noise, deciding = now.noise, now.deciding
    assert noise is not None
    if noise.status == "none" or noise.low_samples is None:
        return "not measured"
    phi = "unknown" if noise.phi_samples is None else f"{noise.phi_samples:.1f}"
    high = "unbounded" if noise.high_samples is None else f"{noise.high_samples:.1f}"
    critical, multiplier = "", None if deciding is None else deciding.noise_scale_multiplier
    if multiplier is not None and noise.phi_samples is not None:
        size = multiplier * noise.phi_samples
        critical = f"; critical batch size {size:.1f} = {multiplier:g} x that"
    return f"{phi} samples [{noise.low_samples:.1f}, {high}]{critical}"


def _decisions(deciding: ControllerStatus, *, paused: bool) -> Iterator[tuple[str, RenderableType]]:
    mode = {"observe": "observes only, "}.get(deciding.mode, "")
    where = "" if deciding.iteration is None else f"at step {deciding.iteration:,}: "
    held = "paused by control/pause; " if paused else ""
    yield "decided", f"{held}{mode}{where}{deciding.reason}"
    if deciding.goodput is not None:
        yield "goodput", f"{_short(deciding.goodput)} useful samples/s"
    if (best := deciding.best) is not None:
        worth = "" if best.goodput is None else f", {_short(best.goodput)} useful samples/s"
        needs = "" if best.needed is None else f", needs {_percent(best.needed)}"
        gain = "" if best.gain is None else f": gains {_percent(best.gain)}{needs}"
        told = gain.removeprefix(": ")
        kept = "" if best.verdict == told else f"; {best.verdict}"
        yield "next", f"{_sizes(best.batch, best.micro_batch)} on {best.layout}{gain}{worth}{kept}"


def _saved(now: RunStatus) -> str:
    if now.saved is None:
        return "none"
    ago = now.saved.steps_ago
    steps = "" if ago is None else ", 1 step" if ago == 1 else f", {ago:,} steps"
    return f"of step {now.saved.iteration:,}, {duration(now.saved.age_s)}{steps} ago"


def _changes(deciding: ControllerStatus) -> Table:
    """The last ones: what was predicted, and what came."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style=_LABEL)
    table.add_column("step", justify="right")
    table.add_column("changed to", overflow="fold", ratio=1)
    for name in ("goodput", "samples/s", "measured"):
        table.add_column(name, justify="right")
    table.add_column("pause", justify="right", no_wrap=True)
    for change in deciding.changes:
        table.add_row(*(Text(cell) for cell in _cells(change)))
    return table


def _cells(change: Change) -> list[str]:
    measured = change.state
    if change.state == "measured":
        measured = "nothing" if change.samples_per_s is None else _short(change.samples_per_s)
        if change.speed_over_predicted is not None:
            measured += f" ({100 * (change.speed_over_predicted - 1):+.0f}%)"
    speed = change.predicted_samples_per_s
    return [
        "" if change.iteration is None else f"{change.iteration:,}",
        change.to,
        "" if change.gain is None else f"{100 * change.gain:+.1f}%",
        "" if speed is None else _short(speed),
        measured,
        "" if change.pause_s is None else f"{change.pause_s:.1f} s",
    ]


def _sizes(batch: int, micro_batch: int | None) -> str:
    return f"batch {batch:,}" + ("" if micro_batch is None else f" in {micro_batch:,}")


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _short(value: float) -> str:
    """Three digits that count, all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds in the two units that count."""
    if not math.isfinite(seconds):
        return "unknown"
    s = max(round(seconds), 0)
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min" + (f" {s % 60} s" if s < 600 and s % 60 else "")
    if s < 48 * 3600:
        return f"{s // 3600} h {s % 3600 // 60} min"
    return f"{s // 86400} d {s % 86400 // 3600} h"
