"""Does the controller finish sooner than the best static batch that a sweep would have found?

    python -m bench.time_to_loss.scenarios [--seeds N] [--first-seed N] [--only S1,S9]

S1: the paper's four clusters, every first batch of the grid, no sweep, two truths: samples of a
batch B make 1/(1 + B/Phi) progress, and a noisy quadratic whose static batches have the best rate
and length each. Figures: time over the best static batch known afterwards, mean and worst.
S2: GPU time in all over that of a sweep by successive halving and its best batch.
S6: the paper's own sets of batches under a constant learning rate, on the noisy quadratic: saved
over the best of its static batches and of its critical-batch-size rule on two layouts. The
controller anneals by batch, as nothing else does; without that it is shown beside it.
S7: the network falls to a quarter of its speed for half of the samples, at the best static batch:
saved over the layout best in hindsight, and over the one best while the network is healthy.
S8: where a perfect schedule saves less than 2 % over the best static batch: behind that, started
there. The seven presets, each with four growths of the critical batch size.
S9: the number of nodes may change: GPU-hours saved at equal time over the best fixed number, which
adapts batch and layout too (ranks_for_a_price.py).

What a user waits for counts: pauses, measuring (as measured by bench.noise_overhead) and deciding.
Rules were chosen on seeds 0 and 1. Writes docs/results/time_to_loss_scenarios.json.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.support import arguments, origin
from bench.time_to_loss import changing_network
from copus_ext.goodput import headroom
from copus_ext.simulate.contenders import Contender, contenders
from copus_ext.simulate.run import Run, simulate, static_run
from copus_ext.simulate.scenario import Scenario, preset, presets
from copus_ext.simulate.tuned_schedules import BatchSchedule, Tuner, static

FILE = "time_to_loss_scenarios.json"
MEASURING, DECIDING_S = 0.011, 0.02
"""Share of a measured step that measuring takes, docs/results/noise_overhead.json, and seconds of a
decision, docs/results/controller_cost.json, both rounded up."""
LITTLE = 0.02
"""A headroom below this is little."""
GROWTHS = {"P^.46": (0.46,), "P^.63": (0.63,), "P^.9": (0.9,), "level": (0.9, 1 / 6)}
"""Growth of the critical batch size over progress: its power, and the share where it ends."""
_BOOTSTRAPS = 2000
PAPER_SETS = {
    "8xh100-3b": (16, 32, 64, 128, 1024),
    "16xh100-13b": (32, 64, 128, 1024),
    "32xmi210-7b": (32, 64, 128, 1024),
    "32xh100-32b": (64, 128, 512),
}
"""Static batches of the paper by cluster (arXiv 2604.26687)."""
ANNEALING = 0.1
"""Part of the run in S6 over which the batch grows instead of the learning rate's decay."""
_LONGER = 4
"""Times the length of a run, for rules under a constant rate that are not there yet."""
GOALS = {
    "S1": {"mean": 0.97, "worst": 1.10},
    "S2": {"figure": 0.7},
    "S6": {"figure": 0.06},
    "S7": {"hindsight": 0.04, "healthy": 0.15},
    "S8": {"worst": 0.01},
    "S9": {"saved": 0.08},
}
HIGHER = {"S6", "S7", "S9"}
"""Scenarios whose figures should be at least the goal."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """A run of the controller from one first batch, against static batches."""

    cluster: str
    truth: str
    first_batch: int
    seed: int
    seconds: float
    """Until the last target, with all that a user waits for; infinite if it was not reached."""
    best_s: float
    """Of the best static batch."""
    same_s: float
    """Of a static run of the first batch; infinite if it never gets there."""
    sweep_s: float
    """Of a sweep over the static batches and the best one to its end."""

    @property
    def ratio(self) -> float:
        """Over the best static batch."""
        return self.seconds / self.best_s


def clusters() -> list[str]:
    """The paper's four."""
    return [name for name in presets() if "nvswitch" not in name]


