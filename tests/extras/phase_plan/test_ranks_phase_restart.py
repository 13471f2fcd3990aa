"""A rank is killed in a phase that has a layout of its own."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from megatron.trainer.logging.metrics import read_metrics
from tests.distributed import test_local_cpu
from tests.distributed.test_local_cpu import FLAGS, WORKER, script
from tests.helpers.jobs import steps_of

pytestmark = test_local_cpu.pytestmark


@pytest.mark.timeout(800)
def test_a_kill_in_a_phase_with_a_layout_of_its_own(tmp_path: Path) -> None:
    """Restarts go on under the layout of the phase, though the schedules name that of the first
    phase, too. The checkpoint at the boundary was saved under that."""
    wishes = {5: {"kill": 1}, 7: {"kill": 1}}
    env = {"COPUS_PROGRAM": str(WORKER), "COPUS_TEST_ASK": json.dumps(wishes)}
    env["COPUS_RESTART_WAIT"] = "0"
    lengths = " ".join(FLAGS).replace("--seq-length 32", "--seq-length 16").replace("100000", "8")
    flags = [*lengths.split(), "--seq-length-schedule", "0:16 50%:32", "--save", "run"]
    flags += ["--micro-batch-size-schedule", "0:1 50%:1", "--save-interval", "2"]
    flags += ["--layout-schedule", "0:tp1.pp1.dp2 50%:tp1.cp2.pp1.dp1"]
    log = tmp_path / "log"
    with script(["-n", "2", *flags], tmp_path, env) as (child, _):
        assert child.wait(timeout=300) == 0, log.read_text()
    said = [line for line in log.read_text().splitlines() if line.startswith("supervisor: ")]
    killed = f"rank 1 on {platform.node()} was ended by SIGKILL"
    under = "supervisor: start again under tp1.cp2.pp1.dp1 from iteration"
    assert said == [f"{under} 4: {killed}", f"{under} 6: {killed}"]
    starts = [r for r in read_metrics(tmp_path / "run") if r["kind"] == "run.start"]
    assert [(r["layout"], r["consumed_samples"]) for r in starts] == [
        ("tp1.pp1.dp2", 0),
        ("tp1.cp2.pp1.dp1", 32),
        ("tp1.cp2.pp1.dp1", 48),
    ]
    steps = steps_of(tmp_path / "run")
    assert [(s["consumed_samples"], s["seq_length"]) for s in steps] == [
        (8 * (i + 1), 16 if i < 4 else 32) for i in range(8)
    ]
