"""Does the shipped controller beat the best static batch on real small runs?

    python -m bench.time_to_loss.small_runs [--minutes M]     trains what is missing
    python -m bench.time_to_loss.small_runs --summary         compares with the atlas

S10: the GPT of `small_gpt` trains with decisions from its own noise scale. A step of B samples
takes h + B, h = 32 and 128, and one that measures 1.1 % more. First batches are 8, 32, 128 and 512.
There are two learning rates: the one tuned at a batch of 32 and half of it. The figure is the time
to the last loss over that of the best static batch of the atlas, with the rate, warm-up and length
that are best for it.
S5: the same from 32 with the tuned rate, h = 8, 32, 128 and 512. The figure is what it saves over
the best static batch, over what the best schedule of the atlas saves, sums over h.
Every line of the results file is a run; a killed command goes on where it was. `--summary` writes
both into docs/results/time_to_loss_scenarios.json.

Static batches are known at two or three lengths. Between two of them the truth is below the line,
so that a static batch of two lengths looks worse than it is. Runs and schedules of large batches
end where small batches would have been long before the shortest. The curves of these go on
straight there, less steep than the truth, so that they look better than they are.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.support import RESULTS, arguments, origin
from bench.time_to_loss import atlas, scenarios
from bench.time_to_loss.intervals import interval, interval_of_few
from bench.time_to_loss.scenarios import MEASURING
from bench.time_to_loss.small_gpt import REFERENCE_BATCH, SEQ_LENGTH, Recipe, SmallRun
from copus_ext.cost_model.cluster_spec import preset as cluster
from copus_ext.gns.estimators import Estimate
from copus_ext.goodput.inputs import ConfigThroughput
from copus_ext.planner.configuration import Configuration
from copus_ext.simulate.contenders import Contender, contenders
from copus_ext.simulate.noise_trajectory import power_law
from copus_ext.simulate.run import simulate
from copus_ext.simulate.scenario import Scenario
from copus_ext.simulate.speeds import Speeds
from copus_ext.simulate.training_dynamics import GroundTruth
from megatron.training.config.layout import Layout

FILE = "small_runs.jsonl"
BATCHES = tuple(2**k for k in range(11))
OVERHEADS, FIRST_BATCHES, RATES, SEEDS = (32, 128), (8, 32, 128, 512), (0, -2), (10, 11, 12)
"""Rates: relative to the tuned one, in half powers of two."""
GROUPS = 4
_LAYOUT = Layout(dp=1)


class SmallTraining:
    """A real run as the simulator's runner steps it.

    It has what the runner asks of a `copus_ext.simulate.training.Training` without fork tests.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.run = SmallRun(recipe)
        self._loss = self.run.evaluate(512)
        self._measures = False
        self.progress = 0.0

    @property
    def samples(self) -> int:
        """Samples trained."""
        return self.run.samples

    def train(self, batch: int, steps: int = 1, *, lr_factor: float = 1.0) -> None:
        """Trains; the last step of the run is cut at its length."""
        self.run.lr_multiple = lr_factor
        for _ in range(steps):
            size = min(batch, self.run.recipe.total_samples - self.samples)
            groups = min(GROUPS, size) if self._measures and size == batch else 1
            self._loss = self.run.step(size, groups)
        self._measures = False

    def passed(self, target: float) -> float | None:
        """No target is named ahead."""
        return None

    def loss(self) -> float:
        """Mean loss of the last step's samples, as a trainer knows it."""
        return self._loss

    def noise_scale(self) -> float:
        """Lets the next step measure; the value is that of the step before."""
        self._measures = True
        return 1.0

    def draw(self, phi: float, batch: int, groups: int) -> Estimate | None:
        """The estimate of the last step, in place of a drawn one."""
        norms = self.run.squared_norms
        if norms is None:
            return None
        small, whole = norms
        groups = min(GROUPS, batch)
        trace = (small - whole) / (groups / batch - 1 / batch)
        return Estimate(grad_norm_sq=whole - trace / batch, grad_variance_trace=trace)


@dataclass(frozen=True, kw_only=True)
class SmallScenario(Scenario):
    """A machine on which a step of B samples takes `overhead` + B seconds, and real training."""

    recipe: Recipe

    def training(self, seed: int = 0) -> Any:
        """The run at its start."""
        return self.started

    def estimator(self, seed: int) -> Any:
        """Takes the estimates of the run itself."""
        return self.started

    @functools.cached_property
    def started(self) -> SmallTraining:
        """The run."""
        return SmallTraining(self.recipe)


