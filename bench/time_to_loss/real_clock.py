"""Does `--copus` finish as soon as the best static batch? Real runs, real clock, two nodes.

    sudo python -m bench.time_to_loss.real_clock [--only S4] [--minutes M]   trains what is missing
    python -m bench.time_to_loss.real_clock --summary [--draw]               figures from the file

Two network namespaces have one core and one rank each, and run `pretrain_gpt.py` as it is. Every
row of the results file is one run; a killed command goes on where it was. S3: the quickstart's
model over 5 Gbit/s, `--copus --copus-layouts all` from three first batches on data parallelism. S4:
a small model on data parallelism over 100 Mbit/s, `--copus` from four first batches. Both figures
are the time over that of the best static batch. No rule was chosen with these seeds in view.

Rates are tuned on seed 0 for each static batch: three rates a factor of 2 apart, more while the
best one is at an end, then the longer warm-up. Runs under the controller have the rate and warm-up
of the reference batch, by the rule that the controller follows. Their clock counts everything but
evaluations: set-up, measuring, deciding, pauses.

It needs root, iproute2, two cores and nothing else running: 2 hours for S4, 4 for S3.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench import nodes
from bench.support import (
    QUICKSTART_MODEL,
    RESULTS,
    ROOT,
    TRAINER,
    RunRecord,
    arguments,
    make_dataset,
    origin,
    read_jsonl,
    read_run,
)
from bench.time_to_loss import real_clock_figures as figures
from bench.time_to_loss.results import FILE as OUTPUT
from bench.time_to_loss.results import save
from copus_ext.planner.configuration import Configuration
from megatron.trainer.config.layout import Layout

FILE = "time_to_loss_real_clock.jsonl"
_TUNING_SEED, _TIMING_SEED = 0, 1
_MAX_RATE = 2
"""Powers of 2 from the first rate, at which the search ends."""
_TIMED_STEPS = 16
_SHARED = ["--split", "95,5,0", "--log-interval", "100", "--adam-beta2", "0.95"]


NO_LIMIT = "0"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What a scenario's runs share, and which runs it has."""

    name: str
    output: str
    """Its key in the results."""
    model: str
    """Flags."""
    copus: str
    """Flags."""
    samples: int
    """Length of a run; a multiple of evaluations times the largest first batch."""
    links: tuple[str, ...]
    """Mbit/s; 0 is a link without limit."""
    starts: tuple[int, ...]
    """First batches of runs under the controller."""
    statics: tuple[int, ...]
    """Those that say most come first."""
    reference_batch: int
    """Whose rate and warm-up the controller gets."""
    lr: float
    """At the reference batch, where the search begins."""
    layouts: tuple[str, ...]
    """In which static batches are timed."""
    start_micro_batch: int
    """Largest, of a run's first steps."""
    timed_micro_batches: tuple[int, ...]
    lengths: tuple[tuple[int, float], ...]
    """(batch, part of the samples) of static runs of other lengths, each with a schedule of its
    own. A run under the controller ends at a loss between those where two static batches end. The
    one that misses it by little gets there in a longer run, and the other one in a shorter."""
    seeds: tuple[int, ...]
    rates: tuple[int, ...] = (-1, 0, 1)
    """Powers of 2 times the first rate that are tried at first."""
    warmups: tuple[float, ...] = (0.1, 0.3)
    """Parts of the samples."""
    eval_samples: int = 64
    """Held-out, of each evaluation."""
    evaluations: int = 32
    static_layout: str = "tp1.pp1.dp2"
    """In which static runs are trained."""

    @property
    def digest(self) -> str:
        """Of all that a run's losses and times depend on. Rows with another one do not count."""
        words = (self.model, self.copus, self.samples, self.lr, self.reference_batch)
        more = (self.eval_samples, self.evaluations, self.start_micro_batch)
        return hashlib.sha256(repr((words, more)).encode()).hexdigest()[:8]


def _model(layers: int, hidden: int, ffn: int, heads: int) -> str:
    """The quickstart's model in another size."""
    words = " ".join(QUICKSTART_MODEL.split()).replace("layers 8", f"layers {layers}")
    words = words.replace("hidden-size 256", f"hidden-size {hidden}")
    words = words.replace("ffn-hidden-size 1024", f"ffn-hidden-size {ffn}")
    return words.replace("heads 8", f"heads {heads}").replace("--eval-iters 0", "").strip()