def truths(name: str) -> dict[str, Scenario]:
    """One cluster under both truths."""
    one = preset(name)
    return {"progress": one, "noisy quadratic": one.with_noisy_quadratic()}


def static_seconds(s: Scenario, loss: float | None = None) -> dict[int, float]:
    """Seconds of every static batch on its fastest layout.

    Args:
        s: the scenario.
        loss: on the noisy quadratic: that the best rate and the shortest length reach. None: to the
            last target.
    """
    last = max(s.targets, key=s.targets.__getitem__)
    if s.quadratic is not None:
        goal = s if loss is None else s.change(targets={"end": loss})
        tuned = goal.tuned([static(float(batch)) for batch in s.batches])
        return {b: one.seconds for b, one in zip(s.batches, next(iter(tuned.values())))}
    found = {}
    for batch in s.batches:
        time_s = static_run(s, Contender(name="static", batch=batch), 0).times_s[last]
        found[batch] = math.inf if time_s is None else time_s
    return found


def sweep_seconds(static_s: dict[int, float]) -> float:
    """A sweep by successive halving, then the best to its end.

    All batches train to an eighth of their run, the better half of them to a quarter, and so on.
    Nothing is trained twice, the better half is known without error, and a batch that never gets
    there counts as much as the slowest that does: a generous sweep.
    """
    slowest = max(t for t in static_s.values() if math.isfinite(t))
    times = sorted(min(t, slowest) for t in static_s.values())
    total, done, alive = 0.0, 0.0, len(times)
    for share in (1 / 8, 1 / 4, 1 / 2):
        total += (share - done) * sum(times[:alive])
        done, alive = share, max(math.ceil(alive / 2), 1)
    return total + (1.0 - done) * times[0]


def schedule_ratios(s: Scenario) -> dict[str, float]:
    """On a noisy quadratic: time of batch schedules over the best static batch that ends at the
    same loss. Each has the learning rate that S1's controller has, and its whole length.

    Growth in three pieces by two paces or in one, and with the decay of the rate by four powers.
    """
    assert s.quadratic is not None
    tuner, found = Tuner(s.quadratic, s.schedule), {}
    seconds = {b: b / s.speeds().fastest(b).samples_per_s for b in s.batches}
    widths = np.diff(tuner.edges)
    goal = max(s.targets.values())
    floor = s.quadratic.loss_floor
    losses = floor + (goal - floor) * np.geomspace(0.5, 2.5, 9)
    times = [min(static_seconds(s, float(loss)).values()) for loss in losses]
    paces: tuple[tuple[float, ...], ...] = ((), (0.02, 0.06), (0.05, 0.15), (0.1, 0.3))
    for batch, power, at in itertools.product(s.batches[:5], (0.0, 0.25, 0.5, 1.0), paces):
        sizes = [max(batch / 2 ** (len(at) - i), s.batches[0]) for i in range(len(at) + 1)]
        schedule = BatchSchedule(
            pieces=tuple(zip((0.0, *at), sizes)), decay=power, choices=s.batches
        )
        peak = s.peak * math.sqrt(schedule.first / s.batches[0])
        loss = float(tuner.final_losses([schedule], [peak], s.total_samples)[0, 0])
        each = [seconds[round(size)] / size for size in tuner.sizes(schedule)]
        static_s = np.exp(np.interp(np.log(loss - floor), np.log(losses - floor), np.log(times)))
        time_s = s.total_samples * float(np.dot(widths, each))
        found[f"{batch} f^-{power:g} {at}"] = time_s / float(static_s)
    return found


def controller_run(s: Scenario, first_batch: int, seed: int) -> tuple[float, dict[int, float]]:
    """Seconds of a run with `--copus --copus-layouts all` from a first batch, all counted, and of
    every static batch to the same loss.

    On the noisy quadratic the run trains all of its samples, as its learning rate decays to their
    end. Static runs then have the length that takes them to its last loss.
    """
    who = copus(s, first_batch)
    if s.quadratic is not None:
        run = simulate(s.change(targets={"none": 0.0}), who, seed=seed)
        assert run.last_loss is not None
        return counted(run.seconds, run), static_seconds(s, run.last_loss)
    run = simulate(s, who, seed=seed)
    time_s = run.times_s[max(s.targets, key=s.targets.__getitem__)]
    reached = math.inf if time_s is None else counted(time_s, run)
    return reached, static_seconds(s)


