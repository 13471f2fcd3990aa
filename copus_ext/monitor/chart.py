"""Charts over samples as SVG: lines, staircases, bands and points. What a run says is escaped."""

from __future__ import annotations

import bisect
import math
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from copus_ext.monitor.explain import amount, seconds

Column = Sequence[float | None]
Clock = Sequence[tuple[float, float]]
"""Samples, growing, and the seconds since the begin of the run at which they were trained."""
MAX_POINTS = 1600
"""About how many points of a line are drawn."""
WIDE, NARROW = 1000, 400
"""Width of a picture for a desk and for a phone, in its own units; its text has 14 of them."""
LEFT, RIGHT, TOP, BOTTOM = 72, 28, 28, 63
"""Margins of a picture; a further line of its legend adds to the top."""
_LINE = 20
_LETTER = 8
"""Width of one, at most."""
_TICK = 75
"""Width that a tick of the samples needs."""
_TICKS = 6


@dataclass(frozen=True, kw_only=True)
class Series:
    """Values over samples. None is a gap."""

    name: str
    x: Sequence[float]
    y: Column
    """Of a band its lower end."""
    kind: Literal["line", "stairs", "points", "band"] = "line"
    style: str = "first"
    """Class of the style sheet."""
    high: Column = ()
    """Upper end of a band; None while it is unbounded, and the band reaches the edge."""
    tips: Sequence[str] = ()
    """What each point says of itself."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    caption: str
    unit: str
    """Title of the vertical axis."""
    series: Sequence[Series]
    is_log: bool = False
    names: Sequence[str] = ()
    """Of a chart of names: those that the values 0, 1, 2 stand for."""
    height: int = 300


def thinned(column: Column, most: int = MAX_POINTS) -> list[int]:
    """Indices to keep of a long line that looks the same then: the first; of each of equal
    stretches the last, the smallest value, the largest and the first gap.

    Args:
        column: None is a gap.
        most: about how many to keep; all if there are no more.
    """
    length = len(column)
    if length <= most:
        return list(range(length))
    num, chosen = max(most // 3, 1), {0}
    for k in range(num):
        begin, end = k * length // num, (k + 1) * length // num
        chosen.add(end - 1)
        known = [(v, i) for i in range(begin, end) if (v := column[i]) is not None]
        if len(known) < end - begin:
            chosen.add(next(i for i in range(begin, end) if column[i] is None))
        chosen |= {min(known)[1], max(known)[1]} if known else set()
    return sorted(chosen)


def turns(column: Sequence[object]) -> list[int]:
    """Indices at which a value differs from the one before; and the first and the last."""
    if not column:
        return []
    found = [i for i in range(1, len(column)) if column[i] != column[i - 1]]
    return sorted({0, *found, len(column) - 1})


def running_mean(values: Column, window: int) -> list[float | None]:
    """Mean of the last values up to each, gaps left out; None where all are gaps."""
    recent: deque[float | None] = deque(maxlen=window)
    result: list[float | None] = []
    for value in values:
        recent.append(value)
        # Summed anew each time: one enormous value leaves no trace behind it.
        known = [x for x in recent if x is not None]
        result.append(math.fsum(known) / len(known) if known else None)
    return result


class _Axis:
    """Places values between two ends of a picture.

    Args:
        ends: of the picture: where the smallest and the largest come.
        is_log: whether the axis is logarithmic; values of 0 or less are at its low end then.
        most: about how many ticks there is room for.
        margin: share of the range that is left free on both sides.
    """

    def __init__(
        self,
        values: Sequence[float],
        ends: tuple[int, int],
        *,
        is_log: bool,
        margin: float = 0.0,
        most: int = _TICKS,
    ) -> None:
        self._is_log, self.ends, self._most = is_log, ends, most
        known = [self._scaled(v) for v in values if v > 0 or not is_log]
        low, high = min(known, default=0.0), max(known, default=1.0)
        spare = (high - low) * margin or (0.5 if high == low else 0.0)
        self._low, self._high = low - spare, high + spare

    def _scaled(self, value: float) -> float:
        return math.log2(value) if self._is_log else value

    def at(self, value: float) -> float:
        if self._is_log and value <= 0:
            return self.ends[0]
        # Each divided first: their difference may be more than a number can hold.
        span = self._high / 2 - self._low / 2
        share = (self._scaled(value) / 2 - self._low / 2) / span if span > 0 else 0.5
        return self.ends[0] + min(max(share, 0.0), 1.0) * (self.ends[1] - self.ends[0])

    def ticks(self) -> list[float]:
        """A few round numbers within the axis; powers of two, as batches are, where it is
        logarithmic."""
        low, high, most = self._low, self._high, self._most
        if self._is_log and high - low >= 2.0:
            every = max(math.ceil((high - low) / most), 1)
            powers = range(math.ceil(low / every), math.floor(high / every) + 1)
            return [2.0 ** (k * every) for k in powers if k * every < sys.float_info.max_exp]
        if self._is_log:  # too few powers
            low, high = 2.0**low, 2.0**high
            most = min(most, max(int(high - low), 1))  # whole numbers, if it has some
        size = (high / most - low / most) or 1.0
        if not math.isfinite(size):
            return []
        ten = 10.0 ** math.floor(math.log10(size))
        step = next((unit * ten for unit in (1, 2, 5) if unit * ten >= 0.8 * size), 10 * ten)
        return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def draw(chart: Chart, until: float, width: int = WIDE, clock: Clock = ()) -> Markup:
    """The chart as an SVG element.

    Args:
        until: right end of the axis, samples.
        clock: says the time below the samples; empty if it is not known.
        width: of the picture. A narrow one has no tips, as nothing points at it.
    """
    shown = [s for s in chart.series if any(v is not None for v in s.y)]
    marks, spare = _legend(shown if not chart.names else [], width)
    height = chart.height + spare
    bottom = height - BOTTOM
    # An interval may reach so far that nothing else would be seen: it is cut at the edges.
    lines = [v for s in shown if s.kind != "band" for v in s.y if v is not None]
    bands = [v for s in shown if s.kind == "band" for v in (*s.y, *s.high) if v is not None]
    if lines:
        low, high = min(lines) / 4, 4 * max(lines)
        bands = [min(max(v, low), high) for v in bands]
    ends, most = (LEFT, width - RIGHT), min((width - RIGHT - LEFT) // _TICK, _TICKS)
    x = _Axis([0.0, max(until, 1.0)], ends, is_log=False, most=most)
    y = _Axis([*lines, *bands], (bottom, TOP + spare), is_log=chart.is_log, margin=0.06)
    has_tips = width > NARROW
    drawn = (_drawn(s, x, y, has_tips=has_tips) for s in shown)
    form = Markup('<svg class="{}" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>')
    return form.format(
        "wide" if has_tips else "narrow",
        *(width, height, f"{chart.title}. {chart.caption}"),
        Markup("").join([*_grid(chart, x, y, clock), *drawn, *marks, *_names(chart, y)]),
    )


def _legend(shown: Sequence[Series], width: int) -> tuple[list[Markup], int]:
    """Names of the series with their marks, in as many lines as they need, and what the lines
    after the first one add to the height."""
    found, place, line = [], LEFT, 0
    for series in shown:
        needed = 44 + _LETTER * len(series.name)
        if place > LEFT and place + needed > width:
            place, line = LEFT, line + _LINE
        at = line + 14
        mark = Markup('<path class="{} {}" d="M{} {}h18"/>').format(
            series.kind, series.style, place, at
        )
        if series.kind == "points":
            mark = _dot(place + 9, at, series.style, "")
        elif series.kind == "band":
            form = Markup('<path class="band {}" d="M{} {}h18v12h-18Z"/>')
            mark = form.format(series.style, place, at - 6)
        found.append(mark + _text(place + 24, at + 4, series.name, "start"))
        place += needed
    return found, line


def _text(x: float, y: float, words: str, anchor: str) -> Markup:
    form = Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>')
    return form.format(x, y, anchor, words)


def _dot(x: float, y: float, style: str, tip: str) -> Markup:
    title = Markup("<title>{}</title>").format(tip) if tip else ""
    form = Markup('<circle class="points {}" cx="{:.1f}" cy="{:.1f}" r="5">{}</circle>')
    return form.format(style, x, y, title)


def _grid(chart: Chart, x: _Axis, y: _Axis, clock: Clock) -> Iterator[Markup]:
    bottom, left = y.ends[0], x.ends[0]
    samples, free = [at for at, _ in clock], -math.inf
    for value in x.ticks():
        at = x.at(value)
        yield Markup('<path class="grid" d="M{:.1f} {}V{}"/>').format(at, bottom, y.ends[1])
        yield _text(at, bottom + 18, amount(value), "middle")
        if 0 < value <= max(samples, default=0):
            passed = seconds(clock[bisect.bisect_left(samples, value)][1])
            half = _LETTER * (len(passed) + 1) / 2
            # A time may have more letters than there is room for between two ticks.
            if at - half >= free:
                yield _text(at, bottom + 37, passed, "middle")
                free = at + half
    for value in range(len(chart.names)) if chart.names else y.ticks():
        at = y.at(value)
        yield Markup('<path class="grid" d="M{} {:.1f}H{}"/>').format(left, at, x.ends[1])
        if not chart.names:
            yield _text(left - 8, at + 4, amount(value), "end")
    title = "samples, and time since the begin" if clock else "samples"
    yield _text(x.ends[1], bottom + 56, title, "end")
    if chart.unit:
        yield _text(LEFT - 8, 18, chart.unit, "end")


def _names(chart: Chart, y: _Axis) -> Iterator[Markup]:
    """Those of a chart of names, above their lines: a layout may have a long one."""
    for value, name in enumerate(chart.names):
        yield _text(LEFT + 4, y.at(value) - 6, name, "start")


def _drawn(series: Series, x: _Axis, y: _Axis, *, has_tips: bool) -> Markup:
    if series.kind == "band":
        return _band(series, x, y)
    if series.kind == "points":
        tips = (has_tips and series.tips) or [""] * len(series.x)
        known = [(a, b, tip) for a, b, tip in zip(series.x, series.y, tips) if b is not None]
        return Markup("").join(_dot(x.at(a), y.at(b), series.style, tip) for a, b, tip in known)
    way, is_down = [], False
    for a, b in zip(series.x, series.y):
        if b is not None:
            place = f"{x.at(a):.1f} {y.at(b):.1f}"
            line = f"H{x.at(a):.1f}V{y.at(b):.1f}" if series.kind == "stairs" else f"L{place}"
            way.append(line if is_down else f"M{place}h0")
        is_down = b is not None
    form = Markup('<path class="{} {}" d="{}"/>')
    return form.format(series.kind, series.style, "".join(way))


def _band(series: Series, x: _Axis, y: _Axis) -> Markup:
    """The interval as closed shapes, one for each segment in which its lower end is known. The
    value of a point holds since the one before, so that one alone is seen, too."""
    segments: list[list[tuple[float, float, float]]] = [[]]
    before = min(series.x[0], 0.0)
    for a, low, high in zip(series.x, series.y, series.high):
        if low is not None:
            ends = y.at(low), float(y.ends[1]) if high is None else y.at(high)
            segments[-1] += [(x.at(p), *ends) for p in ([] if segments[-1] else [before])]
            segments[-1].append((x.at(a), *ends))
        elif segments[-1]:
            segments.append([])
        before = a
    ways = []
    for segment in filter(None, segments):
        corners = [(a, top) for a, _, top in segment] + [(a, low) for a, low, _ in segment[::-1]]
        ways.append("M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in corners) + "Z")
    return Markup('<path class="band {}" d="{}"/>').format(series.style, "".join(ways))
