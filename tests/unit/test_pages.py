"""What pages name exists: flags, variables, files, and where links lead."""

from __future__ import annotations

import re

import pytest

from copus_ext.launch.options import read_options
from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.layout_rules import batch_problems
from megatron.trainer.data.indexed import open_corpus
from tests.helpers.launch import ROOT
from tests.unit.test_cli_frozen import command_line

LEFT_OUT = {"megatron-flags", "results", "clusters", "muon"}
"""Pages that name programs of others, or a family of flags by its first word."""
NAMES = sorted({path.stem for path in (ROOT / "docs").glob("*.md")} - LEFT_OUT)
PAGES = ("README.md", *(f"docs/{name}.md" for name in NAMES))
OF_OTHERS = {"--nproc-per-node", "--no-python", "--shutdown-timeout", "--help", "--version"}
OF_OTHERS |= {"--bind", "--directory", "--moe", "--build-arg", "--rdzv-backend", "--rdzv-id"}
OF_OTHERS |= {"--cpus-per-task"}
"""Flags of torchrun, of argparse, of http.server, of quickstart.sh, of docker, and of srun."""


def test_flags_variables_and_files_that_pages_name_exist() -> None:
    known = {*command_line()}
    sources = [path for name in ("copus_ext", "megatron") for path in (ROOT / name).rglob("*.py")]
    sources += [path for path in (ROOT / "scripts").rglob("*") if path.suffix in (".sh", ".sbatch")]
    text = "".join(path.read_text() for path in sources)
    for page in PAGES:
        words = (ROOT / page).read_text()
        for flag in set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+[a-z0-9]", words)):
            is_there = flag in known | OF_OTHERS or re.search(rf"(?<![\w-]){flag}(?![\w-])", text)
            assert is_there, f"{page} names {flag}"
        # A file "of" a commit is no longer there.
        files = r"(?:scripts|tools|bench|docs)/[\w./-]+\.(?:sh|py|md)(?!` of )"
        for path in set(re.findall(files, words)):
            assert (ROOT / path).exists(), f"{page} names {path}"
        for name in set(re.findall(r"COPUS_[A-Z_]+", words)):
            assert name in text, f"{page} names {name}"
    assert read_options(["--max-crashes", "3", "--", "pretrain_gpt.py"]).limits.per_run == 3


def test_refusals_are_quoted_as_they_are() -> None:
    said = batch_problems(Layout(dp=2), 4, 10)
    with pytest.raises(UsageError) as refused:
        Layout.from_world(3, tp=2)
    said.append(str(refused.value))
    with pytest.raises(UsageError) as refused:
        open_corpus("data/mine", "--data-path")
    said.append(str(refused.value))
    page = (ROOT / "docs/troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE)
    assert [line for line in said if not line.startswith(tuple(quoted))] == []


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