def scenario(overhead: float, recipe: Recipe) -> SmallScenario:
    """A run on a machine."""
    rows = [
        ConfigThroughput(
            configuration=Configuration(
                layout=_LAYOUT, micro_batch_size=max(b // GROUPS, 1), global_batch_size=b
            ),
            samples_per_s=b / (overhead + b),
            relative_sd=0.01,
            source="measured",
        )
        for b in BATCHES
    ]
    total = recipe.total_samples
    return SmallScenario(
        name="small",
        model="llama-3.2-3b",  # Nothing depends on it: the speeds are given.
        seq_length=SEQ_LENGTH,
        cluster=cluster("cpu:1"),
        batches=BATCHES,
        total_samples=total,
        warmup_samples=round(recipe.warmup * total),
        targets={"none": 1.0},
        trajectory=power_law(end=float(total), phi_end=64.0, exponent=0.5),
        truth=GroundTruth(),
        switch_cost_s=0.0,
        assumed_cost_s=0.0,
        measured=Speeds(rows),
        lr_decay=0.05,
        recipe=recipe,
    )


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One run of S10."""

    overhead: int
    first_batch: int
    rate: int
    """Relative to the tuned one at a batch of 32, in half powers of two."""
    seed: int

    @property
    def key(self) -> str:
        """Names the run."""
        return f"h {self.overhead} first {self.first_batch} rate {self.rate} seed {self.seed}"


def specs() -> Iterator[Spec]:
    """All runs, a seed at a time; those of S5 alone at the end."""
    for seed, rate, overhead, first in itertools.product(SEEDS, RATES, OVERHEADS, FIRST_BATCHES):
        yield Spec(overhead=overhead, first_batch=first, rate=rate, seed=seed)
    for seed, overhead in itertools.product(SEEDS, atlas.OVERHEADS):
        if overhead not in OVERHEADS:
            yield Spec(overhead=overhead, first_batch=REFERENCE_BATCH, rate=0, seed=seed)


def one(spec: Spec, tuned: tuple[int, float]) -> dict[str, Any]:
    """Trains one run.

    Args:
        spec: which.
        tuned: rate and warm-up of the static batch of 32 in the atlas.
    """
    rate, warmup = tuned
    recipe = Recipe(
        total_samples=atlas.SHORT,
        learning_rate=atlas.BASE_RATE * 2 ** ((rate + spec.rate) / 2),
        warmup=warmup,
        seed=spec.seed,
    )
    s, began = scenario(spec.overhead, recipe), time.monotonic()
    flags = contenders(s.batches)["no_layouts_goodput_small"].flags
    assert flags is not None
    flags = dataclasses.replace(flags, copus_reference_batch_size=REFERENCE_BATCH)
    run = simulate(s, Contender(name="copus", flags=flags, first_batch=spec.first_batch), seed=0)
    changes = [(c.consumed_samples, c.batch) for c in run.changes]
    loss = s.started.run.evaluate()
    return {
        "key": spec.key,
        "loss": round(loss, 5),
        "time": run.seconds + run.measured_s * MEASURING,
        "steps": run.steps,
        "decisions": run.decisions,
        "changes": changes,
        "seconds": round(time.monotonic() - began, 1),
        "recipe": dataclasses.asdict(recipe),
        "commit": origin()["commit"],
    }


def best_static(best: dict[str, dict[str, Any]], overhead: float, loss: float) -> float | None:
    """Least time in which a static batch of the atlas ends at a loss, the lines going on to any
    higher loss; None if none is known to."""
    found = []
    for batch in (8, 16, 32, 64, 128, 256, 512):
        samples = atlas.samples_to(best, batch, loss, beyond=True)
        if samples is not None:
            found.append(samples * (overhead + batch) / batch)
    return min(found, default=None)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A run against the best static batch that ends at its loss."""

    spec: Spec
    ratio: float | None
    """Its time over that batch's; None where none is known to reach the loss."""


def outcomes(rows: list[dict[str, Any]], best: dict[str, dict[str, Any]]) -> list[Outcome]:
    """Finished runs against the atlas."""
    found, by_key = [], {spec.key: spec for spec in specs()}
    for row in rows:
        spec = by_key[row["key"]]
        static = best_static(best, spec.overhead, row["loss"])
        found.append(Outcome(spec=spec, ratio=None if static is None else row["time"] / static))
    return found


def s10(found: list[Outcome]) -> dict[str, Any]:
    """Mean and worst over starts, overheads and rates; also by part."""
    ratios = [(x.spec, x.ratio) for x in found if x.ratio is not None and _is_of_s10(x.spec)]

    def mean(some: Sequence[tuple[Spec, float]]) -> float:
        return statistics.fmean(ratio for _, ratio in some)

    def worst(some: Sequence[tuple[Spec, float]]) -> float:
        return max(ratio for _, ratio in some)

    by = (lambda one: one[0].seed, lambda one: one[0].first_batch)
    parts: dict[str, list[float]] = {}
    for spec, ratio in ratios:
        for name in ("overhead", "first_batch", "rate"):
            parts.setdefault(f"{name} {getattr(spec, name)}", []).append(ratio)
    return {
        "mean": mean(ratios),
        "worst": worst(ratios),
        "interval": {"mean": interval(ratios, mean, by), "worst": interval(ratios, worst, by)},
        "means": {name: statistics.fmean(values) for name, values in parts.items()},
        "runs": len(ratios),
        "runs_without_a_static_batch": sum(x.ratio is None and _is_of_s10(x.spec) for x in found),
        "seeds": sorted({spec.seed for spec, _ in ratios}),
    }


def _is_of_s10(spec: Spec) -> bool:
    return spec.overhead in OVERHEADS


def schedule_savings(best: dict[str, dict[str, Any]], overhead: float) -> dict[str, float]:
    """What each schedule of the atlas saves over the best static batch that ends at its loss."""
    found = {}
    for cell, row in best.items():
        name = cell.partition("[")[2][:-1]
        if row["spec"]["kind"] != "cosine" or name.isdigit():
            continue
        static = best_static(best, overhead, row["mean_loss"])
        if static is not None:
            time_s = overhead * row["steps"] + row["spec"]["total_samples"]
            found[cell] = 1 - time_s / static
    return found


def s5(found: list[Outcome], best: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Share of the best schedule's saving, over the seeds that every overhead has; None while one
    lacks its runs or schedules."""
    rows: dict[str, Any] = {}
    for overhead in atlas.OVERHEADS:
        saved = schedule_savings(best, overhead)
        own = {
            x.spec.seed: 1 - x.ratio
            for x in found
            if x.ratio is not None and _is_of_s5(x.spec) and x.spec.overhead == overhead
        }
        if not saved or not own:
            return None
        name = max(saved, key=saved.__getitem__)
        row = {"best_schedule": name, "saves": saved[name], "controller": own}
        rows[str(overhead)] = {**row, "seeds": sorted(own)}
    seeds = sorted(set.intersection(*({*row["controller"]} for row in rows.values())))
    hindsight = sum(row["saves"] for row in rows.values())

    def figure(chosen: Sequence[int]) -> float:
        each = [statistics.fmean(r["controller"][s] for s in chosen) for r in rows.values()]
        return sum(each) / hindsight

    return {
        "figure": figure(seeds),
        "interval": {"figure": interval_of_few(seeds, figure)},
        "seeds": seeds,
        "by_h": rows,
    }


def _is_of_s5(spec: Spec) -> bool:
    return spec.first_batch == REFERENCE_BATCH and spec.rate == 0


def summarize(path: Path, atlas_file: Path, output: Path) -> None:
    """Prints every run and writes the figures beside those of the other scenarios."""
    best = atlas.best_of(atlas.read(atlas_file))
    found = outcomes(atlas.read(path), best)
    for x in found:
        ratio = "no static batch is known to" if x.ratio is None else f"{x.ratio:.3f}"
        print(f"{x.spec.key}: over the best static batch {ratio}")
    results = {"S10": s10(found)}
    if (share := s5(found, best)) is not None:
        results["S5"] = share
    commits = sorted({row["commit"] for row in atlas.read(path)})
    for one in results.values():
        one |= scenarios.about("small_runs --summary", one["seeds"]) | {"commits": commits}
    scenarios.save(output, results)
    print(f"S10 mean {results['S10']['mean']:.3f}, worst {results['S10']['worst']:.3f}")
    print("S5 waits for runs" if share is None else f"S5 {share['figure']:.2f}")


def main() -> None:
    """Trains or shows."""
    parser = arguments(__doc__, FILE)
    parser.add_argument("--atlas", type=Path, default=RESULTS / atlas.FILE)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--summary", action="store_true")
    args = parser.parse_args()
    if args.summary:
        summarize(args.output, args.atlas, RESULTS / scenarios.FILE)
        return
    losses = {row["key"]: row["loss"] for row in atlas.read(args.atlas)}
    tuned = atlas.nearest(losses, "cosine", atlas.SHORT, atlas.pieces(REFERENCE_BATCH))
    end = time.monotonic() + 60 * args.minutes
    done = {row["key"] for row in atlas.read(args.output)}
    for spec in specs():
        if spec.key in done or time.monotonic() > end:
            continue
        row = one(spec, tuned)
        with args.output.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{row['key']}: {row['loss']:.4f} after {row['time']:.0f}", flush=True)


if __name__ == "__main__":
    main()
