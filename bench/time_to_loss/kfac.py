"""Does K-FAC train real small runs further than Adam alone, at equal samples and at equal time?

    python -m bench.time_to_loss.kfac --cell "kfac 32"   trains what is missing of a cell
    python -m bench.time_to_loss.kfac                    trains all, times steps, compares, writes

`small_gpt` trains as in the atlas, with the covariances and products of `--kfac` on its linear
layers. Damping and rate are tuned for each batch on seed 0, from Adam's best rate of the atlas; the
warm-up stays Adam's. Seeds 1 to 3 are compared. A run of equal time has as many samples fewer as a
step takes longer, and its whole schedule on them. Every line of kfac.jsonl is a run; a killed
command goes on where it was, and commands for different cells may run at once. Steps are timed with
nothing else running. Writes docs/results/kfac.json; all takes half an hour of a core.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from bench.support import RESULTS, arguments, origin, write
from bench.time_to_loss import atlas
from bench.time_to_loss.small_gpt import Recipe, SmallRun
from megatron.training.model.kfac import Factors

EVERY = 10
"""Steps between two covariances, as `--kfac-interval` has it."""
Way = Literal["adam", "kfac"]
WAYS: tuple[Way, ...] = ("adam", "kfac")
BATCHES = (32, 128)
SEEDS = (1, 2, 3)
DAMPINGS = (1.0, 0.1, 0.01, 0.001)
_FIRST_DAMPING = 0.01
_TIMED_STEPS = 100


class KfacRun(SmallRun):
    """A small run with K-FAC in front of Adam.

    Args:
        recipe: as for Adam.
        damping: of `Factors`; 0: Adam alone.
    """

    def __init__(self, recipe: Recipe, damping: float) -> None:
        super().__init__(recipe)
        layers = [m for m in self.model.modules() if isinstance(m, nn.Linear)] if damping else []
        self.factors = [Factors(layer, damping=damping) for layer in layers]
        optimizer: Any = self.optimizer
        self._adam, optimizer.step = optimizer.step, self._step

    def step(self, batch: int, groups: int = 1) -> float:
        """As Adam's."""
        if self.steps % EVERY == 0:
            for one in self.factors:
                one.begin()
        return super().step(batch, groups)

    def _step(self) -> None:
        # The gradient is clipped before and not after, which is the same: its norm stays.
        for one in self.factors:
            if one.is_on:
                one.refresh()
            one.weight.grad = one.product(one.weight.grad)
        self._adam()


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One run."""

    way: Way
    batch: int
    rate: int
    warmup: float
    damping: float = 0.0
    seed: int = 0
    share: float = 1.0
    """Of the samples."""

    @property
    def key(self) -> str:
        """Names the run."""
        return (
            f"{self.way} [{self.batch}] damping {self.damping:g} rate {self.rate} "
            f"warmup {self.warmup:g} seed {self.seed} share {self.share:g}"
        )

    @property
    def recipe(self) -> Recipe:
        """As the run takes it."""
        alike = atlas.Cell(
            kind="cosine",
            total_samples=round(self.share * atlas.SHORT),
            schedule=atlas.pieces(self.batch),
        )
        return alike.spec(self.rate, self.warmup, self.seed).recipe


def trained(spec: Spec) -> float:
    """The last held-out loss; infinite where it is none."""
    run = KfacRun(spec.recipe, spec.damping)
    while (left := spec.recipe.total_samples - run.samples) > 0:
        if not math.isfinite(run.step(min(spec.batch, left))):
            return math.inf
    loss = run.evaluate()
    return loss if math.isfinite(loss) else math.inf


class Runs:
    """Finished runs, in a file that grows.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._losses = {row["key"]: row["loss"] for row in atlas.read(path)}

    def loss(self, spec: Spec) -> float:
        """The loss of a run, which is trained if it is missing."""
        if spec.key not in self._losses:
            began = time.monotonic()
            loss = round(trained(spec), 5)
            row = {"key": spec.key, "loss": loss, "seconds": round(time.monotonic() - began, 1)}
            with self._path.open("a") as file:
                file.write(json.dumps({**row, "spec": asdict(spec)}) + "\n")
            print(f"{spec.key}: {loss:.4f} in {row['seconds']} s", flush=True)
            self._losses[spec.key] = loss
        return self._losses[spec.key]

    def of_seeds(self, spec: Spec) -> dict[str, Any]:
        """Losses of the compared seeds."""
        losses = [self.loss(replace(spec, seed=seed)) for seed in SEEDS]
        return {"losses": losses, "mean": statistics.mean(losses)}


