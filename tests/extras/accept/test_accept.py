"""`copus accept` ends in time and says what it found, whatever becomes of a check."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from copus_ext.extras.accept import command, many
from copus_ext.extras.accept.finding import Check, Failed, Finding, Skipped, judged, most_apart
from copus_ext.extras.accept.runs import SIZES, Bench, RunResult
from megatron.trainer.common.errors import UsageError
from tests.helpers.processes import wait_until

pytestmark = pytest.mark.unit
LASTING = """
import pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(folder=tmp_path, device="cpu", ranks=1, size="small")


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_run_that_lasts_is_ended_with_its_children(bench: Bench, tmp_path: Path) -> None:
    mark = tmp_path / "pid"

    def check(bench: Bench) -> Finding:
        code, _ = bench.run([sys.executable, "-c", LASTING, str(mark)], tmp_path / "log", {})
        return judged(code == 0, "ended")

    # On a CPU checks have four times as long.
    finding = command.carry_out(Check("lasting", "", 1, 0.5, check), bench)
    assert (finding.verdict, finding.line) == ("failed", "ran past its limit")
    pid = int(mark.read_text())
    assert wait_until(lambda: not _is_alive(pid), 20)


def test_runs_compute_fp32_in_full(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    program = "import os; print(os.environ['NVIDIA_TF32_OVERRIDE'])"
    assert bench.run([sys.executable, "-c", program], tmp_path / "log", {}) == (0, "0\n")


@pytest.mark.parametrize(
    ("raised", "verdict", "line"),
    [
        (Skipped("no GPU"), "skipped", "no GPU"),
        (Failed("code 1", "its last line"), "failed", "code 1"),
        (KeyError("noise"), "failed", "KeyError: 'noise'"),
        (ZeroDivisionError("division"), "failed", "ZeroDivisionError: division"),
    ],
)
def test_a_check_that_raises_is_a_finding(
    bench: Bench, raised: Exception, verdict: str, line: str
) -> None:
    def check(bench: Bench) -> Finding:
        raise raised

    finding = command.carry_out(Check("one", "", 1, 60, check), bench)
    assert (finding.verdict, finding.line) == (verdict, line)


def test_a_check_of_more_ranks_is_left_out(bench: Bench) -> None:
    finding = command.carry_out(Check("two", "", 2, 60, many.moves), bench)
    assert finding == Finding(verdict="skipped", line="needs 2 ranks, there is 1")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--checks", "noise,moovs"], "--checks moovs is unknown"),
        (["--minutes", "0"], "--minutes 0 must be above 0"),
        (["--megatron-lm", "/nowhere", "--device", "cpu"], "has no pretrain_gpt.py"),
        (["--device", "cpu", "--nproc-per-node", "-1"], "--nproc-per-node -1"),
        (["--device", "cpu", "--output", "/dev/null/x"], "--output /dev/null/x cannot be written"),
    ],
)
def test_a_flag_that_cannot_be_is_named(words: list[str], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        command.main(words)


def test_a_folder_that_is_used_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is not empty"):
        command.main(["--device", "cpu", "--keep", str(tmp_path)])
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_layouts_have_all_ranks_and_divide_the_models(ranks: int) -> None:
    from megatron.trainer.config.layout import Layout

    found = [Layout.from_text(text) for text in many.layouts(ranks)]
    assert len(set(found)) == len(found) >= 3
    assert all(layout.world_size == ranks for layout in found)
    assert sum(layout.cp > 1 for layout in found) == 1
    for models in SIZES.values():
        for flags in filter(None, models.values()):
            words = flags.split()
            heads, layers, batch, micro = (
                int(words[words.index(f"--{name}") + 1])
                for name in (
                    "num-attention-heads",
                    "num-layers",
                    "global-batch-size",
                    "micro-batch-size",
                )
            )
            for layout in found:
                assert heads % layout.tp == layers % layout.pp == 0
                if ranks <= 8:
                    assert batch % (layout.dp * micro) == 0


def test_flags_start_a_layout() -> None:
    assert many.flags_of("tp2.cp2.pp4.ep2.etp1.dp8") == [
        *("--tensor-model-parallel-size", "2", "--context-parallel-size", "2"),
        *("--pipeline-model-parallel-size", "4"),
        *("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"),
    ]


def test_what_is_left_behind_is_told() -> None:
    row: dict[str, Any] = {"groups": 23, "free_mib": 1000}
    even = [dict(row) for _ in range(10)]
    assert many._leaks([even, even]) == ""
    assert many._leaks([even, [*even[:-1], row | {"groups": 24}]]) == "1 groups are left"
    lost = [*even[:-1], row | {"free_mib": 899}]
    assert many._leaks([even, lost]) == "101 MiB of the GPU are left"


def test_series_of_other_lengths_are_apart() -> None:
    assert most_apart([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    assert most_apart([1.0], [1.0, 2.0]) == most_apart([], []) == float("inf")


def test_the_measured_time_is_shown_beside_the_planned_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.ranks = 2
    known = {"peak_bytes": 2e9, "predicted_bytes": 2.1e9, "predicted_s": 0.5}

    def train(self: Bench, name: str, flags: Any, **more: Any) -> RunResult:
        steps = [{"elapsed_per_iteration_ms": 250.0}] * 12
        ranks = [known if "tp2" in name else {}]
        return RunResult(steps=steps, ranks=ranks, output="", folder=self.folder)

    monkeypatch.setattr(Bench, "train", train)
    monkeypatch.setattr(Bench, "flags", lambda self, model: [])
    finding = many.speeds(bench)
    assert "tp1.pp1.dp2 0.250 s, tp2.pp1.dp1 0.250 s (planned 0.500)," in finding.line
    assert (finding.verdict, finding.numbers["layouts"]["tp2.pp1.dp1"]["predicted_s"]) == (
        "passed",
        0.5,
    )
