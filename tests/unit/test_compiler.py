"""Without a C compiler a run on GPUs does without torch's, and says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.trainer.resilience.env_checks import lacks_compiler
from tests.helpers.launch import ROOT

START = """
import logging, torch
logging.basicConfig()
torch.cuda.is_available = lambda: True
from megatron.trainer.resilience.env_checks import check_environment
check_environment()
from megatron.core.jit import jit_fuser
print(jit_fuser is torch.compile)
"""


def test_a_compiler_is_looked_for_as_triton_does(tmp_path: Path) -> None:
    env = {"PATH": str(tmp_path)}
    assert lacks_compiler(env) and lacks_compiler({})
    assert not lacks_compiler({**env, "CC": "/opt/cc"})
    assert not lacks_compiler({**env, "TORCHDYNAMO_DISABLE": "1"})
    (tmp_path / "clang").touch(mode=0o755)
    assert not lacks_compiler(env)


@pytest.mark.parametrize("has_one", [False, True])
def test_a_start_without_a_compiler_fuses_nothing(has_one: bool, tmp_path: Path) -> None:
    if has_one:
        (tmp_path / "gcc").touch(mode=0o755)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", START],
        env={"PATH": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(has_one)]
    assert ("no C compiler is found" in done.stderr) != has_one
