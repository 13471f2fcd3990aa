"""docs/runbook.md: its commands run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from megatron.training.common import control
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.launch import ROOT

PAGE = (ROOT / "docs" / "runbook.md").read_text()
COMMANDS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
SPOKEN = re.findall(r"`((?:python|touch) [^`]*)`", PAGE)
MODEL = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--max-position-embeddings 1024 --vocab-size 32000 --micro-batch-size 1"
)


def test_commands_run_on_a_run(tmp_path: Path) -> None:
    run = tmp_path / "RUN"
    make_checkpoint(run)
    for name in ("metrics.jsonl", "journal.jsonl"):
        shutil.copy(ROOT / "docs/results/act_run.journal.jsonl", run / name)
    (run / "control").mkdir()
    (run / control.STOP_FILE.parent / "request.json").write_text("{}")
    told = [" ".join(text.split()) for text in SPOKEN]
    lines = [line for block in COMMANDS for line in block.splitlines()]
    lines += [text.replace('"FLAGS"', repr(MODEL)).replace(" N", " 5") for text in told]
    assert len(lines) > 8
    script = "set -e\n" + "\n".join(lines).replace("tools/", f"{ROOT}/tools/")
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script.replace(" OUT ", " out ")],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    for path in (control.STOP_FILE, control.SAVE_FILE, control.PAUSE_FILE):
        assert (run / path).exists()
