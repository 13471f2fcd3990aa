"""`copus accept` ends in time and says what it found, whatever becomes of a check."""

from __future__ import annotations

import collections
import math
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from copus_ext.controller.flags import CopusConfig
from copus_ext.extras.accept import command, many, one
from copus_ext.extras.accept.finding import Check, Failed, Finding, Skipped, judged, most_apart
from copus_ext.extras.accept.runs import SIZES, Bench, RunResult
from megatron.trainer.common import gpus
from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.arguments import parse_args, resolve
from tests.helpers.launch import ROOT
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


@pytest.mark.parametrize(
    ("limit_s", "left_s", "verdict"), [(0.1, math.inf, "failed"), (9.0, 0.3, "skipped")]
)
def test_what_all_checks_have_no_time_for_is_left_out(
    bench: Bench, tmp_path: Path, limit_s: float, left_s: float, verdict: str
) -> None:
    def check(bench: Bench) -> Finding:
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        return judged(bench.run(sleep, tmp_path / "log", {})[0] == 0, "ended")

    end_s = time.monotonic() + left_s
    lasting = Check("lasting", "", 1, limit_s, check)
    assert command.carry_out(lasting, bench, end_s).verdict == verdict
    if verdict == "skipped":
        late = command.carry_out(Check("never begun", "", 1, 9.0, many.moves), bench, end_s)
        assert late.verdict == "skipped" and "--minutes" in late.line


def test_faults_come_before_figures_and_have_a_time(bench: Bench) -> None:
    names = [check.name for check in command.CHECKS]
    figures = ["memory", "out_of_memory", "throughput"]
    assert names[4:7] == figures and names[-2:] == ["communicators", "speeds"]
    bench.device = "cuda"
    # Only where all go well do all of them fit.
    assert command._default_minutes(bench) == 8
    assert max(check.limit_s for check in command.CHECKS[:7]) < 8 * 60 / 2
    bench.ranks = 8
    assert command._default_minutes(bench) == 45


def test_as_many_gpus_are_taken_as_checks_have_layouts_for() -> None:
    taken = {count: command.most_ranks(count) for count in (0, 1, 3, 5, 8, 16)}
    assert taken == {0: 1, 1: 1, 3: 2, 5: 4, 8: 8, 16: 8}


def test_the_page_has_every_check_in_its_order() -> None:
    page = (ROOT / "docs" / "gpus.md").read_text()
    rows = re.findall(r"(?m)^\| `(\w+)` \| (\d) \|", page)
    assert rows == [(check.name, str(check.min_ranks)) for check in command.CHECKS]


def test_a_run_that_two_checks_read_is_made_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def train(self: Bench, name: str, flags: Any, **more: Any) -> RunResult:
        names.append(name)
        return RunResult(steps=[], ranks=[], output="", folder=self.folder)

    monkeypatch.setattr(Bench, "train", train)
    first = bench.once("a", ["--seed", "1"])
    assert bench.once("b", ["--seed", "1"]) is first
    assert bench.once("c", ["--seed", "2"]) is not first
    assert names == ["a", "c"]


