#!/usr/bin/env python3
"""Writes a run's decisions as a Chrome trace; `copus trace` once installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from copus_ext.extras.trace.command import main
from megatron.trainer.common.program import with_output

if __name__ == "__main__":
    sys.exit(with_output("trace.py", main))
