#!/usr/bin/env python3
"""Plans a training run before it is launched; `copus plan` once installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from copus_ext.commands.plan import main
from megatron.trainer.common.program import with_output

if __name__ == "__main__":
    sys.exit(with_output("plan.py", main))
