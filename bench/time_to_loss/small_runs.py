"""Does the shipped rule beat the best static batch on small runs that really train?

    python -m bench.time_to_loss.small_runs [--seeds 20,21] [--half-seeds 20] [--processes 2]
    python -m bench.time_to_loss.small_runs --again 1      a static batch once more

The GPT of `small_gpt` trains on real text, with decisions from its own noise scale. The clock is
counted: a step of B samples takes h + B, h = 32 and 128, and one that measures 1.1 % more; the
rule knows these speeds. Decisions themselves take nothing. The figure is the time to the last loss
over that of the best static batch, with the rate, warm-up and length that are best for it there.
The rule has the rate and warm-up that are best for a static batch of 32, or half of that rate.

docs/results/time_to_loss_small_runs.jsonl has a line for every run, and a killed command goes on
where it was. Its static rows are the best of `trials` rates and warm-ups with seed 0, and the same
with further seeds (commit 070c845e was the last with the search, `atlas.py`). The figures are
`atlas` in docs/results/time_to_loss.json.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import multiprocessing
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from bench.support import RESULTS, arguments, interval_of_few, origin
from bench.time_to_loss.results import FILE, MEASURING, save
from bench.time_to_loss.small_gpt import REFERENCE_BATCH, SEQ_LENGTH, Recipe, SmallRun, static_loss
from copus_ext.controller.flags import CopusConfig
from copus_ext.cost_model.cluster_spec import preset as cluster
from copus_ext.extras.simulate.contenders import Contender
from copus_ext.extras.simulate.noise_trajectory import power_law
from copus_ext.extras.simulate.run import Runner
from copus_ext.extras.simulate.scenario import Scenario
from copus_ext.extras.simulate.speeds import Speeds
from copus_ext.extras.simulate.training_dynamics import GroundTruth
from copus_ext.gns.estimators import Estimate, Weights, estimate_gns
from copus_ext.goodput.inputs import ConfigThroughput
from copus_ext.planner.configuration import Configuration
from megatron.trainer.config.layout import Layout

RUNS = "time_to_loss_small_runs.jsonl"
BATCHES = tuple(2**k for k in range(11))
TOTAL_SAMPLES = 32_768
"""17 tokens a parameter."""
OVERHEADS, FIRST_BATCHES = (32, 128), (8, 32, 128, 512)
_GROUPS = 4
"""Micro-batches of a step, whose gradients are compared."""
Row = dict[str, Any]
Lengths = Sequence[tuple[float, int]]
"""Last loss and samples of a static batch at each length, the lowest loss first."""


class LiveTraining:
    """A small run as the simulator's runner steps it (`Training` of its `training.py`), and the
    estimates of the run itself in place of drawn ones."""

    progress = 0.0

    def __init__(self, run: SmallRun) -> None:
        self.run = run
        self._loss, self._measures = math.inf, False

    @property
    def samples(self) -> int:
        return self.run.samples

    def train(self, batch: int, steps: int = 1, *, lr_factor: float = 1.0) -> None:
        for _ in range(steps):
            size = min(batch, self.run.recipe.total_samples - self.samples)
            groups = min(_GROUPS, size) if self._measures and size == batch else 1
            self._loss = self.run.step(size, lr_factor, groups)
        self._measures = False

    def passed(self, target: float) -> float | None:
        """No loss is named ahead: the run ends with its samples."""
        return None

    def loss(self) -> float:
        """Of the last step's samples, as a trainer knows it."""
        return self._loss

    def noise_scale(self) -> float:
        """Lets the next step measure. `draw` has the outcome, this value says nothing."""
        self._measures = True
        return 1.0

    def draw(self, phi: float, batch: int, groups: int) -> Estimate | None:
        if self.run.squares is None:
            return None
        small, whole = self.run.squares
        parts = Weights(signal=groups, noise=groups**2 / batch)
        return estimate_gns(small, parts, whole, Weights(signal=1.0, noise=1.0 / batch))


