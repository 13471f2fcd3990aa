#!/usr/bin/env python3
"""Holds the planner against measured step times; `copus validate-planner` once installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from copus_ext.commands.validate_planner import main

if __name__ == "__main__":
    sys.exit(main())
