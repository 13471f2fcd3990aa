"""Can a fork test tell that a learning rate is too low or too high? Its power and its bias.

    python -m bench.time_to_loss.rate_forks [--minutes M]     trains what is missing
    python -m bench.time_to_loss.rate_forks --summary         prints and writes the figures

Runs of `small_gpt`, 32,768 samples, cosine, with a quarter, half, once and twice the best learning
rate of their batch. At two places each forks: for a twentieth of the run three branches train on
the same samples with half, once and twice the rate. They are judged as the trainer judges branches,
by the held-out loss of the weights averaged over their second half, and by the last weights; and
likewise after a quarter and a half of that way. The truth is what the same change of the rate does
to the rest of the run: all branches go on to the end. Every line of the results file is one fork;
the summary is beside it.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.support import arguments, origin, write
from bench.time_to_loss.atlas import BASE_RATE, SHORT, read
from bench.time_to_loss.small_gpt import REFERENCE_BATCH, Recipe, SmallRun

FILE = "rate_forks.jsonl"
BEST = {32: (2, 0.3), 128: (2, 0.5)}
"""By batch: k of the best rate 2^(k/2) `BASE_RATE` and the best warm-up in atlas.jsonl."""
RATES = (0.25, 0.5, 1.0, 2.0)
"""Of runs, over the best one."""
BRANCHES = (0.5, 1.0, 2.0)
"""Of branches, over that of their run."""
PLACES = {32: (0.15, 0.35), 128: (0.25, 0.55)}
"""Parts of the run after which it forks: within the warm-up, and right after it."""
LENGTHS = (0.0125, 0.025, 0.05)
"""After which a branch is judged, as parts of the run. Each is twice the one before, so that the
second half of it begins where that one ends."""
SURE = 2.0
"""Standard errors from which a test says something."""


@dataclass(frozen=True, kw_only=True)
class Fork:
    """One run and where it forks."""

    batch: int
    rate: float
    seed: int

    @property
    def key(self) -> str:
        """Names the run."""
        return f"batch {self.batch} rate {self.rate:g} seed {self.seed}"


def wanted() -> Iterator[Fork]:
    """All runs, the most telling first."""
    for batch, seeds in ((32, (1, 2)), (128, (1,)), (32, (3,)), (128, (2, 3))):
        for seed in seeds:
            for rate in RATES:
                yield Fork(batch=batch, rate=rate, seed=seed)


def _train(run: SmallRun, batch: int, multiple: float, until: int) -> list[torch.Tensor]:
    """Trains at a multiple of the recipe's rate; returns the weights averaged over all steps."""
    run.lr_multiple = multiple * math.sqrt(batch / REFERENCE_BATCH)
    mean, number = [p.detach().clone() for p in run.model.parameters()], 0
    while run.samples + batch <= until:
        run.step(batch)
        number += 1
        for m, p in zip(mean, run.model.parameters()):
            m += (p.detach() - m) / number
    return mean


def _loss_of(run: SmallRun, weights: list[torch.Tensor]) -> list[float]:
    """Held-out losses of some weights, of each eighth of the samples."""
    own = [p.detach().clone() for p in run.model.parameters()]
    with torch.no_grad():
        for p, w in zip(run.model.parameters(), weights):
            p.copy_(w)
        parts = run.held_out.chunk(8)
        found = [
            sum(run.model.loss(some).item() * len(some) for some in part.split(256)) / len(part)
            for part in parts
        ]
        for p, w in zip(run.model.parameters(), own):
            p.copy_(w)
    return found


def _judge(length: float) -> str:
    """Name of the averaged weights of a length."""
    return f"averaged over {length:.2%}"


