"""What do batch and batch schedule do to real runs, each with its best rate and warm-up?

python -m bench.time_to_loss.atlas run [--minutes M]      trains what is missing
python -m bench.time_to_loss.atlas figure               draws loss, samples and time by batch
python -m bench.time_to_loss.atlas table                prints the best trial of every cell

Every line of the results file is one run of `small_gpt`. Rate and warm-up are tuned for each batch
and schedule by coordinate search. Several processes may run at once: they share the file.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.support import RESULTS, arguments, figure
from bench.time_to_loss.small_gpt import BatchSchedule, Kind, Recipe, train

FILE = "atlas.jsonl"
BASE_RATE = 0.008
"""Rate 0 of the search; rate k is 2^(k/2) times it, at a batch of 32."""
WARMUPS = (0.02, 0.1, 0.2, 0.3, 0.5)
MOST_RATE = 8
SHORT, MIDDLE, LONG = 32_768, 49_152, 65_536
"""Lengths of runs in samples: 17, 26 and 35 tokens a parameter."""
EVALUATIONS = tuple(i / 20 for i in range(1, 20))
OVERHEADS = (8, 32, 128, 512)
"""h: fixed time of a step, in samples. A step of B samples takes h + B."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One run."""

    kind: Kind
    total_samples: int
    schedule: BatchSchedule
    rate: int
    """k of 2^(k/2) `BASE_RATE`."""
    warmup: float
    seed: int = 0

    @property
    def key(self) -> str:
        """Names the run."""
        return (
            f"{self.kind} {self.total_samples} [{self.schedule.name}] rate {self.rate} "
            f"warmup {self.warmup:g} seed {self.seed}"
        )

    @property
    def recipe(self) -> Recipe:
        """As the run takes it."""
        return Recipe(
            total_samples=self.total_samples,
            learning_rate=BASE_RATE * 2 ** (self.rate / 2),
            warmup=self.warmup,
            kind=self.kind,
            seed=self.seed,
        )


Losses = dict[str, float]
"""Last loss of each finished run, by its key."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One schedule of one length, with all that is tuned for it."""

    kind: Kind
    total_samples: int
    schedule: BatchSchedule
    first_rate: int = 0
    """The search begins there."""
    first_warmup: float = 0.1
    stride: int = 2
    """Of the first three rates."""
    seeds: int = 3

    def spec(self, rate: int, warmup: float, seed: int = 0) -> Spec:
        """One of its runs."""
        return Spec(
            kind=self.kind,
            total_samples=self.total_samples,
            schedule=self.schedule,
            rate=rate,
            warmup=warmup,
            seed=seed,
        )

    def wanted(self, done: Losses) -> Iterator[Spec]:
        """The runs that the search asks for next, none when it is over."""
        best_rate, warmup = self.first_rate, self.first_warmup
        for stride in sorted({self.stride, 1}, reverse=True):
            best_rate = yield from self._rates(done, best_rate, warmup, stride)
            if best_rate is None:
                return
        best_warmup = yield from self._warmups(done, best_rate, warmup)
        if best_warmup is None:
            return
        if best_warmup != warmup:
            best_rate = yield from self._rates(done, best_rate, best_warmup, 1)
            if best_rate is None:
                return
        final = self.spec(best_rate, best_warmup)
        again = [replace(final, seed=seed) for seed in range(1, self.seeds)]
        yield from (s for s in again if s.key not in done)

    def _rates(self, done: Losses, rate: int, warmup: float, stride: int) -> Any:
        """Moves to the best rate; gives None while runs are missing, which it yields."""
        while True:
            trials = [self.spec(k, warmup) for k in (rate - stride, rate, rate + stride)]
            if (best := (yield from best_trial(done, trials))) is None:
                return None
            if best.rate == rate or abs(best.rate) > MOST_RATE:
                return best.rate
            rate = best.rate

    def _warmups(self, done: Losses, rate: int, warmup: float) -> Any:
        """Moves to the best warm-up among its neighbours; None while runs are missing."""
        while True:
            at = WARMUPS.index(warmup)
            trials = [self.spec(rate, w) for w in WARMUPS[max(at - 1, 0) : at + 2]]
            if (best := (yield from best_trial(done, trials))) is None:
                return None
            if best.warmup == warmup:
                return warmup
            warmup = best.warmup


