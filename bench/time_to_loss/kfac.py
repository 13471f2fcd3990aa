"""Does K-FAC train real small runs further than Adam, and how long does a step take?

    python -m bench.time_to_loss.kfac --cell "direction 32"     trains what is missing of a cell
    python -m bench.time_to_loss.kfac                           trains all, compares, writes

K-FAC (arXiv 1503.05671) multiplies the gradient of a matrix by the inverse covariances of its
inputs and of the gradients of its outputs, for targets drawn from the model. Here it does so for
the linear layers of `small_gpt`; embeddings and norms keep Adam. There are two ways: the product
goes into Adam, or it gives the direction of a step whose size is Adam's, layer by layer.
Covariances and inverses come from one step in `EVERY`. Damping and rate are tuned for each batch
and way on seed 0, from Adam's best rate of the atlas; the warm-up stays Adam's. Seeds 1 to 3 are
compared at equal samples. Every line of kfac.jsonl is a run; a killed command goes on where it was,
and commands for different cells may run at once. In the end a step of each is timed, for which
nothing else may run. Writes docs/results/kfac.json.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.support import RESULTS, arguments, origin, write
from bench.time_to_loss import atlas
from bench.time_to_loss.small_gpt import Recipe, SmallRun
from megatron.training.model import kfac

EVERY = 10
"""Steps between two refreshes of covariances and inverses."""
Way = Literal["adam", "built", "into adam", "direction"]
WAYS: tuple[Way, ...] = ("adam", "built", "into adam", "direction")
BATCHES = (32, 128)
SEEDS = (1, 2, 3)
DAMPINGS = (1.0, 0.1, 0.01, 0.001)
_KEPT, _MOMENTUM = 0.95, 0.9
_SEEN = 32
"""Samples that covariances are taken from."""
_TIMED_STEPS = 60


class Factors:
    """Covariances of one linear layer, and their inverses.

    Args:
        layer: the layer, with a bias.
        damping: its root is the share of the mean eigenvalue that is added to every eigenvalue of
            either covariance.
    """

    def __init__(self, layer: nn.Linear, damping: float) -> None:
        self.layer, self._damping = layer, math.sqrt(damping)
        self._sums: list[Tensor] = []
        self._means: list[Tensor] = []
        self.inverses: list[Tensor] = []
        self.momentum: Tensor | None = None
        self.is_on = False
        self._count = 0
        layer.register_forward_pre_hook(self._take_inputs)
        layer.register_full_backward_hook(self._take_gradients)

    def _add(self, rows: Tensor, at: int) -> None:
        product = rows.T @ rows
        if len(self._sums) <= at:
            self._sums.append(product)
        else:
            self._sums[at] += product

    def _take_inputs(self, layer: Any, inputs: Any) -> None:
        if self.is_on and torch.is_grad_enabled():
            rows = inputs[0].detach().flatten(0, -2)
            self._rows = len(rows)
            self._add(torch.cat([rows, rows.new_ones(len(rows), 1)], 1) / math.sqrt(len(rows)), 0)

    def _take_gradients(self, layer: Any, inputs: Any, outputs: Any) -> None:
        if self.is_on:
            # The loss is a mean over rows.
            self._add(outputs[0].flatten(0, -2) * math.sqrt(self._rows), 1)

    def refresh(self) -> None:
        """Takes what has been seen since the last refresh into the covariances, and inverts."""
        new, self._sums = self._sums, []
        self._count += 1
        kept = min(1 - 1 / self._count, _KEPT)
        self._means = [kept * a + (1 - kept) * b for a, b in zip(self._means or new, new)]
        self.inverses = []
        for mean in self._means:
            added = self._damping * mean.trace() / len(mean)
            whole = mean + added * torch.eye(len(mean))
            self.inverses.append(torch.cholesky_inverse(torch.linalg.cholesky(whole)))

    def gradient(self) -> Tensor:
        """[outputs, inputs + 1] the gradient of weight and bias times both inverses."""
        weight, bias = (p.grad for p in (self.layer.weight, self.layer.bias))
        assert weight is not None and bias is not None
        own = torch.cat([weight, bias[:, None]], 1)
        return self.inverses[1] @ own @ self.inverses[0]


class KfacRun(SmallRun):
    """A small run with K-FAC.

    Args:
        recipe: as for Adam.
        way: how the product is used.
        damping: see `Factors`.
    """

    def __init__(self, recipe: Recipe, way: Way, damping: float) -> None:
        super().__init__(recipe)
        self.way = way
        layers = [m for m in self.model.modules() if isinstance(m, nn.Linear)]
        as_published = way in ("into adam", "direction")
        self.factors = [Factors(layer, damping) for layer in layers] if as_published else []
        self.built = [kfac.Factors(m, damping=damping) for m in layers] if way == "built" else []
        optimizer: Any = self.optimizer
        self._adam, optimizer.step = optimizer.step, self._step

    def step(self, batch: int, groups: int = 1) -> float:
        """As Adam's."""
        if self.factors and self.steps % EVERY == 0:
            self._refresh(batch)
        for one in self.built:
            if self.steps % EVERY == 0:
                one.begin()
        return super().step(batch, groups)

    def _refresh(self, batch: int) -> None:
        """Takes covariances from some samples of the step, with targets drawn from the model."""
        where = (self.samples + torch.arange(min(batch, _SEEN))) % len(self.order)
        data = self.train[self.order[where]]
        for one in self.factors:
            one.is_on = True
        logits = self.model.logits(data[:, :-1]).flatten(0, 1)
        with torch.no_grad():
            drawn = torch.multinomial(logits.softmax(-1), 1).flatten()
        F.cross_entropy(logits, drawn).backward()
        for one in self.factors:
            one.is_on = False
            one.refresh()

    @torch.no_grad()
    def _step(self) -> None:
        for one in self.built:
            if one.is_on:
                one.refresh()
            one.weight.grad = one.product(one.weight.grad)
        products = [one.gradient() for one in self.factors]
        if self.way == "into adam":
            for one, product in zip(self.factors, products):
                one.layer.weight.grad = product[:, :-1].clone()
                one.layer.bias.grad = product[:, -1].clone()
        before = [torch.cat([o.layer.weight, o.layer.bias[:, None]], 1) for o in self.factors]
        self._adam()
        if self.way != "direction":
            return
        for one, product, old in zip(self.factors, products, before):
            m = product if one.momentum is None else one.momentum
            one.momentum = _MOMENTUM * m + (1 - _MOMENTUM) * product
            taken = torch.cat([one.layer.weight, one.layer.bias[:, None]], 1) - old
            new = old - one.momentum * (taken.norm() / one.momentum.norm().clamp_min(1e-30))
            one.layer.weight.copy_(new[:, :-1])
            one.layer.bias.copy_(new[:, -1])


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One run."""

    way: Way
    batch: int
    rate: int
    warmup: float
    damping: float = 0.0
    seed: int = 0

    @property
    def key(self) -> str:
        """Names the run."""
        return (
            f"{self.way} [{self.batch}] damping {self.damping:g} rate {self.rate} "
            f"warmup {self.warmup:g} seed {self.seed}"
        )

    @property
    def recipe(self) -> Recipe:
        """As the run takes it."""
        alike = atlas.Cell(
            kind="cosine", total_samples=atlas.SHORT, schedule=atlas.pieces(self.batch)
        )
        return alike.spec(self.rate, self.warmup, self.seed).recipe


def trained(spec: Spec) -> float:
    """The last held-out loss; infinite where it is none."""
    run = KfacRun(spec.recipe, spec.way, spec.damping)
    try:
        while (left := spec.recipe.total_samples - run.samples) > 0:
            if not math.isfinite(run.step(min(spec.batch, left))):
                return math.inf
    except torch.linalg.LinAlgError:
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

    def best(self, specs: list[Spec]) -> Spec:
        """The one of least loss."""
        return min(specs, key=self.loss)


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
    found = replace(own, way=way, damping=DAMPINGS[1])
    for stride in (2, 1):
        while True:
            rates = [replace(found, rate=found.rate + k) for k in (-stride, stride)]
            dampings = [replace(found, damping=d) for d in DAMPINGS]
            best = runs.best([found, *rates, *dampings])
            if best == found or abs(best.rate) > atlas.MOST_RATE:
                break
            found = best
    return found


def step_seconds(way: Way, batch: int) -> float:
    """The median of a run of steps, as every so many of them refreshes; the mean of each run."""
    run = KfacRun(adams_best(batch).recipe, way, DAMPINGS[1])
    means = []
    for _ in range(_TIMED_STEPS // EVERY):
        began = time.perf_counter()
        for _ in range(EVERY):
            run.step(batch)
        means.append((time.perf_counter() - began) / EVERY)
    return statistics.median(means)


def compared(runs: Runs, batch: int) -> dict[str, Any]:
    """Losses and seconds of all ways at a batch."""
    found: dict[str, Any] = {}
    for way in WAYS:
        spec = tuned(runs, way, batch)
        losses = [runs.loss(replace(spec, seed=seed)) for seed in SEEDS]
        found[way] = {
            "rate": spec.rate,
            "damping": spec.damping,
            "losses": losses,
            "mean_loss": statistics.mean(losses),
            "step_s": step_seconds(way, batch),
        }
    for way in WAYS:
        found[way]["step_over_adam"] = found[way]["step_s"] / found["adam"]["step_s"]
        found[way]["loss_less_than_adam"] = found["adam"]["mean_loss"] - found[way]["mean_loss"]
    return found


def main() -> None:
    """Trains, compares and writes."""
    parser = arguments(__doc__, "kfac.json")
    cells = [f"{way} {batch}" for way in WAYS for batch in BATCHES]
    parser.add_argument("--cell", choices=cells, help="only train a way at a batch")
    args = parser.parse_args()
    runs = Runs(args.output.with_suffix(".jsonl"))
    if args.cell is not None:
        way, _, batch = args.cell.rpartition(" ")
        spec = tuned(runs, way, int(batch))
        for seed in SEEDS:
            runs.loss(replace(spec, seed=seed))
        return
    result = {str(batch): compared(runs, batch) for batch in BATCHES}
    write(args.output, {"what": "K-FAC against Adam on small runs", "batches": result, **origin()})


if __name__ == "__main__":
    main()
