"""How a run stands on a terminal of 60 columns or more, or as plain lines in a pipe."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from copus_ext.monitor.explain import date, seconds, time_left
from copus_ext.monitor.explain import gain as expected
from copus_ext.monitor.liveness import State
from copus_ext.monitor.run_files import unread_words
from copus_ext.monitor.run_status import (
    ChangeStatus,
    ControllerStatus,
    RunStatus,
    Start,
    only_proposed,
)
from megatron.trainer.common.errors import counted

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


def screen(status: RunStatus) -> RenderableType:
    """The whole status. Texts of the run are shown as they are, without markup."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style=_LABEL, no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in rows(status):
        style = _STYLES.get(status.state, "") if label == "state" else ""
        grid.add_row(Text(label), Text(value, style=style))
        if label == "step" and status.share_done is not None:
            done = min(status.share_done, 1.0)
            grid.add_row(Text(""), ProgressBar(total=1.0, completed=done, width=40))
    parts: list[RenderableType] = [grid]
    if status.controller is not None and status.controller.changes:
        parts.append(_changes(status.controller))
        if left_out := _left_out(status.controller):
            parts.append(Text(f"{left_out}; copus report {status.run} shows all", style=_LABEL))
    parts += [Text(f"! {line}", style="red") for line in alarms(status)]
    return Group(*parts)


def alarms(status: RunStatus, *, on_page: bool = False) -> list[str]:
    ages = (x.age_s for x in status.alarms)
    when = ("" if s is None else f" ({_when(s, status.t, on_page=on_page)})" for s in ages)
    return [f"{alarm.line}{at}" for alarm, at in zip(status.alarms, when)]


def _when(age_s: float, t: float, *, on_page: bool) -> str:
    """How long ago something was; on a page, which may be read much later, the time of day.

    Args:
        age_s: seconds from it until `t`.
        t: now, seconds since the epoch.
    """
    return f"{date(t - age_s)} UTC" if on_page else f"{seconds(age_s)} ago"


def rows(status: RunStatus, *, on_page: bool = False) -> Iterator[tuple[str, str]]:
    """Label and words of what is known, for a screen and for a page."""
    yield "run", status.run
    yield "state", f"{status.state}: {status.why}" if status.why else status.state
    yield "verdict", status.verdict
    if status.state not in ("empty", "training") and status.silent_s is not None:
        label = "ended" if status.state in ("done", "stopped") else "last sign"
        yield label, _when(status.silent_s, status.t, on_page=on_page)
    if status.launch:
        yield "launch", _launches(status)
    if status.start is not None:
        yield "start", _start(status.start)
    if status.iteration is not None:
        yield "step", _step(status)
    if status.left_s is not None:
        headroom = None if status.controller is None else status.controller.headroom
        yield "time left", time_left(status.left_s, headroom, t=status.t)
    if status.loss is not None or status.valid_loss is not None:
        yield "loss", _loss(status)
    if status.step_s is not None:
        yield "speed", _speed(status)
    if status.global_batch_size is not None:
        sizes = _sizes(status.global_batch_size, status.micro_batch_size)
        yield (
            "now" if status.is_alive else "at the end",
            f"{sizes} on {status.layout or 'an unknown layout'}",
        )
    if status.noise is not None:
        yield "noise scale", _noise(status)
    if status.controller is not None:
        yield from _decisions(status.controller, paused=status.paused, is_alive=status.is_alive)
    yield "checkpoint", _saved(status, on_page=on_page)
    if status.unread:
        yield "unreadable", unread_words(status.unread)


def _launches(status: RunStatus) -> str:
    if status.launches_at_least and not status.launches:
        return f"{status.launch}, restarts unknown: it began long ago"
    least = "at least " if status.launches_at_least else ""
    crashes = "1 crash" if status.crashes == 1 else f"{status.crashes} crashes"
    again = counted(max(status.launches - 1, 0), "restart")
    lost = f", ranks were lost {counted(status.losses, 'time')}" if status.losses else ""
    return f"{status.launch}, {least}{again}, {crashes}{lost}"


def _start(start: Start) -> str:
    whole = start.processes_s + start.building_s + start.step_s
    return (
        f"{seconds(whole)} to the end of the first step: {seconds(start.processes_s)} for "
        f"processes and imports, {seconds(start.building_s)} for data and model, "
        f"{seconds(start.step_s)} for the step"
    )


def _step(status: RunStatus) -> str:
    of = "" if status.train_iterations is None else f" of {status.train_iterations:,}"
    share = "" if status.share_done is None else f", {100 * status.share_done:.1f} %"
    samples = "" if status.consumed_samples is None else f", {status.consumed_samples:,} samples"
    skipped = f", {status.skipped} of the last steps skipped" if status.skipped else ""
    return f"{status.iteration:,}{of}{share}{samples}{skipped}"


