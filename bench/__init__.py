"""Benchmarks: one module answers one question. Run each from the root: `python -m bench.NAME`."""

import os

# One thread for each rank, before anything loads a library that starts more.
os.environ["OMP_NUM_THREADS"] = "1"