def copus(s: Scenario, first_batch: int, **flags: Any) -> Contender:
    """`--copus --copus-layouts all` from a first batch. The learning rate was chosen for the
    smallest batch of the grid."""
    own = contenders(s.batches)["adaptive_goodput_forward"].flags
    assert own is not None
    flags["copus_reference_batch_size"] = s.batches[0]
    own = dataclasses.replace(own, **flags)
    return Contender(name="copus", flags=own, first_batch=first_batch)


def counted(seconds: float, run: Run) -> float:
    """With what measuring and deciding take."""
    return seconds + run.measured_s * MEASURING + run.decisions * DECIDING_S


def starts(seeds: Sequence[int], say: Callable[[str], None]) -> list[Start]:
    """All starts of S1."""
    found = []
    for cluster in clusters():
        for truth, s in truths(cluster).items():
            for batch in s.batches:
                for seed in seeds:
                    seconds, static_s = controller_run(s, batch, seed)
                    found.append(
                        Start(
                            cluster=cluster,
                            truth=truth,
                            first_batch=batch,
                            seed=seed,
                            seconds=seconds,
                            best_s=min(static_s.values()),
                            same_s=static_s[batch],
                            sweep_s=sweep_seconds(static_s),
                        )
                    )
                own = [one.ratio for one in found[-len(seeds) :]]
                say(f"{cluster}, {truth}, first batch {batch}: {statistics.fmean(own):.3f}")
    return found


def interval(values: Sequence[Any], figure: Callable[[Sequence[Any]], float]) -> list[float]:
    """A 95 % interval of a figure by drawing seeds anew.

    Args:
        values: [seeds] what each seed gave.
        figure: of some of them.
    """
    rng = np.random.default_rng(0)
    drawn = [
        figure([values[i] for i in rng.integers(0, len(values), len(values))])
        for _ in range(_BOOTSTRAPS)
    ]
    return [float(x) for x in np.percentile(drawn, [2.5, 97.5])]


def _by_seed(found: list[Start], seeds: Sequence[int]) -> list[list[Start]]:
    return [[one for one in found if one.seed == seed] for seed in seeds]


def s1(found: list[Start], seeds: Sequence[int]) -> dict[str, Any]:
    """Time over the best static batch known afterwards."""

    def mean(groups: Sequence[list[Start]]) -> float:
        return statistics.fmean(one.ratio for group in groups for one in group)

    def worst(groups: Sequence[list[Start]]) -> float:
        return max(one.ratio for group in groups for one in group)

    groups = _by_seed(found, seeds)
    return {
        "mean": mean(groups),
        "worst": worst(groups),
        "interval": {"mean": interval(groups, mean), "worst": interval(groups, worst)},
        "over_the_same_start": _saved_over_same(found),
        "rows": [vars(one) for one in found],
    }


def _saved_over_same(found: list[Start]) -> dict[str, float]:
    """Mean of the time saved over a static run of the same first batch, where that gets there."""
    saved: dict[str, list[float]] = {}
    for one in found:
        if math.isfinite(one.same_s):
            saved.setdefault(one.cluster, []).append(1 - one.seconds / one.same_s)
    return {name: statistics.fmean(values) for name, values in saved.items()}


def s2(found: list[Start], seeds: Sequence[int]) -> dict[str, Any]:
    """GPU time over sweep and best static batch."""

    def figure(groups: Sequence[list[Start]]) -> float:
        return statistics.fmean(one.seconds / one.sweep_s for group in groups for one in group)

    groups = _by_seed(found, seeds)
    return {"figure": figure(groups), "interval": {"figure": interval(groups, figure)}}


