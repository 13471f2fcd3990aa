"""Does `--copus` finish as soon as the best static batch? Real runs, real clock, two nodes.

    sudo python -m bench.time_to_loss.real_clock [--only S4] [--minutes M]   trains what is missing
    python -m bench.time_to_loss.real_clock --summary [--draw]               figures from the file

Two network namespaces have one core and one rank each, and run `pretrain_gpt.py` as it is. Every
row of the results file is one run; a killed command goes on where it was. S3: the quickstart's
model, three links, `--copus --copus-layouts all` from five first batches on data parallelism,
behind the best static batch. Seeds 2 and 3 share those runs between them; seed 1, which was in view
when the rule was chosen, is shown apart. S4: a small model on data parallelism over 100 Mbit/s,
`--copus` from four first batches, saved over the best static batch.

Rates are tuned on seed 0 for each static batch: three rates a factor of 2 apart, more while the
best one is at an end, then the longer warm-up. Runs under the controller have the rate and warm-up
of the reference batch, by the rule that the controller follows. Their clock counts everything but
evaluations: set-up, measuring, deciding, pauses.

Runs under the controller and timings need a quiet machine. `--losses` trains the static runs alone.
Their losses do not depend on the clock, so they can go on beside other work.

On a quiet machine a run of S4 takes about 100 s (75 to 130 by its clock, 150 with start and
evaluations), one of S3 about 280 s. The first seed of S4 is there after 70 minutes, all of S4 after
2 hours, all of S3 in 6 hours. `--losses` holds 70 minutes of S4 and 2.5 hours of S3. S4 has 0.4M
parameters: with 1M and five tokens for each a run would take ten minutes.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import itertools
import json
import math
import os
import resource
import shutil
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench import nodes
from bench.support import (
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
from bench.time_to_loss.real_clock_scenarios import NO_LIMIT, S3, S4, Scenario
from bench.time_to_loss.scenarios import FILE as SCENARIOS
from bench.time_to_loss.scenarios import save
from copus_ext.planner.configuration import Configuration
from megatron.training.config.layout import Layout

FILE = "time_to_loss_real_clock.jsonl"
_TUNING_SEED = 0
_MOST_RATE = 2
"""Powers of 2 from the first rate, at which the search ends."""
_TIMED_STEPS = 16
_BUSY = 0.1
"""Of a core, which others may have during a run whose clock counts."""
_SHARED = ["--split", "95,5,0", "--log-interval", "100", "--adam-beta2", "0.95"]


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
        """Names the run."""
        return (
            f"{self.scenario} {self.kind} {self.batch} in {self.micro_batch} on {self.layout} "
            f"link {self.link} rate {self.rate} warmup {self.warmup:g} seed {self.seed}"
            + f" length {self.length:g}"
            * (self.length != 1)
        )

    @property
    def counts_by_clock(self) -> bool:
        """Whether its own clock counts, so that nothing else may run beside it."""
        return self.kind != "static"

    @property
    def ranks(self) -> int:
        """How many train it."""
        return Layout.from_text(self.layout).world_size


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
        if beyond in rates or abs(beyond) > _MOST_RATE or len(s.rates) == 1:
            break
        trials.append(replace(first, rate=beyond))
    return (yield from best_trial(done, [replace(best, warmup=w) for w in s.warmups]))


def compared(s: Scenario, best: Spec, seed: int) -> list[Spec]:
    """The static runs of a batch, with its tuned rate, that stand against runs under the
    controller: of the scenario's length first."""
    whole = replace(best, seed=seed)
    lengths = (length for batch, length in s.lengths if batch == best.batch)
    return [whole, *(replace(whole, length=length) for length in lengths)]


def timings(s: Scenario, link: str, seed: int) -> Iterator[Spec]:
    """A few steps of every static batch in the configurations that may be its fastest."""
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
                        seed=seed,
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
        for link, starts in s.starts_of(seed).items():
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
                for batch in starts
            ]
            # A timing has nothing of its seed: those of the others do.
            runs = [*own, *(() if seed in s.sharing else timings(s, link, seed))]
            yield from (spec for spec in runs if spec.key not in done)
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
            for r in run.of("switch")
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


def _cpu_s() -> tuple[float, float]:
    """CPU seconds of ended children of this program, and of all programs of the machine."""
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    busy = sum(int(words[i]) for i in (0, 1, 2, 5, 6, 7)) / os.sysconf("SC_CLK_TCK")
    return own.ru_utime + own.ru_stime, busy


