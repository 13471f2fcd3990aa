"""What rank 0 does for all ranks ends all of them where it goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.trainer.common import collectives
from megatron.trainer.common.collectives import on_rank0
from megatron.trainer.common.device import Device
from megatron.trainer.common.errors import TrainingFailure, UsageError
from megatron.trainer.distributed.process_groups import init_distributed


class Ranks:
    """Lets one rank after the other come to a call, rank 0 first.

    Args:
        monkeypatch: stands in for the world.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank, self.sent = 0, None
        monkeypatch.setattr(collectives.dist, "get_rank", lambda: self.rank)
        monkeypatch.setattr(collectives, "broadcast_from_rank0", self.broadcast)

    def broadcast(self, value: Any) -> Any:
        self.sent = value if self.rank == 0 else self.sent
        return self.sent

    def outcomes(self, act: Callable[[], Any]) -> list[Any]:
        """The result of each rank, or its error."""
        found: list[Any] = []
        for self.rank in (0, 1):
            try:
                found.append(on_rank0("the test", act))
            except Exception as error:
                found.append(error)
        return found


def test_every_rank_has_the_result_and_only_rank_0_made_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    ranks = Ranks(monkeypatch)

    def act() -> int:
        calls.append(ranks.rank)
        return 7

    assert ranks.outcomes(act) == [7, 7] and calls == [0]


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (UsageError("--copus-profile x: no profile"), UsageError, "--copus-profile x: no profile"),
        (PermissionError(13, "Permission denied"), UsageError, "[Errno 13] Permission denied"),
        (LookupError("megatron"), TrainingFailure, "the test failed: LookupError: megatron"),
        (ZeroDivisionError("a bug"), TrainingFailure, "the test failed: ZeroDivisionError: a bug"),
    ],
)
def test_every_rank_ends_with_the_error_of_rank_0(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], text: str
) -> None:
    def act() -> Any:
        raise error

    found = Ranks(monkeypatch).outcomes(act)
    assert [(type(one), str(one)) for one in found] == [(kind, text)] * 2


@pytest.mark.parametrize(("backend", "gpus"), [("nccl", [3]), ("gloo", None)])
def test_a_barrier_of_nccl_is_on_the_gpu_of_the_rank(
    backend: str, gpus: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL would take that of the rank's number, which another rank may have; gloo takes none."""
    found: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(collectives.dist, "get_backend", lambda: backend)
    monkeypatch.setattr(collectives.dist, "barrier", lambda *, device_ids: found.append(device_ids))
    collectives.barrier()
    assert found == [gpus]


def test_a_world_of_nccl_is_not_bound_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would split its communicator for each group, also for those of one rank."""
    found: list[Any] = []
    begin = lambda backend, **given: found.append((backend, given.get("device_id")))  # noqa: E731
    monkeypatch.setattr(collectives.dist, "init_process_group", begin)
    gpu = Device(kind="cuda", torch_device=torch.device("cuda", 3), backend="nccl")
    init_distributed(gpu, timeout_minutes=1.0)
    assert found == [("nccl", None)]


def numbers_after(monkeypatch: pytest.MonkeyPatch, sent: list[list[float]]) -> torch.Tensor:
    """The numbers of two ranks at step 7, where the collective writes so much of the buffer. Memory
    that was not written holds the rows of step 6, as torch's allocator gives it out again."""
    dist, empty = collectives.dist, torch.tensor([6.0, 1.0, 2.0, 6.0, 3.0, 4.0]).double()
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)

    def gather(room: torch.Tensor, message: torch.Tensor) -> None:
        assert message.tolist() == [7.0, 10.0, 20.0]
        room[: sum(map(len, sent))] = torch.tensor(sent, dtype=room.dtype).flatten()
        monkeypatch.setattr(dist, "get_world_size", lambda: 1 / 0)  # the world may be gone

    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: empty.clone())
    own = torch.tensor([10.0, 20.0], dtype=torch.float64)
    return collectives.gather_numbers(own, iteration=7)


def test_numbers_come_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    found = numbers_after(monkeypatch, [[7.0, 10.0, 20.0], [7.0, 30.0, 40.0]])
    assert found.tolist() == [[10.0, 20.0], [30.0, 40.0]]


@pytest.mark.parametrize(
    "sent",
    [[], [[7.0, 10.0, 20.0]], [[7.0, 10.0, 20.0], [6.0, 30.0, 40.0]]],
    ids=["no row has come", "one row has not", "one is of the step before"],
)
def test_numbers_that_have_not_come_are_not_taken_for_some(
    sent: list[list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An aborted collective of NCCL ends without an error."""
    with pytest.raises(RuntimeError, match="process group has lost a member"):
        numbers_after(monkeypatch, sent)