def s6(seeds: Sequence[int], say: Callable[[str], None]) -> dict[str, Any]:
    """Saved over the best static batch and the critical-batch-size rule, at a constant rate."""
    rows: list[dict[str, Any]] = []
    for cluster, batches in PAPER_SETS.items():
        s = preset(cluster).change(lr_schedule="constant", batches=batches).with_noisy_quadratic()
        for batch, share in ((b, share) for b in batches for share in (ANNEALING, 0.0)):
            own = [
                _at_constant_rate(s, copus(s, batch, copus_anneal_by_batch=share), seed)
                for seed in seeds
            ]
            rows.append({"cluster": cluster, "first_batch": batch, "annealing": share, "runs": own})
            saved = statistics.fmean(run["saved"] for run in own)
            say(f"{cluster}, first batch {batch}, annealing over {share:g}: saved {saved:.3f}")

    def figure(chosen: Sequence[Any], share: float = ANNEALING) -> float:
        some = [row["runs"] for row in rows if row["annealing"] == share]
        return statistics.fmean(runs[i]["saved"] for i in chosen for runs in some)

    seen = range(len(seeds))
    return {
        "figure": figure(seen),
        "interval": {"figure": interval(seen, figure)},
        "without_annealing": figure(seen, 0.0),
        "rows": rows,
    }


def _at_constant_rate(s: Scenario, who: Contender, seed: int) -> dict[str, Any]:
    """A run over all samples, and what others need to its last loss."""
    run = simulate(s.change(targets={"none": 0.0}), who, seed=seed)
    assert run.last_loss is not None
    others = {f"static_{b}": time_s for b, time_s in static_seconds(s, run.last_loss).items()}
    longer = s.change(targets={"end": run.last_loss}, total_samples=_LONGER * s.total_samples)
    everybody = contenders(s.batches)
    for name in ("cbs_small", "cbs_large"):
        found = simulate(longer, everybody[name], seed=seed).times_s["end"]
        others[name] = math.inf if found is None else found
    seconds, best = counted(run.seconds, run), min(others, key=others.__getitem__)
    finite = {name: time_s for name, time_s in others.items() if math.isfinite(time_s)}
    saved = 1 - seconds / others[best]
    return {"saved": saved, "seconds": seconds, "best": best, "loss": run.last_loss, **finite}


def s7(seeds: Sequence[int]) -> dict[str, Any]:
    """A network that falls to a quarter for half of the samples, at the best static batch of the
    cluster; other batches and their mean stand beside it."""
    rows = [changing_network.one(batch, len(seeds)) for batch in changing_network.BATCHES]
    static_s = static_seconds(preset(changing_network.PRESET))
    best = min(changing_network.BATCHES, key=static_s.__getitem__)
    own = next(row for row in rows if row["batch"] == best)
    names = {"hindsight": "hindsight_s", "healthy": "healthy_s"}

    def against(name: str, chosen: Sequence[float], row: dict[str, Any] = own) -> float:
        return statistics.fmean(1 - seconds / row[name] for seconds in chosen)

    return {
        **{key: against(name, own["controller_s"]) for key, name in names.items()},
        "interval": {
            key: interval(own["controller_s"], lambda chosen, name=name: against(name, chosen))
            for key, name in names.items()
        },
        "batch": best,
        "mean_of_all_batches": {
            key: statistics.fmean(against(name, row["controller_s"], row) for row in rows)
            for key, name in names.items()
        },
        "rows": rows,
    }


def growing(name: str, exponent: float, level_at: float = 1.0) -> Scenario:
    """A cluster whose critical batch size grows as a power of the progress.

    The mean of its inverse over the progress stays, so that about the same static batch is best.

    Args:
        name: of the preset.
        exponent: of the growth.
        level_at: share of the progress at which the growth ends.
    """
    s = preset(name)
    edges = np.concatenate([[0.0], np.geomspace(1e-4, 1.0, 400)])
    middle, width = np.sqrt(edges[1:] * np.maximum(edges[:-1], edges[1] / 2)), np.diff(edges)
    shape = np.minimum(middle / level_at, 1.0) ** exponent
    present = np.asarray(s.trajectory.phi_at(middle * s.last), dtype=float)
    phi = shape * float(np.sum(width / shape) / np.sum(width / present))
    at = type(s.trajectory)(progress=tuple(middle * s.last), phi=tuple(phi))
    return s.change(trajectory=at)


