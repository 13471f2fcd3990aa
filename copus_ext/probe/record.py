"""What a probe has measured: a file that grows by every round, and matrices out of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from copus_ext.cost_model.cluster_spec import ClusterSpec
from copus_ext.cost_model.links import Links
from copus_ext.probe.findings import usual
from copus_ext.probe.line import Timed
from copus_ext.probe.rounds import Pair
from megatron.training.common.errors import UsageError

Known = dict[tuple[int, int], Timed]
"""What is known of the direction from one node to another."""
_DIGITS = 4
_MOST_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a pair."""

    pair: Pair
    """Its nodes."""
    there: Timed | None = None
    """From the first to the second; None if they did not get through."""
    back: Timed | None = None
    """From the second to the first."""
    why: str = ""
    """Why they did not."""

    @property
    def is_known(self) -> bool:
        """Whether both directions were timed."""
        return self.there is not None and self.back is not None


class Record:
    """The file of a probe: JSON lines, written through after every round.

    Args:
        path: of the file.
        hosts: [nodes] their names; pairs are kept by these, as a new start may number the nodes in
            another way.
        how: backend and sizes, which must not differ within a file.
    """

    def __init__(self, path: Path, hosts: Sequence[str], how: Mapping[str, Any]) -> None:
        self.path, self._hosts, self._how = path, list(hosts), dict(how)
        self.known: Known = {}
        self.silent: dict[Pair, str] = {}

    def begin(self, *, resume: bool) -> None:
        """Starts the file, or reads what an interrupted probe has left in it.

        Raises:
            UsageError: it is there from an interrupted probe and is not to be resumed, or is one of
                other sizes or another backend.
            OSError: it cannot be read or written.
        """
        lines = list(_lines(self.path)) if self.path.exists() else []
        is_open = bool(lines) and not any(line.get("kind") == "done" for line in lines)
        if is_open and not resume and any(line.get("kind") == "link" for line in lines):
            raise UsageError(
                f"{self.path} holds links of a probe that was interrupted; go on with --resume or "
                "delete it"
            )
        if is_open and resume:
            self._take(lines)
            return
        # A new file, never one that a link leads to.
        self.path.unlink(missing_ok=True)
        self._append([{"kind": "probe", "hosts": self._hosts, **self._how}])

    def _take(self, lines: Sequence[dict[str, Any]]) -> None:
        first = lines[0]
        for name, value in self._how.items():
            if first.get("kind") != "probe" or first.get(name) != value:
                raise UsageError(
                    f"{self.path} was begun with {name} {str(first.get(name))[:60]} and not "
                    f"{value}; give the same, or delete it"
                )
        number = {host: i for i, host in enumerate(self._hosts)}
        found: Known = {}
        for line in lines:
            with contextlib.suppress(KeyError, TypeError, ValueError):
                if line["kind"] == "link":
                    way = number[line["from"]], number[line["to"]]
                    found[way] = timed_of(line)
        # Half a pair is timed again.
        self.known = {(i, j): t for (i, j), t in found.items() if i != j and (j, i) in found}

    @property
    def pairs(self) -> frozenset[Pair]:
        """The pairs that need not be timed again."""
        return frozenset((i, j) for i, j in self.known if i < j)

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Takes the pairs of a round.

        Raises:
            OSError: they cannot be written.
        """
        lines: list[dict[str, Any]] = []
        for one in outcomes:
            names = [self._hosts[node] for node in one.pair]
            if one.there is None or one.back is None:
                self.silent[one.pair] = one.why
                lines.append({"kind": "silent", "nodes": names, "why": one.why})
                continue
            for way, ends, timed in (
                (one.pair, names, one.there),
                (one.pair[::-1], names[::-1], one.back),
            ):
                self.known[way] = timed  # pyright: ignore[reportArgumentType]
                line = {"kind": "link", "from": ends[0], "to": ends[1]}
                lines.append({**line, **json_of(timed)})
        self._append(lines)

    def done(self) -> None:
        """Marks the file as that of a whole probe."""
        self._append([{"kind": "done"}])

    def _append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        with self.path.open("a") as file:
            # A line that a kill cut short ends here, so that it spoils no other.
            file.write(("\n" if file.tell() else "") + text)
            file.flush()
            os.fsync(file.fileno())

    def matrices(self) -> tuple[Any, Any]:
        """[nodes, nodes] bytes per second and [nodes, nodes] seconds, from row to column; NaN where
        not known. Both ways of a pair have the latency that was less disturbed: both are half of
        the same round trip."""
        num = len(self._hosts)
        speeds, delays = np.full((num, num), np.nan), np.full((num, num), np.nan)
        for way, timed in self.known.items():
            speeds[way] = timed.bytes_per_s
            delays[way] = min(timed.latency_s, self.known[way[1], way[0]].latency_s)
        return speeds, delays


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.stat().st_size > _MOST_BYTES:
        raise UsageError(f"{path} is too large for links of a probe; delete it")
    with path.open(errors="replace") as file:
        for text in file:
            with contextlib.suppress(ValueError, RecursionError):
                line = json.loads(text)
                if isinstance(line, dict):
                    yield line


def json_of(timed: Timed) -> dict[str, Any]:
    """Plain JSON types."""
    return {"num_bytes": list(timed.num_bytes), "seconds": list(timed.seconds)}


def timed_of(data: Mapping[str, Any]) -> Timed:
    """Reads what `json_of` wrote.

    Raises:
        KeyError, TypeError, ValueError: it is not that.
    """
    sizes, seconds = data["num_bytes"], data["seconds"]
    if not all(isinstance(size, int) for size in sizes):
        raise TypeError("sizes are whole numbers")
    return Timed(num_bytes=tuple(sizes), seconds=tuple(float(s) for s in seconds))


def cluster_of(base: ClusterSpec, record: Record, hosts: Sequence[str]) -> ClusterSpec:
    """The cluster with the links that were measured.

    Args:
        base: its GPUs and the links inside its nodes.
        record: all pairs of it.
        hosts: [nodes] their names.
    """
    speeds, delays = record.matrices()

    def rows(matrix: Any) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(0.0 if i == j else _rounded(value) for j, value in enumerate(row))
            for i, row in enumerate(matrix.tolist())
        )

    links = Links(bytes_per_s=rows(speeds), latency_s=rows(delays), hosts=tuple(hosts))
    nic = _rounded(usual(speeds))
    return replace(base, num_nodes=len(hosts), nic_bytes_per_s=nic, links=links)


def text_of(spec: ClusterSpec) -> str:
    """The cluster file, with one line for each row of a matrix."""
    text = json.dumps(spec.to_json(), indent=2, allow_nan=False)
    return re.sub(r"\[([^\[\]]*)\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
