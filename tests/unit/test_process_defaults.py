"""Variables that a start sets for torch, unless the user did."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.launch import ROOT

START = """
import os
from megatron.trainer.resilience.env_checks import set_process_defaults

set_process_defaults()
print(os.environ.get("PYTORCH_ALLOC_CONF"), os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))
"""
GROWS = "expandable_segments:True"


@pytest.mark.parametrize(
    ("own", "found"),
    [
        ({}, f"{GROWS} {GROWS}"),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "backend:native None"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "None max_split_size_mb:64"),
        ({"PYTORCH_HIP_ALLOC_CONF": "max_split_size_mb:64"}, "None None"),
    ],
)
def test_segments_of_a_gpus_memory_grow_unless_the_user_says_how(
    own: dict[str, str], found: str
) -> None:
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **own}
    command = [sys.executable, "-c", START]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[0] == found
