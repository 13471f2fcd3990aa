"""docs/troubleshooting.md: its flags and files exist."""

from __future__ import annotations

import json
import re

from copus_ext.launch.options import read_options
from tests.helpers.launch import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()


def test_flags_and_variables_are_known() -> None:
    known = set(json.loads((ROOT / "tests/unit/data/cli.json").read_text()))
    sources = [*(ROOT / "copus_ext/commands").glob("*.py"), ROOT / "copus_ext/launch/options.py"]
    sources += [
        *(ROOT / "scripts/slurm").iterdir(),
        ROOT / "megatron/trainer/resilience/watchdog.py",
    ]
    sources += [ROOT / "copus_ext/launch/slurm_job.py", ROOT / "copus_ext/planner/request.py"]
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
