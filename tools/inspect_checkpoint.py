#!/usr/bin/env python3
"""Shows what a checkpoint holds; `copus inspect-checkpoint` once installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.trainer.common.program import with_output
from megatron.trainer.extras.inspect_checkpoint.command import main

if __name__ == "__main__":
    sys.exit(with_output("inspect_checkpoint.py", main))
