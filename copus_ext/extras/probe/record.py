"""What a probe has measured: a file that is written again after every round, and matrices."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from copus_ext.cost_model.cluster_spec import ClusterSpec, Links
from copus_ext.extras.probe.findings import find, usual
from copus_ext.extras.probe.link_fit import Timed, duplex, least
from megatron.trainer.checkpoint.files import read_text, write_atomically
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.outside import parse_json

Pair = tuple[int, int]
"""Two nodes, the lower number first."""
_DIGITS = 4
_MAX_BYTES = 1 << 28
_LONG_WRITE_S = 0.1


class LinkRecord:
    """The links that were timed.

    Args:
        hosts: [nodes] their names. Links are kept by these, since a new start may number the nodes
            in another way.
        how: backend and sizes, which must not differ within a file.
    """

    def __init__(self, path: Path, hosts: Sequence[str], how: Mapping[str, Any]) -> None:
        self.path, self.hosts, self._how = path, list(hosts), dict(how)
        self.known: dict[tuple[int, int], Timed] = {}
        """From one node to another; both directions of a pair."""
        self.silent: dict[Pair, str] = {}
        """Pairs without an answer, and why."""
        self._next_write_s = 0.0

    def begin(self, *, resume: bool) -> None:
        """Starts the file, or reads what an interrupted probe has left in it.

        Raises:
            UsageError: it is there from an interrupted probe and is not to be resumed, or is one of
                other sizes or another backend.
            OSError: it cannot be written.
        """
        found = self._read()
        links = found.get("links")
        if found.get("done") is False and isinstance(links, list):
            if links and not resume:
                raise UsageError(
                    f"{self.path} holds links of a probe that was interrupted; go on with "
                    "--resume or delete it"
                )
            if resume:
                self._take(found, links)
        self._write(done=False)

    def _read(self) -> dict[str, Any]:
        """What is in the file; nothing if it is damaged or missing."""
        try:
            found = parse_json(read_text(self.path, max_bytes=_MAX_BYTES))
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _take(self, found: Mapping[str, Any], links: Sequence[Any]) -> None:
        for name, value in self._how.items():
            if found.get(name) != value:
                raise UsageError(
                    f"{self.path} was begun with {name} {str(found.get(name))[:60]} and not "
                    f"{value}; give the same, or delete it"
                )
        number = {host: i for i, host in enumerate(self.hosts)}
        known = {}
        for line in links:
            with contextlib.suppress(KeyError, TypeError, ValueError):
                known[number[line["from"]], number[line["to"]]] = Timed.of(line)
        # Half a pair is timed again.
        self.known = {(i, j): t for (i, j), t in known.items() if i != j and (j, i) in known}

    @property
    def pairs(self) -> frozenset[Pair]:
        """The pairs that need not be timed again."""
        return frozenset((i, j) for i, j in self.known if i < j)

    def add(self, known: Mapping[tuple[int, int], Timed], silent: Mapping[Pair, str]) -> None:
        """Takes the pairs of a round. Of a link that was timed before, the least times stay; one
        that gives no answer any more is not known.

        Raises:
            OSError: they cannot be written.
        """
        for way, timed in known.items():
            self.known[way] = least(self.known.get(way, timed), timed)
            # Fitted now: those of all links at the end would let the other nodes wait too long.
            _ = self.known[way].bytes_per_s
        for a, b in silent:
            self.known.pop((a, b), None)
            self.known.pop((b, a), None)
        self.silent |= silent
        # A large table takes long to write: then not after every round.
        if time.monotonic() >= self._next_write_s:
            self._write(done=False)

    def flush(self) -> None:
        """Writes what was added since the last write."""
        self._write(done=False)

    def done(self) -> None:
        """Marks the file as that of a whole probe."""
        self._write(done=True)

    def _write(self, *, done: bool) -> None:
        links = [
            {"from": self.hosts[i], "to": self.hosts[j], **timed.to_json()}
            for (i, j), timed in self.known.items()
        ]
        value = {"hosts": self.hosts, **self._how, "links": links, "done": done}
        begin_s = time.monotonic()
        write_atomically(self.path, json.dumps(value, allow_nan=False))
        took_s = time.monotonic() - begin_s
        self._next_write_s = begin_s + (20 * took_s if took_s > _LONG_WRITE_S else 0.0)

    def matrices(self) -> tuple[Any, Any]:
        """[nodes, nodes] bytes per second and [nodes, nodes] seconds, from row to column; NaN where
        not known. Both directions of a pair are half of the same round trip, so both get the lower
        latency, which was less disturbed."""
        num = len(self.hosts)
        speeds, delays = np.full((num, num), np.nan), np.full((num, num), np.nan)
        for way, timed in self.known.items():
            speeds[way] = timed.bytes_per_s
            delays[way] = min(timed.latency_s, self.known[way[1], way[0]].latency_s)
        return speeds, delays

    def unexplained_pairs(self, expected: float | None) -> frozenset[Pair]:
        """The pairs with a slow or far link that no slow or far node explains: something that
        passed may have disturbed one of them.

        Args:
            expected: bandwidth that every link should have; None compares them with each other.
        """
        found = find(*self.matrices(), self.hosts, expected=expected)
        return frozenset((min(w), max(w)) for w in (*found.slow.links, *found.far.links))

    @property
    def duplex(self) -> float:
        """Share of a link's bandwidth that is usually left while the other direction is used."""
        pairs = [(timed, self.known[b, a]) for (a, b), timed in self.known.items()]
        known = [share for pair in pairs if (share := duplex(*pair)) is not None]
        return round(median(known), 2) if known else 1.0

    def cluster(self, base: ClusterSpec) -> ClusterSpec:
        """A cluster with the links that were measured, all of which must be known.

        Args:
            base: its GPUs and the links inside its nodes.
        """
        speeds, delays = self.matrices()

        def rows(matrix: Any) -> tuple[tuple[float, ...], ...]:
            return tuple(
                tuple(0.0 if i == j else _rounded(value) for j, value in enumerate(row))
                for i, row in enumerate(matrix.tolist())
            )

        links = Links(
            bytes_per_s=rows(speeds),
            latency_s=rows(delays),
            hosts=tuple(self.hosts),
            duplex=self.duplex,
        )
        nic = _rounded(usual(speeds))
        return replace(base, num_nodes=len(self.hosts), nic_bytes_per_s=nic, links=links)


def cluster_text(spec: ClusterSpec) -> str:
    """The cluster file, with one line for each row of a matrix."""
    text = json.dumps(spec.to_json(), indent=2, allow_nan=False)
    return re.sub(r"\[([^\[\]]*)\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
