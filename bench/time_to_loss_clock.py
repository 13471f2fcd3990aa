"""Times what the policies of B8 had on a link, in turn.

The runs of B8 follow each other for hours, on a machine that is now and then a fifth slower for as
long as a run. So the seconds of a step are not taken from the run that made it: everything that any
run had on a link is timed in rounds, forwards and backwards, and a step counts with the median over
the rounds, whosever it is, after what a round was slower in for all is taken off.

Also the program that does so on the ranks: `time_to_loss_clock.py REQUEST -- FLAGS OF THE RUN`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from support import ROOT, open_source
from time_to_loss_policies import layout_of

if TYPE_CHECKING:
    from copus_ext.cost_model.profile import Timing
    from copus_ext.planner.configuration import Configuration

ROUNDS = 8
_STEPS, _WARM_UP = 4, 2

Way = tuple[str, int, int]
"""Layout, micro-batch, batch."""


@dataclass(kw_only=True)
class Timed:
    """Takes what `tools/profile_layouts.py` measures."""

    seconds: dict[Way, list[float]] = field(default_factory=dict)

    def add(self, timing: Timing) -> None:
        """One round of one configuration."""
        from copus_ext.planner.configuration import Configuration

        c = Configuration.of_timing(timing)
        way = layout_of(c), c.micro_batch_size, c.global_batch_size
        self.seconds.setdefault(way, []).append(round(timing.step_s, 5))


def configuration_of(layout: str, micro_batch_size: int) -> Configuration:
    """What the runs of B8 give a layout, for its least batch."""
    from copus_ext.planner.configuration import Configuration
    from megatron.training.config.layout import Layout

    at = Layout.from_text(layout)
    return Configuration(
        tp=at.tp,
        pp=at.pp,
        vpp=at.vpp,
        dp=at.dp,
        micro_batch_size=micro_batch_size,
        global_batch_size=micro_batch_size * at.dp,
        sequence_parallel=at.tp > 1,
    )


def lines(ways: list[Way]) -> dict[tuple[str, int], list[int]]:
    """Batches by layout and micro-batch: what one job is built for."""
    found: dict[tuple[str, int], list[int]] = {}
    for layout, micro, batch in sorted(ways):
        found.setdefault((layout, micro), []).append(batch)
    return found


def take_rounds(request: dict[str, Any], flags: list[str], device: Any) -> Timed:
    """Times everything in turn, every second round backwards."""
    import torch.distributed as dist

    sys.path.insert(0, str(ROOT / "tools"))
    measure = importlib.import_module("profile_layouts").measure
    timed = Timed()
    order = list(lines([(a, b, c) for a, b, c in request["ways"]]).items())
    for number in range(ROUNDS):
        for (layout, micro), batches in order if number % 2 == 0 else reversed(order):
            how = argparse.Namespace(
                batches=",".join(map(str, batches)), steps=_STEPS, warm_up=_WARM_UP
            )
            measure(configuration_of(layout, micro), flags, how, device, timed)
        if dist.get_rank() == 0:
            print(f"round {number + 1} of {ROUNDS}", flush=True)
    return timed


@contextlib.contextmanager
def ranks() -> Iterator[Any]:
    """The process group that torchrun asks for; yields the device."""
    import torch.distributed as dist

    from megatron.training.common.device import use_device
    from megatron.training.distributed.process_groups import init_distributed
    from megatron.training.resilience.env_checks import set_process_defaults

    set_process_defaults()
    with use_device("cpu", local_rank=int(os.environ["LOCAL_RANK"])) as device:
        init_distributed(device, timeout_minutes=10)
        yield device
        dist.destroy_process_group()


def main() -> int:
    """On every rank; rank 0 writes what was asked for."""
    open_source()
    at = sys.argv.index("--")
    request = json.loads(Path(sys.argv[1]).read_text())
    with ranks() as device:
        timed = take_rounds(request, sys.argv[at + 1 :], device)
        if os.environ["RANK"] == "0":
            found = [[*way, some] for way, some in timed.seconds.items()]
            Path(request["output"]).write_text(json.dumps(found))
    return 0


def clock_of(known: dict[str, Any]) -> dict[Way, float]:
    """Seconds of a step by configuration, median of the rounds, out of a link in a results file."""
    rows = _rows(known)
    seconds = np.exp(np.median(_evened(rows), axis=1)) if rows else []
    return {(a, b, c): float(s) for (a, b, c, _), s in zip(rows, seconds)}


def scatter_of(known: dict[str, Any]) -> float | None:
    """Part by which a round is off a configuration's mean, over all of them; None if not timed
    twice."""
    rows = _rows(known)
    if len(rows[0][3] if rows else []) < 2:
        return None
    return float(np.sqrt(_evened(rows).var(axis=1, ddof=1).mean()))


def drawn_again(known: dict[str, Any], draw: np.random.Generator) -> dict[str, Any]:
    """A link in a results file as it could have been timed: as many of its rounds, drawn with
    replacement, the same for all configurations."""
    rows = _rows(known)
    _check_rounds(rows)
    number = len(rows[0][3]) if rows else 0
    picked = draw.integers(number, size=number).tolist() if number else []
    ways = [[*way, [some[i] for i in picked]] for *way, some in rows]
    return {**known, "clock": {**known.get("clock", {}), "ways": ways}}


def _rows(known: dict[str, Any]) -> list[Any]:
    return known.get("clock", {}).get("ways", [])


def _check_rounds(rows: list[Any]) -> None:
    if len({len(some) for *_, some in rows}) > 1:
        raise ValueError("configurations of one link were timed in different rounds; time it anew")


def _evened(rows: list[Any]) -> np.ndarray:
    """Logarithms of seconds by configuration and round, each without what the median configuration
    was slower by in that round (one pass of Tukey's median polish)."""
    _check_rounds(rows)
    logs = np.log([some for *_, some in rows])
    return logs - np.median(logs - np.median(logs, axis=1, keepdims=True), axis=0)


if __name__ == "__main__":
    sys.exit(main())
