"""Does the controller finish sooner than the best static batch that a sweep would have found?

    python -m bench.time_to_loss.scenarios [--seeds N] [--first-seed N] [--only S7]

S1: the paper's four clusters, every first batch of the grid, no sweep, two truths: samples of a
batch B make 1/(1 + B/Phi) progress, and a noisy quadratic whose static batches have the best rate
and length each. No profile either: the run starts where the planner predicts it to be fastest, and
predictions are off by 10 % (unprofiled.py). Figures: time over the best static batch in its fastest
configuration, both known afterwards, mean and worst. `speeds_known` has the same after a profile
that nobody waits for.
S2: GPU time in all over that of a sweep by successive halving and its best batch. The sweep knows
the fastest configuration of each batch.
S7: eight H100 in four nodes of two train llama-3.2-3b with a fixed batch. After a quarter of the
samples the network falls to a quarter of its speed, and after three quarters it comes back. Step
times scatter by 5 %, and all speeds are known. Only the layout may change: saved over the layout
best in hindsight, and over the one best while the network is healthy.

What a user waits for counts: pauses, measuring (as measured by bench.overhead) and deciding. Rules
were chosen on seeds 0 to 3. Writes docs/results/time_to_loss_scenarios.json, every scenario with
its command, commit and date.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.support import arguments, interval, interval_of_few, origin
from bench.time_to_loss.unprofiled import Machine
from copus_ext.controller.flags import CopusConfig
from copus_ext.extras.simulate.conditions import Event, World
from copus_ext.extras.simulate.contenders import Contender, contenders
from copus_ext.extras.simulate.run import Run, simulate, static_run
from copus_ext.extras.simulate.scenario import Scenario, preset, presets

FILE = "time_to_loss_scenarios.json"
MEASURING, DECIDING_S = 0.011, 0.02
"""Share of a measured step that measuring takes, docs/results/noise_overhead.json, and mean seconds
of a decision in docs/results/time_to_loss_real_clock.jsonl, rounded up."""
S7_PRESET, S7_BATCHES, S7_STEPS = "8xh100-3b", (16, 32, 64, 128), 12_000
EVENTS = (Event(at=0.25, part="network", speed=0.25), Event(at=0.75, part="network", speed=4.0))
NEARLY = 0.03
"""Batches within this of the least time are the best static batch, too: the three seeds and two
truths of S1 disagree about which is."""


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
    """Of the best static batch in its fastest configuration."""
    best_planned_s: float
    """Of the best one where each is in the configuration that is predicted to be fastest for it."""
    same_s: float
    """Of a static run in the run's own first configuration; infinite if it never gets there."""
    sweep_s: float
    """Of a sweep over the static batches and the best one to its end."""
    overhead: float
    """Part of the time that measuring, deciding and pauses take."""

    @property
    def ratio(self) -> float:
        return self.seconds / self.best_s


def clusters() -> list[str]:
    return [name for name in presets() if "nvswitch" not in name]


def truths(name: str) -> dict[str, Scenario]:
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
        tuned = next(iter(goal.tuned_statics.values()))
        return {one.batch: one.samples / s.speeds.fastest(one.batch).samples_per_s for one in tuned}
    found = {}
    for batch in s.batches:
        time_s = static_run(s, Contender(name="static", batch=batch)).times_s[last]
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


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A run of the controller."""

    seconds: float
    """All counted; infinite if the last target was not reached."""
    overhead: float
    """Part of its time that measuring, deciding and pauses take."""
    static_s: dict[int, float]
    """Of every static batch to the same loss."""


def controller_run(
    s: Scenario, first_batch: int, seed: int, known_afterwards: Scenario | None = None
) -> Finished:
    """A run with `--copus --copus-layouts all` from a first batch.

    On the noisy quadratic the run trains all of its samples, as its learning rate decays to their
    end. Static runs then have the length that takes them to its last loss.

    Args:
        s: the scenario, with the speeds that the run knows.
        first_batch: samples.
        seed: of its noise.
        known_afterwards: the scenario of the static runs; None: `s`.
    """
    who, still = copus(s, first_batch), known_afterwards or s
    if s.quadratic is not None:
        run = simulate(s.change(targets={"none": 0.0}), who, seed=seed)
        assert run.last_loss is not None
        seconds, static_s = counted(run.seconds, run), static_seconds(still, run.last_loss)
    else:
        run = simulate(s, who, seed=seed)
        time_s = run.times_s[max(s.targets, key=s.targets.__getitem__)]
        seconds = math.inf if time_s is None else counted(time_s, run)
        static_s = static_seconds(still)
    return Finished(seconds=seconds, overhead=overhead(run), static_s=static_s)


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


def overhead(run: Run) -> float:
    """Part of a run's time that measuring, deciding and pauses take."""
    whole = counted(run.seconds, run)
    return (whole - run.seconds + run.paused_s) / whole


