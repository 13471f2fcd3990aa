"""The figures of a report as plotly's traces and layouts, without colours.

The page chooses the axis and the theme: `meta.x` of a trace holds its positions as `steps`, `hours`
and `samples`, `meta.tokens` the length of a sequence, and `meta.color` the number of its colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from copus_ext.goodput.state import WINDOW_STEPS
from copus_ext.monitor.downsample import Column, changes, downsample, running_mean, running_rate
from copus_ext.monitor.explain import gain as expected
from copus_ext.monitor.explain import headline, outcome_result, seconds
from copus_ext.monitor.journal import DecisionRecord
from copus_ext.monitor.run_files import RunHistory
from copus_ext.monitor.values import number
from copus_ext.reshard.phases import BACK, PHASES, TOGETHER

_MAX_POINTS, _MIN_POINTS = 2400, 300
_FEW = 30
"""Points of a line up to which each is marked."""
_SPEED_STEPS = 20
_MAX_TICKS = 6
_FAR = 100.0
"""Height of an open interval over that of the picture."""
_NO_PHASES = "new processes"

Figure = dict[str, Any]


class _Series:
    """The traces of one run on a page of several.

    Args:
        runs: all runs of the page.
        index: of the run.
    """

    def __init__(self, runs: Sequence[RunHistory], index: int) -> None:
        self.run, self._index, self._is_alone = runs[index], index, len(runs) == 1
        self.most = max_points(len(runs))

    def line(
        self,
        name: str,
        chosen: Sequence[int],
        values: Sequence[Any],
        *,
        color: int = 0,
        of: Sequence[Any] | None = None,
        **style: Any,
    ) -> Figure:
        """A line through chosen steps.

        Args:
            name: in the legend.
            chosen: indices of the steps.
            values: one for each step.
            color: number of the colour if the run is alone.
            of: steps; those of the run by default.
            style: fields of the trace.
        """
        points = self.run.steps if of is None else of
        picked = [points[i] for i in chosen]
        found = {
            "type": "scatter",
            "mode": "lines+markers" if len(picked) <= _FEW else "lines",
            "y": [values[i] for i in chosen],
            "yaxis": "y",
            "line": {"width": 2},
            "customdata": [p.iteration for p in picked],
            "hovertemplate": "step %{customdata}: %{y}<extra>%{fullData.name}</extra>",
        }
        return found | style | self._about(name, color, picked)

    def points(self, name: str, color: int, points: Sequence[Any], **style: Any) -> Figure:
        return {"type": "scatter", "mode": "markers"} | style | self._about(name, color, points)

    def band(self, name: str, steps: Sequence[Any], *, top: float) -> Figure:
        """The interval of the noise scale as closed shapes, one for each segment where it is known.
        An open upper end lies far above `top`."""
        segments: list[list[Any]] = [[]]
        for step in steps:
            if step.low is not None and (step.high is not None or step.low > 0):
                segments[-1].append(step)
            elif segments[-1]:
                segments.append([])
        lows = [s.low for segment in segments for s in segment if s.low > 0]
        # A logarithmic axis has no 0: an end that reaches it is drawn below all others.
        floor = min(lows, default=1.0) / 2
        found = self._about(name, 0, [])
        y: list[float | None] = []
        for segment in filter(None, segments):
            way = [*segment, *reversed(segment)]
            for axis, values in _positions(self.run, way).items():
                found["meta"]["x"][axis] += [*values, None]
            y += [_FAR * top if s.high is None else s.high for s in segment]
            y += [*(max(s.low, floor) for s in reversed(segment)), None]
        found["meta"]["band"] = True
        style = {"type": "scatter", "mode": "lines", "fill": "toself", "hoverinfo": "skip"}
        return found | style | {"y": y, "line": {"width": 0}}

    def _about(self, name: str, color: int, points: Sequence[Any]) -> Figure:
        """Name, colour and positions. The series of one run are switched together in the legend."""
        meta = {
            "color": color if self._is_alone else self._index,
            "x": _positions(self.run, points),
            "tokens": self.run.tokens_per_sample,
        }
        if self._is_alone:
            return {"name": name, "meta": meta}
        return {"name": f"{self.run.name}: {name}", "legendgroup": self.run.name, "meta": meta}


def _positions(run: RunHistory, points: Sequence[Any]) -> dict[str, list[Any]]:
    begin = run.begin
    hours: list[float | None] = [None] * len(points)
    if begin is not None:
        hours = [None if p.t is None else round((p.t - begin) / 3600, 6) for p in points]
    steps, samples = [p.iteration for p in points], [p.samples for p in points]
    return {"steps": steps, "samples": samples, "hours": hours}


def max_points(num_runs: int) -> int:
    """Points of a series on a page of so many runs."""
    return max(_MAX_POINTS // max(num_runs, 1), _MIN_POINTS)


def _all_series(runs: Sequence[RunHistory]) -> list[_Series]:
    return [_Series(runs, i) for i in range(len(runs))]


def loss_figure(runs: Sequence[RunHistory]) -> Figure:
    data: list[Figure] = []
    for series in _all_series(runs):
        losses = [step.finite_loss for step in series.run.steps]
        mean = running_mean(losses, WINDOW_STEPS)
        hover = "step %{customdata}: loss %{y:.6g}<extra></extra>"
        raw = {"line": {"width": 1}, "opacity": 0.4, "hovertemplate": hover}
        data += [
            series.line("loss", downsample([losses], series.most), losses, **raw),
            series.line(
                f"mean of {WINDOW_STEPS} steps", downsample([mean], series.most // 4), mean
            ),
            _evaluations(series),
            _changes(series, mean),
        ]
    return {
        "id": "loss",
        "title": "Loss",
        "caption": "Nats per token of every step, thin, and the mean of the last "
        f"{WINDOW_STEPS} steps, thick. Diamonds are evaluations, open ones on the test set; "
        "circles are changes that were made.",
        "height": 420,
        "axis": True,
        "data": data,
        "layout": {"yaxis": {"title": {"text": "loss, nats per token"}}},
    }


def _evaluations(series: _Series) -> Figure:
    points = [e for e in series.run.evaluations if number(e.loss) is not None]
    symbols = ["diamond" if e.split == "valid" else "diamond-open" for e in points]
    return series.points(
        "evaluation",
        1,
        points,
        y=[e.loss for e in points],
        customdata=[f"{e.split} after step {e.iteration}" for e in points],
        hovertemplate="%{customdata}: loss %{y:.6g}<extra></extra>",
        marker={"symbol": symbols, "size": 9},
    )


def _changes(series: _Series, mean: Column) -> Figure:
    run = series.run
    index = {step.iteration: i for i, step in enumerate(run.steps)}
    made = [d for d in run.decisions.made if d.iteration in index]
    places = [index[d.iteration] for d in made if d.iteration is not None]
    words = []
    for d in made:
        gain = "" if d.gain is None else f", {expected(d.gain, d.gain_sd)} goodput expected"
        pause = "" if d.relayout is None else f", pause {seconds(d.relayout.pause_s)}"
        words.append(f"after step {d.iteration}: {headline(d)}{gain}{pause}")
    return series.points(
        "change",
        2,
        [run.steps[i] for i in places],
        y=[mean[i] for i in places],
        text=words,
        hovertemplate="%{text}<extra></extra>",
        marker={"symbol": "circle-open", "size": 12, "line": {"width": 2}},
    )


def experts_figure(runs: Sequence[RunHistory]) -> Figure | None:
    """How evenly tokens were shared out over experts; None if no run has any."""
    data: list[Figure] = []
    for series in _all_series(runs):
        steps = [s for s in series.run.steps if s.expert_load is not None]
        load, balance = [s.expert_load for s in steps], [s.balance_loss for s in steps]
        chosen = downsample([load, balance], series.most // 2)
        data += [
            series.line("busiest expert over the mean", chosen, load, of=steps),
            series.line("balance loss", chosen, balance, of=steps, color=1),
        ] * bool(steps)
    if not data:
        return None
    return {
        "id": "experts",
        "title": "Load of experts",
        "caption": "Tokens of the busiest expert over the mean, in the layer where that is "
        "largest, and the balance loss with coefficient 1, a mean over layers. Both are 1 where "
        "every expert gets as many tokens.",
        "height": 320,
        "axis": True,
        "data": data,
        "layout": {"yaxis": {"title": {"text": "over the mean"}}},
    }


def course_figure(runs: Sequence[RunHistory]) -> Figure:
    data: list[Figure] = []
    stairs = {"shape": "hv", "width": 2}
    for series in _all_series(runs):
        steps, most = series.run.steps, series.most // 2
        batch, micro = [s.batch for s in steps], [s.micro for s in steps]
        rates = [s.rate for s in steps]
        layouts = [series.run.layout_at(s.iteration - 1) or None for s in steps]
        speed = running_rate(batch, [s.seconds for s in steps], _SPEED_STEPS)
        panel: dict[str, Any] = {"showlegend": False}  # it has a title
        data += [
            series.line("batch", changes(batch), batch, line=stairs),
            series.line("micro-batch", changes(micro), micro, line=stairs | {"dash": "dot"}),
            series.line("layout", changes(layouts), layouts, line=stairs, yaxis="y2", **panel),
            series.line("learning rate", downsample([rates], most), rates, yaxis="y3", **panel),
            series.line("samples/s", downsample([speed], most), speed, yaxis="y4", **panel),
        ]
    sizes = {size for run in runs for s in run.steps for size in (s.batch, s.micro)}
    names = {name for trace in data if trace["yaxis"] == "y2" for name in trace["y"]}
    layout = _panels()
    layout["yaxis"] |= {"type": "log", "tickmode": "array", "tickvals": _ticks(sizes)}
    layout["yaxis2"] |= {"type": "category", "range": [-0.4, max(len(names), 1) - 0.6]}
    layout["yaxis3"] |= {"exponentformat": "e"}
    return {
        "id": "course",
        "title": "Batch, layout, learning rate, throughput",
        "caption": "Batch (solid) and micro-batch (dotted) of every step, the parallel layout, the "
        f"learning rate, and samples per second over the last {_SPEED_STEPS} steps. Every change "
        "of batch and layout is there.",
        "height": 640,
        "axis": True,
        "data": data,
        "layout": layout,
    }


def _panels() -> dict[str, Any]:
    """Four axes above each other, each with its title on top."""
    domains = ((0.79, 0.97), (0.54, 0.69), (0.27, 0.44), (0.0, 0.17))
    titles = ("batch, micro-batch: samples", "layout", "learning rate", "samples per second")
    layout: dict[str, Any] = {"xaxis": {"anchor": "y4"}, "annotations": []}
    for i, (domain, title) in enumerate(zip(domains, titles)):
        layout[f"yaxis{i + 1 if i else ''}"] = {"domain": list(domain), "automargin": True}
        place = {"xref": "paper", "x": 0, "yref": "paper", "y": domain[1] + 0.005}
        style = {"xanchor": "left", "yanchor": "bottom", "showarrow": False}
        layout["annotations"].append({"text": title, **place, **style})
    return layout


def _ticks(sizes: set[int | None]) -> list[int]:
    """Batches to name on an axis: those that came, or the powers of two among so many."""
    known = sorted(size for size in sizes if size is not None and size > 0)
    if len(known) <= _MAX_TICKS:
        return known
    powers = [1 << k for k in range(known[-1].bit_length()) if known[0] <= 1 << k]
    return powers[:: -(-len(powers) // _MAX_TICKS)] or known[:1]


def noise_figure(runs: Sequence[RunHistory]) -> Figure:
    """The noise scale with its interval, and the batch."""
    data: list[Figure] = []
    top = _top(runs)
    dotted = {"shape": "hv", "dash": "dot", "width": 1.5}
    for series in _all_series(runs):
        steps = [s for s in series.run.steps if s.phi is not None or s.low is not None]
        phi, low = [s.phi for s in steps], [s.low for s in steps]
        high, batch = [s.high for s in steps], [s.batch for s in steps]
        chosen = downsample([phi, low, high], series.most // 2)
        line = series.line("noise scale phi", chosen, phi, of=steps, hovertemplate=_HOVER_PHI)
        line["customdata"] = [
            [steps[i].iteration, low[i], high[i], _interval(low[i], high[i])] for i in chosen
        ]
        data += [
            series.band("95 % interval", [steps[i] for i in chosen], top=top),
            line,
            series.line("batch", changes(batch), batch, color=1, of=steps, line=dotted),
        ]
        if used := [u for d in series.run.decisions.standing if (u := _used(d)) is not None]:
            used = [used[i] for i in downsample([[u.size for u in used]], series.most // 4)]
            data.append(series.points("critical batch size used", 2, used, **_used_style(used)))
    return {
        "id": "noise",
        "title": "Gradient noise scale",
        "caption": "The smoothed noise scale phi with its 95 % interval, open above where only the "
        "lower end is known; dotted the batch. The points are the critical batch sizes that "
        "decisions went by, each with its source: phi times --copus-noise-scale-multiplier, or a "
        "bound that needs no measurement.",
        "height": 420,
        "axis": True,
        "data": data,
        "layout": {
            "yaxis": {
                "type": "log",
                "title": {"text": "samples"},
                # What is open goes on beyond the edge.
                "autorangeoptions": {"clipmax": top},
            }
        },
    }


_HOVER_PHI = "step %{customdata[0]}: phi %{y:.4g}, interval %{customdata[3]}<extra></extra>"


class _Used(NamedTuple):
    """The critical batch size that a decision went by."""

    iteration: int
    samples: int | None
    t: float | None
    size: float
    source: str


def _used(d: DecisionRecord) -> _Used | None:
    """None where a decision went by none."""
    account = d.account
    if account is None or account.critical_batch_size is None or d.iteration is None:
        return None
    source = "a bound that needs no measurement" if account.is_bound else "the noise scale"
    # In samples of the run, as the noise scale of its steps.
    return _Used(d.iteration, d.samples, d.t, account.critical_batch_size, source)


def _used_style(used: Sequence[_Used]) -> Figure:
    return {
        "y": [u.size for u in used],
        "customdata": [[u.iteration, u.source] for u in used],
        "hovertemplate": "step %{customdata[0]}: %{y:.4g} by %{customdata[1]}<extra></extra>",
        "marker": {"size": 6},
    }


def _top(runs: Sequence[RunHistory]) -> float:
    """Upper edge of a picture of all noise scales and batches."""
    values = (v for run in runs for s in run.steps for v in (s.phi, s.low, s.high, s.batch))
    return 1.5 * max((v for v in values if v is not None), default=1.0)


def _interval(low: float | None, high: float | None) -> str:
    ends = [
        "unknown" if low is None else f"{low:.4g}",
        "unbounded" if high is None else f"{high:.4g}",
    ]
    return " to ".join(ends)


def pauses_figure(runs: Sequence[RunHistory]) -> Figure:
    """The pause of each change of layout, by phase."""
    tried = [
        (run, relayout)
        for run in runs
        for relayout in run.decisions.relayouts
        if relayout.phases or relayout.pause_s
    ]
    names: list[str] = []
    phases: dict[str, list[float | None]] = {}
    for i, (run, relayout) in enumerate(tried):
        where = f"{run.name}\n" if len(runs) > 1 else ""
        # A number keeps two bars of one name apart.
        names.append(
            f"{i + 1}. {where}step {relayout.iteration}\n{relayout.start}\nto {relayout.to}"
        )
        parts = {k: v for k, v in relayout.phases.items() if not k.endswith(TOGETHER)}
        for phase, took in (parts or {_NO_PHASES: relayout.pause_s or 0.0}).items():
            phases.setdefault(phase, [None] * len(tried))[i] = took
    known = [*PHASES, *(BACK + phase for phase in PHASES), _NO_PHASES]
    order = sorted(phases, key=lambda p: known.index(p) if p in known else len(known))
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": phase,
            "y": names,
            "x": phases[phase],
            "meta": {"color": known.index(phase) % len(PHASES) if phase in known else 0},
            "hovertemplate": "%{fullData.name}: %{x:.3g} s<extra></extra>",
        }
        for phase in order
    ]
    return {
        "id": "pauses",
        "title": "Pauses for changes of layout",
        "caption": "Seconds of each phase of every change of layout that was tried.",
        "height": 200 + 70 * len(tried),
        "axis": False,
        "data": data,
        "layout": {
            "barmode": "stack",
            "bargap": 0.45,
            "legend": {"traceorder": "normal"},
            "xaxis": {"title": {"text": "seconds"}},
            "yaxis": {"autorange": "reversed", "automargin": True},
        },
    }


def prediction_figure(runs: Sequence[RunHistory]) -> Figure:
    data: list[Figure] = []
    both: list[float] = []
    for series in _all_series(runs):
        outcomes = series.run.decisions.outcomes
        known = [o for o in outcomes if o.predicted and o.speed and o.ratio]
        both += [v for o in known for v in (o.predicted, o.speed) if v is not None]
        trace = series.points(
            "changes",
            0,
            [],
            x=[o.predicted for o in known],
            y=[o.speed for o in known],
            text=[f"step {o.iteration}: {o.after}: {outcome_result(o)}" for o in known],
            hovertemplate="%{text}<extra></extra>",
            marker={"size": 11},
        )
        del trace["meta"]["x"]  # the axis is not a time
        data.append(trace)
    if both:
        ends = [min(both) / 1.2, max(both) * 1.2]
        style = {"dash": "dash", "width": 1}
        data.append({"type": "scatter", "mode": "lines", "name": "equal", "x": ends, "y": ends})
        data[-1] |= {"line": style, "meta": {"color": -1}, "hoverinfo": "skip"}
    return {
        "id": "predictions",
        "title": "Predicted and measured throughput",
        "caption": "Of every change that was made: samples per second as predicted before, and as "
        "measured in the steps after. On the dashed line they are equal.",
        "height": 400,
        "axis": False,
        "data": data,
        "layout": {
            "xaxis": {"type": "log", "title": {"text": "predicted, samples/s"}},
            "yaxis": {"type": "log", "title": {"text": "measured, samples/s"}},
        },
    }
