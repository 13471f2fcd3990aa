"""A link under torch.distributed: a group of two processes, gone when its pair is done."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

DEVICES = {"gloo": "cpu", "nccl": "cuda"}
"""Where the messages of a backend lie."""
_WATCHDOG = 20
"""Times our own limit after which NCCL's watchdog would end the process."""


class TorchWire:
    """One end; see `copus_ext.probe.talk.Wire`."""

    def __init__(self, peer: int, *, backend: str, most_bytes: int, timeout_s: float) -> None:
        self._peer, self._timeout_s = peer, timeout_s
        device = DEVICES[backend]
        self._message = torch.zeros(most_bytes, dtype=torch.uint8, device=device)
        self._order = torch.zeros(2, dtype=torch.int64, device=device)

    def send(self, num_bytes: int) -> None:
        """Sends a message and waits until it is gone."""
        dist.send(self._message[:num_bytes], self._peer)
        self._wait()

    def receive(self, num_bytes: int) -> None:
        """Waits for a message."""
        dist.recv(self._message[:num_bytes], self._peer)
        self._wait()

    def order(self, num_bytes: int, count: int) -> None:
        """Tells the other end what comes next."""
        self._order[0], self._order[1] = num_bytes, count
        dist.send(self._order, self._peer)
        self._wait()

    def next_order(self) -> tuple[int, int]:
        """Waits for what comes next."""
        dist.recv(self._order, self._peer)
        self._wait()
        num_bytes, count = self._order.tolist()
        return num_bytes, count

    def _wait(self) -> None:
        """gloo has waited already; what NCCL does is in a queue of the GPU."""
        if self._message.is_cuda:
            queue, until = torch.cuda.current_stream(), time.monotonic() + self._timeout_s
            while not queue.query():
                if time.monotonic() > until:
                    raise TimeoutError(f"no answer for {self._timeout_s:g} s")


@contextlib.contextmanager
def torch_wire(
    store: dist.Store,
    place: int,
    *,
    backend: str,
    device_number: int,
    most_bytes: int,
    timeout_s: float,
) -> Iterator[TorchWire]:
    """A wire to the other process of a pair, while the context is open. Both call it.

    Args:
        store: of this pair alone.
        place: 0 or 1; the other process has the other.
        backend: `gloo` or `nccl`.
        device_number: GPU of this process; of no meaning under gloo.
        most_bytes: of a message.
        timeout_s: a message that waits longer is an error, as is a connection.
    """
    if DEVICES[backend] == "cuda":
        torch.cuda.set_device(device_number)
    limit_s = timeout_s * (_WATCHDOG if backend == "nccl" else 1)
    dist.init_process_group(
        backend,
        store=store,
        rank=place,
        world_size=2,
        timeout=datetime.timedelta(seconds=limit_s),
    )
    try:
        yield TorchWire(1 - place, backend=backend, most_bytes=most_bytes, timeout_s=timeout_s)
    finally:
        dist.destroy_process_group()
