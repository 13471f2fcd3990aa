"""One HTML page of one or several runs, with all it needs inside: data, script, style, plotly."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from copus_ext.monitor import figures, summary
from copus_ext.monitor.decisions import Decisions
from copus_ext.monitor.history import RunHistory
from copus_ext.monitor.landscape import chosen_decisions, landscape
from copus_ext.monitor.reader import RunReader

VERSION = 1
PLOTLY_SOURCE = "plotly.js"
"""Where a served page finds plotly."""
_SCRIPTS = ("parts.js", "theme.js", "course.js", "landscape.js", "tables.js", "main.js")
Run = tuple[RunHistory, Decisions]
_Key = tuple[int, int, int]
"""Run, generation of its files, place in the journal."""


class ReportData:
    """The runs of a page, read again whenever they are asked for.

    Args:
        runs: directories; or journals, if nothing else is left of a run.

    Raises:
        ValueError: a path that is no run, with the reason.
    """

    def __init__(self, runs: Sequence[Path]) -> None:
        for run in runs:
            if not run.exists():
                raise ValueError(f"RUN {run} does not exist; give the --run-dir of a run")
        self._readers = [RunReader(run, name=name) for run, name in zip(runs, names_of(runs))]
        # Of a live page the same ones are drawn again and again.
        self._landscapes: dict[_Key, dict[str, Any]] = {}

    def refresh(self) -> bool:
        """Takes in what was written since; whether it was anything.

        Raises:
            OSError: a file of a run cannot be read.
        """
        changed = [reader.refresh() for reader in self._readers]
        return any(changed)

    @property
    def empty_runs(self) -> list[Path]:
        """Those without any record."""
        return [reader.run for reader in self._readers if reader.is_empty]

    def payload(self, *, poll_s: float | None = None) -> dict[str, Any]:
        """All that the page shows, as plain JSON types.

        Args:
            poll_s: seconds after which a live page looks again; None for one that stays.
        """
        runs = [(r.history(), r.decisions) for r in self._readers]
        before, self._landscapes = self._landscapes, {}
        common, compared = summary.compare(runs)
        lands = [self._landscapes_of(i, d, len(runs), before) for i, (_, d) in enumerate(runs)]
        drawn = [
            figures.loss_figure(runs),
            figures.course_figure(runs),
            figures.noise_figure(runs),
            figures.pauses_figure(runs),
            figures.prediction_figure(runs),
        ]
        return {
            "version": VERSION,
            "made": summary.date(time.time()),
            "poll_s": poll_s,
            "runs": [_about(*run) for run in runs],
            "figures": drawn,
            "landscapes": lands,
            "changed": list(summary.CHANGED),
            "changes": summary.changes(runs),
            "has_pauses": any(s.pause_s or s.phases for _, d in runs for s in d.switches),
            "compared": list(summary.COMPARED),
            "compare": compared,
            "common": common,
            "differing": summary.differing_flags(runs),
            "journal": [
                line
                for i, (history, decisions) in enumerate(runs)
                for line in summary.journal(i, history, decisions)
            ],
        }

    def _landscapes_of(
        self, index: int, decisions: Decisions, num_runs: int, before: dict[_Key, dict[str, Any]]
    ) -> dict[str, Any]:
        reader, items = self._readers[index], []
        for decided in chosen_decisions(decisions.decided, num_runs):
            key = (index, reader.generation, decided.place)
            # What came of a change may be known by now.
            is_over = decided.outcome is not None or not decided.is_change
            item = before.get(key) if is_over else None
            if item is None:
                item = landscape(reader.journal.at(decided.place), decided)
            self._landscapes[key] = item
            items.append(item)
        path = [[d.iteration, d.to.layout, d.to.batch] for d in decisions.made]
        if decisions.decided:
            first = decisions.decided[0].now
            path.insert(0, [-1, first.layout, first.batch])
        return {"items": items, "path": path}


def _about(run: RunHistory, decisions: Decisions) -> dict[str, Any]:
    return {
        "name": run.name,
        "facts": summary.facts(run, decisions),
        "flags": summary.flags(run.config),
        "launches": summary.launches(run),
        "tokens_per_sample": run.tokens_per_sample,
        "last": run.last,
    }


def names_of(runs: Sequence[Path]) -> list[str]:
    """A name for each run: as much of the end of its path as tells it from the others."""
    parts = [run.resolve().parts for run in runs]
    for length in range(1, 4):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{i + 1}: {'/'.join(part[-3:])}" for i, part in enumerate(parts)]


def script_json(value: Any) -> str:
    """JSON that may stand inside `<script>`: nothing in it ends the element or begins a comment."""
    data = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    return data


@functools.cache
def plotly_code() -> str:
    """The whole of plotly.js, from the package."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


@functools.cache
def _part(name: str) -> str:
    return (files("copus_ext.monitor") / "templates" / name).read_text(encoding="utf-8")


@functools.cache
def script() -> str:
    """Our own script: parts of one scope, each in a file."""
    return '"use strict";\n(() => {\n' + "\n".join(map(_part, _SCRIPTS)) + "})();\n"


def policy(*, is_served: bool) -> str:
    """The page's Content-Security-Policy: no source but itself."""
    scripts = [_hash(script())]
    scripts.append("'self'" if is_served else _hash(plotly_code()))
    parts = {
        "default-src": "'none'",
        "script-src": " ".join(scripts),
        # Plotly sets styles of its own.
        "style-src": "'unsafe-inline'",
        "img-src": "data: blob:",
        "connect-src": "'self'" if is_served else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in parts.items())


def _hash(code: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"


def render(payload: dict[str, Any], *, is_served: bool = False) -> str:
    """The page.

    Args:
        payload: from `ReportData.payload`.
        is_served: whether a server gives it, and plotly beside it.
    """
    env = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    names = [run["name"] for run in payload["runs"]]
    title = names[0] if len(names) == 1 else f"{len(names)} runs: {', '.join(names)}"
    return env.from_string(_part("report.html")).render(
        title=f"COPUS report: {title}",
        made=payload["made"],
        policy=policy(is_served=is_served),
        css=Markup(_part("report.css")),
        # Our own code and plotly's; the data is escaped for where it stands.
        script=Markup(script()),
        plotly="" if is_served else Markup(plotly_code()),
        plotly_source=PLOTLY_SOURCE if is_served else "",
        data=Markup(script_json(payload)),
    )
