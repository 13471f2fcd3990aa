"""Links between the nodes of a cluster, each pair with its own bandwidth and latency."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from copus_ext.cost_model.model_spec import SpecError

_KEYS = ("bytes_per_s", "latency_s", "hosts")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
_RANGES = {"bytes_per_s": (1, 1e18, "bytes/s"), "latency_s": (0, 1e6, "seconds")}
_SHOWN = 60

Matrix = tuple[tuple[float, ...], ...]
"""[nodes][nodes], from the node of the row to that of the column; the diagonal is 0."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """What was measured between all pairs of nodes; need not be symmetric."""

    bytes_per_s: Matrix
    """Bandwidth from node to node while nothing else is sent; the diagonal says nothing."""
    latency_s: Matrix
    """Time of an empty message from node to node; the diagonal says nothing."""
    hosts: tuple[str, ...] = ()
    """Names of the nodes in the order of rows and columns; none: they have only numbers."""

    def __post_init__(self) -> None:
        num = len(self.bytes_per_s)
        for name in ("bytes_per_s", "latency_s"):
            matrix = getattr(self, name)
            if len(matrix) != num:
                raise SpecError(
                    f"links.{name} has {len(matrix)} rows and links.bytes_per_s {num}; give both "
                    "one row and one column per node"
                )
            for i, row in enumerate(matrix):
                if len(row) != num:
                    raise SpecError(
                        f"links.{name} row {i} has {len(row)} values and there are {num} rows; "
                        "give one row and one column per node"
                    )
                for j, value in enumerate(row):
                    _check(f"links.{name}[{i}][{j}]", value, own=i == j, kind=name)
        if self.hosts:
            self._check_hosts(num)

    def _check_hosts(self, num: int) -> None:
        if len(self.hosts) != num:
            raise SpecError(
                f"links.hosts has {len(self.hosts)} names for {num} nodes; name every node once"
            )
        for host in self.hosts:
            if not isinstance(host, str) or not _HOST.fullmatch(host):
                raise SpecError(
                    f"links.hosts {_short(host)} is no host name; use letters, digits, '-', '.'"
                )
            if self.hosts.count(host) > 1:
                raise SpecError(f"links.hosts names {host} twice; name every node once")

    @property
    def num_nodes(self) -> int:
        """Nodes that were measured."""
        return len(self.bytes_per_s)

    def name(self, node: int) -> str:
        """What to call a node: its host name, or its number."""
        return self.hosts[node] if self.hosts else str(node)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        data = {n: [list(row) for row in getattr(self, n)] for n in ("bytes_per_s", "latency_s")}
        return {**data, "hosts": list(self.hosts)} if self.hosts else dict(data)

    @classmethod
    def from_json(cls, data: Any, quantity: Callable[[str], float]) -> Links:
        """Reads what `to_json` wrote.

        Args:
            data: `bytes_per_s` a matrix of numbers or texts such as `10GB/s`; `latency_s` a matrix,
                one number for all pairs, or left out; `hosts` may be left out; anything may stand
                on the diagonals, also null.
            quantity: turns a text into a number.

        Raises:
            SpecError: an unknown key or a bad value.
        """
        if not isinstance(data, dict):
            raise SpecError('cluster.links must be an object with "bytes_per_s" and "latency_s"')
        if unknown := sorted(set(data) - set(_KEYS)):
            raise SpecError(f"unknown links keys: {', '.join(unknown)}; known: {', '.join(_KEYS)}")
        if "bytes_per_s" not in data:
            raise SpecError("links lacks bytes_per_s; give one row and one column per node")
        speeds = _matrix("bytes_per_s", data["bytes_per_s"], quantity)
        latency = data.get("latency_s", 0.0)
        if not isinstance(latency, list):
            num = len(speeds)
            latency = [[latency if i != j else 0.0 for j in range(num)] for i in range(num)]
        hosts = data.get("hosts", [])
        if not isinstance(hosts, list):
            raise SpecError(f"links.hosts {_short(hosts)} must be a list of host names")
        latencies = _matrix("latency_s", latency, None)
        return cls(bytes_per_s=speeds, latency_s=latencies, hosts=tuple(hosts))


def _matrix(name: str, rows: Any, quantity: Callable[[str], float] | None) -> Matrix:
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise SpecError(f"links.{name} {_short(rows)} must be a list of rows, one per node")

    def number(i: int, j: int, value: Any) -> Any:
        if i == j:
            return 0.0
        return quantity(value) if quantity is not None and isinstance(value, str) else value

    return tuple(
        tuple(number(i, j, value) for j, value in enumerate(row)) for i, row in enumerate(rows)
    )


def _check(what: str, value: Any, *, own: bool, kind: str) -> None:
    least, most, unit = _RANGES[kind]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if own and not (is_number and value == 0):
        raise SpecError(f"{what} is {_short(value)}; it must be 0: no node has a link to itself")
    # Comparisons, as a whole number may be too large for a float.
    if not own and not (is_number and least <= value <= most):
        raise SpecError(f"{what} is {_short(value)}; use {least:g} to {most:g} {unit}")


def _short(value: Any) -> str:
    return repr(str(value)[:_SHOWN]) if isinstance(value, str) else str(value)[:_SHOWN]
