#!/usr/bin/env python3
"""Makes an indexed data set of text; `copus preprocess-data` once installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from copus_ext.commands.preprocess_data import main
from megatron.trainer.common.program import with_output

if __name__ == "__main__":
    sys.exit(with_output("preprocess_data.py", main))
