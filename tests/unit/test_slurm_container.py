"""`pretrain.sbatch` with an image: what srun is given, and what the host needs besides."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.helpers.launch import ROOT

SRUN = """#!/bin/bash
printf '%s\\n' "$@" >"$CALLED"
printf '%s\\n' "$PYTHONPATH" >"$CALLED.path"
exit "${CODE:-0}"
"""
BARE = f"""#!/bin/bash
exec {sys.executable} -S "$@"
"""
"""A Python of the host, without any package."""


def submitted(
    folder: Path, *flags: str, cwd: Path = ROOT, **variables: object
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs the script as the first node of a job would, and returns the words of srun."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    for name, text in {"srun": SRUN, "python3": BARE, "scontrol": "#!/bin/sh\nexit 1\n"}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    env = {"PATH": f"{commands}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "COPUS_ROOT": str(ROOT)}
    env |= {"CALLED": str(folder / "called"), "HOME": os.environ.get("HOME", "/")}
    done = subprocess.run(
        ["bash", ROOT / "scripts/slurm/pretrain.sbatch", *flags],
        cwd=cwd,
        env=env | {name: str(value) for name, value in variables.items()},
        capture_output=True,
        text=True,
        timeout=120,
    )
    called = folder / "called"
    return done, called.read_text().splitlines() if called.exists() else []


def of(words: list[str], option: str) -> str:
    """What follows an option."""
    return words[words.index(option) + 1]


def test_a_container_sees_repository_run_and_data_and_runs_its_own_python(tmp_path: Path) -> None:
    work, run = tmp_path / "work", tmp_path / "run"
    work.mkdir()
    image = {"COPUS_CONTAINER_IMAGE": "/images/copus.sqsh", "COPUS_RUN": run}
    mounts = {"COPUS_CONTAINER_MOUNTS": "/data:/data"}
    done, words = submitted(tmp_path, "--lr", "1e-3", cwd=work, **image, **mounts)
    assert done.returncode == 0, done.stderr
    assert of(words, "--container-image") == "/images/copus.sqsh"
    assert of(words, "--container-workdir") == str(work)
    seen = [f"{path}:{path}" for path in (ROOT, run, work, "/data")]
    assert of(words, "--container-mounts").split(",") == seen
    assert of(words, "--container-env") == "PYTHONPATH"
    assert (tmp_path / "called.path").read_text().strip() == str(ROOT)
    assert words[words.index("-m") - 1] == "python", "the container's"
    assert words[-6:] == ["--run-dir", str(run), "--save", str(run), "--load", str(run)]


def test_without_an_image_nothing_is_asked_of_pyxis(tmp_path: Path) -> None:
    done, words = submitted(
        tmp_path, "--lr", "1e-3", COPUS_RUN=tmp_path / "run", COPUS_USE_PYTHON=sys.executable
    )
    assert done.returncode == 0, done.stderr
    assert [word for word in words if "container" in word] == []
    assert words[words.index("-m") - 1] == sys.executable


def test_a_python_without_packages_puts_the_job_back_into_the_queue(tmp_path: Path) -> None:
    image = {"COPUS_CONTAINER_IMAGE": "x", "COPUS_RUN": tmp_path / "run", "CODE": 85}
    done, _ = submitted(tmp_path, "--lr", "1e-3", **image)
    assert "Traceback" not in done.stderr, done.stderr
    assert re.search(r"^job 7: .*queue", done.stderr, re.MULTILINE), done.stderr


def test_an_old_python_of_the_host_is_named(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text('#!/bin/sh\ncase "$*" in *version_info*) exit 1 ;; esac\n')
    old.chmod(0o755)
    image = {"COPUS_CONTAINER_IMAGE": "x", "COPUS_RUN": tmp_path / "run"}
    done, words = submitted(tmp_path, "--lr", "1e-3", **image, COPUS_USE_PYTHON=old)
    assert (done.returncode, words) == (2, []) and "COPUS_USE_PYTHON" in done.stderr


def test_the_page_and_the_script_name_the_same_variables() -> None:
    page, script = (ROOT / name for name in ("docs/clusters.md", "scripts/slurm/pretrain.sbatch"))
    named, read = (
        set(re.findall(r"COPUS_CONTAINER_[A-Z]+", x.read_text())) for x in (page, script)
    )
    assert named == read == {"COPUS_CONTAINER_IMAGE", "COPUS_CONTAINER_MOUNTS"}
