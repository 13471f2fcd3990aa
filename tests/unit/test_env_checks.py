"""What `scripts/setup_env.sh run` installs is enough for the commands that the pages give."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helpers.launch import ROOT
from tests.helpers.written_runs import usual_run

ONLY = """
import runpy, sys

absent, program = set(sys.argv[1].split(",")), sys.argv[2]

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
sys.argv = sys.argv[2:]
runpy.run_path(program, run_name="__main__")
"""


def installed_by(file: str) -> set[str]:
    """Distributions that a file of requirements brings, with all that they need."""
    lines = (ROOT / "requirements" / file).read_text().splitlines()
    left = ["torch", *(line for line in lines if not line.startswith(("#", "-")))]
    found: set[str] = set()
    while left:
        name = canonicalize_name(left.pop())
        if name in found:
            continue
        try:
            needs = [Requirement(line) for line in metadata.requires(name) or ()]
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        left += [n.name for n in needs if n.marker is None or n.marker.evaluate({"extra": ""})]
    return found


def absent_with(file: str) -> set[str]:
    """Top-level modules that are here and would not be there."""
    there = installed_by(file)
    # `packages_distributions` of Python 3.10 leaves out what has no top_level.txt.
    owners: dict[str, set[str]] = {}
    for found in metadata.distributions():
        for path in found.files or ():
            module = path.parts[0].removesuffix(".py")
            owners.setdefault(module, set()).add(canonicalize_name(found.name))
    return {name for name, of in owners.items() if name.isidentifier() and not there & of}


def test_the_commands_of_the_quickstart_need_nothing_else(tmp_path: Path) -> None:
    run = usual_run(tmp_path / "run", steps=20).path
    absent = absent_with("run.txt")
    assert "hypothesis" in absent
    page = (ROOT / "docs" / "quickstart.md").read_text()
    commands = re.findall(r"^copus ((?:status|report) .*)$", page, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        words = [str(run) if word == "runs/quickstart" else word for word in command.split()]
        words[0] = str(ROOT / "tools" / f"{words[0]}.py")
        done = subprocess.run(
            [sys.executable, "-c", ONLY, ",".join(sorted(absent)), *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "<svg" in (tmp_path / "report.html").read_text()


def test_hints_install_what_is_here_and_not_what_an_index_has_of_our_name() -> None:
    told = list(ROOT.glob("*.md"))
    for folder in ("docs", "tools", "megatron", "copus_ext", "scripts"):
        told += [p for p in (ROOT / folder).rglob("*") if p.suffix in (".md", ".py", ".sh")]
    texts = {str(path): path.read_text() for path in told}
    foreign = re.compile(r"pip install [^\n]{0,40}\bcopus\b")
    assert [name for name, text in texts.items() if foreign.search(text)] == []
    extras = {
        e for text in texts.values() for e in re.findall(r"pip install -e .\.\[(\w+)\]", text)
    }
    known = re.findall(r'^ +"([a-z]+)": ', (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert extras and extras <= set(known)