S3 = Scenario(
    name="S3",
    output="real_clock_layouts",
    # A layout that is moved to has these overlaps too.
    model=_model(8, 256, 1024, 8) + " --overlap-grad-reduce --overlap-param-gather",
    copus="--copus --copus-layouts all",
    samples=4096,
    links=("5000",),
    starts=(8, 2, 32),
    statics=(8, 4, 16, 2, 32),
    reference_batch=4,
    lr=7e-4,
    layouts=("tp1.pp1.dp2", "tp1.pp2.vpp4.dp1"),
    start_micro_batch=1,
    timed_micro_batches=(2, 4, 8),
    lengths=((8, 1.25), (4, 0.875)),
    seeds=(3,),
    static_layout="tp1.pp1.dp1",
)
S4 = Scenario(
    name="S4",
    output="real_clock_batch",
    model=_model(3, 96, 256, 3),
    copus="--copus",
    samples=15_360,
    links=("100",),
    starts=(32, 8, 128, 2),
    statics=(64, 32, 128, 16, 8),
    reference_batch=32,
    lr=4e-3,
    layouts=("tp1.pp1.dp2",),
    start_micro_batch=16,
    timed_micro_batches=(16, 64),
    lengths=((64, 1.25), (64, 1.5), (32, 0.875)),
    seeds=(4,),
    eval_samples=256,
    evaluations=30,
)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One run."""

    scenario: str
    kind: str
    """static: to the end of its samples. copus: the same under the controller. timing: a few steps
    of a static batch."""
    batch: int
    """The first."""
    link: str
    seed: int
    rate: int = 0
    """Powers of 2 over the first rate of the scenario, which goes with the root of the batch."""
    warmup: float = 0.1
    """Part of the samples."""
    layout: str = "tp1.pp1.dp2"
    micro_batch: int = 1
    length: float = 1.0
    """Its samples over those of the scenario."""

    @property
    def key(self) -> str:
        return (
            f"{self.scenario} {self.kind} {self.batch} in {self.micro_batch} on {self.layout} "
            f"link {self.link} rate {self.rate} warmup {self.warmup:g} seed {self.seed}"
            + f" length {self.length:g}"
            * (self.length != 1)
        )


Losses = dict[str, float]
"""Last held-out loss of each finished run, by its key; 0 for a timing."""
Search = Generator[Spec, None, "Spec | None"]


def best_trial(done: Losses, trials: Sequence[Spec]) -> Search:
    """Yields the trials that are missing; returns the one of least loss, or None while some are."""
    if missing := [spec for spec in trials if spec.key not in done]:
        yield from missing
        return None
    return min(trials, key=lambda spec: done[spec.key])


def _static(s: Scenario, batch: int) -> Spec:
    """The static run with which the search for a batch begins."""
    share = batch // Layout.from_text(s.static_layout).dp
    return Spec(
        scenario=s.name,
        kind="static",
        batch=batch,
        link=NO_LIMIT,
        seed=_TUNING_SEED,
        warmup=s.warmups[0],
        layout=s.static_layout,
        micro_batch=max(min(share, max(s.timed_micro_batches)), 1),
    )


def tuned(s: Scenario, batch: int, done: Losses) -> Search:
    """Yields the runs that the search for a batch asks for next; returns the best run, or None
    while runs are missing."""
    first = _static(s, batch)
    trials = [replace(first, rate=k) for k in s.rates]
    while True:
        if (best := (yield from best_trial(done, trials))) is None:
            return None
        rates = [spec.rate for spec in trials]
        beyond = best.rate + (1 if best.rate == max(rates) else -1)
        if beyond in rates or abs(beyond) > _MAX_RATE or len(s.rates) == 1:
            break
        trials.append(replace(first, rate=beyond))
    return (yield from best_trial(done, [replace(best, warmup=w) for w in s.warmups]))


def compared(s: Scenario, best: Spec, seed: int) -> list[Spec]:
    """The static runs of a batch, with its tuned rate, that stand against runs under the
    controller: of the scenario's length first."""
    whole = replace(best, seed=seed)
    lengths = (length for batch, length in s.lengths if batch == best.batch)
    return [whole, *(replace(whole, length=length) for length in lengths)]


