"""docs/runbook.md: its commands run, its flags and files exist."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from copus_ext.launch.options import read_options
from megatron.training import control
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.launch import ROOT

PAGE = (ROOT / "docs" / "runbook.md").read_text()
COMMANDS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
SPOKEN = re.findall(r"`((?:python|touch) [^`]*)`", PAGE)


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


MODEL = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--max-position-embeddings 1024 --vocab-size 32000 --micro-batch-size 1"
)


def test_flags_and_variables_are_known() -> None:
    known = set(json.loads((ROOT / "tests/unit/data/cli.json").read_text()))
    sources = [*(ROOT / "tools").glob("*.py"), ROOT / "copus_ext/launch/options.py"]
    sources += [*(ROOT / "scripts/slurm").iterdir(), ROOT / "megatron/training/watchdog.py"]
    sources += [ROOT / "copus_ext/launch/requeue.py"]
    text = "".join(path.read_text() for path in sources)
    for flag in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)):
        assert flag in known or flag in text, flag
    for name in set(re.findall(r"COPUS_[A-Z_]+", PAGE)):
        assert name in text, name
    assert read_options(["--max-crashes", "3", "--", "pretrain_gpt.py"]).limits.per_run == 3


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
