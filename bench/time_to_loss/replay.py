"""Do the simulator and the real clock agree? And what is c, by the static batches?

    python -m bench.time_to_loss.replay [--input docs/results/time_to_loss_real.json]

Of each seed, the link counts that all policies were trained on. A fit finds c and the weight of the
learning rate that lay the losses of all static batches on one curve over progress. The simulator
then runs every policy over the speeds and the noise scale that were measured. Its times to the
targets stand beside the measured ones, without set-up. The static batches made the curve, so only
the others tell whether it predicts. Each run also shows a c alone, by its loss where its batch
changes. Writes `<input>.replay.json` in some twenty seconds.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.support import RESULTS, arguments, origin
from bench.time_to_loss.clock import MEASURING, Way, clock_of, is_measuring, steadied
from bench.time_to_loss.curves import curve_of, percent, targets
from bench.time_to_loss.policies import (
    BASELINES,
    PAPER,
    Profile,
    Recipe,
    batch_of,
    is_static,
    start_of,
)
from copus_ext.controller.flags import CopusConfig
from copus_ext.cost_model.cluster_spec import of_gpu
from copus_ext.cost_model.model_spec import PRESETS
from copus_ext.goodput.inputs import ConfigThroughput
from copus_ext.simulate.contenders import Contender
from copus_ext.simulate.noise_trajectory import NoiseTrajectory
from copus_ext.simulate.run import simulate
from copus_ext.simulate.scenario import Scenario
from copus_ext.simulate.speeds import PROFILED_SD, Speeds
from copus_ext.simulate.training_dynamics import GroundTruth, RateSchedule

CALIBRATIONS = np.geomspace(0.25, 64, 49)
"""c that are tried."""
EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Powers of the learning rate over its peak that are tried as the worth of a sample."""
_KNOTS, _DEGREE, _STEP = 10, 4, 4
GOAL = 0.05

Runs = list[dict[str, Any]]
Clock = dict[Way, float]
Noise = Callable[[Any], Any]


def batches_at(run: dict[str, Any], samples: Any) -> Any:
    """Batch of a run after so many samples."""
    starts = [way["samples"] for way in run["ways"]]
    sizes = np.array([way["batch"] for way in run["ways"]], dtype=float)
    return sizes[np.searchsorted(starts, samples, side="right") - 1]


def schedule_of(recipe: Recipe, exponent: float) -> RateSchedule:
    """What the learning rate of the runs makes of a sample."""
    return RateSchedule(
        warmup_samples=int(recipe.warmup_part * recipe.samples),
        total_samples=recipe.samples,
        end_part=recipe.min_lr_part,
        exponent=exponent,
    )


def noise_points(
    run: dict[str, Any], calibration: float, schedule: Any
) -> list[tuple[float, float]]:
    """(progress, noise scale) of a run that measured it, progress by E(B) with some c."""
    curve = run["training"]
    known = [(n, x) for n, x in zip(curve["samples"], curve["phi"]) if x]
    if len(known) < _KNOTS:
        return []
    samples, phis = map(np.array, zip(*known))
    ends = np.arange(_STEP, samples[-1] + 1, _STEP, dtype=float)
    phi = np.exp(np.interp(ends, samples, np.log(phis)))
    worth = 1 / (1 + batches_at(run, ends - _STEP) / (calibration * phi))
    progress = np.cumsum(np.diff(schedule.worth([0.0, *ends])) * worth)
    return list(zip(np.interp(samples, ends, progress).tolist(), phis.tolist()))


def noise_of(runs: Runs, calibration: float, schedule: Any) -> tuple[list[float], list[float]]:
    """Noise scale over progress: medians of the points of all runs in parts of equal ratio."""
    points = sorted(p for run in runs for p in noise_points(run, calibration, schedule))
    if not points:
        raise SystemExit("no run of this seed measured the noise scale")
    x, y = np.log(np.array(points)).T
    edges = np.linspace(x[0], x[-1], _KNOTS + 1)
    found = []
    for low, high in itertools.pairwise(edges):
        inside = (x >= low) & (x <= high)
        if inside.any():
            found.append((float(np.median(x[inside])), float(np.median(y[inside]))))
    progress, phi = (np.exp(column).tolist() for column in zip(*found))
    return progress, phi


def progress_of(
    run: dict[str, Any], samples: Sequence[float], calibration: float, noise: Any, schedule: Any
) -> Any:
    """Progress of a run after so many samples."""
    starts = np.arange(0, samples[-1], _STEP, dtype=float)
    edges = [*starts, starts[-1] + _STEP]
    batches, worth = batches_at(run, starts), np.diff(schedule.worth(edges))
    logs = np.log(noise[0]), np.log(noise[1])
    progress = [1e-9]
    for batch, part in zip(batches.tolist(), worth.tolist()):
        phi = calibration * float(np.exp(np.interp(np.log(progress[-1]), *logs)))
        progress.append(progress[-1] + part / (1 + batch / phi))
    return np.interp(samples, edges, progress)


