"""Elastic launches: ranks and nodes are killed, the others go on, and those that come again join.

Every run must end with the losses and the samples of one without a kill.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from copus_ext.extras.elastic.environment import RESIZE_VARIABLE
from copus_ext.extras.elastic.resize import RANKS_FILE
from megatron.trainer.common.control import write_stop
from megatron.trainer.logging.metrics import read_metrics
from tests.extras.elastic.runs import MODEL, account, start, start_node, wait
from tests.helpers import processes
from tests.helpers.launch import ROOT, run_ranks
from tests.helpers.on_ranks import on_ranks
from tests.helpers.text import text_prefix

pytestmark = [pytest.mark.waits, pytest.mark.timeout(1800)]
STEPS = 160
_LIMIT_S = 400.0


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Loss by iteration of a run without a kill."""
    folder = tmp_path_factory.mktemp("reference")
    flags = [*MODEL.split(), "--data-path", text_prefix()]
    flags += ["--train-iters", str(STEPS), "--save", str(folder)]
    run_ranks([ROOT / "pretrain_gpt.py", *flags], 2, timeout_s=600).check()
    rows = [r for r in read_metrics(folder) if r["kind"] == "step"]
    return {r["iteration"]: r["losses"]["lm loss"] for r in rows}


class Run:
    def __init__(
        self,
        folder: Path,
        nodes: Sequence[int],
        layout: str,
        kills: Sequence[dict[str, Any]],
        pause_s: float,
        data: str,
    ) -> None:
        self.folder, self.mark, self.data = folder, uuid.uuid4().hex, data
        # The others are at work for long enough that those that come again find them.
        plan = {"kills": list(kills), "pause_from": 20, "pause_s": pause_s}
        if kills:
            plan |= {"pause_from": 95, "ranks": sum(nodes)}
        (folder / "plan.json").write_text(json.dumps(plan))
        self.nodes, self.layout = nodes, layout
        self.children: list[subprocess.Popen[bytes]] = start(
            folder, nodes, layout, STEPS, data=data, elastic=True, mark=self.mark
        )

    def start_again(self, node: int) -> None:
        self.children[node].wait()
        self.children[node] = start_node(
            self.folder, self.nodes, node, self.layout, STEPS, data=self.data, mark=self.mark
        )

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("log*")))

    def starts(self) -> list[dict[str, Any]]:
        """Records of the starts of generations so far."""
        try:
            records = read_metrics(self.folder / "run", superseded=True)
        except FileNotFoundError:
            return []
        return [r for r in records if r["kind"] == "run.start"]

    def last_step(self) -> int:
        """The last step of the record; 0 before there is one."""
        try:
            rows = read_metrics(self.folder / "run")
        except FileNotFoundError:
            return 0
        return max((r["iteration"] for r in rows if r["kind"] == "step"), default=0)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        assert processes.wait_until(condition, _LIMIT_S), self.log[-6000:]

    def ask_for_ranks(self, ranks: int) -> None:
        (self.folder / "run" / RANKS_FILE).write_text(f"{ranks}\n")

    def end(self) -> list[int | None]:
        codes = wait(self.children, _LIMIT_S)
        assert None not in codes, self.log[-6000:]
        return codes

    def check(self, reference: dict[int, float], steps: int = STEPS) -> None:
        """Every sample counts once, and the losses are those without a kill."""
        found = account(self.folder, steps, reference)
        assert found["last_step"] == steps, self.log[-6000:]
        assert found["samples_lost"] == 0
        assert found["largest_loss_difference"] < 1e-6


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(
        nodes: Sequence[int],
        layout: str,
        *kills: dict[str, Any],
        pause_s: float = 0.0,
        data: str = "",
    ) -> Run:
        runs.append(Run(tmp_path, nodes, layout, kills, pause_s, data or text_prefix()))
        return runs[-1]

    yield make
    for run in runs:
        processes.end_marked(run.mark)
        for child in run.children:
            child.wait()


def kill(
    number: int, step: int, victim: list[int], what: str = "rank", **more: Any
) -> dict[str, Any]:
    return {"number": number, "step": step, "victim": victim, "what": what, **more}


def test_a_rank_and_a_node_are_lost_and_come_again(
    begin: Callable[..., Run], reference: dict[int, float]
) -> None:
    run = begin(
        (2, 2),
        "--tensor-model-parallel-size 2",
        kill(1, 25, [0, 1], moment="optimizer"),
        kill(2, 90, [1, 0], "node", moment="compute"),
        pause_s=1.0,
    )
    run.wait_for(lambda: (run.folder / "kill-2").exists())
    # The node comes again while the other trains.
    run.start_again(1)
    assert run.end() == [0, 0]
    run.check(reference)
    starts = run.starts()
    sizes = [len(s["members"]) for s in starts]
    assert sizes[:2] == [4, 3] and sizes[-1] == 4 and 2 in sizes
    assert all(s["loaded"] == "memory of the ranks" for s in starts[1:])
    assert {s["why"] for s in starts} == {"start", "loss", "join"}
    assert "both copies" not in run.log