def starts(seeds: Sequence[int], say: Callable[[str], None], *, profiled: bool) -> list[Start]:
    """All starts of S1."""
    found = []
    for cluster in clusters():
        for truth, s in truths(cluster).items():
            machines = {seed: None if profiled else Machine(s, seed) for seed in seeds}
            for batch in s.batches:
                own = [one_start(s, truth, batch, *at) for at in machines.items()]
                found += own
                ratio = statistics.fmean(one.ratio for one in own)
                say(f"{cluster}, {truth}, first batch {batch}: {ratio:.3f}")
    return found


def one_start(s: Scenario, truth: str, batch: int, seed: int, machine: Machine | None) -> Start:
    """One run of S1 and its static ones; without a machine the speeds of `s` are known."""
    own, still, slower = s, s, dict.fromkeys(s.batches, 1.0)
    if machine is not None:
        own, still = machine.unprofiled(), machine.known_afterwards()
        for b in s.batches:
            planned = machine.true(own.speeds.fastest(b).configuration)
            slower[b] = still.speeds.fastest(b).samples_per_s / planned
    run = controller_run(own, batch, seed, still)
    planned_s = {b: time_s * slower[b] for b, time_s in run.static_s.items()}
    return Start(
        cluster=s.name,
        truth=truth,
        first_batch=batch,
        seed=seed,
        seconds=run.seconds,
        best_s=min(run.static_s.values()),
        best_planned_s=min(planned_s.values()),
        same_s=planned_s[batch],
        sweep_s=sweep_seconds(run.static_s),
        overhead=run.overhead,
    )


BY_START = tuple(operator.attrgetter(name) for name in ("cluster", "seed", "first_batch"))
"""What a start came from. A cluster and a seed have one machine, so that seeds come first."""


def s1(found: list[Start]) -> dict[str, Any]:
    """Time over the best static batch known afterwards, in its fastest configuration and where each
    batch is in the one that was planned for it."""
    planned = [dataclasses.replace(one, best_s=one.best_planned_s) for one in found]
    return {
        **_mean_and_worst(found),
        "over_planned_configurations": _mean_and_worst(planned),
        "overhead": of_all([one.overhead for one in found]),
        "by_cluster": _by(found, "cluster"),
        "by_truth": _by(found, "truth"),
        "over_the_same_start": _saved_over(found, "same_s"),
    }


def _mean_and_worst(found: list[Start]) -> dict[str, Any]:
    def mean(some: Sequence[Start]) -> float:
        return statistics.fmean(one.ratio for one in some)

    def worst(some: Sequence[Start]) -> float:
        return max(one.ratio for one in some)

    figures = {"mean": mean, "worst": worst}
    return {
        **{name: figure(found) for name, figure in figures.items()},
        "interval": {name: interval(found, f, BY_START) for name, f in figures.items()},
    }


def of_all(values: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "worst": max(values)}


def _by(found: list[Start], *names: str) -> dict[str, dict[str, float]]:
    """Mean and worst ratio by some of what starts came from."""
    groups: dict[str, list[float]] = {}
    for one in found:
        groups.setdefault(", ".join(getattr(one, n) for n in names), []).append(one.ratio)
    return {name: of_all(ratios) for name, ratios in groups.items()}


def _saved_over(found: list[Start], name: str) -> dict[str, float]:
    """By cluster, mean of the time saved over a static run of the same first batch, where that gets
    there."""
    saved: dict[str, list[float]] = {}
    for one in found:
        if math.isfinite(same := getattr(one, name)):
            saved.setdefault(one.cluster, []).append(1 - one.seconds / same)
    return {name: statistics.fmean(values) for name, values in saved.items()}


def s2(found: list[Start]) -> dict[str, Any]:
    """GPU time over sweep and best static batch."""

    def figure(some: Sequence[Start]) -> float:
        return statistics.fmean(one.seconds / one.sweep_s for one in some)

    return {"figure": figure(found), "interval": {"figure": interval(found, figure, BY_START)}}


