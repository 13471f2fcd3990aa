"""The shell scripts: which build of torch they set up, and what a user's shell may hold."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launch import ROOT

SCRIPTS = sorted(
    path
    for folder in (".ci", "scripts", "tools", "tests/slurm")
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and path.read_bytes().startswith((b"#!/usr/bin/env bash", b"#!/bin/bash"))
)
NAMES = [str(path.relative_to(ROOT)) for path in SCRIPTS]
TOOLS = ["bash", "cat", "chmod", "cksum", "dirname", "flock", "grep", "mktemp", "mv", "rm", "uname"]

# Python, but pip installs made-up builds of torch and notes what it was asked for.
PYTHON = f"""#!{sys.executable} -S
import os, pathlib, sys

venv, words = pathlib.Path(sys.argv[0]).parent.parent, sys.argv[1:]
if words[:3] == ["-m", "pip", "install"]:
    with (venv / "calls").open("a") as calls:
        print(*words[3:], file=calls)
    torch = [word for word in words if word.startswith("torch==")]
    is_there = (venv / "site/torch").exists() and "--force-reinstall" not in words
    if torch and ("+cpu" in torch[0] or not is_there):
        version, build = torch[0].partition("==")[2], "None"
        if "+cpu" not in version and os.environ["INDEX_HAS"] == "cuda":
            build = "'13.0'"
        (venv / "site/torch").mkdir(parents=True, exist_ok=True)
        (venv / "site/torch/version.py").write_text(f"cuda = {{build}}\\n")
        (venv / "site/torch-2.dist-info").mkdir(exist_ok=True)
        about = f"Name: torch\\nVersion: {{version}}\\n"
        (venv / "site/torch-2.dist-info/METADATA").write_text(about)
elif words[:2] != ["-m", "pip"]:
    os.environ["PYTHONPATH"] = str(venv / "site")
    os.execv(sys.executable, [sys.executable, "-S", *words])
