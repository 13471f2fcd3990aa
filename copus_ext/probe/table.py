"""Links as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from copus_ext.probe.findings import duration, rate, usual

MOST_COLUMNS = 12
"""Nodes up to which every link is shown; beyond them one line per node."""
_WIDTH = 9
_NAME = 24


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
    lines = _matrix(speeds, hosts) if len(hosts) <= MOST_COLUMNS else _per_node(speeds, hosts)
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
