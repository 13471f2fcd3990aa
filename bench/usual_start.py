"""Starts a program as a trainer does that takes no care: megatron-core is imported as it is.

    torchrun ... bench/usual_start.py pretrain_gpt.py FLAGS

Then torch's compiler is loaded with it, for kernels that nobody uses without a GPU.
"""

from __future__ import annotations

import runpy
import sys

import megatron.core  # noqa: F401

del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
