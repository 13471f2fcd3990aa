"""The hosted CI runs the parts that scripts/test.sh has, with few rights and a limit on time."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from megatron.trainer.resilience.env_checks import SUPPORTED_CORE
from tests.helpers.launch import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PARTS = ["lint", "unit", "ranks", "slurm", "browser"]


def load(name: str) -> dict[Any, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_only_reads_and_ends(path: Any) -> None:
    text, flow = path.read_text(), load(path.name)
    assert flow["permissions"] == {"contents": "read"}
    assert "secrets." not in text and "pull_request_target" not in text
    actions = re.findall(r"uses: (\S+)", text)
    assert actions and all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in actions)
    for job in flow["jobs"].values():
        assert 0 < job["timeout-minutes"] <= (240 if path.name == "nightly.yml" else 60)
        if path.name != "release.yml":
            assert set(job["strategy"]["matrix"]["part"]) <= {*PARTS, "nightly"}
            assert job["steps"][-1]["env"] == {"PARTS": "${{ matrix.part }}"}


def test_only_the_job_that_drafts_a_release_may_write() -> None:
    jobs = load("release.yml")["jobs"]
    assert "permissions" not in jobs["build"] and jobs["draft"]["needs"] == "build"
    assert jobs["draft"]["permissions"] == {"contents": "write"}
    # It runs nothing of the repository, only what the other job has built.
    assert "checkout" not in str(jobs["draft"]) and "--draft" in str(jobs["draft"])


def test_every_part_runs_on_every_python() -> None:
    matrix = load("ci.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix == {"python": ["3.10", "3.11", "3.12"], "part": PARTS}
    assert f"\nall={','.join(PARTS)}\n" in (ROOT / "scripts" / "test.sh").read_text()


def test_what_a_commit_leaves_out_runs_every_night() -> None:
    flow = load("nightly.yml")
    assert flow["jobs"]["test"]["strategy"]["matrix"] == {"part": ["nightly"]}
    assert flow[True]["schedule"][0]["cron"].endswith(" * * *"), "YAML reads `on` as true"


def test_the_range_of_megatron_core_is_the_same_everywhere() -> None:
    for name in ("setup.py", ".github/workflows/newest-megatron-core.yml"):
        (found,) = re.findall(r'"megatron-core([<>=][^"]+)"', (ROOT / name).read_text())
        assert SpecifierSet(found) == SpecifierSet(SUPPORTED_CORE)


def test_the_hooks_check_folders_that_exist() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = {hook["id"]: hook["entry"].split() for hook in repo["hooks"]}
    assert set(entries) == {"ruff-check", "ruff-format", "pyright"}
    assert all((ROOT / folder).is_dir() for folder in entries["pyright"][1:])
