"""The batch script of docs/megatron-lm.md, as a reader saves it, with stand-ins for SLURM."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.trainer.logging.tracker import Tracker
from tests.helpers.launch import ROOT
from tests.helpers.recorded import CONFIG, LAYOUT, step

NAMES = {
    "scontrol": 'case $1 in show) printf "n1\\nn2\\n" ;; *) echo "$*" >>"$CALLED.scontrol" ;; esac',
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "torchrun": 'printf "%s\\n" "$@" >"$CALLED"; cp -r "$CALLED.run" "$RUN"; exit $CODE',
    "python": f'exec {sys.executable} "$@"',
}
WHY = {"done": "done", "by the clock": "Megatron-LM has ended it before its last step"}


def record(run: Path, ends: str) -> int:
    """What a run of a checkout records that ends in a way, and the exit code of torchrun."""
    run.mkdir()
    if ends == "before it began":
        return 1
    with Tracker(run, launch="7.0.0") as tracker:
        tracker.event("run.start", 0, 0, config=CONFIG, layout=LAYOUT, has_lock=False)
        step(tracker, 1)
        if ends in WHY:
            tracker.event("run.end", 1, 16, why=WHY[ends])
            return 0
        tracker.event("fault", 1, 16, fault="error", line="RuntimeError: boom")
    return 1


def job(folder: Path, ends: str, **variables: str) -> tuple[int, list[str], list[str]]:
    """Runs the script of the page in a folder, whose training ends in a way.

    Returns:
        Its exit code, the words of torchrun, and what was asked of scontrol.
    """
    page = (ROOT / "docs/megatron-lm.md").read_text()
    (text,) = re.findall(r"```console\n(#!/bin/bash\n.*?)```", page, re.DOTALL)
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin/activate").touch()
    for name, line in NAMES.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / "bin" / name).chmod(0o755)
    paths = {"/path/to/copus": str(ROOT), "/path/to/environment": str(folder)}
    paths |= {"/path/to/Megatron-LM": str(folder), "/shared/run1": str(folder / "run")}
    paths |= {"YOUR FLAGS": "--lr 1e-3 --wandb-exp-name 'two words'"}
    for found, own in paths.items():
        assert found in text
        text = text.replace(found, own)
    (folder / "job.sh").write_text(text)
    env = {"PATH": f"{folder}/bin:/usr/bin:/bin", "CALLED": str(folder / "called")}
    code = record(folder / "called.run", ends)
    env |= {"CODE": str(code), "RUN": str(folder / "run"), "SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}
    done = subprocess.run(
        ["bash", folder / "job.sh"],
        env={**env, "HOME": os.environ.get("HOME", "/"), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    asked = folder / "called.scontrol"
    again = asked.read_text().splitlines() if asked.exists() else []
    return done.returncode, (folder / "called").read_text().splitlines(), again


def test_flags_reach_the_ranks_as_they_are(tmp_path: Path) -> None:
    _, words, _ = job(tmp_path, "done")
    assert words[words.index("--rdzv-endpoint") + 1] == "n1:29500"
    assert words[words.index("--nnodes") + 1] == "2"
    script = words.index("pretrain_gpt.py")
    assert words[script - 2 : script] == ["-m", "copus_ext.megatron_lm"]
    assert words[script + 1 :][:4] == ["--lr", "1e-3", "--wandb-exp-name", "two words"]
    save, load = (words[words.index(flag) + 1] for flag in ("--save", "--load"))
    assert save == load == str(tmp_path / "run") and words[-1] == "--copus"


@pytest.mark.parametrize(
    ("ends", "restarts", "is_requeued"),
    [
        ("done", "", False),
        ("by the clock", "", True),
        ("by the clock", "19", True),
        ("by the clock", "20", False),
        ("crashed", "3", True),
        ("before it began", "", False),
    ],
)
def test_the_job_goes_back_into_the_queue_unless_it_is_done_or_hopeless(
    tmp_path: Path, ends: str, restarts: str, is_requeued: bool
) -> None:
    known = {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    code, _, asked = job(tmp_path, ends, **known)
    assert asked == (["requeue 7"] if is_requeued else [])
    assert (code == 0) == (is_requeued or ends == "done")
