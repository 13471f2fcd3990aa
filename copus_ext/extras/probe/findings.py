"""Links as a table, and which links and nodes are slow beside the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SLOW = 2.0
"""A link is slow if its bandwidth is below the usual one divided by this."""
FAR = 4.0
"""A link is far if its latency is above the usual one times this: latency scatters more."""
FAR_S = 2e-4
"""And if it is more than this above it: less is nothing beside a step."""
MAX_LINES = 20
"""Links that are named one by one."""
MAX_COLUMNS = 12
"""Nodes up to which the table shows every link; beyond them one line per node."""
_WIDTH = 9
_NAME = 24


@dataclass(frozen=True, kw_only=True)
class Culprits:
    """What explains a set of bad links with few words. Numbers of nodes."""

    nodes: tuple[int, ...] = ()
    """All links of these are bad, both ways."""
    senders: tuple[int, ...] = ()
    """All links from these are bad."""
    receivers: tuple[int, ...] = ()
    """All links to these are bad."""
    links: tuple[tuple[int, int], ...] = ()
    """(from, to) of the bad links that none of these explains."""

    def __bool__(self) -> bool:
        return bool(self.nodes or self.senders or self.receivers or self.links)


def culprits(bad: Any) -> Culprits:
    """Names the nodes and links behind bad links.

    A node is named if it has two partners or more and all that is known of it is bad; of one
    partner only the link can be named.

    Args:
        bad: [n, n] from row to column; 1 is bad, 0 is good, NaN is not known; the diagonal is not
            looked at.
    """
    left = np.array(bad, dtype=float)
    np.fill_diagonal(left, np.nan)
    is_bad, known = left == 1, ~np.isnan(left)
    sends = (known.sum(1) >= 2) & (is_bad | ~known).all(1)
    receives = (known.sum(0) >= 2) & (is_bad | ~known).all(0)
    if is_bad.any() and (is_bad | ~known).all():
        # Everything is bad: no node stands out.
        sends[:] = receives[:] = False
    both = sends & receives
    is_bad[both, :] = is_bad[:, both] = False
    only_sends, only_receives = sends & is_bad.any(1), receives & is_bad.any(0)
    is_bad[only_sends, :] = False
    is_bad[:, only_receives] = False
    return Culprits(
        nodes=tuple(np.flatnonzero(both).tolist()),
        senders=tuple(np.flatnonzero(only_sends).tolist()),
        receivers=tuple(np.flatnonzero(only_receives).tolist()),
        links=tuple((int(i), int(j)) for i, j in np.argwhere(is_bad)),
    )


def usual(matrix: Any, *, best: Any = np.max) -> float:
    """The usual value of a link: the median, not led astray by one bad node.

    In a cluster of three or four nodes the links of one are half of all or more, so that the median
    of all may be one of its own. The median is taken without each of the nodes in turn, and the
    best of these counts. With many nodes it is the plain median, nearly.

    Args:
        matrix: [n, n] from row to column, NaN where not known; the diagonal is not looked at.
        best: `np.max` where more is better, `np.min` where less is.

    Returns:
        NaN if nothing is known.
    """
    values = np.array(matrix, dtype=float)
    np.fill_diagonal(values, np.nan)
    found = [_median(values)]
    if len(values) > 2:
        for node in range(len(values)):
            found.append(_median(np.delete(np.delete(values, node, 0), node, 1)))
    found = [value for value in found if not np.isnan(value)]
    return float(best(found)) if found else float("nan")


def _median(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else float("nan")


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What is wrong with the links of a cluster."""

    bytes_per_s: float
    """The usual bandwidth, or the one expected; links below half of it are slow."""
    latency_s: float
    """The usual latency; links above four times of it are far."""
    slow: Culprits
    """Behind the slow links."""
    far: Culprits
    """Behind the far ones."""
    lines: tuple[str, ...]
    """The same in words, one line each; none if all is well."""


def find(
    bytes_per_s: Any, latency_s: Any, hosts: Sequence[str], *, expected: float | None = None
) -> Findings:
    """Looks for slow and far links.

    Args:
        bytes_per_s: [n, n] from row to column, NaN where not known.
        latency_s: likewise.
        hosts: [n] names of the nodes.
        expected: bandwidth that every link should have; None compares them with each other.
    """
    speeds, delays = (np.array(m, dtype=float) for m in (bytes_per_s, latency_s))
    speed = usual(speeds) if expected is None else expected
    delay = usual(delays, best=np.min)
    slow = culprits(np.where(np.isnan(speeds), np.nan, speeds < speed / SLOW))
    is_far = (delays > delay * FAR) & (delays > delay + FAR_S)
    far = culprits(np.where(np.isnan(delays), np.nan, is_far))
    what = "expected" if expected is not None else "usual"
    slow_words = _Words(
        name="slow", values=speeds, hosts=hosts, than=f"{what} {rate(speed)}", show=rate
    )
    far_words = _Words(
        name="far", values=delays, hosts=hosts, than=f"usual {duration(delay)}", show=duration
    )
    return Findings(
        bytes_per_s=speed,
        latency_s=delay,
        slow=slow,
        far=far,
        lines=(*slow_words.of(slow), *far_words.of(far)),
    )


