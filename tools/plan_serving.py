#!/usr/bin/env python3
"""Plans how to serve a trained model; `copus plan-serving` once installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from copus_ext.commands.plan_serving import main

if __name__ == "__main__":
    sys.exit(main())
