"""The controller's requests for more or fewer ranks."""

from __future__ import annotations

import io
import json
import math
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from copus_ext.controller.callback import Controller
from copus_ext.controller.decision_log import NAME, DecisionLog, read_journal
from copus_ext.controller.flags import CopusConfig, controller_flags, read_settings
from copus_ext.controller.rank_requests import RankRequests, rank_range
from copus_ext.controller.throughput_table import ThroughputTable
from copus_ext.cost_model.cluster_spec import preset
from copus_ext.goodput.ranks import whole_nodes
from copus_ext.goodput.state import ControllerState, RankChange
from copus_ext.planner.configuration import Configuration
from megatron.training.common.control import GENERATION_VARIABLE, ranks_asked
from megatron.training.common.errors import UsageError
from megatron.training.config.arguments import parse_args
from tests.unit.test_controller_parts import config, flags, rows_of
from tests.unit.test_decide import situation

BATCHES = [8, 16, 32]


@pytest.mark.parametrize(
    ("ranks", "cost", "words"),
    [
        ("4", 1.0, "--copus-ranks 4: write MIN-MAX"),
        ("0-4", 1.0, "--copus-ranks 0-4: write MIN-MAX"),
        ("8-4", 1.0, "--copus-ranks 8-4: the first number"),
        ("4-8", None, "--copus-ranks needs --copus-cost-of-time"),
        ("4-8", -1.0, "--copus-cost-of-time -1 must be at least 0"),
        ("4-8", float("nan"), "--copus-cost-of-time nan must be"),
        (None, 4.0, "--copus-cost-of-time needs --copus-ranks"),
    ],
)
def test_flags_that_make_no_sense(ranks: str | None, cost: float | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        rank_range(flags(copus_ranks=ranks, copus_cost_of_time=cost))


def test_only_an_elastic_run_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GENERATION_VARIABLE, raising=False)
    given = {"copus_ranks": "2-8", "copus_cost_of_time": 2.0}
    with pytest.raises(UsageError, match="needs an elastic run"):
        RankRequests(flags(**given), DecisionLog(None))
    RankRequests(flags(**given, copus_mode="observe"), DecisionLog(None))
    RankRequests(flags(), DecisionLog(None))
    monkeypatch.setenv(GENERATION_VARIABLE, "launch/1")
    RankRequests(flags(**given), DecisionLog(None))


@pytest.mark.parametrize(
    ("given", "of_node", "found"),
    [
        ((1, 4), 1, [1, 2, 3, 4]),
        ((3, 17), 4, [4, 8, 12, 16]),
        ((5, 7), 4, []),
        ((8, 1000), 8, [8 * n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 125)]),
    ],
)
def test_whole_nodes(given: tuple[int, int], of_node: int, found: list[int]) -> None:
    assert [of_node * nodes for nodes in whole_nodes(*given, of_node)] == found


def present(c: Configuration) -> tuple[float, float, int] | None:
    """The time of the present configuration, the only one that was measured."""
    return (0.5, 0.001, 20) if (c.micro_batch_size, c.global_batch_size) == (1, 8) else None