def forks_of(fork: Fork) -> list[dict[str, Any]]:
    """Trains a run and its branches."""
    k, warmup = BEST[fork.batch]
    recipe = Recipe(
        total_samples=SHORT,
        learning_rate=BASE_RATE * 2 ** (k / 2) * fork.rate,
        warmup=warmup,
        seed=fork.seed,
    )
    run, batch, rows = SmallRun(recipe), fork.batch, []
    for place in PLACES[batch]:
        _train(run, batch, 1.0, int(place * SHORT))
        at, branches = run.snapshot(), []
        for factor in BRANCHES:
            run.restore(at)
            _train(run, batch, factor, int((place + LENGTHS[0] / 2) * SHORT))
            averaged = [
                _loss_of(run, _train(run, batch, factor, int((place + length) * SHORT)))
                for length in LENGTHS
            ]
            last = _loss_of(run, [p.detach().clone() for p in run.model.parameters()])
            _train(run, batch, factor, SHORT)
            end = round(run.evaluate(), 5)
            judges = dict(zip(map(_judge, LENGTHS), averaged))
            branches.append({"factor": factor, **judges, "last": last, "end": end})
        run.restore(at)
        about = {"batch": batch, "rate": fork.rate, "seed": fork.seed}
        rows.append({"key": fork.key, **about, "place": place, "branches": branches})
    return rows


def run_missing(path: Path, minutes: float) -> None:
    """Trains until nothing is missing or the time is over."""
    end = time.monotonic() + 60 * minutes
    for fork in wanted():
        if fork.key in {row["key"] for row in read(path)}:
            continue
        if time.monotonic() > end:
            return
        began, rows = time.monotonic(), forks_of(fork)
        with path.open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{fork.key}: {time.monotonic() - began:.0f} s", flush=True)


def compared(row: dict[str, Any], factor: float, judge: str) -> tuple[float, float, float]:
    """A branch against that of the run's own rate: how much lower its loss is, the standard error
    of that over the parts of the held-out samples, and how much lower its end is."""
    own, other = (next(b for b in row["branches"] if b["factor"] == f) for f in (1.0, factor))
    lower = [a - b for a, b in zip(own[judge], other[judge])]
    error = statistics.stdev(lower) / math.sqrt(len(lower))
    return statistics.fmean(lower), error, own["end"] - other["end"]


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By batch, place, rate of the run, change of it and judge: means over the seeds, and how many
    tests speak for the change."""
    found: dict[tuple[Any, ...], list[tuple[float, float, float]]] = {}
    for row in rows:
        for factor in (0.5, 2.0):
            for judge in (*map(_judge, LENGTHS), "last"):
                at = row["batch"], row["place"], row["rate"], factor, judge
                found.setdefault(at, []).append(compared(row, factor, judge))
    names = ("batch", "place", "rate", "factor", "judge")
    return [
        {
            **dict(zip(names, at)),
            "lower": statistics.fmean(one[0] for one in some),
            "lower_at_the_end": statistics.fmean(one[2] for one in some),
            "seeds": len(some),
            "for_it": sum(one[0] > SURE * one[1] for one in some),
            "against_it": sum(one[0] < -SURE * one[1] for one in some),
            "right": sum(one[0] * one[2] > 0 for one in some),
        }
        for at, some in sorted(found.items())
    ]


def main() -> None:
    """Trains or sums up."""
    parser = arguments(__doc__, FILE)
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no run begins")
    parser.add_argument("--summary", action="store_true", help="figures from the file, no runs")
    args = parser.parse_args()
    if not args.summary:
        run_missing(args.output, args.minutes)
    rows = summary(read(args.output))
    for row in rows:
        print(
            f"batch {row['batch']}, {row['place']:.0%}, rate {row['rate']:g}, times "
            f"{row['factor']:g}, {row['judge']}: {row['lower']:+.4f}, at the end "
            f"{row['lower_at_the_end']:+.4f}; for {row['for_it']}, against {row['against_it']} "
            f"of {row['seeds']}"
        )
    write(args.output.with_suffix(".json"), {"forks": rows, "origin": origin()}, hide=["forks"])


if __name__ == "__main__":
    main()
