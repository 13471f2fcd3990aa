"""Runs the tests of this folder with Megatron-LM's program of other releases.

    python -m tests.guest.versions 0.17.1 0.18.2

Each is unpacked from its wheel; see `tests/newest_core/prepare.py`. It takes about a quarter of an
hour for a release, and no part of the tests of a commit does it.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.helpers.launch import ROOT
from tests.newest_core.prepare import python_path


def main(versions: list[str]) -> int:
    """Returns 1 if the tests of a release fail."""
    outcomes = {version: _passes(version) for version in versions}
    for version, passes in outcomes.items():
        print(f"Megatron-LM {version}: {'passed' if passes else 'FAILED'}")
    return 0 if outcomes and all(outcomes.values()) else 1


def _passes(version: str) -> bool:
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{python_path(version)}"}
    command = [sys.executable, "-m", "pytest", "-q", "tests/guest"]
    return subprocess.run(command, env=env, cwd=ROOT, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