def collapse(runs: Runs, calibration: float, noise: Any, schedule: Any) -> tuple[float, Any]:
    """How far the losses of runs lie from one curve, and that curve: a polynomial in ln(progress).

    Args:
        runs: of one seed.
        calibration: c.
        noise: scale over progress.
        schedule: of the learning rate; while it warms up no loss counts.
    """
    points = []
    for run in runs:
        curve = curve_of(run)
        progress = progress_of(run, curve.samples, calibration, noise, schedule)
        rows = zip(curve.samples, np.log(progress), curve.losses)
        points += [(x, loss) for n, x, loss in rows if n >= schedule.warmup_samples]
    x, y = np.array(points).T
    line = np.polynomial.Polynomial.fit(x, y, _DEGREE)
    return float(np.sqrt(np.mean((line(x) - y) ** 2))), line


def fitted(
    runs: Runs, noisy: Runs, recipe: Recipe, exponents: Sequence[float] = EXPONENTS
) -> dict[str, Any]:
    """What lays the losses of runs on one curve best, and the curve: c, the c that do so up to a
    tenth worse, and the power of the learning rate. A single run tells c by what its loss does
    where its batch changes.

    Args:
        runs: whose losses.
        noisy: those whose noise scale counts.
        recipe: of both.
        exponents: of the learning rate, tried.
    """
    tried = []
    for exponent in exponents:
        schedule = schedule_of(recipe, exponent)
        for c in CALIBRATIONS.tolist():
            noise = noise_of(noisy, c, schedule)
            tried.append((*collapse(runs, c, noise, schedule), c, exponent, noise))
    error, line, c, exponent, noise = min(tried, key=lambda t: t[0])
    near = [t[2] for t in tried if t[0] <= 1.1 * error]
    found = {"c": c, "low": min(near), "high": max(near), "rms": error, "exponent": exponent}
    return {**found, "line": line, "noise": noise}


def progress_at(line: Any, goal: float) -> float | None:
    """Progress at which the curve first has a loss; None if it never does."""
    low, high = line.domain
    x = np.linspace(low, high, 4000)
    reached = np.flatnonzero(line(x) <= goal)
    return float(np.exp(x[reached[0]])) if len(reached) else None


def own_clock(runs: Runs) -> Clock:
    """Seconds of a step by configuration where nothing was timed in turn: medians over the runs,
    without what measuring the noise scale took; a single step tells nothing."""
    found: dict[Way, list[float]] = {}
    pairs = ((run, speed) for run in runs for speed in run["speeds"])
    for measured, speed in (pair for pair in pairs if pair[1]["steps"] > 1):
        way = speed["layout"], speed["micro_batch"], speed["batch"]
        factor = 1 + MEASURING * is_measuring(measured)
        found.setdefault(way, []).append(speed["median_s"] / factor)
    return {way: statistics.median(some) for way, some in found.items()}


def rows_of(run: dict[str, Any], recipe: Recipe, profile: Profile, clock: Clock) -> list[Any]:
    """Every layout and batch of the profile in its fastest micro-batch, by the clock; at the start
    of a run in the one that it started in. Measuring the noise scale slows all alike."""
    start = run["ways"][0]
    factor = 1 + MEASURING * is_measuring(run)
    rows: dict[Any, Any] = {}
    for batch in recipe.batches:
        for _, c in profile.ranked(batch):
            way = str(c.layout), c.micro_batch_size, batch
            is_start = (way[0], batch) == (start["layout"], start["batch"])
            if way not in clock or (is_start and c.micro_batch_size != start["micro_batch"]):
                continue
            if is_start or batch not in recipe.rising or not c.is_blind:
                row = ConfigThroughput(
                    configuration=c,
                    samples_per_s=batch / (factor * clock[way]),
                    relative_sd=PROFILED_SD,
                    source="profiled",
                )
                best = rows.setdefault((row.layout, batch), row)
                if row.samples_per_s > best.samples_per_s:
                    rows[row.layout, batch] = row
    return list(rows.values())


def scenario_of(recipe: Recipe, rows: list[Any], fit: dict[str, Any], goals: list[float]) -> Any:
    """What the simulator is told."""
    progress, phi = fit["noise"]
    at = {f"{goal:.4f}": progress_at(fit["line"], goal) for goal in goals}
    return Scenario(
        name="real clock",
        model=next(iter(PRESETS)),  # only asked where nothing is measured
        seq_length=128,
        cluster=of_gpu("CPU-rank", nodes=1, gpus_per_node=2),
        batches=tuple(recipe.rising),
        total_samples=recipe.samples,
        warmup_samples=int(recipe.warmup_part * recipe.samples),
        targets={name: p for name, p in at.items() if p is not None},
        trajectory=NoiseTrajectory(progress=tuple(progress), phi=tuple(phi)),
        truth=GroundTruth(
            noise_scale_multiplier=fit["c"],
            reference_batch=float(recipe.first_batch),
            rate_exponent=fit["exponent"],
        ),
        switch_cost_s=0.4,
        assumed_cost_s=10.0,
        measured=Speeds(rows),
        beta2=recipe.beta2,
        lr_decay=recipe.min_lr_part,
    )