class Runner:
    """Trains one run after another."""

    def __init__(self, work: Path) -> None:
        self._work = work
        work.mkdir(parents=True, exist_ok=True)
        self.data_path = str(work / "stdlib_text_document")
        if not Path(f"{self.data_path}.idx").exists():
            make_dataset(work / "stdlib")
        self.data_bytes = Path(f"{self.data_path}.bin").stat().st_size
        self._indexed: set[tuple[str, int]] = set()

    def train(self, s: Scenario, specs: Sequence[Spec]) -> list[dict[str, Any]]:
        """The rows of a run, or of two of a rank each that are trained at the same time."""
        before = {k: v for k, v in origin().items() if k in ("date", "commit", "load_average")}
        with nodes.two_nodes(float(specs[0].link)) as pair:
            for spec in specs:
                if (s.name, spec.seed) not in self._indexed:
                    # One step, so that no run is the one that makes the index of the samples.
                    self._start(pair, s, spec, [], only_index=True)
                    self._indexed.add((s.name, spec.seed))
            link = pair.measure_link(1.0) if specs[0].kind == "copus" else {}
            cpu_s, busy_s = _cpu_s()
            orders = [[0], [1]] if len(specs) > 1 else [list(range(specs[0].ranks))]
            pool = ThreadPoolExecutor(len(specs))
            try:
                walls_s = list(pool.map(functools.partial(self._start, pair, s), specs, orders))
            finally:
                # After a signal the nodes go away, and the runs on them with it.
                pool.shutdown(wait=False, cancel_futures=True)
            own_s = _cpu_s()[0] - cpu_s
            others_s = _cpu_s()[1] - busy_s - own_s
        shared = {
            "cpu_s": round(own_s, 1),
            "others_cpu_s": round(others_s, 1),
            "mbit_per_s": link,
            "data_bytes": self.data_bytes,
            **before,
        }
        rows = []
        for spec, wall_s in zip(specs, walls_s):
            at = self._directory(spec)
            row = {"key": spec.key, "digest": s.digest, **account(read_run(at))}
            rows.append({**row, "wall_s": round(wall_s, 1), "spec": asdict(spec), **shared})
            shutil.rmtree(at)
        return rows

    def _directory(self, spec: Spec) -> Path:
        return self._work / spec.key.replace(" ", "_")

    def _start(
        self,
        pair: nodes.Nodes,
        s: Scenario,
        spec: Spec,
        order: Sequence[int],
        *,
        only_index: bool = False,
    ) -> float:
        """Trains on nodes; returns the seconds that it took."""
        at = self._directory(spec)
        shutil.rmtree(at, ignore_errors=True)
        command = [TRAINER, *flags_of(s, spec), "--data-path", self.data_path]
        command += ["--data-cache-path", str(self._work / "cache"), "--run-dir", str(at)]
        if only_index:
            command += ["--exit-interval", "1"]
        order = order or range(spec.ranks)
        return pair.run(command, self._work / f"{spec.kind}_{order[0]}", order=order)


def together(missing: Iterator[Spec]) -> list[Spec]:
    """The next run, with the one after it where both need one core and no clock."""
    specs = list(itertools.islice(missing, 2))
    can_share = [not spec.counts_by_clock and spec.ranks == 1 for spec in specs]
    alike = len({spec.scenario for spec in specs}) == 1
    return specs if alike and all(can_share) else specs[:1]


def run(path: Path, scenarios: Sequence[Scenario], minutes: float, *, only_losses: bool) -> None:
    """Trains until nothing is missing or the time is over.

    Raises:
        SystemExit: another process writes the file, it is about other data, or a run failed.
    """
    nodes.require()
    runner, end = Runner(ROOT / "runs" / path.stem), time.monotonic() + 60 * minutes
    by_name = {s.name: s for s in scenarios}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another process writes {path}") from None
        if any(row["data_bytes"] != runner.data_bytes for row in rows_of(path, scenarios)):
            raise SystemExit(f"{path} is about another data set")
        while time.monotonic() < end:
            done = {row["key"]: row["loss"] for row in rows_of(path, scenarios)}
            missing = wanted(scenarios, done)
            if only_losses:
                missing = (spec for spec in missing if not spec.counts_by_clock)
            if not (specs := together(missing)):
                return
            for row in runner.train(by_name[specs[0].scenario], specs):
                append(path, row)
                print(
                    f"{row['key']}: loss {row['loss']:.4f} in {row['seconds']} s; wall "
                    f"{row['wall_s']}, cpu {row['cpu_s']}, others {row['others_cpu_s']}",
                    flush=True,
                )