def adams_best(batch: int) -> Spec:
    """Adam with its best rate and warm-up of the atlas."""
    done = {row["key"]: row["loss"] for row in atlas.read(RESULTS / atlas.FILE)}
    rate, warmup = atlas.nearest(done, "cosine", atlas.SHORT, atlas.pieces(batch))
    return Spec(way="adam", batch=batch, rate=rate, warmup=warmup)


def tuned(runs: Runs, way: Way, batch: int) -> Spec:
    """The best damping and rate of a way, on seed 0."""
    own = adams_best(batch)
    if way == "adam":
        return own
    found = replace(own, way=way, damping=_FIRST_DAMPING)
    for stride in (2, 1):
        while True:
            rates = [replace(found, rate=found.rate + k) for k in (-stride, stride)]
            dampings = [replace(found, damping=d) for d in DAMPINGS]
            best = min([found, *rates, *dampings], key=runs.loss)
            if best == found or abs(best.rate) > atlas.MOST_RATE:
                break
            found = best
    return found


def step_seconds(spec: Spec) -> float:
    """Of a step, the median over rounds from one set of covariances to the next."""
    run, means = KfacRun(spec.recipe, spec.damping), []
    for _ in range(_TIMED_STEPS // EVERY):
        began = time.perf_counter()
        for _ in range(EVERY):
            run.step(spec.batch)
        means.append((time.perf_counter() - began) / EVERY)
    return statistics.median(means)


def compared(runs: Runs, batch: int) -> dict[str, Any]:
    """Losses and seconds at a batch."""
    specs = {way: tuned(runs, way, batch) for way in WAYS}
    seconds = {way: step_seconds(spec) for way, spec in specs.items()}
    longer = seconds["kfac"] / seconds["adam"]
    adam, kfac = (runs.of_seeds(specs[way]) for way in WAYS)
    # Down to a hundredth, so that another timing finds the same runs.
    share = round(math.floor(100 / longer) / 100, 2)
    same_time = runs.of_seeds(replace(specs["kfac"], share=share))
    return {
        "step_s": seconds,
        "step_over_adam": longer,
        "rate": {way: spec.rate for way, spec in specs.items()},
        "damping": specs["kfac"].damping,
        "adam": adam,
        "kfac_at_equal_samples": kfac,
        "kfac_at_equal_time": {"share": share, **same_time},
        "less_at_equal_samples": adam["mean"] - kfac["mean"],
        "less_at_equal_time": adam["mean"] - same_time["mean"],
    }


def main() -> None:
    """Trains, compares and writes."""
    parser = arguments(__doc__, "kfac.json")
    cells = [f"{way} {batch}" for way in WAYS for batch in BATCHES]
    parser.add_argument("--cell", choices=cells, help="only train a way at a batch")
    args = parser.parse_args()
    runs = Runs(args.output.with_suffix(".jsonl"))
    if args.cell is not None:
        way, _, batch = args.cell.rpartition(" ")
        runs.of_seeds(tuned(runs, way, int(batch)))
        return
    result = {str(batch): compared(runs, batch) for batch in BATCHES}
    write(args.output, {"what": "K-FAC against Adam on small runs", "batches": result, **origin()})


if __name__ == "__main__":
    main()