"""


class Machine:
    """One shared environment, set up from nodes with and without a GPU."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.venv = folder, folder / "venv"
        self.python = self.venv / "bin/python"
        self.python.parent.mkdir(parents=True)
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)
        for node in ("login", "gpu"):
            (folder / node).mkdir()
            for tool in TOOLS:
                found = shutil.which(tool)
                assert found is not None, tool
                (folder / node / tool).symlink_to(found)
        (folder / "gpu/nvidia-smi").symlink_to(sys.executable)

    def set_up(
        self, node: str, *, index_has: str = "cuda", **more: str
    ) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """How a call ends, and what it had pip install of torch; `other` stands for the rest."""
        (self.venv / "calls").write_text("")
        done = subprocess.run(
            ["bash", "scripts/setup_env.sh", "run"],
            cwd=ROOT,
            env={
                "PATH": str(self._folder / node),
                "COPUS_VENV": str(self.venv),
                "INDEX_HAS": index_has,
                **more,
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
        calls = [line.split() for line in (self.venv / "calls").read_text().splitlines()]
        torch = [[w for w in c if w.startswith(("torch", "--force"))] for c in calls]
        return done, [" ".join(words) or "other" for words in torch]

    @property
    def has_cuda(self) -> bool:
        """Whether torch there was built with CUDA."""
        return "13.0" in (self.venv / "site/torch/version.py").read_text()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def pinned() -> str:
    return (ROOT / "requirements/torch.txt").read_text().strip()


def test_a_gpu_node_replaces_the_cpu_build_of_a_login_node(machine: Machine) -> None:
    done, installed = machine.set_up("login")
    assert (done.returncode, done.stdout) == (0, f"{machine.python}\n")
    assert installed == [f"{pinned()}+cpu", "other"] and not machine.has_cuda
    assert machine.set_up("login")[1] == []
    done, installed = machine.set_up("gpu")
    # The second brings what the build with CUDA needs.
    assert installed == [f"--force-reinstall {pinned()}", pinned(), "other"] and machine.has_cuda
    assert (done.returncode, done.stdout) == (0, f"{machine.python}\n")
    assert machine.set_up("gpu")[1] == machine.set_up("login")[1] == []
    assert machine.set_up("login", COPUS_TORCH="cpu")[1] == [], "it serves CPU ranks as well"


def test_copus_lies_beside_the_python_that_is_printed(machine: Machine, tmp_path: Path) -> None:
    machine.set_up("login")
    machine.python.unlink()
    machine.python.symlink_to(sys.executable)
    copus = machine.venv / "bin/copus"
    done = subprocess.run(
        [copus, "replai"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.endswith("there is no command replai; did you mean replay?\n")
    # What pip has put there stays.
    copus.write_text("#!/bin/sh\n")
    machine.python.unlink()
    machine.python.write_text(PYTHON)
    machine.python.chmod(0o755)
    machine.set_up("login")
    assert copus.read_text() == "#!/bin/sh\n"


def test_the_user_may_choose_the_build(machine: Machine) -> None:
    assert machine.set_up("login", COPUS_TORCH="cuda")[1] == [pinned(), "other"]
    assert machine.has_cuda and machine.set_up("gpu")[1] == []
    shutil.rmtree(machine.venv / "site")
    (machine.venv / ".copus-run").unlink()
    assert machine.set_up("gpu", COPUS_TORCH="cpu")[1] == [f"{pinned()}+cpu", "other"]
    assert not machine.has_cuda and machine.set_up("gpu", COPUS_TORCH="cpu")[1] == []
    done, installed = machine.set_up("login", COPUS_TORCH="rocm")
    assert done.returncode == 2 and "use cpu or cuda" in done.stderr and installed == []


def test_transformer_engine_comes_on_request_and_with_cuda_alone(machine: Machine) -> None:
    done, installed = machine.set_up("login", COPUS_TE="1")
    assert done.returncode == 2 and "COPUS_TORCH=cuda" in done.stderr and installed == []
    machine.set_up("gpu")
    assert machine.set_up("gpu", COPUS_TE="1")[1] == ["other"] * 3
    asked = (machine.venv / "calls").read_text().splitlines()[-1]
    assert asked.endswith("requirements/te.txt") and "--no-build-isolation" in asked
    assert machine.set_up("gpu", COPUS_TE="1")[1] == machine.set_up("gpu")[1] == []


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu"])
@pytest.mark.parametrize("has_cuda", [False, True])
def test_a_torch_that_is_there_stays_on_a_cpu_node(
    version: str, has_cuda: bool, machine: Machine
) -> None:
    machine.set_up("login", COPUS_TORCH="cuda" if has_cuda else "cpu")
    about = machine.venv / "site/torch-2.dist-info/METADATA"
    about.write_text(f"Name: torch\nVersion: {version}\n")
    (machine.venv / ".copus-run").write_text("of before\n")
    assert machine.set_up("login")[1] == ["other"] and machine.has_cuda == has_cuda


def test_an_index_without_cuda_is_named(machine: Machine) -> None:
    for _ in range(2):
        done, _ = machine.set_up("gpu", index_has="cpu")
        assert done.returncode == 2 and "COPUS_TORCH=cpu" in done.stderr
    assert not (machine.venv / ".copus-run").exists()
    assert machine.set_up("gpu", index_has="cpu", COPUS_TORCH="cpu")[0].returncode == 0


def test_a_script_knows_where_it_is_whatever_cdpath_says(machine: Machine) -> None:
    done, _ = machine.set_up("login", CDPATH=f".:{ROOT}")
    assert (done.returncode, done.stdout) == (0, f"{machine.python}\n"), done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)
def test_cd_prints_nothing(script: Path) -> None:
    """With CDPATH set, `cd` may go elsewhere, and prints where it went into `$(...)`."""
    before, cd, _ = re.sub(r"(?m)^\s*#.*$", "", script.read_text()).partition("cd ")
    assert not cd or re.search(r"(?m)^unset CDPATH\b", before)


@pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)
def test_arrays_may_be_empty_in_old_shells(script: Path) -> None:
    """With `set -u`, bash before 4.4 takes an empty array for an unset one."""
    text = script.read_text()
    begun_empty = re.findall(r"(?m)^\s*(?:local )?(\w+)=\(\)", text)
    bare = [name for name in begun_empty if re.search(rf'(?<!\+)"\${{{name}\[@\]}}"', text)]
    assert bare == []