def contender_of(policy: str, recipe: Recipe, profile: Profile) -> Contender | None:
    """A policy as one of the simulator's; None if it has no such."""
    if is_static(policy):
        return Contender(name=policy, batch=batch_of(policy))
    values: dict[str, Any] = {}
    if policy in BASELINES:
        values["copus_policy"] = policy.partition("_small")[0].partition("_large")[0]
    elif policy in ("adaptive", PAPER, "only_layout"):
        values["copus_layouts"] = "all"
        if policy != "adaptive":
            values["copus_policy"] = "copus" if policy == PAPER else "static"
    elif policy != "only_batch":
        return None
    start = "small"
    if policy in BASELINES and policy != "cbs_small":
        values["copus_noise_scale_multiplier"] = recipe.calibration
        own, small = (start_of(name, recipe, profile) for name in (policy, "cbs_small"))
        start = "small" if str(own.layout) == str(small.layout) else "large"
    most = recipe.batches[-1]
    flags = CopusConfig(copus=True, copus_max_global_batch_size=most, **values)
    return Contender(name=policy, start=start, flags=flags)


def replayed(result: dict[str, Any], seed: int, number: int) -> dict[str, Any]:
    """One seed: c, and for each policy measured and simulated seconds to the targets."""
    recipe, link = Recipe.of(result), next(iter(result["links"]))
    runs = [r for r in result["runs"] if r["seed"] == seed and r["link"] == link]
    clock = clock_of(result["links"][link]) or own_clock(runs)
    runs = [steadied(run, clock) for run in runs]
    curves = {r["policy"]: curve_of(r) for r in runs}
    statics = [r for r in runs if is_static(r["policy"])]
    goals = targets({r["policy"]: [curves[r["policy"]]] for r in statics}, number)
    fit = fitted(statics, runs, recipe)
    profile = Profile.of_records(result["links"][link]["profile"]["records"])
    policies: dict[str, Any] = {}
    for run in runs:
        contender = contender_of(run["policy"], recipe, profile)
        if contender is None:
            continue
        rows = rows_of(run, recipe, profile, clock)
        scenario = scenario_of(recipe, rows, fit, goals)
        simulated = simulate(scenario, contender, seed=seed)
        measured = [curves[run["policy"]].time_to(goal) for goal in goals]
        own = [None if t is None else t - run["set_up_s"] for t in measured]
        other = [simulated.times_s.get(f"{goal:.4f}") for goal in goals]
        off = [b / a - 1 for a, b in zip(own, other) if a is not None and b is not None]
        policies[run["policy"]] = {
            "measured_s": own,
            "simulated_s": other,
            "off": statistics.fmean(map(abs, off)) if off else None,
            "batches": [(c.consumed_samples, c.batch, c.layout) for c in simulated.changes],
        }
        if len(run["ways"]) > 2:
            alone = fitted([run], [run], recipe, [fit["exponent"]])
            policies[run["policy"]]["c"] = {k: alone[k] for k in ("c", "low", "high", "rms")}
    off = {name: p["off"] for name, p in policies.items() if p["off"] is not None}
    known = [x for name, x in off.items() if not is_static(name)]
    kept = {name: fit[name] for name in ("c", "low", "high", "rms", "exponent", "noise")}
    return {
        "seed": seed,
        **kept,
        "targets": goals,
        "policies": policies,
        "off": statistics.fmean(known) if known else None,
        "off_static": statistics.fmean(x for name, x in off.items() if is_static(name)),
        "worst": max(known, default=None),
        "not_simulated": [r["policy"] for r in runs if r["policy"] not in policies],
    }


def by_policy(found: list[dict[str, Any]]) -> dict[str, float]:
    """How far the simulated times of a policy are off, mean over losses and seeds."""
    names = {name for one in found for name in one["policies"] if not is_static(name)}
    off = {n: [one["policies"][n]["off"] for one in found if n in one["policies"]] for n in names}
    known = {name: [x for x in some if x is not None] for name, some in off.items()}
    means = {name: statistics.fmean(some) for name, some in known.items() if some}
    return dict(sorted(means.items(), key=lambda item: item[1]))


def main() -> None:
    """Replays every seed, prints and writes."""
    parser = arguments(__doc__)
    parser.add_argument("--input", type=Path, default=RESULTS / "time_to_loss_real.json")
    parser.add_argument("--targets", type=int, default=5)
    args = parser.parse_args()
    result = json.loads(args.input.read_text())
    seeds = sorted({r["seed"] for r in result["runs"]})
    found = [replayed(result, seed, args.targets) for seed in seeds]
    for one in found:
        print(
            f"seed {one['seed']}: c {one['c']:.2f} ({one['low']:.2f} to {one['high']:.2f}), "
            f"power {one['exponent']} of the learning rate, losses {one['rms']:.3f} off one curve, "
            f"times {percent(one['off'])} off, of static batches {percent(one['off_static'])}"
        )
    means = by_policy(found)
    print("mean of the seeds: " + ", ".join(f"{n} {percent(x)}" for n, x in means.items()))
    record = {"what": "real clock and simulator", "goal": GOAL, "policies": means, "seeds": found}
    record |= origin()
    args.input.with_suffix(".replay.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
