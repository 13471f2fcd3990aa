"""Elastic runs without processes: who keeps whose copy, what is restored, how a run goes on."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from copus_ext.commands.pretrain import main
from copus_ext.extras.elastic.choice import BATCH_CHANGE, choose
from copus_ext.extras.elastic.copies import (
    CopySet,
    HeldCopies,
    Moment,
    Piece,
    backup_ranks,
    backup_ranks_of_released,
)
from copus_ext.extras.elastic.environment import (
    COPY_INTERVAL,
    COPY_INTERVAL_VARIABLE,
    PIPE_VARIABLE,
    RESIZE_VARIABLE,
)
from copus_ext.extras.elastic.messages import Generation, JsonSocket, Member
from copus_ext.extras.elastic.node import Agent
from copus_ext.extras.elastic.resize import RANKS_FILE, ask_cluster, ranks_asked, staying
from copus_ext.launch.launchers import Start
from copus_ext.launch.options import read_options
from copus_ext.launch.workers import RELEASED
from megatron.trainer.common.control import (
    GENERATION_VARIABLE,
    LAUNCH_VARIABLE,
    LOCK_FILE,
)
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.host_memory import HostMemory
from megatron.trainer.common.train_state import TrainState
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.layout import Layout
from megatron.trainer.distributed.sharding import Record
from megatron.trainer.model.shards import KINDS, Shards
from megatron.trainer.resilience.exit_status import RunOutcome
from megatron.trainer.resilience.lock import Holder, Lock
from tests.extras.elastic.bad_files import agent, generation
from tests.helpers.jobs import TINY
from tests.helpers.processes import wait_until


def test_a_generation_survives_its_json() -> None:
    one = generation(2, 1, kind="loss", lost=(Member(2, 0, 1),))
    assert Generation.from_json(json.loads(json.dumps(one.to_json()))) == one


@pytest.mark.parametrize("ranks", [(2,), (4,), (2, 2), (1, 1, 1), (8, 4), (2, 1, 1), (1,) * 5])
def test_every_copy_has_one_keeper_and_leaves_its_node(ranks: tuple[int, ...]) -> None:
    one = generation(*ranks)
    for rank, keeper in enumerate(backup_ranks(one)):
        assert keeper is not None and keeper != rank
        if len(ranks) > 1:
            assert one.members[keeper].node != one.members[rank].node


@pytest.mark.parametrize("ranks", [(2, 2), (1, 1, 1, 1), (2,) * 6])
def test_one_second_node_is_fatal_and_no_other(ranks: tuple[int, ...]) -> None:
    one = generation(*ranks)
    found = backup_ranks(one)
    for node in one.nodes:
        with_copies = {
            one.members[keeper].node for r in one.ranks_of(node) if (keeper := found[r]) is not None
        }
        assert len(with_copies) == 1


def test_a_rank_alone_has_no_keeper() -> None:
    assert backup_ranks(generation(1)) == [None]


def test_messages_of_two_threads_stay_whole() -> None:
    ours, theirs = socket.socketpair()
    takes = {"of": int, "text": str}
    sender, receiver = JsonSocket(ours, takes), JsonSocket(theirs, takes)
    threads = [
        threading.Thread(target=lambda i=i: [sender.send(of=i, text="x" * 500) for _ in range(200)])
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    found: list[dict[str, Any]] = []
    while len(found) < 800:
        messages = receiver.read()
        assert messages is not None, "a message was torn"
        found += messages
    for thread in threads:
        thread.join()
    assert [sum(m["of"] == i for m in found) for i in range(4)] == [200] * 4


# Another number of ranks.


@pytest.mark.parametrize(
    ("nodes", "asked", "left"),
    [
        ((2, 2), 4, (2, 2)),
        ((2, 2), 3, (2,)),
        ((2, 2), 1, (2,)),  # one node stays, whatever is asked for
        ((1, 2, 1), 3, (1, 2)),
        ((1, 2, 1), 2, (1,)),
        ((4, 4), 100, (4, 4)),
    ],
)
def test_whole_nodes_leave_and_the_first_stay(
    nodes: tuple[int, ...], asked: int, left: tuple[int, ...]
) -> None:
    assert staying(generation(*nodes).members, asked) == generation(*left).members


def test_those_that_stay_keep_what_those_that_leave_hold() -> None:
    now = generation(2, 1, 2)
    kept = staying(now.members, 3)
    released = tuple(m for m in now.members if m not in kept)
    following = generation(2, 1, kind="resize", number=2, released=released)
    assert backup_ranks_of_released(now, following) == [None, None, None, 0, 1]
    assert Generation.from_json(json.loads(json.dumps(following.to_json()))) == following


def ask_for(run_dir: Path, ranks: int) -> None:
    (run_dir / RANKS_FILE).parent.mkdir(exist_ok=True)
    (run_dir / RANKS_FILE).write_text(f"{ranks}\n")


def test_the_same_number_asked_for_again_is_another_request(tmp_path: Path) -> None:
    assert ranks_asked(tmp_path) is None
    ask_for(tmp_path, 8)
    first = ranks_asked(tmp_path)
    os.utime(tmp_path / RANKS_FILE, ns=(1, 1))
    second = ranks_asked(tmp_path)
    assert first is not None and second is not None
    assert first.ranks == second.ranks == 8 and first != second


def test_the_cluster_is_asked_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = tmp_path / "said"
    command = 'echo "$COPUS_PRESENT_RANKS to $COPUS_WANTED_RANKS on $COPUS_NODES $COPUS_LAUNCH"'
    monkeypatch.setenv(RESIZE_VARIABLE, f"{command} >> {said}")
    monkeypatch.setenv(LAUNCH_VARIABLE, "ends with its processes")
    ask_cluster(6, generation(2, 2))
    assert wait_until(lambda: said.exists() and said.read_text().endswith("\n"), 20)
    assert said.read_text() == "4 to 6 on 0,1 \n"
    assert "asks for 6 ranks and has 4: start more nodes" in capsys.readouterr().err
    monkeypatch.setenv(RESIZE_VARIABLE, "exit 3")
    ask_cluster(2, generation(2))
    told: list[str] = []
    assert wait_until(
        lambda: told.append(capsys.readouterr().err) or "left with 3" in "".join(told), 20
    )
    monkeypatch.delenv(RESIZE_VARIABLE)
    ask_cluster(2, generation(2))
    assert capsys.readouterr().err == ""


def ask(one: Agent, tmp_path: Path, ranks: int) -> None:
    ask_for(tmp_path, ranks)
    one._resize()


def test_a_join_waits_until_released_ranks_have_left(tmp_path: Path) -> None:
    one = agent(tmp_path, 1, 1, 1)
    ask(one, tmp_path, 2)
    assert one.generation is not None and one.generation.kind == "resize"
    assert one.generation.released == (Member(2, 0),)
    one._hear_peer(1, {"ready": [[1, 0, 1000]]})
    one._propose()
    assert one.generation.number == 2, "the released rank still holds its state"
    one._hear_peer(2, {"gone": [[2, 0, 0]]})
    one._propose()
    assert one.generation.number == 3 and one.generation.kind == "join"
    assert one.generation.members == (Member(0, 0), Member(1, 0), Member(1, 0, 1000))


@pytest.mark.parametrize("died", [Member(1, 0), Member(2, 0)])
def test_a_loss_takes_back_what_was_let_go(tmp_path: Path, died: Member) -> None:
    # The other one may hold the only copy that is left.
    one = agent(tmp_path, 1, 1, 1, 1)
    ask(one, tmp_path, 2)
    one._hear_peer(died.node, {"died": [list(died)]})
    one._propose()
    now = one.generation
    assert now is not None and now.kind == "loss" and now.released == ()
    assert now.members == tuple(Member(n, 0) for n in range(4) if n != died.node)


def test_a_rank_that_has_left_and_is_wanted_again_is_lost(tmp_path: Path) -> None:
    one = agent(tmp_path, 1, 1, 1)
    ask(one, tmp_path, 2)
    one._hear_peer(1, {"died": [[1, 0, 0]]})
    one._propose()
    one._hear_peer(2, {"gone": [[2, 0, 0]]})
    one._propose()
    now = one.generation
    assert now is not None and now.members == (Member(0, 0),) and now.lost == (Member(2, 0),)


def test_a_node_that_waits_to_join_ends_where_nobody_is_left_to_be_joined(tmp_path: Path) -> None:
    # Node 1 has lost its rank, and starts it again; the connection with node 0 is lost then.
    one = agent(tmp_path, 2, 1, 1, node=1)
    one._take(generation(2, number=2, lost=(Member(1, 0), Member(2, 0))))
    for member in (Member(1, 0, 1), Member(2, 0, 1)):
        one._join([member])
    assert one._goes_on
    for member in (Member(0, 0), Member(0, 1)):
        one._lose(member)
    one._propose()
    assert one.generation is not None and one.generation.number == 2 and not one._goes_on


def test_released_ranks_that_have_gone_hold_nothing(tmp_path: Path) -> None:
    # Two of four have handed over and left. Then node 1 falls silent: one of two is enough.
    one = agent(tmp_path, 1, 1, 1, 1)
    ask(one, tmp_path, 2)
    for node in (2, 3):
        one._hear_peer(node, {"gone": [[node, 0, 0]]})
    one._was_silent = True
    one._lose(Member(1, 0))
    one._propose()
    now = one.generation
    assert now is not None and now.kind == "loss" and now.members == (Member(0, 0),)


def test_a_newcomer_takes_no_rank_that_has_gone_for_one_that_is_left(tmp_path: Path) -> None:
    one = agent(tmp_path, 1, 1, node=1)
    one.generation = None
    released = generation(1, kind="resize", number=2, released=(Member(1, 0),))
    one._hear_peer(0, {"gone": [[1, 0, 0]], "generation": released.to_json()})
    assert one._goes_on and not one._is_released
    one._hear_peer(0, {"died": [[0, 0, 0]]})
    one._propose()
    assert one.generation is not None and one.generation.number == 2 and not one._goes_on


def test_released_nodes_go_on_if_all_others_are_lost(tmp_path: Path) -> None:
    one = agent(tmp_path, 1, 1, node=1)
    rank: Any = SimpleNamespace(
        member=Member(1, 0), lines=SimpleNamespace(send=lambda **message: None)
    )
    one._places = [SimpleNamespace(rank=rank, start_again_at=None)]  # pyright: ignore[reportAttributeAccessIssue]
    one._take(generation(1, kind="resize", number=2, released=(Member(1, 0),)))
    one._lose(Member(0, 0))
    one._propose()
    now = one.generation
    assert now is not None and now.kind == "loss" and now.members == (Member(1, 0),)
    assert one._goes_on and not one._is_released


def test_a_second_release_gives_ranks_their_time_again(tmp_path: Path) -> None:
    # One of two ranks has left after the first release, which a loss then took back.
    one, killed = agent(tmp_path, 1, 2, node=1), []
    rank: Any = SimpleNamespace(
        member=Member(1, 0),
        lines=SimpleNamespace(send=lambda **message: None),
        process=SimpleNamespace(kill=lambda: killed.append("rank")),
    )
    one._places = [SimpleNamespace(rank=rank, start_again_at=None)]  # pyright: ignore[reportAttributeAccessIssue]
    released = (Member(1, 0), Member(1, 1))
    one._take(generation(1, kind="resize", number=2, released=released))
    one._released_s = time.monotonic() - 1000
    one._take(generation(1, 1, kind="loss", number=3, lost=(Member(1, 1),)))
    one._take(generation(1, kind="resize", number=4, released=(Member(1, 0),)))
    one._end_the_rest()
    assert one._is_released and not killed


@pytest.mark.parametrize("has_met", [False, True])
def test_a_rank_that_joins_as_the_run_ends_waits_for_nobody(tmp_path: Path, has_met: bool) -> None:
    one, killed = agent(tmp_path, 1, 1), []
    rank: Any = SimpleNamespace(
        member=Member(0, 0, 1),
        has_met=False,
        lines=SimpleNamespace(send=lambda **message: None),
        process=SimpleNamespace(kill=lambda: killed.append("rank")),
    )
    one._places = [SimpleNamespace(rank=rank, start_again_at=None)]  # pyright: ignore[reportAttributeAccessIssue]
    joined = replace(generation(1, 1), members=(Member(1, 0), Member(0, 0, 1)))
    one._take(replace(joined, kind="join", number=2))
    if has_met:
        one._hear_rank(0, {"met": 1})
    one._hear_peer(1, {"left": [[1, 0, 0]]})
    one._end_the_rest()
    assert killed == ([] if has_met else ["rank"])


@pytest.mark.parametrize("text", ["many", "-3", "0", "3.5", "\u0663"])
def test_no_number_of_ranks_is_said_once_and_changes_nothing(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one = agent(tmp_path, 1, 1)
    (tmp_path / RANKS_FILE).write_text("")
    one._resize()
    assert capsys.readouterr().err == "", "it is still being written"
    (tmp_path / RANKS_FILE).write_text(text)
    one._resize()
    assert "control/ranks must hold a number of ranks" in capsys.readouterr().err
    one._resize()
    assert capsys.readouterr().err == ""
    assert one.generation is not None and one.generation.number == 1


def test_a_request_counts_once_and_for_all_launchers(tmp_path: Path) -> None:
    one = agent(tmp_path, 1, 1, 1)
    ask(one, tmp_path, 2)
    asked = next(m["asked"] for m in one._peers.told if "asked" in m)  # pyright: ignore[reportAttributeAccessIssue]
    one._hear_peer(2, {"gone": [[2, 0, 0]]})
    one._hear_peer(2, {"ready": [[2, 0, 1000]]})
    one._propose()
    one._resize()
    assert one.generation is not None and one.generation.number == 3, "it came, and stays"
    heir = agent(tmp_path / "heir", 1, 1, 1, node=1)
    heir._hear_peer(0, {"asked": asked})
    assert heir._asked == ranks_asked(tmp_path)


def test_a_released_launcher_ends_with_its_own_code(tmp_path: Path) -> None:
    one = agent(tmp_path, 1, 1, node=1)
    rank: Any = SimpleNamespace(
        member=Member(1, 0), lines=SimpleNamespace(send=lambda **message: None)
    )
    one._places = [SimpleNamespace(rank=rank, start_again_at=None)]  # pyright: ignore[reportAttributeAccessIssue]
    one._failures[Member(1, 0, 0)] = SimpleNamespace(code=1)  # pyright: ignore[reportArgumentType]
    released = generation(1, kind="resize", number=2, released=(Member(1, 0),))
    one._take(released)
    assert one._goes_on
    one._places[0].rank = None
    assert not one._goes_on
    assert [failure.code for failure in one._what_failed()] == [RELEASED]
    one._places[0].rank = rank
    one._take(generation(1, 1, kind="loss", number=3))
    assert not one._is_released, "it was taken back"


def test_a_piece_holds_what_its_records_name() -> None:
    tensors = [{kind: torch.randn(10) for kind in KINDS}, {kind: torch.randn(7) for kind in KINDS}]
    records = [
        Record("a", (10,), (2,), (6,), 0, 3, True),
        Record("b", (3, 2), (0, 0), (3, 2), 1, 1, True),
    ]
    piece = Piece.of(3, Shards(records=records, tensors=tensors), HostMemory())
    assert piece.buffer.shape == (len(KINDS), 10) and piece.rank == 3
    for kind in KINDS:
        flat = piece.tensors[kind]
        for record, kept in zip(records, piece.records):
            live = tensors[record.shard][kind][record.offset : record.offset + record.numel]
            assert torch.equal(flat[kept.offset : kept.offset + kept.numel], live)
            assert (kept.key, kept.lo, kept.hi, kept.shard) == (record.key, record.lo, record.hi, 0)


def test_older_copies_go_and_are_counted() -> None:
    held = HeldCopies()
    records = [Record("a", (4,), (0,), (4,), 0, 0, True)]
    for iteration in (10, 20):
        held.sets[Moment(1, iteration)] = CopySet(
            layout=Layout(),
            common={},
            step=iteration,
            scaler=None,
            pieces=[Piece.empty(0, records)],
        )
    assert held.num_bytes == 2 * 3 * 4 * 4
    held.keep_only(Moment(1, 20))
    assert list(held.sets) == [Moment(1, 20)] and held.num_bytes == 48


def test_a_fallback_to_fewer_steps_is_newer() -> None:
    assert Moment(2, 5) > Moment(1, 100)


def test_lines_come_whole() -> None:
    ours, theirs = socket.socketpair()
    takes = {"a": int, "b": int}
    lines = JsonSocket(theirs, takes)
    ours.sendall(b'{"a": 1}\n{"b"')
    assert lines.read() == [{"a": 1}]
    ours.sendall(b": 2}\n")
    assert lines.read() == [{"b": 2}]
    ours.sendall(b"[1]\n")
    assert lines.read() is None, "a launcher sends objects"
    ours.close()
    assert JsonSocket(theirs, takes).read() is None


# Layout and batch.

FLAGS = [*TINY.split(), "--train-iters", "100", "--use-distributed-optimizer"]


def stored(ranks: int, *more: str) -> dict[str, object]:
    config = resolve(parse_args([*FLAGS, *more]), ranks, cuda_available=False)
    return config.replace(padded_vocab_size=512).flat()


def test_the_batch_stays_where_a_layout_allows_it() -> None:
    found = choose(FLAGS, stored(4), 2, has_gpu=False, why="")
    assert found.config.batch.initial_global_batch_size == 8 and not found.note
    assert found.config.layout.world_size == 2


def test_a_large_batch_moves_a_little_for_a_faster_layout() -> None:
    flags = [*FLAGS, "--global-batch-size", "128"]
    found = choose(flags, stored(8, "--global-batch-size", "128"), 7, has_gpu=False, why="")
    batch = found.config.batch.initial_global_batch_size
    assert found.config.layout.dp == 7 and batch % 7 == 0
    assert 0 < abs(batch - 128) <= BATCH_CHANGE * 128 and str(batch) in found.note


def test_a_small_batch_moves_to_the_nearest_legal_one() -> None:
    found = choose(FLAGS, stored(4), 3, has_gpu=False, why="")
    assert found.config.batch.initial_global_batch_size == 9 and "instead of 8" in found.note


@pytest.mark.parametrize(("batch", "ranks"), [(4, 4), (8, 4), (16, 4), (32, 8), (256, 8)])
def test_the_batch_comes_again_with_the_ranks(batch: int, ranks: int) -> None:
    flags = [*FLAGS, "--global-batch-size", str(batch)]
    state, replaced = stored(ranks, "--global-batch-size", str(batch)), None
    for number in (ranks - 1, max(ranks - 2, 1), ranks - 1, ranks):
        found = choose(flags, state, number, has_gpu=False, why="", replaced=replaced)
        state, replaced = found.config.replace(padded_vocab_size=512).flat(), found.replaced
    assert state["global_batch_size"] == batch and not found.note
    # What somebody else has set since stays.
    state = stored(ranks, "--global-batch-size", str(2 * ranks))
    found = choose(flags, state, ranks, has_gpu=False, why="", replaced=(batch, batch - 1))
    assert found.config.batch.initial_global_batch_size == 2 * ranks


def test_every_number_of_ranks_goes_on() -> None:
    for ranks in (1, 5, 13):
        found = choose(FLAGS, stored(4), ranks, has_gpu=False, why="")
        assert found.config.layout.world_size == ranks


def test_flags_of_another_start_go() -> None:
    flags = [*FLAGS, "--load", "old", "--finetune"]
    found = choose(flags, stored(4), 2, has_gpu=False, why="")
    assert "--finetune" not in found.flags


# Launcher flags, and the lock.


def test_flags_of_the_launcher() -> None:
    plain = ["--nproc-per-node", "2", "--", *FLAGS]
    assert read_options(plain, {}).launcher is None

    def interval(*flags: str) -> int:
        launcher = read_options([*flags, *plain], {}).launcher
        assert launcher is not None
        return int(launcher.environment[COPY_INTERVAL_VARIABLE])

    assert interval("--elastic") == COPY_INTERVAL
    assert interval("--elastic", "--copy-interval", "7") == 7
    asked = read_options(["--elastic", "--resize-command", "./more", *plain], {}).launcher
    assert asked is not None and asked.environment[RESIZE_VARIABLE] == "./more"
    for flags, said in (
        (["--copy-interval", "7"], "--copy-interval needs --elastic"),
        (["--elastic", "--copy-interval", "0"], "--copy-interval 0"),
        (["--nnodes", "2:4"], "needs --elastic; or give one number"),
    ):
        with pytest.raises(UsageError, match=said):
            read_options([*flags, *plain], {})


def test_a_later_generation_replaces_the_holder_of_a_lock() -> None:
    before = Holder(generation="job.0.0/2")
    assert replace(before, generation="job.0.0/3").replaces(before)
    for other in ("job.0.0/2", "job.0.0/1", "job.0.1/3", "", "job.0.0/x"):
        assert not replace(before, generation=other).replaces(before), other
    assert not Holder().replaces(Holder())


def test_the_lock_of_a_generation_that_is_cut_off_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[str] = []

    def lock(number: int) -> Lock:
        monkeypatch.setenv(GENERATION_VARIABLE, f"job.0.0/{number}")
        return Lock(
            tmp_path,
            flag="--save",
            launch="job.0.0",
            is_supervised=True,
            touch_s=0.01,
            on_lost=lost.append,
        )

    with lock(1) as first, lock(2):
        # The first one lives, and sees that it is out.
        first._thread.join(10)
        assert len(lost) == 1
        assert "job.0.0/2" in (tmp_path / LOCK_FILE).read_text()


def test_the_time_limit_counts_from_the_start_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not from that of the generation: `--exit-duration-in-mins` is given for the run."""
    clock_s, elapsed_s = [1000.0], list[float]()

    def generations(argv: Any, train: Callable[[Start], int]) -> int:
        for waited_s in (30.0, 600.0):
            clock_s[0] += waited_s
            train(Start(flags=argv))
        return 0

    def run(
        config: Any, callbacks: Any, device: Any, signals: Any, started_s: float, *_: Any, **__: Any
    ) -> RunOutcome:
        elapsed_s.append(time.monotonic() - started_s)
        return RunOutcome(state=TrainState(), run_dir=tmp_path, layout=config.layout, save=None)

    monkeypatch.setattr("copus_ext.extras.elastic.run.run_elastic", generations)
    monkeypatch.setattr("megatron.trainer.resilience.env_checks.set_process_defaults", lambda: None)
    for name, value in (("_run", run), ("init_distributed", lambda *_, **__: None)):
        monkeypatch.setattr(f"megatron.trainer.train.pretrain.{name}", value)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "", "MASTER_PORT": "29500"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(PIPE_VARIABLE, "0:0:0:0")
    monkeypatch.setattr(time, "monotonic", lambda: clock_s[0])
    assert main([*TINY.split(), "--train-iters", "2", "--run-dir", str(tmp_path)]) == 0
    assert elapsed_s == [30.0, 630.0]