def test_data_that_changed_since_the_copy_is_refused_as_at_a_resume(
    begin: Callable[..., Run], tmp_path: Path
) -> None:
    (own := tmp_path / "own").mkdir()
    prefix = Path(text_prefix())
    for file in prefix.parent.glob(f"{prefix.name}.*"):
        shutil.copy(file, own)
    (tokens,) = own.glob("*.bin")
    run = begin((2,), "", pause_s=0.2, data=str(tokens.with_suffix("")))
    run.wait_for(lambda: run.last_step() > 20)
    # Another file in its place: the ranks still read the one that they have open.
    (longer := own / "longer").write_bytes(tokens.read_bytes() + b"\0\0")
    longer.replace(tokens)
    os.kill(run.starts()[0]["pid"], signal.SIGKILL)
    assert run.end() == [1]
    refused = [x for x in run.log.splitlines() if "the data is not what the run has" in x]
    assert refused and all("stdlib_text_document.bin has" in x for x in refused), run.log[-3000:]
    assert all("--allow-changed-data" in x for x in refused)
    assert "start again" not in run.log and len(run.starts()) == 2


def test_without_both_copies_the_run_goes_on_from_its_checkpoint(
    begin: Callable[..., Run], reference: dict[int, float]
) -> None:
    # The second keeps what the first holds; and it dies while the others recover.
    run = begin(
        (4,),
        "--pipeline-model-parallel-size 2",
        kill(1, 40, [0, 1], moment="compute"),
        kill(2, 40, [0, 2], moment="compute"),
    )
    assert run.end() == [0]
    run.check(reference)
    assert any(s["iteration"] == 25 and s["generation"] > 1 for s in run.starts())
    assert "both copies of some shard are lost" in run.log


def test_a_node_that_stops_for_a_while_is_left_behind(
    begin: Callable[..., Run], reference: dict[int, float]
) -> None:
    run = begin(
        (1, 1, 1),
        "",
        kill(1, 30, [0, 0], "frozen node", moment="compute", seconds=9),
        pause_s=0.1,
    )
    codes = run.end()
    # Node 0 ends itself when it goes on: the others have gone on without it.
    assert codes[0] == 1 and codes[1:] == [0, 0]
    run.check(reference)
    assert "the others" in run.log or "gone on without it" in run.log
    assert len(run.starts()[-1]["members"]) == 2


def test_a_node_leaves_that_the_run_can_do_without(
    begin: Callable[..., Run],
    reference: dict[int, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = tmp_path / "told"
    command = f'echo "$COPUS_PRESENT_RANKS to $COPUS_WANTED_RANKS" >> {told}'
    monkeypatch.setenv(RESIZE_VARIABLE, command)
    run = begin((1, 1, 2), "--tensor-model-parallel-size 2", pause_s=0.1)

    def was_told() -> list[str]:
        return told.read_text().splitlines() if told.exists() else []

    # More than there are changes nothing; 3 leave those of the first two nodes.
    run.wait_for(lambda: run.last_step() > 20)
    run.ask_for_ranks(6)
    run.wait_for(lambda: was_told() == ["4 to 6"])
    run.ask_for_ranks(3)
    assert run.children[2].wait(_LIMIT_S) == 0, "it ends while the others train"
    run.wait_for(lambda: was_told() == ["4 to 6", "2 to 3"])
    first, second = run.starts()
    run.wait_for(lambda: run.last_step() > second["iteration"] + 20)
    write_stop(run.folder / "run", "")
    run.end()
    run.check(reference, run.last_step())
    assert len(first["members"]) == 4 and first["why"] == "start"
    assert second["members"] == first["members"][:2] and second["why"] == "resize"
    assert second["loaded"] == "memory of the ranks"
    assert second["iteration"] == max(
        r["iteration"]
        for r in read_metrics(run.folder / "run", superseded=True)
        if r["kind"] == "step" and r["t"] < second["t"]
    )
    assert "start more nodes" in run.log and "let go is node 2" in run.log


def test_the_controller_goes_on_with_the_ranks_that_are_left(begin: Callable[..., Run]) -> None:
    # No growth, whose ramp of the learning rate would last until the end.
    flags = "--copus --copus-max-global-batch-size 12 --exit-interval 100"
    run = begin((2, 1, 1), flags, pause_s=0.1)
    run.wait_for(lambda: run.last_step() > 30)
    run.ask_for_ranks(2)
    assert run.end() == [0, 0, 0]
    journal = (run.folder / "run" / "journal.jsonl").read_text().splitlines()
    decisions = [r for r in map(json.loads, journal) if r["kind"] == "decision"]
    assert [r["number"] for r in decisions] == list(range(1, len(decisions) + 1)), "one count"
    first, second = run.starts()
    assert second["why"] == "resize" and second["members"] == first["members"][:2]
    rows = [r for r in read_metrics(run.folder / "run") if r["kind"] == "step"]
    assert [r["iteration"] for r in rows] == list(range(1, len(rows) + 1)), "each step once"
    samples = [b["consumed_samples"] - a["consumed_samples"] for a, b in pairwise(rows)]
    assert samples == [r["global_batch_size"] for r in rows[1:]], "each sample once"


def test_a_model_whose_step_failed_is_gone_with_one_collection(tmp_path: Path) -> None:
    # Else the next generation builds its model beside it, and closes groups that are broken.
    found = on_ranks("tests.extras.elastic.worker", tmp_path, 1, timeout_s=120)
    assert found["told"] == "a bug in the backward pass"
    assert not found["after"]


def test_a_world_that_was_aborted_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    """torch then knows no default group, and megatron-core still has its own."""
    found = on_ranks("tests.extras.elastic.worker_abort", tmp_path, 2, timeout_s=120)
    assert found["known"] == [False, True] and found["left"] == [False, False]
    assert found["sums"] == [3.0, 3.0]
    before, after = found["threads"]
    assert before > 10 and after == 0
