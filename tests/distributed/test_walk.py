"""One run of four ranks: it trains, measures noise, changes its layout, saves, and resumes under
another. `scripts/test.sh --quick` runs this test of the ranks alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from copus_ext.controller.decision_log import NAME, read_journal
from megatron.trainer.checkpoint import files
from tests.distributed.worker_controller_layouts import BASE, write_profile
from tests.helpers.jobs import losses_of, steps_of, train

STEPS, SAVED = 20, 10
"""At which it ends, and of the first launch; the flags ask for more, so that a change pays."""
COPUS = "--copus --copus-layouts all --copus-policy static"


def test_a_run_trains_measures_changes_its_layout_saves_and_resumes(tmp_path: Path) -> None:
    run, save, profile = (tmp_path / name for name in ("run", "save", "profile.jsonl"))
    write_profile(profile, 4)
    settings = tmp_path / "copus.yaml"
    settings.write_text("max_micro_batch_size: 1\n")
    own = [*BASE, *COPUS.split(), "--copus-config", str(settings)]
    own += ["--copus-profile", str(profile), "--save", str(save)]
    own += ["--load", str(save), "--exit-interval", str(SAVED)]
    train(own, 4, run).check()
    assert files.read_latest(save) == SAVED
    (relayout,) = (r for r in read_journal(run / NAME) if r["kind"] == "relayout")
    assert relayout["start"] == "tp1.pp1.dp4" and ".pp2." in relayout["to"]
    assert relayout["outcome"]["kind"] == "moved" and relayout["iteration"] < SAVED
    resumed = train([*own, "--tensor-model-parallel-size", "2"], 4, run).check()
    assert f"(iteration {SAVED})" in resumed.stdout and "layout tp2.pp1.dp2" in resumed.stdout
    steps = steps_of(run)
    assert [step["consumed_samples"] for step in steps] == [8 * (i + 1) for i in range(STEPS)]
    assert all(step["noise"]["measured"] for step in steps)
    train([*BASE, "--exit-interval", str(STEPS)], 4, tmp_path / "plain").check()
    assert losses_of(run) == pytest.approx(losses_of(tmp_path / "plain"), rel=1e-5)
