#!/usr/bin/env python3
"""Runs policies on a virtual clock; `copus simulate` once installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from copus_ext.commands.simulate import main

if __name__ == "__main__":
    sys.exit(main())
