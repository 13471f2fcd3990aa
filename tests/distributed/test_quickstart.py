"""The first of the README's two commands, shortened."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.helpers.launch import ROOT


def quickstart(folder: Path, steps: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the script with this test's own environment of Python."""
    venv = Path(sys.prefix)
    extra = {"QUICKSTART_STEPS": str(steps), "QUICKSTART_DIR": str(folder)}
    return subprocess.run(
        ["bash", "scripts/quickstart.sh", *words],
        cwd=ROOT,
        env={**os.environ, **extra, "COPUS_VENV": str(venv)},
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_it_trains_saves_and_goes_on_under_another_layout(tmp_path: Path) -> None:
    done = quickstart(tmp_path / "run", 12)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "layouts:" in done.stdout and " then " in done.stdout
    assert re.search(r"^copus: (\d+ change|nothing was changed)", done.stdout, re.MULTILINE)
    assert (tmp_path / "run/report.html").stat().st_size > 1e6
    texts = done.stdout.splitlines()[-3:]
    assert [ast.literal_eval(t).split(" ", 1)[0] for t in texts] == ["def", "class", "import"]
    # The batch falls early, so that the samples of 12 steps take more of them.
    latest = (tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt").read_text()
    assert int(latest) >= 12


def test_a_mixture_of_experts_trains_and_shares_its_experts_out(tmp_path: Path) -> None:
    done = quickstart(tmp_path / "run", 12, "--moe")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tp1.pp1.dp2 then tp1.pp1.ep2.dp2" in done.stdout
    assert "busiest expert:" in done.stdout
    assert "Load of experts" in (tmp_path / "run/report.html").read_text()
    assert quickstart(tmp_path / "other", 12, "--dense").returncode == 2


def test_it_touches_no_folder_that_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "keep").write_text("mine")
    done = quickstart(tmp_path, 12)
    assert done.returncode == 2
    assert "QUICKSTART_DIR" in done.stderr
    assert (tmp_path / "keep").read_text() == "mine"
