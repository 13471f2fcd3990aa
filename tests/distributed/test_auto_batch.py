"""A run with `--global-batch-size auto` on real text, and its second launch."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tests.helpers.jobs import TINY, steps_of, train

BASE = TINY.replace("--global-batch-size 8", "--global-batch-size auto")
FLAGS = "--train-samples 4000 --copus --save-interval 6 --lr-decay-style constant"


def test_a_run_takes_the_batch_of_the_plan_and_keeps_it(tmp_path: Path) -> None:
    flags = [*FLAGS.split(), "--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved")]
    first = train([*flags, "--exit-interval", "6"], 2, tmp_path / "run", base=BASE, timeout_s=240)
    first.check()
    told = re.search(r"note: --global-batch-size auto: a first batch of (\d+) ", first.stdout)
    assert told is not None, first.tail
    batch, steps = int(told[1]), steps_of(tmp_path / "run")
    assert steps[0]["global_batch_size"] == batch > 2
    again = train([*flags, "--exit-interval", "9"], 2, tmp_path / "run", base=BASE, timeout_s=240)
    again.check()
    assert f"note: --global-batch-size auto is {batch}, as at the first launch" in again.stdout
    steps = steps_of(tmp_path / "run")
    assert [step["iteration"] for step in steps] == list(range(1, 10))
    before, after = steps[5], steps[6]
    assert after["consumed_samples"] == before["consumed_samples"] + after["global_batch_size"]
    # --lr is the rate for that batch, whatever batch comes later; a record has the next step's.
    for now, then in itertools.pairwise(steps):
        assert now["learning_rate"] <= 1.0001e-3 * (then["global_batch_size"] / batch) ** 0.5
    last = steps[0]["learning_rate"], steps[1]["global_batch_size"]
    assert last[1] > batch or last[0] == pytest.approx(1e-3 * (last[1] / batch) ** 0.5)