def timings(s: Scenario, link: str) -> Iterator[Spec]:
    """A few steps of every static batch in the configurations that may be its fastest. They count
    for all seeds."""
    for batch in s.statics:
        for text in s.layouts:
            layout = Layout.from_text(text)
            share = batch // layout.dp
            if layout.vpp > 1:
                # Micro-batches in groups of as many as there are stages.
                share //= layout.pp
            micros = {max(min(share, m), 1) for m in s.timed_micro_batches}
            for micro in sorted(micros):
                if batch % (layout.dp * micro * (layout.pp if layout.vpp > 1 else 1)) == 0:
                    yield Spec(
                        scenario=s.name,
                        kind="timing",
                        batch=batch,
                        link=link,
                        seed=_TIMING_SEED,
                        layout=text,
                        micro_batch=micro,
                    )


def wanted(scenarios: Sequence[Scenario], done: Losses) -> Iterator[Spec]:
    """What is missing, the most telling first. What depends on a missing run does not come yet."""
    for turn in range(max(len(s.seeds) for s in scenarios)):
        for s in scenarios:
            if turn < len(s.seeds):
                yield from _of_seed(s, s.seeds[turn], done)


def _of_seed(s: Scenario, seed: int, done: Losses) -> Iterator[Spec]:
    best = yield from tuned(s, s.reference_batch, done)
    if best is not None:
        for link in s.links:
            own = [
                Spec(
                    scenario=s.name,
                    kind="copus",
                    batch=batch,
                    link=link,
                    seed=seed,
                    rate=best.rate,
                    warmup=best.warmup,
                    micro_batch=max(min(batch // 2, s.start_micro_batch), 1),
                )
                for batch in s.starts
            ]
            yield from (spec for spec in [*own, *timings(s, link)] if spec.key not in done)
    for batch in s.statics:
        best = yield from tuned(s, batch, done)
        if best is not None:
            yield from (spec for spec in compared(s, best, seed) if spec.key not in done)


def flags_of(s: Scenario, spec: Spec) -> list[str]:
    """The trainer's flags of a run, without data and directories.

    Rates go with the batch as the controller would change them: learning rate by the root, weight
    decay per token. All runs of one length see the same held-out samples after the same samples.
    """
    factor = math.sqrt(spec.batch / s.reference_batch)
    lr, samples = s.lr * 2.0**spec.rate * factor, round(s.samples * spec.length)
    c = Configuration(
        layout=Layout.from_text(spec.layout),
        micro_batch_size=spec.micro_batch,
        global_batch_size=spec.batch,
    )
    evaluating = ["--eval-iters", str(s.eval_samples // spec.batch)]
    evaluating += ["--eval-interval", str(samples // s.evaluations // spec.batch)]
    if spec.kind == "timing":
        evaluating = ["--eval-iters", "0", "--exit-interval", str(_TIMED_STEPS)]
    return [
        *s.model.split(),
        *_SHARED,
        *c.to_flags(),
        *("--train-samples", str(samples)),
        *("--lr", f"{lr:.9g}", "--min-lr", f"{0.1 * lr:.9g}", "--lr-decay-style", "cosine"),
        *("--lr-warmup-samples", str(int(spec.warmup * samples))),
        *("--weight-decay", f"{0.01 * factor:.9g}"),
        *evaluating,
        *("--seed", str(spec.seed)),
        *(s.copus.split() if spec.kind == "copus" else ()),
    ]


def clocked(records: Sequence[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """Gives steps their `clock`; returns the evaluations as (samples, clock, loss).

    The clock begins when the trainer has its flags. An evaluation lasts from the record of the step
    before it to its own; that is taken off.
    """
    began = next(r["m"] for r in records if r["kind"] == "run.start")
    evaluations, off, step = [], 0.0, {}
    for r in records:
        if r["kind"] == "step":
            step = r
            r["clock"] = r["m"] - began - off
        elif r["kind"] == "eval":
            off += r["m"] - step["m"]
            loss = round(r["losses"]["lm loss"], 6)
            # The last step may be evaluated once more.
            if not evaluations or evaluations[-1][0] != r["consumed_samples"]:
                evaluations.append((r["consumed_samples"], round(step["clock"], 4), loss))
    return evaluations


def account(run: RunRecord) -> dict[str, Any]:
    """Curve, configurations, step times, changes and decisions of a finished run."""
    curve = clocked(run.records)
    ways: list[dict[str, Any]] = []
    intervals: dict[figures.Way, list[float]] = {}
    samples, set_up_s = 0, run.steps[0]["clock"] - run.steps[0]["seconds"]
    clock = set_up_s
    for r in run.steps:
        at = r["layout"], r["micro_batch_size"], r["global_batch_size"]
        named = dict(zip(("layout", "micro_batch", "batch"), at))
        if not ways or figures.way_of(ways[-1]) != at:
            ways.append({"samples": samples, **named})
        intervals.setdefault(at, []).append(r["clock"] - clock)
        samples, clock = r["consumed_samples"], r["clock"]
    return {
        "loss": curve[-1][2] if curve else 0.0,
        "steps": len(run.steps),
        "seconds": round(clock, 3),
        "set_up_s": round(set_up_s, 3),
        "curve": curve,
        "ways": ways,
        "speeds": [
            {
                **dict(zip(("layout", "micro_batch", "batch"), way)),
                "steps": len(some),
                "step_s": round(figures.ordinary_mean(some), 5),
            }
            for way, some in intervals.items()
        ],
        "moves": [
            {
                **{k: r[k] for k in ("consumed_samples", "start", "to")},
                "kind": r["outcome"]["kind"],
                "pause_s": round(r["outcome"]["pause_s"], 3),
            }
            for r in run.of("relayout")
        ],
        "decisions": [
            {"samples": r["consumed_samples"], "seconds": round(r["seconds"], 4)}
            | {k: r["decision"][k] for k in ("kind", "reason")}
            for r in run.of("decision")
        ],
    }


def append(path: Path, row: dict[str, Any]) -> None:
    """Adds a line; one that a kill cut short ends before it."""
    is_cut = path.exists() and (old := path.read_bytes()) and not old.endswith(b"\n")
    with path.open("a") as file:
        file.write("\n" * bool(is_cut) + json.dumps(row) + "\n")


def rows_of(path: Path, scenarios: Sequence[Scenario]) -> list[dict[str, Any]]:
    """Finished runs of the scenarios as they are now."""
    digests = {s.name: s.digest for s in scenarios}
    return [r for r in read_jsonl(path) if digests.get(r["spec"]["scenario"]) == r["digest"]]


class Runner:
    """Trains one run after another."""

    def __init__(self, work: Path) -> None:
        self._work = work
        work.mkdir(parents=True, exist_ok=True)
        self.data_path = str(work / "stdlib_text_document")
        if not Path(f"{self.data_path}.idx").exists():
            make_dataset(work / "stdlib")
        self._indexed: set[tuple[str, int]] = set()

    def train(self, s: Scenario, spec: Spec) -> dict[str, Any]:
        before = {k: v for k, v in origin().items() if k in ("date", "commit", "load_average")}
        with nodes.emulated(2, float(spec.link)) as pair:
            if (s.name, spec.seed) not in self._indexed:
                # One step, so that no run is the one that makes the index of the samples.
                self._start(pair, s, spec, "--exit-interval", "1")
                self._indexed.add((s.name, spec.seed))
            wall_s, at = self._start(pair, s, spec)
        found = read_run(at)
        row = {"key": spec.key, "digest": s.digest, **account(found)}
        shutil.rmtree(at)
        timed = {r["layout"]: 8e-6 * r["link_bytes_per_s"] for r in found.of("start")}
        about = {"wall_s": round(wall_s, 1), "spec": asdict(spec), "mbit_per_s": timed}
        return {**row, **about, **before}

    def _start(self, pair: nodes.Nodes, s: Scenario, spec: Spec, *more: str) -> tuple[float, Path]:
        """Trains on nodes; returns the seconds that it took, and the run's directory."""
        at = self._work / spec.key.replace(" ", "_")
        shutil.rmtree(at, ignore_errors=True)
        command = [TRAINER, *flags_of(s, spec), "--data-path", self.data_path, *more]
        command += ["--data-cache-path", str(self._work / "cache"), "--run-dir", str(at)]
        order = range(Layout.from_text(spec.layout).world_size)
        return pair.run(command, self._work / spec.kind, order=order), at


def run(path: Path, scenarios: Sequence[Scenario], minutes: float) -> None:
    """Trains until nothing is missing or the time is over."""
    nodes.require()
    runner, end = Runner(ROOT / "runs" / path.stem), time.monotonic() + 60 * minutes
    by_name = {s.name: s for s in scenarios}
    path.parent.mkdir(parents=True, exist_ok=True)
    while time.monotonic() < end:
        done = {row["key"]: row["loss"] for row in rows_of(path, scenarios)}
        if (spec := next(wanted(scenarios, done), None)) is None:
            return
        row = runner.train(by_name[spec.scenario], spec)
        append(path, row)
        print(f"{row['key']}: loss {row['loss']:.4f} in {row['seconds']} s", flush=True)


def best_static(s: Scenario, batch: int) -> Spec:
    """The static run of a batch with its tuned rate and warm-up, out of the committed rows.

    Raises:
        SystemExit: runs of its search are missing.
    """
    losses = {row["key"]: row["loss"] for row in rows_of(RESULTS / FILE, [s])}
    if (best := last_of(tuned(s, batch, losses))) is None:
        raise SystemExit(f"run bench.time_to_loss.real_clock --only {s.name} before")
    return best


def tuned_rows(s: Scenario, rows: figures.Rows) -> list[dict[str, Any]]:
    """Rows of a scenario without static runs whose rate or warm-up is not the tuned one."""
    own = [row for row in rows if row["spec"]["scenario"] == s.name]
    done = {row["key"]: row["loss"] for row in own}
    best = {batch: last_of(tuned(s, batch, done)) for batch in s.statics}
    finals = [compared(s, spec, k) for spec in best.values() if spec for k in s.seeds]
    kept = {spec.key for specs in finals for spec in specs}
    return [row for row in own if row["spec"]["kind"] != "static" or row["key"] in kept]


def last_of(search: Search) -> Spec | None:
    while True:
        try:
            next(search)
        except StopIteration as end:
            return end.value


def summarise(path: Path, scenarios: Sequence[Scenario], output: Path) -> None:
    """Prints the figures of every scenario that has a complete seed, and writes them."""
    rows, found = rows_of(path, scenarios), {}
    for s in scenarios:
        own = tuned_rows(s, rows)
        seeds, comparisons = figures.compare(
            own,
            {seed: dict.fromkeys(s.links, s.starts) for seed in s.seeds},
            batches=[*s.statics, *(batch for batch, _ in s.lengths)],
        )
        if not seeds:
            print(f"{s.name}: no seed is complete")
            continue
        command = f"python -m bench.time_to_loss.real_clock --only {s.name}"
        found[s.output] = {
            **figures.result(comparisons),
            "command": f"sudo {command} && {command} --summary",
            "commits": sorted({row["commit"] for row in own}),
            "date": origin()["date"],
            "parts": figures.mean_parts(own, comparisons),
        }
        print(json.dumps({k: v for k, v in found[s.output].items() if k != "rows"}))
    save(output, found)


def draw(path: Path, s: Scenario, output: Path) -> None:
    """Draws the first complete seed of S4.

    Raises:
        SystemExit: there is none.
    """
    runs = tuned_rows(s, rows_of(path, [s]))
    seeds, found = figures.compare(
        runs, {seed: dict.fromkeys(s.links, s.starts) for seed in s.seeds}, batches=s.statics
    )
    if not seeds:
        raise SystemExit(f"{s.name}: no seed is complete")
    statics, ours = figures.curves_of(runs, s.links[0], seeds[0])
    loss = max(one.loss for one in found if one.seed == seeds[0])
    figures.draw(output, {b: some[0] for b, some in statics.items()}, ours, loss)


def main() -> None:
    p = arguments(__doc__, FILE)
    p.add_argument("--only", choices=("S3", "S4"))
    p.add_argument("--minutes", type=float, default=1e9, help="after which no run begins")
    p.add_argument("--summary", action="store_true", help="figures from the file, no runs")
    p.add_argument("--draw", action="store_true", help="figure from the file, no runs")
    args: argparse.Namespace = p.parse_args()
    scenarios = [s for s in (S4, S3) if args.only in (None, s.name)]
    if not (args.summary or args.draw):
        run(args.output, scenarios, args.minutes)
    if args.summary:
        summarise(args.output, scenarios, RESULTS / OUTPUT)
    if args.draw:
        draw(args.output, S4, args.output.with_suffix(".svg"))


if __name__ == "__main__":
    main()
