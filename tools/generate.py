#!/usr/bin/env python3
"""Generates text with a trained model; `copus generate` once installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.trainer.common.program import with_output
from megatron.trainer.extras.generate.command import main

if __name__ == "__main__":
    sys.exit(with_output("generate.py", main))
