"""The commands that a page of the documentation gives."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

RECORD = """
record() { printf '%s\\0' "$@" '' >&3; }
python() { record python "$@"; }
torchrun() { record torchrun "$@"; }
copus() { record copus "$@"; }
srun() { record srun "$@"; }
bash() { record bash "$@"; echo python; }
"""
"""Commands of a page write down what they were called with; others are not found."""

COPUS = ("-m", "copus_ext.commands.main")
"""What `copus` stands for on a page, as arguments of Python."""


def commands(path: Path) -> list[list[str]]:
    """What the shell blocks of a page call, as the shell itself reads them."""
    blocks = re.findall(r"```bash\n(.*?)```", path.read_text(), re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:  # some commands write files
        done = subprocess.run(
            ["/bin/bash", "-c", "exec 3>&1 >/dev/null\n" + RECORD + "\n".join(blocks)],
            cwd=folder,
            env={"PATH": "/nowhere"},
            capture_output=True,
            text=True,
            check=False,
        )
    return [part.split("\0") for part in done.stdout.removesuffix("\0\0").split("\0\0")]