class LiveRunner(Runner):
    def __init__(self, scenario: Scenario, contender: Contender, run: SmallRun) -> None:
        super().__init__(scenario, contender, 0, None)
        self.training = LiveTraining(run)
        self.estimator = cast(Any, self.training)


def scenario(overhead: float, total_samples: int) -> Scenario:
    """A machine on which a step of B samples takes `overhead` + B, which the rule knows."""
    rows = [
        ConfigThroughput(
            configuration=Configuration(
                layout=Layout(dp=1), micro_batch_size=max(b // _GROUPS, 1), global_batch_size=b
            ),
            samples_per_s=b / (overhead + b),
            relative_sd=0.01,
            source="measured",
        )
        for b in BATCHES
    ]
    return Scenario(
        name="small",
        model="llama-3.2-3b",  # of no effect, as speeds and training are given; so is the truth
        cluster=cluster("cpu:1"),
        trajectory=power_law(end=1.0, phi_end=1.0, exponent=0.5),
        truth=GroundTruth(),
        targets={"none": 1.0},
        seq_length=SEQ_LENGTH,
        batches=BATCHES,
        total_samples=total_samples,
        warmup_samples=0,
        relayout_cost_s=0.0,
        measured=Speeds(rows),
    )


def live_run(overhead: float, first_batch: int, recipe: Recipe) -> Row:
    """Trains with the rule to the end of the samples; the time is in that of a sample."""
    flags = CopusConfig(
        copus=True,
        copus_max_global_batch_size=BATCHES[-1],
        copus_reference_batch_size=REFERENCE_BATCH,
    )
    contender, small = Contender(name="", flags=flags, first_batch=first_batch), SmallRun(recipe)
    run = LiveRunner(scenario(overhead, recipe.total_samples), contender, small).run()
    return {
        "loss": round(small.evaluate(), 5),
        "time": run.seconds + run.measured_s * MEASURING,
        "steps": run.steps,
        "decisions": run.decisions,
        "changes": [(change.consumed_samples, change.batch) for change in run.changes],
    }


def static_lengths(rows: Iterable[Row]) -> dict[int, Lengths]:
    """By batch its lengths; the loss of each is the mean of its seeds."""
    losses: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        if row["kind"] == "static":
            losses.setdefault((row["batch"], row["total_samples"]), []).append(row["loss"])
    found: dict[int, list[tuple[float, int]]] = {}
    for (batch, samples), some in losses.items():
        found.setdefault(batch, []).append((statistics.fmean(some), samples))
    return {batch: sorted(lengths) for batch, lengths in found.items()}


def samples_to(loss: float, lengths: Lengths) -> float | None:
    """Length of the run of a static batch that ends at a loss, samples.

    The logarithm of the samples over the loss is a parabola through three lengths. Beyond the ends
    it goes on straight. The truth is convex and lies above that line, so that the static batch
    looks better than it is. It goes on to any higher loss, and to lower ones by half of the
    distance of the ends; below that the answer is None.
    """
    losses, samples = zip(*lengths)
    if loss < losses[0] - (losses[-1] - losses[0]) / 2:
        return None
    curve = np.polynomial.Polynomial.fit(losses, np.log(samples), 2)
    near = min(max(loss, losses[0]), losses[-1])
    # A higher loss takes less, however the noise of a few seeds bends the curve.
    slope = min(curve.deriv()(near), 0.0)
    return float(np.exp(curve(near) + slope * (loss - near)))


def outcome(row: Row, lengths: dict[int, Lengths]) -> Row:
    """A run with its time over that of the static batch that ends at its loss soonest."""
    needed = {batch: samples_to(row["loss"], own) for batch, own in lengths.items()}
    times = {b: n * (row["overhead"] + b) / b for b, n in needed.items() if n is not None}
    batch = min(times, key=times.__getitem__)
    static = {"static_batch": batch, "static_time": times[batch]}
    return {**row, **static, "ratio": row["time"] / times[batch]}


def table(found: Sequence[Row]) -> Row:
    """Mean and worst of some outcomes, in all and by what they differ in."""
    seeds = sorted({row["seed"] for row in found})

    def mean(some: Sequence[int]) -> float:
        return statistics.fmean(row["ratio"] for row in found if row["seed"] in some)

    def by(name: str) -> Row:
        groups: dict[str, list[float]] = {}
        for row in found:
            groups.setdefault(f"{row[name]:g}", []).append(row["ratio"])
        return {k: {"mean": statistics.fmean(v), "worst": max(v)} for k, v in groups.items()}

    return {
        "mean": mean(seeds),
        "worst": max(row["ratio"] for row in found),
        "mean_interval": interval_of_few(seeds, mean),
        "runs": len(found),
        "seeds": seeds,
        "by": {name: by(name) for name in ("overhead", "first_batch", "seed")},
    }


def read(path: Path) -> list[Row]:
    """Finished runs, without a last line that was cut off."""
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _recipe(row: Row, seed: int, rate: float = 1.0) -> Recipe:
    """That of a static row, with some of its learning rate."""
    return Recipe(
        total_samples=row["total_samples"],
        learning_rate=row["learning_rate"] * rate,
        warmup=row["warmup"],
        seed=seed,
    )


def _one(spec: Row, usual: Row) -> Row:
    recipe = _recipe(usual, spec["seed"], spec["rate"])
    found = live_run(spec["overhead"], spec["first_batch"], recipe)
    return {**spec, **found, "commit": origin()["commit"]}


def run_all(path: Path, seeds: dict[float, Sequence[int]], processes: int) -> list[Row]:
    """Trains what is missing, appends each run as soon as it is over, and returns the outcomes.
    Seeds are by rate, over the one that is best for a static batch of 32."""
    known = read(path)
    path.write_text("".join(json.dumps(row) + "\n" for row in known))
    usual = {"kind": "static", "batch": REFERENCE_BATCH, "total_samples": TOTAL_SAMPLES}
    work = functools.partial(_one, usual=next(r for r in known if r.items() >= usual.items()))
    todo: list[Row] = [
        {"kind": "controller", "rate": rate, "seed": seed, "overhead": h, "first_batch": first}
        for rate, some in seeds.items()
        for seed, h, first in itertools.product(some, OVERHEADS, FIRST_BATCHES)
    ]
    missing = [spec for spec in todo if not any(row.items() >= spec.items() for row in known)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for row in pool.imap_unordered(work, missing):
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            known.append(row)
            print(json.dumps(row), flush=True)
    lengths = static_lengths(known)
    done = (next(row for row in known if row.items() >= spec.items()) for spec in todo)
    return [outcome(row, lengths) for row in done]


def main() -> None:
    parser = arguments(__doc__, RUNS)
    parser.add_argument("--seeds", default="20,21", help="comma between them")
    parser.add_argument("--half-seeds", default="20", help="of runs with half of the rate")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--again", type=int, default=0, help="train so many static rows once more")
    args = parser.parse_args()
    for row in read(args.output)[: args.again]:
        loss = static_loss(_recipe(row, row["seed"]), row["batch"])
        print(f"batch {row['batch']}: {loss:.5f}, recorded {row['loss']:.5f}")
    if args.again:
        return
    tuned, half = ([int(x) for x in text.split(",")] for text in (args.seeds, args.half_seeds))
    found = run_all(args.output, {1.0: tuned, 0.5: half}, args.processes)
    usual, halved = (table([r for r in found if r["rate"] == rate]) for rate in (1.0, 0.5))
    flags = f"--seeds {args.seeds} --half-seeds {args.half_seeds}"
    made = {"command": f"python -m bench.time_to_loss.small_runs {flags}", **origin()}
    made["commits"] = sorted({row["commit"] for row in found})
    save(RESULTS / FILE, {"atlas": {**usual, "half_rate": halved, **made, "rows": found}})
    print(json.dumps({**usual, "half_rate": halved}, indent=1))


if __name__ == "__main__":
    main()
