"""Which share of its time does a large job train, by what follows the loss of a node?

    python -m bench.elastic_useful_time

A simulation, not a run: 1,024 GPUs on 128 nodes for 30 days. Nodes fail at random and are repaired.
Either the ranks that are left go on, or the job is launched again from its checkpoint on a spare
node, on the nodes left, or after the repair. Work counts in node-hours at full speed, over those of
a job without failures. The seconds from a loss to the next step are those that
docs/results/elastic_kills.json has measured on four CPU ranks, and ten times as many. All other
numbers are assumptions, named in docs/results/elastic_useful_time.json, which this writes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.support import RESULTS, arguments, origin, write


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a simulation assumes."""

    policy: str = "elastic"
    """`elastic`, `spare` (relaunch on one that waits), `wait` (for the repair), `shrink` (relaunch
    on the nodes left)."""
    between_failures_s: float = 3 * 3600.0
    """Mean time between failures of the whole job."""
    nodes: int = 128
    """Of the job."""
    repair_s: float = 3600.0
    """Mean time until a node comes again."""
    relaunch_s: float = 600.0
    """From a loss to the next step with a relaunch."""
    detect_s: float = 10.0
    """Until a loss is noticed."""
    pause_s: float = 5.0
    """From there to the next step with a recovery."""
    join_s: float = 5.0
    """Pause when a node comes again."""
    save_s: float = 5.0
    """Training waits so long for a checkpoint."""
    step_s: float = 10.0
    """Of a step."""
    copy_interval: int = 25
    """Steps between copies."""
    copies_cost: float = 0.01
    """Share of the time that copies take."""
    both_lost: float = 0.002
    """Chance that a loss takes both copies, as where two nodes fail together."""
    unit: int = 1
    """Nodes that a layout needs together; 1 where some layout fits every number."""
    hours: float = 24 * 30.0
    """Simulated."""


def checkpoint_interval(case: Case) -> float:
    """Seconds between checkpoints that lose least, to first order (Young, 1974)."""
    return math.sqrt(2 * case.save_s * case.between_failures_s)


def useful_share(case: Case, seed: int) -> float:
    """The work done over that of a job without failures."""
    rng = np.random.default_rng(seed)
    is_elastic = case.policy == "elastic"
    interval = checkpoint_interval(case)
    # An elastic run still saves, against the loss of both copies, but rarely.
    saving = case.save_s / (3600.0 if is_elastic else interval + case.save_s)
    cost = saving + (case.copies_cost if is_elastic else 0.0)
    end, now, work, since = case.hours * 3600.0, 0.0, 0.0, 0.0
    up, back = case.nodes, list[float]()

    def speed() -> float:
        return up // case.unit * case.unit / case.nodes * (1 - cost)

    while now < end:
        failing = rng.exponential(case.between_failures_s * case.nodes / up)
        returning = max(min(back) - now, 0.0) if back else math.inf
        passed = min(failing, returning, end - now)
        now, work, since = now + passed, work + speed() * passed, since + passed
        if passed == returning:
            back.remove(min(back))
            up += 1
            now += case.join_s if is_elastic else case.save_s + case.relaunch_s
            since = 0.0
        elif passed == failing:
            is_live = is_elastic and rng.random() > case.both_lost
            reach = case.copy_interval * case.step_s if is_live else interval
            work -= rng.uniform(0, min(since, reach)) * speed()
            since = 0.0
            now += case.detect_s + (case.pause_s if is_live else case.relaunch_s)
            if case.policy == "wait":
                now += rng.exponential(case.repair_s)
            elif case.policy != "spare":
                up -= 1
                back.append(now + rng.exponential(case.repair_s))
    return work / end


def share(case: Case, runs: int) -> dict[str, float]:
    """Mean and standard error over seeds, in percent."""
    found = [100 * useful_share(case, seed) for seed in range(runs)]
    return {"percent": float(np.mean(found)), "error": float(np.std(found) / math.sqrt(runs))}


def cases(measured_s: float) -> dict[str, Callable[[Case], Case]]:
    """Rows of the table: a name, and what it changes.

    Args:
        measured_s: from a death to the next step, as measured.
    """
    return {
        "elastic, the pause measured": lambda c: replace(c, pause_s=measured_s),
        "elastic, ten times that pause": lambda c: replace(c, pause_s=10 * measured_s),
        "elastic, losses noticed after 600 s": lambda c: replace(c, detect_s=600.0),
        "elastic, copies every 100 steps": lambda c: replace(c, copy_interval=100),
        "elastic, whole replicas of 16 nodes": lambda c: replace(c, unit=16),
        "elastic, repair takes 24 h": lambda c: replace(c, repair_s=86400.0),
        "relaunch on a spare, 180 s": lambda c: replace(c, policy="spare", relaunch_s=180.0),
        "relaunch on a spare, 600 s": lambda c: replace(c, policy="spare"),
        "relaunch on the nodes left, 600 s": lambda c: replace(c, policy="shrink"),
        "relaunch after the repair, 600 s": lambda c: replace(c, policy="wait"),
    }


def main() -> None:
    """Simulates, prints and writes."""
    parser = arguments(__doc__, "elastic_useful_time.json")
    parser.add_argument("--runs", type=int, default=20, help="seeds of each case")
    args = parser.parse_args()
    kills = json.loads((RESULTS / "elastic_kills.json").read_text())
    measured_s = kills["next_step_s"]["p90"]
    table: dict[str, Any] = {}
    for hours in (3, 8, 1):
        usual = Case(between_failures_s=hours * 3600.0)
        table[f"{hours} h between failures"] = {
            name: share(change(usual), args.runs) for name, change in cases(measured_s).items()
        }
    result = {
        "what": "share of useful time of 1,024 GPUs under failures, simulated, in percent",
        "assumptions": {k: v for k, v in vars(Case()).items() if k != "policy"},
        "measured_pause_s": measured_s,
        "runs": args.runs,
        "table": table,
        **origin(),
    }
    write(args.output, result)


if __name__ == "__main__":
    main()
