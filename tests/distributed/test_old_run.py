"""A run that the code of November 2026 wrote, goes on today; its journal is still read."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from copus_ext.commands import replay, report
from tests.helpers.jobs import losses_of, steps_of
from tests.helpers.launch import ROOT, run_ranks

ARCHIVE = Path(__file__).parent / "data" / "run_of_2026_11.tar.xz"
SAVED = 40
"""Steps before its checkpoint."""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The run, its data set, its flags, and what the code of then made of its next steps."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def test_it_resumes_with_the_same_batches_and_losses(old: Path) -> None:
    expected: dict[str, list[Any]] = json.loads((old / "expected.json").read_text())
    batches = expected["global_batch_size"]
    assert batches[0] != batches[-1], "the batch grows once more after the checkpoint"
    # The rules of then, where today's decide in another way.
    (old / "copus.yaml").write_text("early_steps: 0\nallow_shrink: false\n")
    flags = [*(old / "flags.txt").read_text().split(), "--copus-config", "copus.yaml"]
    program = [ROOT / "pretrain_gpt.py", *flags, "--load", "run/checkpoints"]
    result = run_ranks(program, 2, timeout_s=400, cwd=old).check()
    assert f"(iteration {SAVED})" in result.stdout
    later = [step for step in steps_of(old / "run") if step["iteration"] > SAVED]
    assert [step["global_batch_size"] for step in later] == batches
    assert losses_of(old / "run")[SAVED:] == pytest.approx(expected["losses"], rel=1e-4)
    assert replay.main([str(old / "run")]) == 0, "old decisions and new ones in one journal"


def test_its_journal_is_reported_and_decided_again(
    old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay.main([str(old / "run")]) == 0
    said = capsys.readouterr().out
    assert "0 different" in said and "by the rules of an earlier release" in said
    page = old / "report.html"
    assert report.main([str(old / "run"), "-o", str(page)]) == 0
    text = page.read_text()
    decisions = [json.loads(line) for line in (old / "run/journal.jsonl").open()]
    reasons = [r["decision"]["reason"] for r in decisions if r["kind"] == "decision"]
    assert reasons and any(reason in text for reason in reasons)
