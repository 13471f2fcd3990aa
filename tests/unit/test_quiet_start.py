"""What torch and megatron-core say at every start, of what is meant, does not reach the user."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.helpers.launch import ROOT

START = """
import logging, sys, warnings
from megatron.trainer.resilience.env_checks import import_core, set_process_defaults

set_process_defaults()
import_core()
import megatron.core.inference.contexts
import torch
import torch.distributed.checkpoint as dcp
import torch.utils.cpp_extension

torch.utils.cpp_extension._find_cuda_home()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    dcp.save({"a": torch.ones(2)}, checkpoint_id=sys.argv[1])
dcp.load({"a": torch.zeros(2)}, dcp.FileSystemReader(sys.argv[1]), no_dist=True)
print("and now", file=sys.stderr)
warnings.warn("a new warning")
logging.getLogger("torch.utils.cpp_extension").warning("a new note")
"""


def test_a_start_and_a_load_say_only_what_is_new(tmp_path: Path) -> None:
    # As in many containers, sources are compiled at every start. CUDA_HOME has torch look for it.
    env = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "CUDA_HOME": "/usr/local"}
    done = subprocess.run(
        [sys.executable, "-c", START, tmp_path / "checkpoint"],
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    known, new = done.stderr.split("and now\n")
    assert known == ""
    assert "a new warning" in new and "a new note" in new
