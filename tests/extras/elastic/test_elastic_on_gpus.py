"""What an elastic run does on GPUs, as far as a CPU can show: where messages lie, which GPU a rank
takes, and what goes to ranks with other GPUs."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from copus_ext.extras.elastic import copies, membership, recover
from copus_ext.extras.elastic.copies import CopySet, HeldCopies, Moment, PeerCopies, Piece
from copus_ext.extras.elastic.membership import Membership
from copus_ext.extras.elastic.messages import Generation, Member
from copus_ext.extras.elastic.rank_process import RankProcess
from copus_ext.extras.elastic.recover import Found
from copus_ext.extras.elastic.run import trains_on_gpu
from copus_ext.launch.workers import Launch
from copus_ext.reshard import transfer
from copus_ext.reshard.ownership import all_of_layout
from copus_ext.reshard.plan import make_plan
from copus_ext.reshard.transfer import Transfer
from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.model_shape import ModelShape
from megatron.trainer.distributed import process_groups
from megatron.trainer.distributed.sharding import Record
from megatron.trainer.model.shards import KINDS, Shards

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=24,
    ffn_hidden_size=72,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=6,
    padded_vocab_size=128,
    gated=True,
    linear_bias=False,
    normalization="RMSNorm",
    tied=False,
    ddp_bucket_size=5000,
    overlap_grad_reduce=True,
    use_distributed_optimizer=True,
)
MOMENT = Moment(1, 50)


def room_for(records: list[Record], device: str) -> Shards:
    """The shards of a job that was just built."""
    sizes = [0] * (1 + max(record.shard for record in records))
    for record in records:
        sizes[record.shard] = max(sizes[record.shard], record.offset + record.numel)
    tensors = [{kind: torch.zeros(size, device=device) for kind in KINDS} for size in sizes]
    return Shards(records=records, tensors=tensors)


class Messages:
    """Stands for the messages of two ranks: rank 0 has all copies, and rank 1 has joined."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank, self.devices = 0, set[torch.device]()
        self.sent: list[torch.Tensor] = []
        for name, value in (("get_rank", lambda *_: self.rank), ("get_world_size", lambda *_: 2)):
            monkeypatch.setattr(dist, name, value)
        monkeypatch.setattr(dist, "get_backend", lambda *_: "gloo")
        monkeypatch.setattr(dist, "P2POp", lambda call, tensor, **peer: (call, tensor))
        monkeypatch.setattr(dist, "batch_isend_irecv", self.carry)
        monkeypatch.setattr(transfer, "ALONE_BYTES", 64)

    def carry(self, operations: list[tuple[Any, torch.Tensor]]) -> list[Any]:
        for call, tensor in operations:
            self.devices.add(tensor.device)
            if call is dist.isend:
                self.sent.append(tensor.clone())
            elif not tensor.is_meta:
                tensor.copy_(self.sent.pop(0))
        return []

    def run(self, layout: Layout, device: str) -> list[Shards]:
        """Fills the jobs of both ranks from the copies that rank 0 has of two."""
        then = Layout(dp=2)
        found = Found(moment=MOMENT, layout=then, held=[[0, 1], []], common={}, step=1, scaler=None)
        pieces = [Piece.empty(rank, own) for rank, own in enumerate(all_of_layout(SHAPE, then))]
        start = 0
        for piece in pieces:
            count = piece.buffer.numel()
            piece.buffer.copy_(torch.arange(start, start + count).view_as(piece.buffer))
            start += count
        held = CopySet(layout=then, common={}, step=1, scaler=None, pieces=pieces)
        records = all_of_layout(SHAPE, layout)
        plan, targets = make_plan(recover._sources(found, SHAPE), records), []
        for self.rank in (0, 1):
            own = held if self.rank == 0 else None
            targets.append(room_for(records[self.rank], device))
            one = Transfer(
                plan,
                source=recover._source(found, own),
                target=targets[-1],
                group=None,
                timeout_s=1.0,
                bucket_bytes=2000,
                is_batched=True,
            )
            one.copy_own()
            one.exchange()
        return targets