def test_one_rank_is_no_part_of_the_job_of_this_shell(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    def run(self: Bench, words: list[str], log: Path, env: dict[str, str]) -> Any:
        started.append((words, env))
        raise Skipped("seen")

    monkeypatch.setattr(Bench, "run", run)
    for ranks in (1, 2):
        with pytest.raises(Skipped):
            bench.train("one", [], ranks=ranks)
    (alone, env), (several, others) = started
    assert env["WORLD_SIZE"] == "1" and env["RANK"] == env["LOCAL_RANK"] == "0"
    assert "torch.distributed.run" not in alone and "torch.distributed.run" in several
    assert others == {}


@pytest.mark.parametrize(
    ("alone", "predicted", "verdict"),
    [(1e9, 1.2e9, "passed"), (1.03e9, 1.2e9, "failed"), (1e9, 1.5e9, "failed")],
)
def test_peaks_are_compared_with_both_predictions(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, alone: float, predicted: float, verdict: str
) -> None:
    bench.device, bench.size = "cuda", "full"
    row = {"peak_bytes": 1.2e9, "allocated_bytes": 1e9, "padded_vocab_size": 384}
    run = RunResult(
        steps=[], ranks=[row | {"predicted_bytes": predicted}], output="", folder=bench.folder
    )
    monkeypatch.setattr(Bench, "once", lambda self, name, flags: run)
    monkeypatch.setattr(Bench, "peak_of_rank", lambda self, name, flags: {"peak": alone})
    monkeypatch.setattr(Bench, "text", lambda self: Path("text"))
    finding = one.memory(bench)
    assert finding.verdict == verdict
    assert list(finding.numbers["rows"]) == list(finding.numbers["errors"])
    assert len(finding.numbers["rows"]) == 4


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
        (["--device", "cpu", "--nproc-per-node", "6"], "layouts of 1, 2, 4 and 8 ranks"),
        (["--device", "cpu", "--output", "/dev/null/x"], "--output /dev/null/x cannot be written"),
    ],
)
def test_a_flag_that_cannot_be_is_named(words: list[str], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        command.main(words)


def test_gpus_that_torch_cannot_use_are_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(gpus, "torch_uses_gpus", lambda: True)
    monkeypatch.setattr(gpus, "_has_gpu_nodes", lambda: True)
    machine: dict[str, Any] = {"gpus": [], "has_engine": False}

    def device(*words: str) -> str:
        return command._bench(command.parser().parse_args(words), machine, tmp_path).device

    with pytest.raises(UsageError, match=r"2 GPUs .* driver .* --device cpu"):
        device()
    assert device("--device", "cpu") == "cpu"
    machine["gpus"] = [{"name": "a"}, {"name": "a"}]
    assert device() == "cuda"


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
        for name, flags in models.items():
            words = flags.split()
            if not words or name == "fast":  # of one rank
                continue
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


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("size", SIZES)
def test_a_lost_rank_leaves_the_batch_of_its_check(
    ranks: int, size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = pytest.importorskip("copus_ext.extras.elastic.choice")
    monkeypatch.setattr(Bench, "text", lambda self: Path("text"))
    bench = Bench(folder=tmp_path, device="cpu", ranks=ranks, size=size)
    batch = many.batch_of_recovery(ranks)
    flags = [*bench.flags(), "--global-batch-size", str(batch), "--train-iters", "30"]
    config = resolve(parse_args(flags), ranks, cuda_available=False)
    stored = config.replace(padded_vocab_size=384).flat()
    found = choice.choose(flags, stored, ranks - 1, has_gpu=False, why="")
    assert found.config.batch.initial_global_batch_size == batch and not found.note


def _flags_of_runs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, walks: dict[str, list[str]] | None = None
) -> dict[str, list[str]]:
    """Filled with the flags of each run by its name, as `walks` with its changes; none is made."""
    seen: dict[str, list[str]] = {}

    def train(self: Bench, name: str, flags: Any, **more: Any) -> RunResult:
        seen[name] = [*flags]
        squares = {kind: {"w": 1.0} for kind in ("small", "big")}
        steps = [{**row, "noise": {"squares": squares}} for row in LOSSES]
        steps = [{**row, "elapsed_per_iteration_ms": 1.0} for row in steps]
        walk = (more.get("task") or {}).get("walk", [])
        if walk and walks is not None:
            walks[name] = walk
        sums: dict[str, Any] = {"sums": {}, "loaded": collections.defaultdict(dict)}
        rows = [{**sums, "moves": [{"to": to, **MOVED} for to in walk]}]
        return RunResult(steps=steps, ranks=rows, output="", folder=self.folder)

    monkeypatch.setattr(Bench, "train", train)
    monkeypatch.setattr(Bench, "text", lambda self: Path("text"))
    return seen


def test_runs_that_are_compared_bit_by_bit_are_deterministic(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.ranks, bench.device = 2, "cuda"
    seen = _flags_of_runs(bench, monkeypatch)
    one.noise(bench)
    many.communicators(bench)
    for name in ("unwatched", "watched", "communicators-lazy", "communicators-eager"):
        assert "--deterministic-mode" in seen[name], name


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_both_rounds_of_moves_are_the_same(
    bench: Bench, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.ranks = ranks
    walks: dict[str, list[str]] = {}
    seen = _flags_of_runs(bench, monkeypatch, walks)
    many.moves(bench)
    many.moves_of_experts(bench)
    assert list(walks) == ["moves", "moves-experts"]
    for name, walk in walks.items():
        half = len(walk) // 2
        assert walk[:half] == walk[half:] and walk[-1] != walk[0]
        # A step behind each change.
        assert one._number(seen[name], "--train-iters") == 2 + len(walk)
    assert set(walks["moves"]) == set(many.layouts(ranks))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_layout_of_a_check_is_one_of_transformer_engine(
    bench: Bench, ranks: int, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.ranks, bench.device, bench.size, bench.has_engine = ranks, "cuda", size, True
    walks: dict[str, list[str]] = {}
    seen = _flags_of_runs(bench, monkeypatch, walks)
    for check in command.CHECKS:
        if check.min_ranks > 1 and check.run is not many.recovery:
            check.run(bench)
    alone = _flags_of_runs(bench, monkeypatch)
    one.noise(bench)
    have = {"cuda_available": True, "transformer_engine_available": True, "apex_available": True}
    assert len(seen) >= 16 and len(walks) == 6 and len(alone) == 6
    for name, flags in [*seen.items(), *alone.items()]:
        ranks = 1 if name in alone else bench.ranks
        home = [] if name not in walks else many.flags_of("tp1.cp1.pp1.ep1.etp1")
        for layout in ["", *walks.get(name, [])]:
            words = [*flags, *(home and layout and [*home, *many.flags_of(layout)])]
            args = parse_args(words, {"copus controller": CopusConfig})
            config = resolve(args, ranks, **have)
            assert config.layout.world_size == ranks, (name, layout)
            # Squares of single samples are asked for.
            assert not (name.startswith("noise") and config.kernels.gradient_accumulation_fusion)


def test_flags_start_a_layout() -> None:
    assert many.flags_of("tp2.cp2.pp4.ep2.etp1.dp8") == [
        *("--tensor-model-parallel-size", "2", "--context-parallel-size", "2"),
        *("--pipeline-model-parallel-size", "4"),
        *("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"),
    ]


def test_what_is_left_behind_is_told() -> None:
    row: dict[str, Any] = {"groups": 23, "free_mib": 1000}
    even = [dict(row) for _ in range(12)]
    assert many._leaks([even, even]) == ""
    # The first round loads kernels, and each layout holds something else.
    assert many._leaks([[row | {"free_mib": 2000}] * 5 + even[5:10] + even[:2]]) == ""
    assert many._leaks([even, [*even[:-1], row | {"groups": 24}]]) == "1 groups are left"
    lost = [*even[:-1], row | {"free_mib": 899}]
    assert many._leaks([even, lost]) == "101 MiB of the GPU are left"


def test_series_of_other_lengths_are_apart() -> None:
    assert most_apart([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    assert most_apart([1.0], [1.0, 2.0]) == most_apart([], []) == float("inf")


LOSSES = [{"losses": {"lm loss": 1 / n}, "t": 10.0 * n, "grad_norm": 1.0} for n in range(1, 7)]
MOVED = {"kind": "moved", "reason": "", "pause_s": 1.0, "groups": 9, "keeps_bits": True}


@pytest.mark.parametrize("fault", ["", "bits", "scale"])
def test_a_checkpoint_that_loads_otherwise_is_named(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    bench.ranks = 2

    def train(self: Bench, name: str, flags: Any, task: Any = None, **more: Any) -> RunResult:
        sums = {"param.a": 1}
        loaded = dict.fromkeys((task or {}).get("load", ()), sums)
        if fault == "bits" and name == "loaded-tp1.pp2.dp1":
            loaded["tp2.pp1.dp1"] = {"param.a": 2}
        steps = LOSSES[3:] if loaded else LOSSES
        if fault == "scale" and name == "saved-tp1.cp2.pp1.dp1":
            steps = [{**row, "grad_norm": 2.0} for row in steps]
        rows = [{"sums": sums, "loaded": loaded}]
        return RunResult(steps=steps, ranks=rows, output="", folder=self.folder)

    monkeypatch.setattr(Bench, "train", train)
    monkeypatch.setattr(Bench, "text", lambda self: Path("text"))
    finding = many.checkpoints(bench)
    assert finding.verdict == ("failed" if fault else "passed")
    assert finding.numbers["differ"] == ["tp2.pp1.dp1 in tp1.pp2.dp1"] * (fault == "bits")


NEED = "9.10 GB are needed beside the old state and 8.83 GB are free"


@pytest.mark.parametrize(
    ("full", "edge", "verdict"),
    [
        ({"kind": "moved"}, {"refused": NEED}, "passed"),
        ({"kind": "cancelled", "reason": NEED}, {"refused": ""}, "passed"),
        ({"kind": "cancelled", "reason": "shards do not match"}, {"refused": NEED}, "failed"),
        ({"kind": "moved"}, {"refused": "CUDA out of memory"}, "failed"),
        ({"kind": "moved"}, {"kind": "cancelled", "refused": NEED, "reason": NEED}, "failed"),
    ],
)
def test_only_want_of_memory_refuses_a_move(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    full: dict[str, str],
    edge: dict[str, str],
    verdict: str,
) -> None:
    bench.ranks, bench.device = 2, "cuda"

    def train(self: Bench, name: str, flags: Any, task: Any = None, **more: Any) -> RunResult:
        rows = [{**MOVED, **(edge if "edge" in task else full)} for _ in task["walk"]]
        steps = [*LOSSES, *LOSSES[:2]]
        return RunResult(steps=steps, ranks=[{"moves": rows}], output="", folder=self.folder)

    monkeypatch.setattr(Bench, "train", train)
    monkeypatch.setattr(Bench, "text", lambda self: Path("text"))
    assert many.moves_when_full(bench).verdict == verdict


@pytest.mark.parametrize(("kind", "verdict"), [("moved", "passed"), ("cancelled", "failed")])
def test_both_kinds_of_communicators_must_move(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: str, verdict: str
) -> None:
    bench.ranks, bench.device = 2, "cuda"
    tasks: list[dict[str, Any]] = []

    def train(self: Bench, name: str, flags: Any, task: Any = None, **more: Any) -> RunResult:
        tasks.append(task)
        rows = [{"moves": [{"kind": kind if task["bind"] else "moved"}]}]
        return RunResult(steps=LOSSES[:4], ranks=rows, output="", folder=self.folder)

    monkeypatch.setattr(Bench, "train", train)
    monkeypatch.setattr(Bench, "text", lambda self: Path("text"))
    finding = many.communicators(bench)
    assert finding.verdict == verdict and [task["bind"] for task in tasks] == [False, True]
    # Nothing that a line of the file has of every check.
    assert [*finding.numbers] == ["times"]
    assert finding.numbers["times"]["eager"]["move_s"] == pytest.approx(10.0)


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
