"""The figures of a report as plotly's traces and layouts, without colours.

The page chooses the axis and the theme: `meta.x` of a trace holds its positions as `steps`, `hours`
and `samples`, `meta.tokens` the length of a sequence, and `meta.color` the number of its colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from copus_ext.goodput.state import WINDOW_STEPS
from copus_ext.monitor.downsample import Column, changes, downsample, running_mean, running_rate
from copus_ext.monitor.explain import headline, outcome_result, percent, seconds
from copus_ext.monitor.run_files import RunHistory
from copus_ext.monitor.values import number
from copus_ext.reshard.phases import BACK, PHASES, TOGETHER

_MOST_POINTS, _LEAST_POINTS = 2400, 300
_FEW = 30
"""Points of a line up to which each is marked."""
_SPEED_STEPS = 20
_MOST_TICKS = 6
_FAR = 100.0
"""Height of an open interval over that of the picture."""
_NO_PHASES = "new processes"

Figure = dict[str, Any]


def most_points(num_runs: int) -> int:
    """Points of a series on a page of so many runs."""
    return max(_MOST_POINTS // max(num_runs, 1), _LEAST_POINTS)


def loss_figure(runs: Sequence[RunHistory]) -> Figure:
    """Training loss, its mean, evaluations and changes."""
    data: list[dict[str, Any]] = []
    for color, run in enumerate(runs):
        losses = [step.finite_loss for step in run.steps]
        mean = running_mean(losses, WINDOW_STEPS)
        style = {"width": 1}
        raw = _along(run, downsample([losses], most_points(len(runs))), losses, color, line=style)
        smooth = _along(run, downsample([mean], most_points(len(runs)) // 4), mean, color)
        data += [
            raw | _named(run, runs, "loss") | {"opacity": 0.4, "hovertemplate": _HOVER_LOSS},
            smooth | _named(run, runs, f"mean of {WINDOW_STEPS} steps"),
            _evaluations(run, _own(color, 1, runs)) | _named(run, runs, "evaluation"),
            _changes(run, mean, _own(color, 2, runs)) | _named(run, runs, "change"),
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


_HOVER_LOSS = "step %{customdata}: loss %{y:.6g}<extra></extra>"


def course_figure(runs: Sequence[RunHistory]) -> Figure:
    """Batch, layout, learning rate and throughput."""
    data: list[dict[str, Any]] = []
    for color, run in enumerate(runs):
        steps = run.steps
        stairs = {"shape": "hv", "width": 2}
        batch, micro = [s.batch for s in steps], [s.micro for s in steps]
        rates = [s.rate for s in steps]
        layouts = [run.layout_at(s.iteration - 1) or None for s in steps]
        speed = running_rate(batch, [s.seconds for s in steps], _SPEED_STEPS)
        most = most_points(len(runs)) // 2
        hidden = {"showlegend": False}  # their panels have names
        data += [
            _along(run, changes(batch), batch, color, line=stairs) | _named(run, runs, "batch"),
            _along(run, changes(micro), micro, color, line=stairs | {"dash": "dot"})
            | _named(run, runs, "micro-batch"),
            _along(run, changes(layouts), layouts, color, line=stairs, axis="y2")
            | _named(run, runs, "layout")
            | hidden,
            _along(run, downsample([rates], most), rates, color, axis="y3")
            | _named(run, runs, "learning rate")
            | hidden,
            _along(run, downsample([speed], most), speed, color, axis="y4")
            | _named(run, runs, "samples/s")
            | hidden,
        ]
    sizes = {s.batch for run in runs for s in run.steps} | {
        s.micro for run in runs for s in run.steps
    }
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
    if len(known) <= _MOST_TICKS:
        return known
    powers = [1 << k for k in range(known[-1].bit_length()) if known[0] <= 1 << k]
    return powers[:: -(-len(powers) // _MOST_TICKS)] or known[:1]


def noise_figure(runs: Sequence[RunHistory]) -> Figure:
    """The measured noise scale with its interval, and the batch."""
    data: list[dict[str, Any]] = []
    top = _top(runs)
    for color, run in enumerate(runs):
        measured = [s for s in run.steps if s.phi is not None or s.low is not None]
        phi, low = [s.phi for s in measured], [s.low for s in measured]
        high, batch = [s.high for s in measured], [s.batch for s in measured]
        chosen = downsample([phi, low, high], most_points(len(runs)) // 2)
        line = _along(run, chosen, phi, color, of=measured)
        line["customdata"] = [
            [measured[i].iteration, low[i], high[i], _interval(low[i], high[i])] for i in chosen
        ]
        data += [
            _band(run, [measured[i] for i in chosen], color, top=top)
            | _named(run, runs, "95 % interval"),
            line | _named(run, runs, "noise scale phi") | {"hovertemplate": _HOVER_PHI},
            _along(
                run,
                changes(batch),
                batch,
                _own(color, 1, runs),
                of=measured,
                line={"shape": "hv", "dash": "dot", "width": 1.5},
            )
            | _named(run, runs, "batch"),
        ]
    return {
        "id": "noise",
        "title": "Gradient noise scale",
        "caption": "phi as measured, smoothed, with its 95 % interval, open above where only the "
        "lower end is known; dotted the batch. Decisions go by the critical batch size: "
        "phi times --copus-noise-scale-multiplier.",
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
        (run, switch)
        for run in runs
        for switch in run.decisions.switches
        if switch.phases or switch.pause_s
    ]
    names: list[str] = []
    phases: dict[str, list[float | None]] = {}
    for i, (run, switch) in enumerate(tried):
        where = f"{run.name}\n" if len(runs) > 1 else ""
        # A number keeps two bars of one name apart.
        names.append(f"{i + 1}. {where}step {switch.iteration}\n{switch.start}\nto {switch.to}")
        parts = {k: v for k, v in switch.phases.items() if not k.endswith(TOGETHER)}
        for phase, took in (parts or {_NO_PHASES: switch.pause_s or 0.0}).items():
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
    """Predicted against measured throughput of every change."""
    data: list[dict[str, Any]] = []
    both: list[float] = []
    for color, run in enumerate(runs):
        known = [o for o in run.decisions.outcomes if o.predicted and o.speed]
        both += [v for o in known for v in (o.predicted, o.speed) if v is not None]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [o.predicted for o in known],
                "y": [o.speed for o in known],
                "text": [f"step {o.iteration}: {o.after}: {outcome_result(o)}" for o in known],
                "hovertemplate": "%{text}<extra></extra>",
                "marker": {"size": 11},
                "meta": {"color": color},
                **_named(run, runs, "changes"),
            }
        )
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


def _along(
    run: RunHistory,
    chosen: Sequence[int],
    values: Sequence[Any],
    color: int,
    *,
    of: Sequence[Any] | None = None,
    line: dict[str, Any] | None = None,
    axis: str = "y",
) -> dict[str, Any]:
    """A line through chosen steps of a run."""
    points = run.steps if of is None else of
    picked = [points[i] for i in chosen]
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(picked) <= _FEW else "lines",
        "y": [values[i] for i in chosen],
        "yaxis": axis,
        "line": line or {"width": 2},
        "customdata": [p.iteration for p in picked],
        "hovertemplate": "step %{customdata}: %{y}<extra>%{fullData.name}</extra>",
        "meta": {"color": color, **_positions(run, picked)},
    }


def _positions(run: RunHistory, points: Sequence[Any]) -> dict[str, Any]:
    """The positions of points on each axis."""
    begin = run.begin
    hours: list[float | None] = [None] * len(points)
    if begin is not None:
        hours = [None if p.t is None else round((p.t - begin) / 3600, 6) for p in points]
    columns = {"steps": [p.iteration for p in points], "samples": [p.samples for p in points]}
    return {"x": {**columns, "hours": hours}, "tokens": run.tokens_per_sample}


def _own(color: int, index: int, runs: Sequence[RunHistory]) -> int:
    """The colour of the run if there are several, else that of the series."""
    return color if len(runs) > 1 else index


def _named(run: RunHistory, runs: Sequence[RunHistory], what: str) -> dict[str, Any]:
    """Name in the legend; with several runs, those of one run are switched together."""
    if len(runs) == 1:
        return {"name": what}
    return {"name": f"{run.name}: {what}", "legendgroup": run.name}


def _evaluations(run: RunHistory, color: int) -> dict[str, Any]:
    points = [e for e in run.evaluations if number(e.loss) is not None]
    return {
        "type": "scatter",
        "mode": "markers",
        "y": [e.loss for e in points],
        "customdata": [f"{e.split} after step {e.iteration}" for e in points],
        "hovertemplate": "%{customdata}: loss %{y:.6g}<extra></extra>",
        "marker": {
            "symbol": ["diamond" if e.split == "valid" else "diamond-open" for e in points],
            "size": 9,
        },
        "meta": {"color": color, **_positions(run, points)},
    }


def _changes(run: RunHistory, mean: Column, color: int) -> dict[str, Any]:
    """Marks of changes on the mean loss."""
    index = {step.iteration: i for i, step in enumerate(run.steps)}
    made = [d for d in run.decisions.made if d.iteration in index]
    places = [index[d.iteration] for d in made if d.iteration is not None]
    words = []
    for d in made:
        gain = "" if d.gain is None else f", {percent(d.gain, sign=True)} goodput expected"
        pause = "" if d.switch is None else f", pause {seconds(d.switch.pause_s)}"
        words.append(f"after step {d.iteration}: {headline(d)}{gain}{pause}")
    return {
        "type": "scatter",
        "mode": "markers",
        "y": [mean[i] for i in places],
        "text": words,
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"symbol": "circle-open", "size": 12, "line": {"width": 2}},
        "meta": {"color": color, **_positions(run, [run.steps[i] for i in places])},
    }


def _band(run: RunHistory, steps: Sequence[Any], color: int, *, top: float) -> dict[str, Any]:
    """The interval as closed shapes, one for each stretch where it is known. An open upper end lies
    far above the picture."""
    stretches: list[list[Any]] = [[]]
    for step in steps:
        if step.low is not None and (step.high is not None or step.low > 0):
            stretches[-1].append(step)
        elif stretches[-1]:
            stretches.append([])
    lows = [s.low for stretch in stretches for s in stretch if s.low > 0]
    # A logarithmic axis has no 0: an end that reaches it is drawn below all others.
    floor = min(lows, default=1.0) / 2
    trace: dict[str, Any] = {"type": "scatter", "mode": "lines", "fill": "toself", "y": []}
    columns: dict[str, list[Any]] = {"steps": [], "samples": [], "hours": []}
    for stretch in filter(None, stretches):
        way = [*stretch, *reversed(stretch)]
        for name, values in _positions(run, way)["x"].items():
            columns[name] += [*values, None]
        ups = [_FAR * top if s.high is None else s.high for s in stretch]
        trace["y"] += [*ups, *(max(s.low, floor) for s in reversed(stretch)), None]
    meta = {"color": color, "band": True, "x": columns, "tokens": run.tokens_per_sample}
    return trace | {"line": {"width": 0}, "hoverinfo": "skip", "meta": meta}
