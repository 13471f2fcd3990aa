#!/usr/bin/env python3
"""Generates text with a trained model; `copus generate` once installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from copus_ext.commands.main import run_tool

if __name__ == "__main__":
    sys.exit(run_tool(__file__))