def _loss(status: RunStatus) -> str:
    parts = [] if status.loss is None else [f"{status.loss:.4f}"]
    if status.valid_loss is not None:
        where = "" if status.valid_iteration is None else f" at step {status.valid_iteration:,}"
        parts.append(f"validation {status.valid_loss:.4f}{where}")
    return ", ".join(parts)


def _speed(status: RunStatus) -> str:
    parts = []
    if status.tokens_per_s is not None:
        parts.append(f"{_short(status.tokens_per_s)} tokens/s")
    if status.step_s is not None:
        parts.append(f"{_short(status.step_s)} s a step")
    return ", ".join(parts)


def _noise(status: RunStatus) -> str:
    noise = status.noise
    assert noise is not None
    if noise.status == "none" or noise.low_samples is None:
        return "not measured"
    phi = "unknown" if noise.phi_samples is None else f"{noise.phi_samples:.1f}"
    high = "unbounded" if noise.high_samples is None else f"{noise.high_samples:.1f}"
    at = noise.measured_at
    when = "before this record" if at is None else f"at step {at:,}"
    return f"{phi} samples [{noise.low_samples:.1f}, {high}], last measured {when}"


def _decisions(
    controller: ControllerStatus, *, paused: bool, is_alive: bool
) -> Iterator[tuple[str, str]]:
    observes = "observes only, " if is_alive else "observed only, "
    mode = observes if controller.mode == "observe" else ""
    where = "" if controller.iteration is None else f"at step {controller.iteration:,}: "
    if controller.headroom is not None:
        yield "to gain", controller.headroom.words(is_over=not is_alive)
    held = "paused by control/pause; " if paused else ""
    stay = "to stay; " if controller.kind == "stay" else ""
    yield "decided", f"{held}{mode}{where}{stay}{controller.reason}"
    if controller.critical_batch_size_source:
        yield "went by", controller.critical_batch_size_source


def _saved(status: RunStatus, *, on_page: bool) -> str:
    if status.saved is None:
        return "none"
    saved, ago = status.saved, status.saved.steps_ago
    words = f"of step {saved.iteration:,}, {_when(saved.age_s, status.t, on_page=on_page)}"
    if not ago:
        return words
    return f"{words}, {counted(ago, 'step')} before the {'last' if status.is_alive else 'end'}"


CHANGE = (
    "step",
    "changed to",
    "goodput predicted",
    "samples/s before",
    "predicted",
    "measured",
    "pause",
)
"""Columns of changes."""
_TO = CHANGE.index("changed to")


def heads(*, only_proposed: bool) -> list[str]:
    """Columns of changes, or of mere proposals."""
    return ["would change to" if only_proposed and i == _TO else c for i, c in enumerate(CHANGE)]


def _left_out(controller: ControllerStatus) -> str:
    """How many changes and proposals there are, if not all are shown; else empty."""
    numbers = {"change": controller.num_changes, "proposal": controller.num_proposals}
    if (shown := len(controller.changes)) == sum(numbers.values()):
        return ""
    parts = [counted(number, what) for what, number in numbers.items() if number]
    return f"the last {shown} of {' and '.join(parts)}"


def _changes(controller: ControllerStatus) -> Table:
    """The last ones: what was predicted, and what came."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style=_LABEL)
    for i, name in enumerate(heads(only_proposed=only_proposed(controller.changes))):
        if i == _TO:
            table.add_column(name, overflow="fold", ratio=1)
        else:
            table.add_column(name, justify="right", no_wrap=name == "pause")
    for change in controller.changes:
        table.add_row(*map(Text, cells(change)))
    return table


def cells(change: ChangeStatus) -> list[str]:
    """A change under `CHANGE`."""
    measured = change.state
    if change.state == "measured":
        measured = "nothing" if change.samples_per_s is None else _short(change.samples_per_s)
    speed, before = change.predicted_samples_per_s, change.samples_per_s_before
    doubt = ""
    if speed is not None and change.predicted_sd:
        doubt = f" +- {speed * change.predicted_sd:.2g}"
    return [
        "" if change.iteration is None else f"{change.iteration:,}",
        change.to,
        "" if change.gain is None else expected(change.gain, change.gain_sd),
        "" if before is None else _short(before),
        "" if speed is None else f"{_short(speed)}{doubt}",
        measured,
        "" if change.pause_s is None else f"{change.pause_s:.1f} s",
    ]


def _sizes(batch: int, micro_batch: int | None) -> str:
    return f"batch {batch:,}" + ("" if micro_batch is None else f" in {micro_batch:,}")


def _short(value: float) -> str:
    """Three digits that count, all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
