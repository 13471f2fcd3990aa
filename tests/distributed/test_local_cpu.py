"""scripts/local_cpu.sh as it is: runs that ask for another layout, lose a rank, are stopped."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from megatron.trainer.checkpoint import files
from megatron.trainer.logging.metrics import read_metrics
from tests.helpers import processes
from tests.helpers.jobs import ENDLESS, TINY, losses_of, steps_of
from tests.helpers.launch import ROOT

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(
        sys.prefix == sys.base_prefix,
        reason="the script would install what it needs into a python of the system",
    ),
]
WORKER = Path(__file__).with_name("worker_local_cpu.py")
FLAGS = [*TINY.split(), *ENDLESS]
FLAGS += ["--log-interval", "1"]


@contextlib.contextmanager
def script(
    arguments: list[str], folder: Path, env: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The script at work in a folder, its output in `log`; and the mark of its processes, none of
    which outlives the block."""
    mark = uuid.uuid4().hex
    venv = {"COPUS_VENV": sys.prefix, processes.MARK: mark}
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(
            ["bash", ROOT / "scripts/local_cpu.sh", *arguments],
            cwd=folder,
            env={**os.environ, **venv, **(env or {})},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield child, mark
    finally:
        processes.end_marked(mark)
        child.wait()


def wait_for(text: str, child: subprocess.Popen[bytes], log: Path) -> None:
    """Until the log has it."""
    deadline = time.monotonic() + 400
    while text not in log.read_text():
        assert time.monotonic() < deadline and child.poll() is None, log.read_text()
        time.sleep(0.1)


@pytest.mark.timeout(1200)
def test_another_layout_a_kill_and_term(tmp_path: Path, uninterrupted: list[float]) -> None:
    wishes = {3: {"layout": {"tp": 1, "pp": 2, "vpp": 2, "dp": 1}}, 5: {"kill": 1}}
    env = {"COPUS_PROGRAM": str(WORKER), "COPUS_TEST_ASK": json.dumps(wishes)}
    env["COPUS_RESTART_WAIT"] = "0"
    flags = [*FLAGS, "--save", "run", "--save-interval", "4"]
    log = tmp_path / "log"
    with script(["-n", "2", *flags], tmp_path, env) as (child, mark):
        wait_for(" iteration        7/", child, log)
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(timeout=100) == 128 + signal.SIGTERM, log.read_text()
        assert not processes.marked(mark), "nothing is left"
    said = [line for line in log.read_text().splitlines() if line.startswith("supervisor: ")]
    under = "supervisor: start again under tp1.pp2.vpp2.dp1 from iteration"
    killed = f"rank 1 on {platform.node()} was ended by SIGKILL"
    assert said == [f"{under} 3: the test asks for it", f"{under} 4: {killed}"]
    starts = [r for r in read_metrics(tmp_path / "run") if r["kind"] == "run.start"]
    assert [(r["layout"], r["consumed_samples"]) for r in starts] == [
        ("tp1.pp1.dp2", 0),
        ("tp1.pp2.vpp2.dp1", 24),
        ("tp1.pp2.vpp2.dp1", 32),
    ]
    steps = steps_of(tmp_path / "run")
    assert [s["consumed_samples"] for s in steps] == [8 * (i + 1) for i in range(len(steps))]
    assert losses_of(tmp_path / "run")[:7] == pytest.approx(uninterrupted[:7], abs=1e-5)
    assert files.read_latest(tmp_path / "run") == len(steps), "saved when asked to stop"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["-h"], 0, "usage: "),
        ([], 2, "no flags"),
        (["-n"], 2, "-n needs"),
        (["-n", "two", "--seed", "1"], 2, "-n two"),
        (["-n", "0", "--seed", "1"], 2, "-n 0"),
        (["--seed", "1"], 2, "no program nowhere.py"),
    ],
    ids=lambda value: str(value),
)
def test_it_says_how_to_use_it(tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    with script(arguments, tmp_path, {"COPUS_PROGRAM": "nowhere.py"}) as (child, _):
        assert child.wait(timeout=30) == code
    log = (tmp_path / "log").read_text()
    assert said in log and len(log.splitlines()) <= 2
