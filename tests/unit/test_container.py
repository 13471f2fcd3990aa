"""What the images install: pinned as scripts/setup_env.sh pins it, each file with its hash."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

from tests.helpers.launch import ROOT

FILES = ROOT / "requirements/container"
OF_THE_BASE = {"torch", "numpy", "triton", "setuptools"}
"""What comes with the base image, which nothing may replace."""
PYTHON = {"python_version": "3.12", "python_full_version": "3.12.3", "extra": ""}
"""Of the base images."""
PIN = re.compile(r"([\w.-]+)==([\w.]+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n")


def pins(path: Path) -> dict[NormalizedName, str]:
    """The pinned version of each name; every line of the file is one of a pin."""
    text = "".join(line for line in path.open() if not line.startswith("#"))
    assert PIN.sub("", text) == "", "not a pin with hashes"
    return {canonicalize_name(name): version for name, version, _ in PIN.findall(text)}


def lines(path: Path) -> list[Requirement]:
    text = [line.strip() for line in path.read_text().splitlines()]
    return [Requirement(line) for line in text if line and not line.startswith(("#", "-"))]


def holds(requirement: Requirement) -> bool:
    marker = requirement.marker
    return marker is None or marker.evaluate(dict(PYTHON))


def test_pins_are_those_of_the_set_up() -> None:
    known = [r for r in lines(ROOT / "requirements/constraints.txt") if holds(r)]
    set_up = {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in known}
    own = pins(FILES / "others.txt")
    assert {name: version for name, version in own.items() if set_up.get(name) != version} == {}
    asked = {canonicalize_name(r.name) for r in lines(ROOT / "requirements/run.txt")}
    assert asked - OF_THE_BASE - {"megatron-core"} <= set(own)


def test_nothing_that_a_pin_needs_is_missing() -> None:
    """pip installs them without dependencies."""
    own = pins(FILES / "others.txt")
    for name in own:
        needed = map(Requirement, importlib.metadata.requires(name) or ())
        missing = {canonicalize_name(r.name) for r in needed if holds(r)} - set(own) - OF_THE_BASE
        assert not missing, f"{name} needs {missing}"


def test_there_is_a_file_for_each_release_of_megatron_core_that_is_named() -> None:
    pinned = {path.stem.rpartition("-")[2]: pins(path) for path in FILES.glob("megatron-core-*")}
    assert all(own == {"megatron-core": core} for core, own in pinned.items())
    page = (ROOT / "docs/gpus.md").read_text()
    set_up = [r for r in lines(ROOT / "requirements/constraints.txt") if r.name == "megatron-core"]
    named = set(re.findall(r"^\| ([\d.]+) \| `docker build", page, re.MULTILINE))
    assert set(pinned) == named == {str(r.specifier).removeprefix("==") for r in set_up}


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.rocm"])
def test_an_image_installs_nothing_without_a_hash(name: str) -> None:
    text = (ROOT / name).read_text()
    calls = re.findall(r"pip3? install (.+?)(?= \\\n    &&)", text, re.DOTALL)
    assert len(calls) == 2 and all(c.startswith("--require-hashes --no-deps ") for c in calls)
    core = re.findall(r"^ARG CORE=(.+)$", text, re.MULTILINE)[0]
    files = [path.replace("${CORE}", core) for path in re.findall(r"-r (\S+)", text)]
    assert [path for path in files if not (ROOT / path).exists()] == []
    assert text.count("pip install") == 2, "and nothing by another way"
