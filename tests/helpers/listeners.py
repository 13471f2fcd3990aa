"""Where processes listen, by the kernel's own tables."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_LISTENS = "0A"


def listening(*pids: int) -> set[tuple[str, int]]:
    """Addresses and ports on which some processes listen for TCP connections."""
    own = {inode for pid in pids for inode in _sockets_of(pid)}
    return {where for where, inode in _table() if inode in own}


def _sockets_of(pid: int) -> Iterator[str]:
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for number in numbers:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{number}")
        except OSError:
            continue
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]


def _table() -> Iterator[tuple[tuple[str, int], str]]:
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTENS:
                address, _, port = words[1].partition(":")
                yield (_address(address), int(port, 16)), words[9]


def _address(text: str) -> str:
    """An address as the kernel writes it: words of 32 bits in the order of this machine."""
    words = [int(text[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
