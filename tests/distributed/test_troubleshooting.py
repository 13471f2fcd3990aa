"""docs/troubleshooting.md: its commands run."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

from megatron.trainer.common import control
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.launch import ROOT, run_ranks
from tests.helpers.pages import COPUS
from tests.helpers.written_runs import usual_run

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
COMMANDS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
SPOKEN = re.findall(r"`(copus [^\s`]+\s[^`]+|touch [^`]+)`", PAGE)
MODEL = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--max-position-embeddings 1024 --vocab-size 32000 --micro-batch-size 1"
)


def test_commands_run_on_a_run(tmp_path: Path) -> None:
    run = tmp_path / "RUN"
    make_checkpoint(run)
    usual_run(run)
    (run / "control").mkdir()
    (run / control.STOP_FILE.parent / "request.json").write_text("{}")
    told = [" ".join(text.split()) for text in SPOKEN]
    lines = [line for block in COMMANDS for line in block.splitlines()]
    lines += [text.replace('"FLAGS"', repr(MODEL)).replace(" N", " 5") for text in told]
    assert len(lines) > 8
    for line in lines:
        words = shlex.split(line.replace(" docs/", f" {ROOT}/docs/"), comments=True)
        if words[0] == "copus":
            run_ranks([*COPUS, *words[1:]], 1, timeout_s=100, cwd=tmp_path).check()
        else:
            subprocess.run(words, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL, timeout=100)
    for path in (control.STOP_FILE, control.SAVE_FILE, control.PAUSE_FILE):
        assert (run / path).exists()