def best_trial(done: Losses, trials: Sequence[Any]) -> Any:
    """The run of least loss, by its `key`; None while some are missing, which it yields."""
    if missing := [s for s in trials if s.key not in done]:
        yield from missing
        return None
    return min(trials, key=lambda s: done[s.key])


def pieces(*parts: float) -> BatchSchedule:
    """`pieces(16, .05, 32)` is 16 until 5 % of the samples, then 32."""
    starts = [0.0, *parts[1::2]]
    return BatchSchedule(pieces=tuple((a, int(b)) for a, b in zip(starts, parts[::2])))


def _schedules() -> list[BatchSchedule]:
    """Growth, decay, both, and starts that are too large."""
    grown = [pieces(b // 4, 0.05, b // 2, 0.15, b) for b in (32, 64, 128, 256)]
    slow = [pieces(b // 4, 0.1, b // 2, 0.3, b) for b in (64, 128)]
    halves = [pieces(b // 2, 0.1, b) for b in (64, 128)]
    late = [pieces(b // 4, 0.2, b // 2, 0.5, b) for b in (128, 512)]
    decays = [replace(pieces(b), decay=0.5) for b in (16, 32, 64, 128)]
    faster = [replace(pieces(b), decay=1.0) for b in (16, 32, 64)]
    both = [replace(pieces(b // 4, 0.05, b // 2, 0.15, b), decay=0.5) for b in (32, 64, 128)]
    shrinks = [pieces(a, at, b) for a, at, b in SHRINKS]
    return [
        *(grown[i] for i in (1, 2, 3, 0)),
        both[1],
        late[1],
        both[2],
        decays[1],
        decays[3],
        *both,
        *decays,
        *shrinks,
        *halves,
        *slow,
        *late,
        *faster,
    ]


SHRINKS = ((256, 0.05, 32), (512, 0.05, 32), (512, 0.05, 64), (256, 0.1, 32), (128, 0.2, 32))


def cells(done: Losses) -> Iterator[Cell]:
    """All cells, those first that say most. Some begin where another one ended."""
    yield from _short((32, 64, 16, 128, 8, 256))
    yield from _longer(done, MIDDLE, (64, 128, 32, 256))
    for schedule in _unique(_schedules()):
        first = nearest(done, "cosine", SHORT, pieces(32))
        yield Cell(
            kind="cosine",
            total_samples=SHORT,
            schedule=schedule,
            first_rate=first[0] - 1,
            first_warmup=0.2,
            stride=1,
            seeds=2,
        )
    kinds: tuple[Kind, ...] = ("constant", "wsd")
    for kind in kinds:
        for batch in (32, 64, 16, 128, 256):
            rate, warmup = nearest(done, "cosine", SHORT, pieces(batch))
            yield Cell(
                kind=kind,
                total_samples=SHORT,
                schedule=pieces(batch),
                first_rate=rate - 1,
                first_warmup=warmup,
                stride=1,
                seeds=2,
            )
        for schedule in (pieces(16, 0.1, 64, 0.5, 256), pieces(32, 0.5, 128), pieces(32, 0.8, 256)):
            first = nearest(done, kind, SHORT, pieces(32))
            yield Cell(
                kind=kind,
                total_samples=SHORT,
                schedule=schedule,
                first_rate=first[0],
                stride=1,
                seeds=2,
            )
    yield from _longer(done, LONG, (128, 64, 256))
    for length in (MIDDLE, LONG):
        yield from _longer(done, length, (16, 32, 8, 512))
    yield from _short((512, 4))


def _short(batches: tuple[int, ...]) -> Iterator[Cell]:
    """Static batches, the search for their rates wide. Those of few steps begin with a lower rate
    and a long warm-up: from elsewhere their search ends in a worse place."""
    for batch in batches:
        few = batch >= 256
        yield Cell(
            kind="cosine",
            total_samples=SHORT,
            schedule=pieces(batch),
            first_rate=-2 if few else 0,
            first_warmup=0.5 if few else 0.1 if batch <= 64 else 0.2,
        )


def _longer(done: Losses, length: int, batches: tuple[int, ...]) -> Iterator[Cell]:
    """Static batches of a longer run; they begin where the short ones ended."""
    for batch in batches:
        rate, warmup = nearest(done, "cosine", SHORT, pieces(batch))
        yield Cell(
            kind="cosine",
            total_samples=length,
            schedule=pieces(batch),
            first_rate=rate,
            first_warmup=warmup,
            stride=1,
            seeds=2,
        )


def _unique(schedules: list[BatchSchedule]) -> list[BatchSchedule]:
    return list(dict.fromkeys(schedules))


def nearest(done: Losses, kind: Kind, length: int, schedule: BatchSchedule) -> tuple[int, float]:
    """Best rate and warm-up so far of another cell."""
    start = f"{kind} {length} [{schedule.name}] "
    own = [key for key in done if key.startswith(start) and key.endswith("seed 0")]
    if not own:
        return 0, 0.1
    words = min(own, key=lambda key: done[key])[len(start) :].split()
    return int(words[1]), float(words[3])


def read(path: Path) -> list[dict[str, Any]]:
    """Finished runs, without a line that was cut off."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def _claim(path: Path, claims: Path) -> Spec | None:
    """The first run that is neither finished nor claimed by a living process."""
    with open(f"{claims}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        taken = json.loads(claims.read_text()) if claims.exists() else {}
        taken = {key: pid for key, pid in taken.items() if Path(f"/proc/{pid}").exists()}
        done = {row["key"]: row["loss"] for row in read(path)}
        for cell in cells(done):
            for spec in cell.wanted(done):
                if spec.key not in taken:
                    taken = {k: p for k, p in taken.items() if p != os.getpid()}
                    claims.write_text(json.dumps({**taken, spec.key: os.getpid()}))
                    return spec
    return None


def run(path: Path, minutes: float) -> None:
    """Trains until nothing is missing or the time is over."""
    claims, end = path.with_suffix(".claims"), time.monotonic() + 60 * minutes
    while time.monotonic() < end and (spec := _claim(path, claims)) is not None:
        began = time.monotonic()
        trained, curve = train(spec.recipe, spec.schedule, evaluations=EVALUATIONS)
        loss = trained.evaluate()
        row = {"key": spec.key, "loss": round(loss, 5), "steps": trained.steps}
        row |= {"seconds": round(time.monotonic() - began, 1), "python": sys.version.split()[0]}
        row |= {"spec": asdict(spec), "curve": curve}
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(row) + "\n")
        print(f"{spec.key}: {loss:.4f} in {row['seconds']} s", flush=True)


def best_of(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By kind, length and schedule: its best run with seed 0, and the mean loss of its seeds."""
    found: dict[str, dict[str, Any]] = {}
    by_key = {row["key"]: row for row in rows}
    for row in rows:
        cell = row["key"].partition(" rate")[0]
        if row["spec"]["seed"] == 0 and row["loss"] < found.get(cell, {"loss": 99})["loss"]:
            found[cell] = row
    for cell, row in found.items():
        stem = row["key"].rpartition(" ")[0]
        losses = [r["loss"] for k, r in by_key.items() if k.rpartition(" ")[0] == stem]
        found[cell] = {**row, "mean_loss": sum(losses) / len(losses), "num_seeds": len(losses)}
    return found


def draw(path: Path, output: Path) -> None:
    """Loss of the tuned static batches, the samples to the worst loss of the three smallest with
    several lengths, and the time to it for four overheads of a step.

    Full points lie between lengths that were trained, hollow ones beyond. A triangle says that the
    shortest run of a small batch is below that loss: it needs less.
    """
    best = best_of(read(path))
    with figure(output, columns=3, figsize=(13, 4)) as axes:
        for length in (SHORT, MIDDLE, LONG):
            own = _statics(best, length)
            axes[0].plot(*zip(*own), marker="o", label=f"{length:,} samples")
        axes[0].set(ylabel="last loss, nats a byte")
        short = _statics(best, SHORT)
        several = {batch for n in (MIDDLE, LONG) for batch, _ in _statics(best, n)}
        goal = max(loss for _, loss in ([x for x in short if x[0] in several] or short)[:3])
        needed = _needed(best, goal)
        _curve(axes[1], needed, 0.0, color="black")
        axes[1].set(ylabel=f"samples to a loss of {goal:.3f}")
        for i, overhead in enumerate(OVERHEADS):
            _curve(axes[2], needed, overhead, color=f"C{i}", label=f"h = {overhead}")
        axes[2].set(yscale="log", ylabel=f"time to a loss of {goal:.3f}, a sample takes 1")
        for axis in axes:
            axis.set(xscale="log", xlabel="batch")
            axis.set_xticks(_BATCHES, [str(batch) for batch in _BATCHES])
            axis.set_xticks([], minor=True)
        axes[0].legend()
        axes[2].legend()


_BATCHES = (4, 8, 16, 32, 64, 128, 256, 512)


def table(rows: list[dict[str, Any]]) -> str:
    """Best trial of every cell as Markdown, its loss as the mean of its seeds. A cell with one seed
    is one whose search was not over."""
    lines = [
        "| rate | samples | batch | steps | last loss | seeds | rate, warm-up |",
        "|---" * 7 + "|",
    ]
    for cell, row in best_of(rows).items():
        kind, samples, schedule = cell.split(" ", 2)
        spec = row["spec"]
        rate = BASE_RATE * 2 ** (spec["rate"] / 2)
        lines.append(
            f"| {kind} | {samples} | {schedule[1:-1]} | {row['steps']} | {row['mean_loss']:.3f} "
            f"| {row['num_seeds']} | {rate:.4f}, {spec['warmup']:.0%} |"
        )
    return "\n".join(lines)


def _needed(best: dict[str, dict[str, Any]], goal: float) -> list[tuple[int, float, str]]:
    """Batch, samples to a loss, and what is known of them: `between` lengths, `beyond` them, or
    that they are at `most` so many."""
    found = []
    for batch in _BATCHES:
        lengths = (SHORT, MIDDLE, LONG)
        losses = [loss for n in lengths for b, loss in _statics(best, n) if b == batch]
        if (samples := samples_to(best, batch, goal)) is not None:
            kind = "between" if min(losses) <= goal <= max(losses) else "beyond"
            found.append((batch, samples, kind))
        elif losses and losses[0] <= goal:
            found.append((batch, float(SHORT), "most"))
    return found


def _curve(axis: Any, needed: list[tuple[int, float, str]], overhead: float, **look: Any) -> None:
    """Time by batch where a step takes an overhead beside its samples."""
    points = [(b, n * (overhead + b) / b, kind) for b, n, kind in needed]
    line = [(b, t) for b, t, kind in points if kind != "most"]
    axis.plot(*zip(*line), lw=1, **look)
    for kind, marker, face in (
        ("between", "o", None),
        ("beyond", "o", "white"),
        ("most", "v", None),
    ):
        some = [(b, t) for b, t, own in points if own == kind]
        if some:
            color = look["color"]
            axis.plot(*zip(*some), marker, color=color, mfc=face or color)


def _statics(best: dict[str, dict[str, Any]], length: int) -> list[tuple[int, float]]:
    found = []
    for batch in (4, 8, 16, 32, 64, 128, 256, 512):
        row = best.get(f"cosine {length} [{batch}]")
        if row is not None:
            found.append((batch, row["mean_loss"]))
    return found


def samples_to(
    best: dict[str, dict[str, Any]], batch: int, loss: float, *, beyond: bool = False
) -> float | None:
    """Length of the run of a static batch that ends at a loss, samples.

    The logarithm of the samples over the loss is a parabola through three lengths, or a straight
    line through two. Beyond the ends it goes on straight. The truth is convex and lies above such a
    line, so that the answer is less than it. It goes on by half of the distance of the ends, and
    from two lengths not to lower losses, else the answer is None.

    Args:
        best: best trial of every cell.
        batch: of the run.
        loss: at its end.
        beyond: whether it goes on to any higher loss.
    """
    import numpy as np

    points = [
        (row["mean_loss"], np.log(length))
        for length in (SHORT, MIDDLE, LONG)
        if (row := best.get(f"cosine {length} [{batch}]")) is not None
    ]
    if len(points) < 2:
        return None
    losses, logs = zip(*sorted(points))
    reach = (losses[-1] - losses[0]) / 2
    least = losses[0] - reach * (len(points) > 2)
    if not least <= loss <= (math.inf if beyond else losses[-1] + reach):
        return None
    curve = np.polynomial.Polynomial.fit(losses, logs, len(points) - 1)
    near = min(max(loss, losses[0]), losses[-1])
    # A higher loss takes less, however the noise of three runs bends the curve.
    slope = min(curve.deriv()(near), 0.0)
    return float(np.exp(curve(near) + slope * (loss - near)))


def main() -> None:
    """Runs what the command line asks for."""
    parser = arguments(__doc__, FILE)
    parser.add_argument("what", choices=("run", "figure", "table"))
    parser.add_argument("--minutes", type=float, default=1e9)
    args = parser.parse_args()
    if args.what == "run":
        run(args.output, args.minutes)
    elif args.what == "table":
        print(table(read(args.output)))
    else:
        draw(args.output, RESULTS / "atlas.svg")


if __name__ == "__main__":
    main()
