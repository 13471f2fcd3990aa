#!/usr/bin/env python3
"""Takes the pictures of docs/results/report_*.png.

python -m tests.browser.pictures runs/quickstart docs/results
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from copus_ext.commands import report
from tests.browser.browser import browser, missing

_SETTLE_S = 1.0
"""For fonts and the last drawing."""


def main(argv: list[str] | None = None) -> int:
    """Makes a report and looks at it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="pictures", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="directory of a run")
    parser.add_argument("folder", type=Path, help="where to write them")
    args = parser.parse_args(argv)
    if reason := missing():
        print(f"pictures: error: {reason}", file=sys.stderr)
        return 5
    with tempfile.TemporaryDirectory() as folder, browser() as chromium:
        page = Path(folder) / "report.html"
        if code := report.main([str(args.run), "-o", str(page)]):
            return code
        chromium.look(1120, 900)
        chromium.open(page.as_uri())
        time.sleep(_SETTLE_S)
        chromium.picture(args.folder / "report_charts.png", of="#charts")
        chromium.picture(args.folder / "report_decision.png", of="#decision")
    return 0


if __name__ == "__main__":
    sys.exit(main())