def s1_and_s2(seeds: Sequence[int], say: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Both, and both again with speeds that are known, where seeds hardly differ: one of them."""
    found, known = starts(seeds, say, profiled=False), starts(seeds[:1], say, profiled=True)
    return {
        "S1": {
            **s1(found),
            "speeds_known": {**s1(known), "seeds": [*seeds[:1]]},
            "rows": [vars(one) for one in found],
        },
        "S2": {**s2(found), "speeds_known": {**s2(known), "seeds": [*seeds[:1]]}},
    }


def changing_network(batch: int, steps: int = S7_STEPS) -> Scenario:
    """A run of S7 with one batch to its last sample."""
    return preset(S7_PRESET).change(
        batches=(batch,),
        total_samples=steps * batch,
        warmup_samples=100 * batch,
        events=EVENTS,
        step_noise=0.05,
        targets={"none": float(steps * batch)},  # out of reach
    )


def fixed(s: Scenario) -> dict[str, float]:
    """Seconds of the whole run by layout."""
    world, batch, seconds = World(s), s.batches[0], {}
    edges = [0.0, *(event.at for event in s.events), 1.0]
    for start, end in itertools.pairwise(edges):
        world.go_on(start)
        for layout in world.speeds.layouts:
            row = world.speeds.at(layout, batch)
            if row is not None:
                part = (end - start) * s.total_samples / row.samples_per_s
                seconds[str(layout)] = seconds.get(str(layout), 0.0) + part
    return seconds


def of_batch(batch: int, seeds: Sequence[int]) -> dict[str, Any]:
    """The controller and fixed layouts under S7."""
    s = changing_network(batch)
    layouts = fixed(s)
    healthy, best = str(s.speeds.fastest(batch).layout), min(layouts, key=layouts.__getitem__)
    flags = CopusConfig(copus=True, copus_policy="static", copus_layouts="all")
    runs = [simulate(s, Contender(name="controller", flags=flags), seed=i) for i in seeds]
    seconds = [counted(run.seconds, run) for run in runs]
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
        "overhead": [overhead(run) for run in runs],
        "changes": [(c.consumed_samples // batch, c.layout) for c in runs[0].changes],
    }


def s7(seeds: Sequence[int]) -> dict[str, Any]:
    """Saved over both fixed layouts, mean of the batches that are the best static one of the
    cluster or nearly so. Intervals are over the seeds of these cases."""
    rows = [of_batch(batch, seeds) for batch in S7_BATCHES]
    static_s = static_seconds(preset(S7_PRESET))
    min_s = min(static_s[batch] for batch in S7_BATCHES)
    best = [batch for batch in S7_BATCHES if static_s[batch] <= (1 + NEARLY) * min_s]
    names, seen = {"hindsight": "hindsight_s", "healthy": "healthy_s"}, range(len(seeds))

    def against(name: str, batches: Sequence[int], chosen: Sequence[int]) -> float:
        own = [row for row in rows if row["batch"] in batches]
        return statistics.fmean(
            1 - row["controller_s"][i] / row[name] for row in own for i in chosen
        )

    return {
        **{key: against(name, best, seen) for key, name in names.items()},
        "interval": {
            key: interval_of_few(seen, functools.partial(against, name, best))
            for key, name in names.items()
        },
        "overhead": of_all([x for row in rows if row["batch"] in best for x in row["overhead"]]),
        "batches": best,
        "rows": rows,
    }


def plain(value: Any) -> Any:
    """The same for strict JSON: what is infinite or no number becomes None."""
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save(path: Path, found: Mapping[str, dict[str, Any]]) -> None:
    """Puts the results of scenarios into a file and leaves the others in it as they are."""
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(plain({**known, **found}), indent=1, allow_nan=False) + "\n")


def about(command: str, seeds: Sequence[int]) -> dict[str, Any]:
    """Where the figures of a scenario come from."""
    made = origin()
    return {
        "seeds": list(seeds),
        "command": f"python -m bench.time_to_loss.{command}",
        "commit": made["commit"],
        "date": made["date"],
    }


def main() -> None:
    parser = arguments(__doc__, FILE)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=10)
    parser.add_argument("--only", choices=("S1,S2", "S7"))
    args = parser.parse_args()
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    say: Callable[[str], None] = lambda text: print(text, flush=True)  # noqa: E731
    todo: dict[str, Callable[[], dict[str, dict[str, Any]]]] = {
        "S1,S2": lambda: s1_and_s2(seeds, say),
        "S7": lambda: {"S7": s7(seeds)},
    }
    for names in [args.only] if args.only else todo:
        flags = f"--seeds {args.seeds} --first-seed {args.first_seed} --only {names}"
        came_from = about(f"scenarios {flags}", seeds)
        found = {name: {**one, **came_from} for name, one in todo[names]().items()}
        save(args.output, found)
        for name, one in found.items():
            say(json.dumps({name: {k: v for k, v in one.items() if k != "rows"}}))


if __name__ == "__main__":
    main()
