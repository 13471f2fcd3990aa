"""Sockets that listen no further than they have to. No torch.

torch's own store listens on all addresses of a machine and asks nobody for a password. It takes a
socket that listens already, so that the choice of the address is ours.
"""

from __future__ import annotations

import errno
import ipaddress
import socket

import psutil

LOOPBACK = "127.0.0.1"
_BACKLOG = 1024
"""Connections that wait for their turn; a kernel may allow fewer."""


def listen_at(host: str, port: int = 0) -> socket.socket:
    """Listens at the address of a host alone, where that is possible.

    It is not where a name means this machine's loopback, which other nodes cannot reach, or an
    address that no interface here has, as behind a load balancer. Then the socket listens on all
    addresses.

    Args:
        host: a name or an address by which others reach this machine.
        port: 0 for any that is free.

    Raises:
        OSError: the port is taken.
    """
    for family, address in _addresses(host):
        if ipaddress.ip_address(address).is_loopback and not _is_loopback(host):
            continue
        try:
            return socket.create_server((address, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            # The second: a system without IPv6, for a name that has such an address.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
        )
    return socket.create_server(("", port), backlog=_BACKLOG)


def loopback_interface() -> str:
    """Name of the interface that has the loopback's address."""
    found = psutil.net_if_addrs().items()
    return next((n for n, own in found if any(a.address == LOOPBACK for a in own)), "lo")


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """What a name means here, IPv4 first as the store of torch tries all of them."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # a name that only other nodes know
        return []
    # The index of an interface may follow an address of IPv6.
    both = [(family, str(address[0]).partition("%")[0]) for family, _, _, _, address in found]
    return sorted(both, key=lambda one: one[0] != socket.AF_INET)


def _is_loopback(host: str) -> bool:
    """Whether the loopback is meant, and not only what a name stands for on this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