@dataclass(frozen=True, kw_only=True)
class _Words:
    name: str
    values: np.ndarray
    hosts: Sequence[str]
    than: str
    show: Any

    def of(self, found: Culprits) -> list[str]:
        lines = []
        for i in found.nodes:
            both = np.stack([self.values[i], self.values[:, i]])
            lines.append(f"{self.name} node: {self.hosts[i]}: all its links, {self._of(both, i)}")
        for i in found.senders:
            middle = self._of(self.values[i][None], i)
            lines.append(f"{self.name} node: {self.hosts[i]}: all it sends, {middle}")
        for i in found.receivers:
            middle = self._of(self.values[:, i][None], i)
            lines.append(f"{self.name} node: {self.hosts[i]}: all it receives, {middle}")
        return [*lines, *self._of_links(found.links)]

    def _of_links(self, found: Sequence[tuple[int, int]]) -> list[str]:
        known = self.values[~np.isnan(self.values) & ~np.eye(len(self.values), dtype=bool)]
        if len(found) == known.size > 2:
            middle = self.show(float(np.median(known)))
            return [f"{self.name} links: all of them, {middle} in the median; {self.than}"]
        links, lines = set(found), []
        for i, j in found:
            here = self.show(self.values[i, j])
            if (j, i) not in links:
                way = f"from {self.hosts[i]} to {self.hosts[j]}: {here}"
            elif i < j:
                back = self.show(self.values[j, i])
                way = f"between {self.hosts[i]} and {self.hosts[j]}: {here} and {back} back"
            else:
                continue
            lines.append(f"{self.name} link: {way}; {self.than}")
        more = len(lines) - MAX_LINES
        return [*lines[:MAX_LINES], *([f"{self.name} links: {more} more"] if more > 0 else [])]

    def _of(self, values: np.ndarray, node: int) -> str:
        return f"{self.show(_median(np.delete(values, node, 1)))} in the median; {self.than}"


def rate(bytes_per_s: float) -> str:
    """A bandwidth as people read it, such as 12.3 GB/s."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        # Below it, 999.6 would be written 1e+03.
        if bytes_per_s >= 0.9995 * size:
            return f"{bytes_per_s / size:.3g} {unit}"
    return f"{bytes_per_s:.3g} B/s"


def duration(seconds: float) -> str:
    """A latency as people read it, such as 35 us."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def table(bytes_per_s: Any, latency_s: Any, hosts: Sequence[str]) -> str:
    """Bandwidth of the links and a line on latency.

    Args:
        bytes_per_s: [n, n] from row to column, NaN where not known; the diagonal is not looked at.
        latency_s: likewise.
        hosts: [n] names of the nodes.
    """
    speeds, delays = (np.array(m, dtype=float) for m in (bytes_per_s, latency_s))
    for matrix in (speeds, delays):
        np.fill_diagonal(matrix, np.nan)
    if np.isnan(speeds).all():
        return "no link was timed"
    known = delays[~np.isnan(delays)]
    lines = _matrix(speeds, hosts) if len(hosts) <= MAX_COLUMNS else _per_node(speeds, hosts)
    lines.append(
        f"bandwidth {rate(usual(speeds))} as a rule, {rate(np.nanmin(speeds))} to "
        f"{rate(np.nanmax(speeds))}; latency {duration(float(np.median(known)))} in the median, "
        f"{duration(known.min())} to {duration(known.max())}"
    )
    return "\n".join(lines)


def _matrix(speeds: np.ndarray, hosts: Sequence[str]) -> list[str]:
    largest = float(np.nanmax(speeds))
    unit, size = ("GB/s", 1e9) if largest >= 1e9 else ("MB/s", 1e6)
    wide = min(max(map(len, hosts)), _NAME)
    head = "".join(f"{'to ' + str(j):>{_WIDTH}}" for j in range(len(hosts)))
    lines = [f"{unit + ' from':<{wide + 5}}{head}"]
    for i, host in enumerate(hosts):
        cells = "".join(
            f"{'-' if i == j else '?' if np.isnan(v) else f'{v / size:.2f}':>{_WIDTH}}"
            for j, v in enumerate(speeds[i])
        )
        lines.append(f"{i:>4} {host[:wide]:<{wide}}{cells}")
    return lines


def _per_node(speeds: np.ndarray, hosts: Sequence[str]) -> list[str]:
    wide = min(max(map(len, hosts)), _NAME)
    lines = [f"{'node':<{wide + 5}}{'sends':>12}{'receives':>12}{'slowest':>12}  link"]
    for i, host in enumerate(hosts):
        sends, receives = speeds[i], speeds[:, i]
        both = np.concatenate([sends, receives])
        if np.isnan(both).all():
            lines.append(f"{i:>4} {host[:wide]:<{wide}}{'?':>12}{'?':>12}{'?':>12}")
            continue
        worst = int(np.nanargmin(both))
        way = "to" if worst < len(hosts) else "from"
        middles = "".join(
            f"{'?' if np.isnan(some).all() else rate(float(np.nanmedian(some))):>12}"
            for some in (sends, receives)
        )
        lines.append(
            f"{i:>4} {host[:wide]:<{wide}}{middles}{rate(both[worst]):>12}  "
            f"{way} {hosts[worst % len(hosts)]}"
        )
    return lines
