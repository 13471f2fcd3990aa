"""One HTML page of one or several runs, with data, script, style and plotly inside."""

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
from copus_ext.monitor.explain import date
from copus_ext.monitor.landscape import chosen_decisions, landscape
from copus_ext.monitor.liveness import liveness
from copus_ext.monitor.run_files import RunHistory, RunReader

VERSION = 2
_SCRIPTS = ("parts.js", "theme.js", "course.js", "landscape.js", "tables.js", "main.js")


class ReportData:
    """The runs of a page, which may be read again and again.

    Args:
        runs: directories; or journals, if nothing else is left of a run.
    """

    def __init__(self, runs: Sequence[Path]) -> None:
        self._readers = [RunReader(run, name=name) for run, name in zip(runs, names_of(runs))]
        # A page that follows a run draws most landscapes again: run, generation, place.
        self._landscapes: dict[tuple[int, int, int], dict[str, Any]] = {}

    def refresh(self) -> None:
        """Reads what was written since.

        Raises:
            OSError: a file of a run cannot be read.
        """
        for reader in self._readers:
            reader.refresh()

    @property
    def empty_runs(self) -> list[Path]:
        """Runs without any record."""
        return [reader.run for reader in self._readers if reader.is_empty]

    def payload(self, *, reload_s: float | None = None) -> dict[str, Any]:
        """The content of the page, as plain JSON types.

        Args:
            reload_s: seconds after which the page reloads itself while a run goes on; None for a
                page that stays.
        """
        runs = [reader.history() for reader in self._readers]
        t = time.time()
        is_over = all(liveness(run, t=t).state == "done" for run in runs)
        common, compared = summary.compare(runs)
        before, self._landscapes = self._landscapes, {}
        drawn = [
            figures.loss_figure(runs),
            figures.course_figure(runs),
            figures.noise_figure(runs),
            figures.experts_figure(runs),
            figures.pauses_figure(runs),
            figures.prediction_figure(runs),
        ]
        return {
            "version": VERSION,
            "made": date(t),
            "made_t": t,
            "reload_s": None if is_over else reload_s,
            "runs": [_about(run) for run in runs],
            "figures": [figure for figure in drawn if figure is not None],
            "landscapes": [self._landscapes_of(i, run, before) for i, run in enumerate(runs)],
            "changed": list(summary.CHANGED),
            "changes": summary.changes(runs),
            "has_pauses": any(s.pause_s or s.phases for r in runs for s in r.decisions.relayouts),
            "compared": list(summary.COMPARED),
            "compare": compared,
            "common": common,
            "differing": summary.differing_flags(runs),
            "journal": [line for i, run in enumerate(runs) for line in summary.journal(i, run)],
        }

    def _landscapes_of(
        self, index: int, run: RunHistory, before: dict[tuple[int, int, int], dict[str, Any]]
    ) -> dict[str, Any]:
        reader, decisions, items = self._readers[index], run.decisions, []
        for decided in chosen_decisions(decisions.decided, len(self._readers)):
            key = (index, reader.generation, decided.place)
            # The outcome of a change may have come since.
            is_final = decided.outcome is not None or not decided.is_change
            item = before.get(key) if is_final else None
            if item is None:
                item = landscape(reader.decision_at(decided.place), decided)
            self._landscapes[key] = item
            items.append(item)
        path = [[d.iteration, d.to.layout, d.to.batch] for d in decisions.made]
        if decisions.decided:
            first = decisions.decided[0].now
            path.insert(0, [-1, first.layout, first.batch])
        return {"items": items, "path": path}


def _about(run: RunHistory) -> dict[str, Any]:
    return {
        "name": run.name,
        "facts": summary.facts(run),
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
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


@functools.cache
def _part(name: str) -> str:
    return (files("copus_ext.monitor") / "templates" / name).read_text(encoding="utf-8")


@functools.cache
def script() -> str:
    """Our own script: parts of one scope, each in a file."""
    return '"use strict";\n(() => {\n' + "\n".join(map(_part, _SCRIPTS)) + "})();\n"


def policy() -> str:
    """The page's Content-Security-Policy: no source but itself."""
    parts = {
        "default-src": "'none'",
        "script-src": f"{_hash(script())} {_hash(plotly_code())}",
        # Plotly sets styles of its own.
        "style-src": "'unsafe-inline'",
        "img-src": "data: blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in parts.items())


def _hash(code: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"


def render(payload: dict[str, Any]) -> str:
    """The page.

    Args:
        payload: from `ReportData.payload`.
    """
    env = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    names = [run["name"] for run in payload["runs"]]
    title = names[0] if len(names) == 1 else f"{len(names)} runs: {', '.join(names)}"
    return env.from_string(_part("report.html")).render(
        title=f"COPUS report: {title}",
        made=payload["made"],
        policy=policy(),
        css=Markup(_part("report.css")),
        # Our own code and plotly's; the data is escaped for where it stands.
        script=Markup(script()),
        plotly=Markup(plotly_code()),
        data=Markup(script_json(payload)),
    )