class Asking:
    """A run of two ranks on two nodes that may ask for one to eight."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        monkeypatch.setenv(GENERATION_VARIABLE, "launch/1")
        folder.mkdir(exist_ok=True)
        self.folder, self.state = folder, ControllerState()
        self.decision: Any = SimpleNamespace(kind="stay")
        given = flags(copus_ranks="1-8", copus_max_global_batch_size=64, **more)
        self.table = ThroughputTable(config(), given, gpu=None)
        self.requests = RankRequests(given, DecisionLog(folder))

    def due(self, phi: float, **more: Any) -> RankChange | None:
        rows, now = rows_of(self.table, BATCHES, present)
        inputs = situation(phi=phi, rows=rows, batch=8, **more)
        inputs = replace(inputs, current=rows.index(now))
        context: Any = SimpleNamespace(run_dir=self.folder)
        with redirect_stdout(io.StringIO()):
            found = self.requests.due(
                inputs, self.table, self.state, context, self.decision, moving_s=0.5
            )
        if found is not None:
            self.state.rank_change = RankChange(**json.loads(json.dumps(found)))
        return self.state.rank_change if found is not None else None


def test_what_other_ranks_reach_goes_with_what_the_present_ones_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Asking(tmp_path, monkeypatch, copus_cost_of_time=1.0).table
    speeds = []
    for step_s in (0.5, 0.25):
        _, now = rows_of(table, BATCHES, lambda c, step_s=step_s: (step_s, 0.001, 20))
        rows = table.rows_of_ranks([1, 2, 4], BATCHES, now=now)
        assert {r.layout.world_size for r in rows} == {1, 4}, "the present number is known"
        assert all(r.relative_sd > 0 for r in rows)
        speeds.append([r.samples_per_s for r in rows])
    # A correction keeps a trace of what was predicted, here 1e-5.
    assert speeds[1] == pytest.approx([2 * x for x in speeds[0]], rel=1e-4)


def test_costly_time_asks_for_more_and_cheap_time_for_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = Asking(tmp_path / "fast", monkeypatch, copus_cost_of_time=1e6)
    asked = fast.due(1e5)
    assert asked is not None and asked.before == 2 and asked.after > 2
    written = ranks_asked(fast.folder)
    assert written is not None and written.ranks == asked.after
    notes = [json.loads(line) for line in (fast.folder / NAME).read_text().splitlines()]
    assert [n["kind"] for n in notes] == ["ranks"] and notes[0]["after"] == asked.after
    assert fast.due(1e5) is None, "what was asked for is not asked for again"

    cheap = Asking(tmp_path / "cheap", monkeypatch, copus_cost_of_time=0.0)
    asked = cheap.due(4.0)
    assert asked is not None and asked.after == 1


def test_an_infinite_cost_asks_for_the_least_time_and_can_be_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = Asking(tmp_path / "fast", monkeypatch, copus_cost_of_time=1e9)
    fastest = Asking(tmp_path / "fastest", monkeypatch, copus_cost_of_time=math.inf)
    dear, priceless = fast.due(1e5), fastest.due(1e5)
    assert priceless is not None and priceless == dear and priceless.after > 2
    given = flags(copus_ranks="1-8", copus_cost_of_time=math.inf)
    # The journal, which knows no infinity, has the flags of every launch.
    DecisionLog(tmp_path).append("start", flags=Controller(given).settings())
    (start,) = read_journal(tmp_path / NAME)
    text = start["flags"]["copus_cost_of_time"]
    words = ["--copus", "--copus-cost-of-time", text]
    read = controller_flags(parse_args(words, {"copus controller": CopusConfig}))
    assert read.copus_cost_of_time == math.inf
    (tmp_path / "copus.yaml").write_text(f"cost_of_time: {text}")
    assert read_settings(tmp_path / "copus.yaml") == {"copus_cost_of_time": math.inf}


def test_nothing_is_asked_for_while_decisions_are_paused_or_only_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Asking(tmp_path / "paused", monkeypatch, copus_cost_of_time=1e6)
    assert run.due(1e5, paused=True) is None
    watched = Asking(
        tmp_path / "watched", monkeypatch, copus_cost_of_time=1e6, copus_mode="observe"
    )
    assert watched.due(1e5) is None and watched.due(1e5) is None
    assert ranks_asked(watched.folder) is None, "only the journal tells"
    assert len((watched.folder / NAME).read_text().splitlines()) == 1, "and once"


def test_one_change_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Asking(tmp_path, monkeypatch, copus_cost_of_time=1e6)
    run.decision.kind = "batch"
    assert run.due(1e5) is None
    run.decision.kind = "stay"
    assert run.due(1e5) is not None


def test_a_request_that_cannot_be_written_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Asking(tmp_path, monkeypatch, copus_cost_of_time=1e6)
    (tmp_path / "control").write_text("a file in its place")
    assert run.due(1e5) is None and run.state.rank_change is None
    (tmp_path / "control").unlink()
    assert run.due(1e5) is not None


def test_ranks_that_have_gone_again_are_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Asking(tmp_path, monkeypatch, copus_cost_of_time=1e6)
    asked = run.due(1e5)
    assert asked is not None and run.due(1e5) is None
    # It had come from another number then; the run has left that number since.
    run.state.rank_change = replace(asked, before=8)
    assert run.due(1e5) is not None


@pytest.mark.parametrize("links", [False, True])
def test_a_cluster_that_a_flag_describes_follows_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    monkeypatch.setenv(GENERATION_VARIABLE, "launch/2")
    text = "h100-80g:16"
    if links:
        spec = preset(text).to_json()
        spec["links"] = {"bytes_per_s": [[1e10] * 2] * 2, "latency_s": [[1e-5] * 2] * 2}
        (tmp_path / "cluster.json").write_text(json.dumps(spec))
        text = str(tmp_path / "cluster.json")
    given = flags(copus_cluster=text, copus_ranks="8-32", copus_cost_of_time=1.0)
    table = ThroughputTable(config(world=8), given, gpu=None)
    assert table.cluster is not None and table.cluster.world_size == 8
    _, now = rows_of(table, BATCHES, present)
    rows = table.rows_of_ranks([8, 16, 32], BATCHES, now=now)
    assert {r.layout.world_size for r in rows} == {16, 32}
    left = ThroughputTable(config("--global-batch-size 12", world=6), given, gpu=None)
    assert left.cluster is not None and left.cluster.world_size == 6


def test_a_state_keeps_what_was_asked_for() -> None:
    asked = RankChange(before=2, after=4, critical_batch_size=64.0, iteration=7)
    state = ControllerState(rank_change=asked)
    again = ControllerState.from_json(json.loads(json.dumps(state.to_json())))
    assert again.rank_change == asked
    older = {name: value for name, value in state.to_json().items() if name != "rank_change"}
    assert ControllerState.from_json(older).rank_change is None