LAYOUTS = [Layout(tp=2), Layout(pp=2), Layout(dp=2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_message_of_a_recovery_lies_where_the_copies_are(
    monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    """The copies are in memory of the host, and NCCL knows no host tensors."""
    messages = Messages(monkeypatch)
    messages.run(layout, "meta")
    assert messages.sent and messages.devices == {torch.device("meta")}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_state_is_the_same_by_way_of_buffers(
    monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    """As from copies on another device than that of the messages."""
    direct = Messages(monkeypatch).run(layout, "cpu")
    messages = Messages(monkeypatch)
    monkeypatch.setattr(transfer, "_contiguous", lambda *_: None)
    staged = messages.run(layout, "cpu")
    assert not messages.sent
    for one, other in zip(
        itertools.chain(*(x.tensors for x in direct)),
        itertools.chain(*(x.tensors for x in staged)),
        strict=True,
    ):
        assert all(torch.equal(one[kind], other[kind]) and one[kind].any() for kind in KINDS)


def test_a_rank_without_new_shards_sends_from_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    none, some = Shards(records=[], tensors=[]), room_for(all_of_layout(SHAPE, Layout())[0], "cpu")
    of = transfer._device_of_messages
    assert of("nccl", some, none) == torch.device("cuda", 3)
    assert of("gloo", some, none) == of("gloo", none, none) == torch.device("cpu")


class World:
    """Records how a rank enters its first world, on a node with four GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, Any]] = []
        monkeypatch.setattr(membership, "_wait_in_slices", lambda _: None)
        monkeypatch.setattr(Membership, "_listen", lambda _: None)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.setenv(name, "")
        monkeypatch.setenv(membership.GENERATION_VARIABLE, "")
        monkeypatch.setenv("LOCAL_RANK", "2")
        store = SimpleNamespace(set_timeout=lambda _: None)
        monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: store)
        monkeypatch.setattr(dist, "PrefixStore", lambda *_: store)
        monkeypatch.setattr(dist, "init_process_group", self.begin)
        monkeypatch.setattr(dist, "barrier", self.wait)
        monkeypatch.setattr(dist, "get_backend", lambda: self.calls[-1][0])
        monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        monkeypatch.setattr(torch.cuda, "set_device", self.take)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.gpu)

    def take(self, number: int) -> None:
        self.gpu = number
        self.calls.append(("gpu", number))

    def begin(self, backend: str, *, device_id: Any = None, **_: Any) -> None:
        self.calls.append((backend, device_id))

    def wait(self, *, device_ids: Any) -> None:
        self.calls.append(("barrier", device_ids))

    def enter(self, backend: str) -> list[tuple[str, Any]]:
        ours, theirs = socket.socketpair()
        members = (Member(0, 1), Member(0, 2, 1))
        joined = Generation(number=2, members=members, store="127.0.0.1:1", kind="join")
        with contextlib.closing(ours), contextlib.closing(theirs):
            one = Membership(ours, members[1], "launch")
            one.enter(joined, backend=backend, timeout_minutes=1.0)
        return self.calls


def test_a_rank_takes_its_own_gpu_before_its_first_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that joins meets the others long before it builds a model. torch is not told of the GPU,
    since every group, also one that is never used, would then be made by the whole world."""
    found = World(monkeypatch).enter("nccl")
    assert found == [("gpu", 2), ("nccl", None), ("barrier", [2])]


def test_a_rank_of_gloo_takes_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert World(monkeypatch).enter("gloo") == [("gloo", None), ("barrier", None)]


def test_a_rank_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(UsageError, match="local rank 4 has no GPU of its own"):
        world.enter("nccl")
    assert world.calls == []


def test_an_abort_that_does_not_end_is_waited_for_a_while_and_begun_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rank ends itself later; until then its other connections can be shut down."""
    begun, may_end = [], threading.Event()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda *_: "nccl")
    monkeypatch.setattr(process_groups, "_ABORT_S", 0.01)
    monkeypatch.setattr(process_groups, "_abort", lambda: (begun.append(1), may_end.wait()))
    for _ in range(3):
        process_groups.abort_world()
    assert begun == [1]
    # The next world would lose its tables to a late end.
    monkeypatch.setattr(process_groups, "_ABORTED_S", 0.01)
    with pytest.raises(RuntimeError, match="NCCL has not aborted the old world"):
        process_groups.destroy_broken_world()
    may_end.set()
    monkeypatch.setattr(process_groups, "_ABORT_S", 60.0)
    process_groups.abort_world()  # the end of the first
    process_groups.abort_world()
    assert begun == [1, 1]


def test_the_world_is_aborted_before_its_connections_are_shut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL would else tell torch of the connections that this rank has shut itself."""
    monkeypatch.setattr(membership, "_wait_in_slices", lambda _: None)
    monkeypatch.setattr(Membership, "_listen", lambda _: None)
    ours, theirs = socket.socketpair()
    with contextlib.closing(ours), contextlib.closing(theirs), socket.create_server(("", 0)) as one:
        member = Membership(ours, Member(0, 0), "launch")
        member._before = membership._connections()
        with socket.create_connection(one.getsockname()) as near, one.accept()[0] as far:
            monkeypatch.setattr(process_groups, "abort_world", lambda: near.sendall(b"lives"))
            member.shut_connections()
            assert far.recv(99) == b"lives"
            with pytest.raises(OSError):
                near.sendall(b"x")


def test_torch_does_not_end_ranks_where_nccl_has_lost_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")  # torch's own default
    launch = Launch(
        name="launch", node=0, nodes=[0], num_ranks=1, endpoint="", folder=str(tmp_path)
    )
    told = tmp_path / "told"
    program = "import os; value = os.environ['TORCH_NCCL_ASYNC_ERROR_HANDLING']\n"
    program += f"open({str(told)!r}, 'w').write(value)"
    rank = RankProcess.start(Member(0, 0), launch, ["-c", program])
    assert rank.process.wait(60) == 0 and told.read_text().split() == ["0"]
    rank.lines.close()


def test_a_loss_scale_leaves_its_gpu_before_it_goes_to_other_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that gets it may have no GPU of that number."""
    with FakeTensorMode():
        scale = torch.ones(1, device="cuda")
    monkeypatch.setattr(copies, "scaler_state", lambda _: {"scale": scale, "growth_tracker": 3})
    monkeypatch.setattr(copies, "local_shards", lambda *_: Shards(records=[], tensors=[]))
    monkeypatch.setattr(copies, "common_state", lambda *_: {})
    monkeypatch.setattr(copies, "adam_steps", lambda _: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    one = Generation(number=1, members=(Member(0, 0),), store="127.0.0.1:1", kind="start")
    member: Any = None
    held = HeldCopies()
    context: Any = SimpleNamespace(
        config=SimpleNamespace(layout=Layout()),
        state=SimpleNamespace(iteration=50),
        data_identity=[],
        model=[],
        optimizer=None,
        groups=None,
        scheduler=None,
    )
    PeerCopies(held, member, one, interval=25)._take(context)
    state = held.sets[MOMENT].scaler
    assert scale.device.type == "cuda" and state is not None
    assert state["scale"].device.type == "cpu" and state["growth_tracker"] == 3


def test_a_copy_is_there_before_it_is_sent_and_before_the_optimizer_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is made on a stream of its own, while the step computes."""
    order: list[str] = []
    held: Any = HeldCopies()
    held.memory = SimpleNamespace(
        before_write=lambda: order.append("the optimizer may write"),
        wait=lambda: order.append("there"),
    )
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    sent = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(dist, "isend", lambda *_, **__: order.append("sent") or sent)
    members = tuple(Member(0, local) for local in range(2))
    generation = Generation(number=1, members=members, store="127.0.0.1:1", kind="start")
    nobody: Any = None
    copies = PeerCopies(held, nobody, generation, interval=25)
    copies.on_grads_ready(nobody)
    own = Piece(rank=0, records=[], buffer=torch.zeros(3, 0))
    kept = CopySet(layout=Layout(), common={}, step=1, scaler=None, pieces=[own])
    copies._exchange(kept, [1, None], [])
    copies.close()
    assert order == ["the optimizer may write", "there", "sent", "there"]


def test_room_of_older_copies_is_used_again_and_that_of_a_failed_one_is_not() -> None:
    """A message of the failed one may still be under way."""
    held: Any = HeldCopies()
    given: list[torch.Tensor] = []
    held.memory = SimpleNamespace(give_back=given.append)
    pieces = [[Piece(rank=i, records=[], buffer=torch.zeros(3, 1)) for i in (0, 1)] for _ in "123"]
    for iteration, of in enumerate(pieces):
        held.sets[Moment(1, iteration)] = CopySet(
            layout=Layout(), common={}, step=1, scaler=None, pieces=of
        )
    held.drop(Moment(1, 2))
    assert given == []
    held.keep_only(Moment(1, 1))
    assert [one is pieces[0][0].buffer for one in given] == [True], "not that of another rank"


def test_a_cpu_run_beside_gpus_is_known_by_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [trains_on_gpu(words) for words in ([], ["--device", "cuda"])] == [True, True]
    assert not trains_on_gpu(["--device=cuda", "--device", "cpu"])