def s8(seeds: Sequence[int], say: Callable[[str], None]) -> dict[str, Any]:
    """Behind the best static batch, started there, where the headroom is below 2 %."""
    rows: list[dict[str, Any]] = []
    cases = {name: preset(name) for name in presets()}
    for text, growth in GROWTHS.items():
        cases |= {f"{name}, {text}": growing(name, *growth) for name in presets()}
    for name, s in cases.items():
        static_s = static_seconds(s)
        best = min(static_s, key=static_s.__getitem__)
        told = told_headroom(s, best)
        if told >= LITTLE:
            continue
        behind = [controller_run(s, best, seed)[0] / static_s[best] - 1 for seed in seeds]
        rows.append({"case": name, "headroom": told, "first_batch": best, "behind": behind})
        say(f"{name}: headroom {told:.3f}, behind {max(behind):.4f}")

    def worst(chosen: Sequence[Any]) -> float:
        return max(row["behind"][i] for i in chosen for row in rows)

    seen = range(len(seeds))
    return {"worst": worst(seen), "interval": {"worst": interval(seen, worst)}, "rows": rows}


def told_headroom(s: Scenario, batch: int) -> float:
    """What adapting the batch can save on the fastest layout of a batch, over its true course."""
    layout = s.speeds().fastest(batch).layout
    rows = [row for b in s.batches if (row := s.speeds().at(layout, b)) is not None]
    now = next(i for i, row in enumerate(rows) if row.global_batch_size == batch)
    edges = np.geomspace(1e-3, 1.0, 301) * s.last
    phi = s.trajectory.phi_at(np.sqrt(edges[1:] * edges[:-1]))
    course = headroom.Course(
        progress=np.diff(edges), critical_batch_size=s.truth.noise_scale_multiplier * phi
    )
    return headroom.estimate(rows, now, [course], source="measured").adapting.likely


def main() -> None:
    """Runs, prints and writes."""
    parser = arguments(__doc__, FILE)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=10)
    parser.add_argument("--only", default="S1,S2,S6,S7,S8,S9")
    args = parser.parse_args()
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    names = args.only.split(",")
    say: Callable[[str], None] = lambda text: print(text, flush=True)  # noqa: E731
    results = json.loads(args.output.read_text()) if args.output.exists() else {}
    command = f"python -m bench.time_to_loss.scenarios --seeds {args.seeds}"
    about = {"seeds": list(seeds), "command": f"{command} --first-seed {args.first_seed}"}
    if {"S1", "S2"} & {*names}:
        found = starts(seeds, say)
        results["S1"], results["S2"] = ({**f(found, seeds), **about} for f in (s1, s2))
        best = {}
        for name in clusters():
            ratios = schedule_ratios(truths(name)["noisy quadratic"])
            best[name] = min((ratio, schedule) for schedule, ratio in ratios.items())
            say(f"{name}, noisy quadratic: best schedule {best[name][1]}: {best[name][0]:.3f}")
        results["S1"]["best_schedules"] = best
    if "S6" in names:
        results["S6"] = {**s6(seeds, say), **about}
    if "S7" in names:
        results["S7"] = {**s7(seeds), **about, "seeds": list(range(args.seeds))}
    if "S8" in names:
        results["S8"] = {**s8(seeds, say), **about}
    if "S9" in names:
        from bench.time_to_loss import ranks_for_a_price  # which needs this module

        results["S9"] = {**ranks_for_a_price.s9(seeds, say), **about}
    for name, goals in GOALS.items():
        if name in results:
            for figure, goal in goals.items():
                value = results[name][figure]
                met = value >= goal if name in HIGHER else value <= goal
                say(f"{name} {figure}: {value:.3f}, goal {goal}: {'met' if met else 'NOT MET'}")
    results["origin"] = origin()
    args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
