"""What `--copus` made of a run: losses, and the time to the other run's loss, in one line.

    python scripts/compare_runs.py PLAIN_RUN COPUS_RUN

Both are run directories of `pretrain_gpt.py` with the same samples and held-out evaluations. The
clock begins when the trainer has its flags, and counts set-up, measuring and changes. Evaluations
are taken off, since only some runs have them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.trainer.common.errors import UsageError
from megatron.trainer.logging.metrics import read_metrics

_WIDTH, _HEIGHT = 60, 12
"""Of the chart, characters."""
EQUAL = 0.003
"""Relative difference of two losses that counts as none."""


class Point(NamedTuple):
    """A held-out evaluation."""

    seconds: float
    loss: float


def curve(run: Path) -> list[Point]:
    """Held-out losses over training time, s.

    Raises:
        UsageError: the run has none, or no record, or was started again.
    """
    began, off, trained, starts, found = 0.0, 0.0, 0.0, 0, []
    for r in read_metrics(run):
        if r["kind"] == "run.start":
            starts += 1
            began, trained = r["m"], r["m"]
        elif r["kind"] == "step":
            trained = r["m"]
        elif r["kind"] == "eval" and r["split"] == "valid":
            found.append(Point(trained - began - off, r["losses"]["lm loss"]))
            off += r["m"] - trained
            trained = r["m"]
    if starts > 1:
        raise UsageError(f"{run} was started {starts} times, each with a clock of its own")
    if not found:
        raise UsageError(f"{run} has no evaluation; give --eval-interval and --eval-iters")
    return found


def seconds_to(points: Sequence[Point], loss: float) -> float | None:
    """When a run first had a loss, s, on a straight line between two evaluations; None if never."""
    for before, after in zip([points[0], *points], points):
        if after.loss <= loss:
            if before.loss <= after.loss:
                return after.seconds
            share = (before.loss - loss) / (before.loss - after.loss)
            return before.seconds + min(max(share, 0.0), 1.0) * (after.seconds - before.seconds)
    return None


def verdict(plain: Sequence[Point], copus: Sequence[Point]) -> str:
    """One line, which claims no more than these two runs show."""
    theirs, ours = plain[-1], copus[-1]
    losses = (
        f"held-out loss {ours.loss:.3f} with --copus after {ours.seconds:.0f} s, "
        f"{theirs.loss:.3f} without after {theirs.seconds:.0f} s"
    )
    there = seconds_to(copus, theirs.loss)
    if there is not None and there < theirs.seconds:
        return f"{losses}; the loss of the plain run was there after {there:.0f} s"
    if ours.loss <= theirs.loss * (1 + EQUAL):
        return f"{losses}; nothing was gained here"
    return f"{losses}; --copus was behind here"


def chart(plain: Sequence[Point], copus: Sequence[Point]) -> str:
    """Both losses over time, log scale, in characters: `o` without and `*` with the controller."""
    points = [*plain, *copus]
    low, high = (math.log(pick(p.loss for p in points)) for pick in (min, max))
    longest = max(p.seconds for p in points)
    rows = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for mark, some in (("o", plain), ("*", copus)):
        for p in some:
            share = (math.log(p.loss) - low) / max(high - low, 1e-9)
            column = min(int(p.seconds / longest * _WIDTH), _WIDTH - 1)
            rows[min(int((1 - share) * _HEIGHT), _HEIGHT - 1)][column] = mark
    names = {0: math.exp(high), _HEIGHT - 1: math.exp(low)}
    lines = [
        f"{f'{names[i]:.2f}' if i in names else '':>6} |{''.join(row).rstrip()}"
        for i, row in enumerate(rows)
    ]
    axis = f"{'':>6} +{'-' * _WIDTH}"
    below = f"{'':>8}0 s{f'{longest:.0f} s':>{_WIDTH - 3}}"
    return "\n".join([*lines, axis, below])


def main(words: Sequence[str]) -> int:
    """Prints the chart and the line."""
    if len(words) != 2:
        print(f"usage: {(__doc__ or '').splitlines()[2].strip()}", file=sys.stderr)
        return 2
    try:
        plain, copus = (curve(Path(word)) for word in words)
    except (UsageError, OSError) as error:
        print(f"compare_runs: {error}", file=sys.stderr)
        return 2
    print("held-out loss over training time; o without --copus, * with it\n")
    print(chart(plain, copus))
    print(f"\n{verdict(plain, copus)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
