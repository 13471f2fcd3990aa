#!/usr/bin/env python3
"""Times the links between all pairs of nodes; `copus probe-links` once installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from copus_ext.commands.probe_links import main

if __name__ == "__main__":
    sys.exit(main())
