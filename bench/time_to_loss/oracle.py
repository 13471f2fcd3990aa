"""How much could anybody save in S1? The best sequence of batches and layouts, with all knowledge.

    python -m bench.time_to_loss.oracle [--seeds N] [--first-seed N]

On S1's four clusters under its first truth: progress 1/(1 + B/Phi), Phi known, all speeds known,
pauses of changes of layout counted, measuring and deciding free. Stands over the best static batch
known afterwards, as S1 does. (Under the second truth S1 has its own `best_schedules`.)

`known_speeds` asks what the rule lacks: on the clusters with predicted speeds that are right, it is
run from all first batches; then without the time of measuring and deciding; then with the noise
scale known as it is, within the bound of the run's first samples; then from its best first batch
alone. What is left to the oracle is the most that looking ahead could gain.

Writes `oracle` into docs/results/time_to_loss_scenarios.json in two minutes.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from typing import Any

from bench.support import arguments
from bench.time_to_loss.scenarios import (
    FILE,
    about,
    clusters,
    copus,
    counted,
    save,
    static_seconds,
)
from bench.time_to_loss.unprofiled import Machine
from copus_ext.goodput.inputs import DecisionInputs
from copus_ext.simulate.compare import optimum
from copus_ext.simulate.run import Runner
from copus_ext.simulate.scenario import Scenario, preset


def one(name: str, seed: int) -> dict[str, Any]:
    """A cluster with the speeds of a seed of S1."""
    s = Machine(preset(name), seed).known_afterwards()
    best = optimum(s, s.speeds(), s.last)
    static_s = min(static_seconds(s).values())
    return {
        "cluster": name,
        "seed": seed,
        "seconds": best.seconds,
        "relayouts": best.relayouts,
        "best_s": static_s,
        "over_best_static": best.seconds / static_s,
    }


class _ExactNoise(Runner):
    """A run whose measured noise scale is the true one from the first step on."""

    def _inputs(self) -> DecisionInputs:
        s, phi = super()._inputs(), self.training.noise_scale()
        exact = dataclasses.replace(
            s.noise,
            status="ok",
            phi_samples=phi,
            low_samples=phi / 1.001,
            high_samples=phi * 1.001,
            grad_norm_sq=1.0,
            grad_variance_trace=phi,
            effective_steps=1000.0,
        )
        return dataclasses.replace(s, noise=exact)


def known_speeds(name: str, seed: int) -> dict[str, float]:
    """What the rule lacks on a cluster whose speeds it knows, each over the best static batch."""
    s = preset(name)
    best_s = min(static_seconds(s).values())
    last = max(s.targets, key=s.targets.__getitem__)

    def seconds(runner: type[Runner], s: Scenario, batch: int) -> tuple[float, float]:
        """Until the last target, with measuring and deciding and without."""
        run = runner(s, copus(s, batch), seed, None).run()
        time_s = run.times_s[last]
        assert time_s is not None
        return counted(time_s, run) / best_s, time_s / best_s

    measured = [seconds(Runner, s, batch) for batch in s.batches]
    exact = [seconds(_ExactNoise, s, batch)[1] for batch in s.batches]
    return {
        "rule": statistics.fmean(one[0] for one in measured),
        "measuring_and_deciding_free": statistics.fmean(one[1] for one in measured),
        "noise_scale_exact": statistics.fmean(exact),
        "from_its_best_first_batch": min(exact),
        "oracle": optimum(s, s.speeds(), s.last).seconds / best_s,
    }


def main() -> None:
    """Finds, prints and writes."""
    parser = arguments(__doc__, FILE)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=10)
    args = parser.parse_args()
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    rows = [one(name, seed) for name in clusters() for seed in seeds]
    by_cluster = {
        name: statistics.fmean(r["over_best_static"] for r in rows if r["cluster"] == name)
        for name in clusters()
    }
    mean = statistics.fmean(r["over_best_static"] for r in rows)
    known = {name: known_speeds(name, args.first_seed) for name in clusters()}
    keys = next(iter(known.values()))
    in_all = {key: statistics.fmean(one[key] for one in known.values()) for key in keys}
    flags = f"--seeds {args.seeds} --first-seed {args.first_seed}"
    found = {
        "mean": mean,
        "by_cluster": by_cluster,
        "rows": rows,
        "known_speeds": {**known, "mean": in_all},
        **about(f"oracle {flags}", seeds),
    }
    save(args.output, {"oracle": found})
    print(json.dumps({"mean": mean, **by_cluster, "known": in_all}, indent=1))


if __name__ == "__main__":
    main()
