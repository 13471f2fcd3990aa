"""sdist, wheel, installed package: in another folder it does all that a checkout does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from copus_ext import __version__
from copus_ext.commands.main import names
from tests.helpers import processes
from tests.helpers.launch import ROOT
from tests.helpers.of_extras import needs_extra

SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "megatron", "copus_ext")
SHAPE = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-3
--tokenizer-type ByteLevelTokenizer --data-path text_text_document --split 100,0,0 --eval-iters 0"""


@dataclass(frozen=True)
class Installed:
    """The package in a folder of its own."""

    library: Path
    """What goes on Python's path; the checkout does not."""
    work: Path
    """Where commands run."""

    def run(self, *words: Any, code: int = 0) -> str:
        """Runs a command; returns what it printed on both streams."""
        mark = uuid.uuid4().hex
        path = os.pathsep.join([str(self.library / "bin"), os.environ["PATH"]])
        env = {**os.environ, "PYTHONPATH": str(self.library), "PATH": path, "OMP_NUM_THREADS": "1"}
        env |= {processes.MARK: mark, "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
        try:
            done = subprocess.run(
                [str(word) for word in words],
                cwd=self.work,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=240,
            )
        finally:
            processes.end_marked(mark)
        assert done.returncode == code, done.stdout
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Builds the sdist of a copy of the sources, and installs the wheel that pip builds from it;
    without a network."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("installed")
    skipped = shutil.ignore_patterns("__pycache__")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / "sources" / name, ignore=skipped)
        else:
            (folder / "sources").mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / "sources")
    (folder / "work").mkdir()
    build = [sys.executable, "-c", "from setuptools import build_meta as b; b.build_sdist('..')"]
    subprocess.run(build, cwd=folder / "sources", check=True, timeout=240)
    shutil.rmtree(folder / "sources")
    (sdist,) = folder.glob("copus-*.tar.gz")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    pip += ["--no-build-isolation", "--target", str(folder / "library"), str(sdist)]
    subprocess.run(pip, cwd=folder, check=True, timeout=240)
    return Installed(folder / "library", folder / "work")


def test_every_file_of_the_packages_is_in_the_wheel(installed: Installed) -> None:
    for package in ("copus_ext", "megatron/trainer"):
        there, here = (
            {
                str(path.relative_to(root))
                for path in (root / package).rglob("*")
                if path.is_file() and "__pycache__" not in path.parts
            }
            for root in (installed.library, ROOT)
        )
        assert there == here
    assert not list(installed.library.glob("tools*"))
    (about,) = installed.library.glob("copus-*.dist-info")
    assert about.name == f"copus-{__version__}.dist-info"
    assert installed.run("copus", "--version") == f"copus {__version__}\n"


@pytest.mark.nightly
def test_every_command_says_what_it_takes(installed: Installed) -> None:
    shown = installed.run("copus", "--help")
    assert all(f"\n  {name} " in shown for name in names())
    for name in names():
        assert installed.run("copus", name, "--help").startswith(f"usage: copus {name} ")
    # Tables that lie beside the modules.
    plan = "--model llama-2-7b --cluster h100-80g:8 --global-batch-size 64 --top 1"
    assert "tp" in installed.run("copus", "plan", *plan.split())


@needs_extra("generate", "inspect_checkpoint")
def test_from_text_to_a_report_and_to_text_again(installed: Installed) -> None:
    texts = installed.work / "texts"
    texts.mkdir()
    for i in range(3):
        (texts / f"{i}.py").write_text(f"def f(x):\n    return x + {i}\n")
    made = installed.run(
        "copus", "preprocess-data", "--input", texts, "--output-prefix", "text", "--append-eod"
    )
    assert "--data-path text_text_document" in made
    flags = SHAPE.split()
    installed.run("copus", "pretrain", *flags, "--save", "alone", "--run-dir", "run")
    out = ["--num-tokens-to-generate", 4, "--output", "texts.jsonl"]
    installed.run("copus", "generate", "--load", "alone", "--prompt", "def ", *out)
    (line,) = (installed.work / "texts.jsonl").read_text().splitlines()
    assert len(json.loads(line)["generated_tokens"]) == 4
    assert "report.html" in installed.run("copus", "report", "run", "-o", "report.html")
    assert "step" in installed.run("copus", "status", "run")
    assert "complete" in installed.run("copus", "inspect-checkpoint", "alone", "--verify")
    # Ranks of torch's launcher and of ours, which finds the trainer without a checkout.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    ways = {
        "torchrun": [*torchrun, 2, "--no-python", "copus", "pretrain", *flags],
        "ours": ["copus", "launch", "--nproc-per-node", 2, "--", *flags],
    }
    for name, command in ways.items():
        said = installed.run(*command, "--save", name, "--run-dir", f"{name}-run")
        assert "layout tp1.pp1.dp2" in said
        assert (installed.work / name / "latest_checkpointed_iteration.txt").read_text() == "2\n"
    refused = installed.run("copus", "pretrain", *flags, "--bogus", code=2)
    assert refused.startswith("copus pretrain: error: unknown flag --bogus")