def tuned_rows(s: Scenario, rows: figures.Rows) -> list[dict[str, Any]]:
    """Rows of a scenario without static runs whose rate or warm-up is not the tuned one."""
    own = [row for row in rows if row["spec"]["scenario"] == s.name]
    done = {row["key"]: row["loss"] for row in own}
    best = {batch: last_of(tuned(s, batch, done)) for batch in s.statics}
    finals = [compared(s, spec, k) for spec in best.values() if spec for k in s.seeds]
    kept = {spec.key for specs in finals for spec in specs}
    return [row for row in own if row["spec"]["kind"] != "static" or row["key"] in kept]


def last_of(search: Search) -> Spec | None:
    """What a search returns."""
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
            {seed: s.starts_of(seed) for seed in s.seeds},
            batches=[*s.statics, *(batch for batch, _ in s.lengths)],
        )
        if not set(s.sharing) <= set(seeds):
            comparisons = [one for one in comparisons if one.seed not in s.sharing]
        if not comparisons:
            print(f"{s.name}: no seed is complete")
            continue
        command = f"python -m bench.time_to_loss.real_clock --only {s.name}"
        command = f"sudo {command} && {command} --summary"
        commits = sorted({row["commit"] for row in own})
        about = figures.result(s.name, comparisons, seen=s.seen, sharing=s.sharing)
        made = {"command": command, "commits": commits, "date": origin()["date"]}
        found[s.name] = {**about, **made}
        for one in comparisons:
            print(
                f"{s.name} link {one.link} seed {one.seed} from {one.first_batch}: "
                f"{one.seconds:.1f} s to {one.loss:.3f}, static {one.best_batch} {one.best_s:.1f} s"
            )
        print("\n".join(figures.verdicts(s.name, about)))
        counted = [one for one in comparisons if one.seed in about["seeds"]]
        parts = found[s.name]["parts"] = figures.mean_parts(own, counted)
        print(f"{s.name} takes its time for", ", ".join(f"{k} {v:.3f}" for k, v in parts.items()))
    save(output, found)
    clocked_rows = [row for row in rows if Spec(**row["spec"]).counts_by_clock]
    busy = [r["key"] for r in clocked_rows if r["others_cpu_s"] > _BUSY * r["wall_s"]]
    if busy:
        print(f"others had more than {_BUSY:.0%} of a core during: {'; '.join(busy)}")


def draw(path: Path, s: Scenario, output: Path) -> None:
    """Draws the first complete seed of S4.

    Raises:
        SystemExit: there is none.
    """
    runs = tuned_rows(s, rows_of(path, [s]))
    seeds, found = figures.compare(
        runs, {seed: s.starts_of(seed) for seed in s.seeds}, batches=s.statics
    )
    if not seeds:
        raise SystemExit(f"{s.name}: no seed is complete")
    statics, ours = figures.curves_of(runs, s.links[0], seeds[0])
    loss = max(one.loss for one in found if one.seed == seeds[0])
    figures.draw(output, {b: some[0] for b, some in statics.items()}, ours, loss)


def main() -> None:
    """Does what the command line asks for."""
    p = arguments(__doc__, FILE)
    p.add_argument("--only", choices=("S3", "S4"))
    p.add_argument("--minutes", type=float, default=1e9, help="after which no run begins")
    p.add_argument("--losses", action="store_true", help="only what needs no quiet machine")
    p.add_argument("--summary", action="store_true", help="figures from the file, no runs")
    p.add_argument("--draw", action="store_true", help="figure from the file, no runs")
    args: argparse.Namespace = p.parse_args()
    scenarios = [s for s in (S4, S3) if args.only in (None, s.name)]
    if not (args.summary or args.draw):
        run(args.output, scenarios, args.minutes, only_losses=args.losses)
    if args.summary:
        summarise(args.output, scenarios, RESULTS / SCENARIOS)
    if args.draw:
        draw(args.output, S4, args.output.with_suffix(".svg"))


if __name__ == "__main__":
    main()
