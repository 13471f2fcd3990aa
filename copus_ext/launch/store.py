"""The store of a launch, in which its ranks meet: torch's, on the address of the endpoint alone."""

from __future__ import annotations

import datetime
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from copus_ext.launch.listen import listen_at

BACKEND = "copus"


def serve(host: str, port: int = 0, *, timeout_s: float = 300.0) -> Any:
    """A store that listens as `listen_at` says.

    Args:
        host: address of this machine, or a name of it.
        port: 0 for any that is free.
        timeout_s: a key that nobody has set is waited for so long.

    Raises:
        OSError: the port is taken.
    """
    server = listen_at(host, port)
    # Where it listens on all addresses, this is one of them, by which it can be reached from here.
    address, port = server.getsockname()[:2]
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=server.detach(),  # the store closes it
    )


class Meeting(RendezvousHandler):
    """Nodes whose number and order are known meet in the store of the first, as with torch's
    `static` backend.

    Args:
        params: of the launch; `rank` is the place of this node.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        host, _, port = params.endpoint.rpartition(":")
        self._rank, self._num_nodes = int(params.config["rank"]), params.max_nodes
        self._run_id, self._host, self._port = params.run_id, host, int(port)
        self._timeout_s = float(params.config["timeout"])
        self._store: Any = None

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Opens the store on the first node, and connects with it on the others."""
        if self._store is None and self._rank == 0:
            self._store = serve(self._host, self._port, timeout_s=self._timeout_s)
            self._port = self._store.port
        elif self._store is None:
            limit = datetime.timedelta(seconds=self._timeout_s)
            self._store = TCPStore(self._host, self._port, is_master=False, timeout=limit)
        return RendezvousInfo(
            PrefixStore(self._run_id, self._store),
            self._rank,
            self._num_nodes,
            RendezvousStoreInfo(self._host, self._port),
        )

    def is_closed(self) -> bool:
        """A launch has one meeting."""
        return False

    def set_closed(self) -> None:
        """Nothing to do."""

    def num_nodes_waiting(self) -> int:
        """None can come later."""
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        """The store ends with the process."""
        return True


def register() -> None:
    """Makes `BACKEND` known to torch."""
    rendezvous_handler_registry.register(BACKEND, Meeting)
