"""S7 of `scenarios`: does the controller keep up with a network that is slow for half of a run?

Eight H100 in four nodes of two train llama-3.2-3b with a fixed batch, on the virtual clock of
tools/simulate.py. After a quarter of the samples the network falls to a quarter of its speed, and
after three quarters it comes back. Step times scatter by 5 %. The controller may only change the
layout. It is compared with two fixed layouts: the one that was best in hindsight, and the one that
is best while the network is healthy. Deciding and pauses count.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from bench.time_to_loss import scenarios
from bench.time_to_loss.intervals import interval_of_few
from copus_ext.controller.flags import CopusConfig
from copus_ext.simulate.conditions import Event, World
from copus_ext.simulate.contenders import Contender
from copus_ext.simulate.run import simulate
from copus_ext.simulate.scenario import Scenario, preset

BATCHES, PRESET = (16, 32, 64, 128), "8xh100-3b"
EVENTS = (Event(at=0.25, part="network", speed=0.25), Event(at=0.75, part="network", speed=4.0))
NEARLY = 0.03
"""Batches within this of the least time are the best static batch, too: the three seeds and two
truths of S1 disagree about which is."""
STEPS = 12_000
STEP_NOISE = 0.05
GOAL_HINDSIGHT, GOAL_HEALTHY = 0.04, 0.15


def scenario(batch: int, steps: int = STEPS) -> Scenario:
    """A run of one batch to its last sample."""
    return preset(PRESET).change(
        batches=(batch,),
        total_samples=steps * batch,
        warmup_samples=100 * batch,
        events=EVENTS,
        step_noise=STEP_NOISE,
        targets={"none": float(steps * batch)},  # out of reach
    )


def fixed(s: Scenario) -> dict[str, float]:
    """Seconds of the whole run by layout."""
    world, batch, seconds = World(s, 0), s.batches[0], {}
    edges = [0.0, *(event.at for event in s.events), 1.0]
    for start, end in itertools.pairwise(edges):
        world.go_on(start)
        for layout in world.speeds.layouts:
            row = world.speeds.at(layout, batch)
            if row is not None:
                part = (end - start) * s.total_samples / row.samples_per_s
                seconds[str(layout)] = seconds.get(str(layout), 0.0) + part
    return seconds


def one(batch: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Controller and fixed layouts."""
    s = scenario(batch)
    layouts = fixed(s)
    healthy, best = str(s.speeds().fastest(batch).layout), min(layouts, key=layouts.__getitem__)
    flags = CopusConfig(copus=True, copus_policy="static", copus_layouts="all")
    runs = [simulate(s, Contender(name="controller", flags=flags), seed=i) for i in seeds]
    seconds = [scenarios.counted(run.seconds, run) for run in runs]
    mean = statistics.fmean(seconds)
    return {
        "batch": batch,
        "seeds": list(seeds),
        "healthy": healthy,
        "healthy_s": layouts[healthy],
        "hindsight": best,
        "hindsight_s": layouts[best],
        "controller_s": seconds,
        "saved_over_hindsight": 1 - mean / layouts[best],
        "saved_over_healthy": 1 - mean / layouts[healthy],
        "paused_s": [run.paused_s for run in runs],
        "overhead": [scenarios.overhead(run) for run in runs],
        "changes": [(c.consumed_samples // batch, c.layout) for c in runs[0].changes],
    }


def s7(seeds: Sequence[int]) -> dict[str, Any]:
    """Saved over both fixed layouts, mean of the batches that are the best static one of the
    cluster or nearly so. Intervals are over the seeds of these cases."""
    rows = [one(batch, seeds) for batch in BATCHES]
    static_s = scenarios.static_seconds(preset(PRESET))
    least_s = min(static_s[batch] for batch in BATCHES)
    best = [batch for batch in BATCHES if static_s[batch] <= (1 + NEARLY) * least_s]
    names = {"hindsight": "hindsight_s", "healthy": "healthy_s"}

    def against(name: str, batches: Sequence[int], chosen: Sequence[int]) -> float:
        own = [row for row in rows if row["batch"] in batches]
        return statistics.fmean(
            1 - row["controller_s"][i] / row[name] for row in own for i in chosen
        )

    seen = range(len(seeds))
    return {
        **{key: against(name, best, seen) for key, name in names.items()},
        "interval": {
            key: interval_of_few(seen, functools.partial(against, name, best))
            for key, name in names.items()
        },
        "overhead": scenarios.of_all(
            [part for row in rows if row["batch"] in best for part in row["overhead"]]
        ),
        "batches": best,
        "by_batch": {
            str(batch): {key: against(name, [batch], seen) for key, name in names.items()}
            for batch in BATCHES
        },
        "rows": rows,
    }
