"""How long does the report of a long run take to write, and a browser to open it?

    python -m bench.report_opening

Writes the report of a run of 100,000 steps and 5,000 decisions and of one of 120 steps, opens each
several times in Debian's Chromium with an empty cache, and asks the browser when it had shown the
page: the end of its load event or its first picture with content, whichever comes later. Writes
docs/results/report_opening.json.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.support import arguments, origin, write

RUNS = {"long": (100_000, 20), "short": (120, 20)}
"""Steps of a run, and after how many it decides."""
SCREENS = {"desktop": (1200, 900), "phone": (390, 844)}
SHOWN = """(() => {
  const load = performance.getEntriesByType("navigation")[0].loadEventEnd;
  const paint = performance.getEntriesByName("first-contentful-paint")[0];
  return load > 0 && paint ? Math.max(load, paint.startTime) : null;
})()"""


def opened(page: Path, screen: tuple[int, int], times: int) -> list[float]:
    """Seconds until a browser of its own has shown a page, each time."""
    from tests.browser.browser import browser

    found = []
    for _ in range(times):
        with browser() as chromium:
            chromium.look(*screen)
            chromium.open(page.as_uri())
            chromium.wait(f"{SHOWN} !== null")
            found.append(chromium.run(SHOWN) / 1000)
            if errors := chromium.errors():
                raise RuntimeError(f"{page}: {errors[0]}")
    return found


def measured(name: str, folder: Path, times: int) -> dict[str, Any]:
    """All numbers of one run."""
    from copus_ext.commands import report
    from tests.helpers.written_runs import usual_run

    steps, every = RUNS[name]
    run = usual_run(folder / name, steps=steps, every=every)
    page = folder / f"{name}.html"
    start = time.perf_counter()
    if report.main([str(run.path), "-o", str(page)]) != 0:
        raise RuntimeError(f"the report of {run.path} cannot be written")
    taken: dict[str, Any] = {
        "steps": steps,
        "decisions": steps // every,
        "record_bytes": sum(p.stat().st_size for p in run.path.glob("*.jsonl")),
        "page_bytes": page.stat().st_size,
        "written_s": time.perf_counter() - start,
    }
    for screen, size in SCREENS.items():
        seconds = opened(page, size, times)
        taken[f"{screen}_shown_s"] = seconds
        taken[f"{screen}_median_s"] = statistics.median(seconds)
    return taken


def main() -> None:
    """Measures and writes."""
    parser = arguments(__doc__, "report_opening.json")
    parser.add_argument("--times", type=int, default=7, help="openings (default: %(default)s)")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    args = parser.parse_args()
    from tests.browser.browser import missing

    if reason := missing():
        parser.error(reason)
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        result = {name: measured(name, Path(folder), args.times) for name in args.runs}
    write(args.output, {**result, "origin": {**origin(), "load_average_before": before}})


if __name__ == "__main__":
    main()
