"""The core trains, measures, moves, saves and resumes without an extra: its folder is gone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.trainer.common.extras import PACKAGES, extras
from tests.helpers.launch import ROOT

FOLDERS = {extra.name: extra.package.replace(".", "/") for extra in extras()}
ALL = "all of them"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name", [ALL, *(pytest.param(n, marks=pytest.mark.nightly) for n in FOLDERS)]
)
def test_the_walk_without_an_extra(name: str, tmp_path: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__", ".*", "runs", "docs", "bench")
    house = shutil.copytree(ROOT, tmp_path / "house", ignore=ignore)
    gone = [p.replace(".", "/") for p in PACKAGES] if name == ALL else [FOLDERS[name]]
    for folder in gone:
        shutil.rmtree(house / folder, ignore_errors=True)
    walk = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    walk += ["tests/distributed/test_walk.py", "--basetemp", tmp_path / "walk"]
    own = {**os.environ, "PYTHONPATH": str(house)}
    for worker in [n for n in own if n.startswith("PYTEST_")]:
        del own[worker]
    done = subprocess.run(walk, cwd=house, env=own, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
