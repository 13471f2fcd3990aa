"""Does a run reach a loss sooner? Real processes, real clock, two nodes, three link speeds.

    sudo python -m bench.time_to_loss.real      # again to go on where it was ended
    python -m bench.time_to_loss.real --draw    # tables and figure from the results file

Two network namespaces, one core and one rank in each, `pretrain_gpt.py` as it is. Every policy
trains the same samples of the Python standard library's sources with the same learning rates by
sample and batch; held-out loss at fixed samples. Policies follow each other, then the next link,
then the next seed. Policies whose batches no speed decides train on the first link only, and their
steps are timed on the others. Writes docs/results/time_to_loss_real.json and a figure beside it.
Needs root, iproute2, two cores and nothing else running. `--quick` shows in minutes that it works.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import nodes
from bench.support import QUICKSTART_MODEL, ROOT, TRAINER, arguments, make_dataset, origin, read_run
from bench.time_to_loss.clock import clock_of, needed
from bench.time_to_loss.policies import (
    ABLATIONS,
    BASELINES,
    OURS,
    PAPER,
    STATIC,
    Profile,
    Recipe,
    flags_of,
    is_blind_to_speed,
)
from bench.time_to_loss.report import report

LINKS = ("5000", "2000", "0")
"""Mbit/s, nominal; 0 is a link without limit. Chosen before any time to loss was seen."""
_QUICK = QUICKSTART_MODEL.replace("num-layers 8", "num-layers 4").replace("size 256", "size 64")
_POINTS = 250
"""Of the training curve that is kept."""


class Measurement:
    """What is measured, what of it is there, and where it is kept."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, model = args, " ".join((_QUICK if args.quick else QUICKSTART_MODEL).split())
        self.recipe = Recipe(lr=args.lr)
        if args.quick:
            sizes: dict[str, Any] = {"batches": (4, 8), "samples": 512, "evaluations": 8}
            self.recipe = Recipe(lr=args.lr, eval_samples=16, **sizes)
        statics = [f"{STATIC}_{batch}" for batch in self.recipe.batches]
        self.policies = args.policies or [*statics, *BASELINES, *OURS, *ABLATIONS, PAPER]
        self.work = ROOT / "runs" / "time_to_loss_real"
        recipe = json.loads(json.dumps(dataclasses.asdict(self.recipe)))
        size = "tiny" if args.quick else "quickstart"
        settings = {"size": size, "recipe": recipe, "model": model}
        what = "time to loss on two emulated nodes, by the wall clock"
        self.result = {"what": what, "settings": settings, "links": {}, "runs": []}
        if args.output.exists():
            self.result = json.loads(args.output.read_text())
        if self.result["settings"] != settings:
            raise SystemExit(f"{args.output} holds other settings: {self.result['settings']}")
        self.work.mkdir(parents=True, exist_ok=True)
        data = args.data_path or str(self.work / "stdlib_text_document")
        if not Path(f"{data}.idx").exists():
            data = make_dataset(self.work / "stdlib")
        # A profile times data parallelism with these; a layout that is moved to has them too.
        self.flags = [*model.split(), "--overlap-grad-reduce", "--overlap-param-gather"]
        self.flags += ["--split", "95,5,0", "--log-interval", "100", "--data-path", data]
        self.flags += ["--data-cache-path", str(self.work / "cache")]
        bytes_of_data = Path(f"{data}.bin").stat().st_size
        if self.result.setdefault("data_bytes", bytes_of_data) != bytes_of_data:
            raise SystemExit(f"{data}.bin is not the data set that {args.output} is about")
        self.result.setdefault("machine", origin())

    def write(self) -> None:
        """All of it, or what was there before."""
        path = self.args.output
        beside = path.with_name(path.name + ".new")
        beside.write_text(json.dumps(self.result) + "\n")
        os.replace(beside, path)

    def left(self, seed: int, link: str) -> list[str]:
        """Policies that are not in the results. Every block begins with another, so that none is
        always the first."""
        names = [
            name
            for name in self.policies
            if link == self.args.links[0] or not (is_blind_to_speed(name) or name in ABLATIONS)
        ]
        block = self.args.seeds.index(seed) * len(self.args.links) + self.args.links.index(link)
        turn = 4 * block % max(len(names), 1)
        runs = self.result["runs"]
        done = {r["policy"] for r in runs if (r["seed"], r["link"]) == (seed, link)}
        return [name for name in [*names[turn:], *names[:turn]] if name not in done]

    def known(self, link: str) -> dict[str, Any]:
        """What is known of a link."""
        return self.result["links"].setdefault(link, {"measured_mbit_per_s": []})

    def profile(self, link: str) -> Profile:
        """The measured times of a link."""
        return Profile.of_records(self.known(link)["profile"]["records"])

    @property
    def timing_flags(self) -> list[str]:
        """Of the run that is timed, behind the flags of the program that times it."""
        flags = ["--", *self.flags, "--micro-batch-size", "1", "--eval-iters", "0"]
        length = ["--train-samples", str(self.recipe.samples)]
        return [*flags, *length, *self.recipe.rates(self.recipe.first_batch)]

    def take_profile(self, pair: nodes.Nodes, link: str) -> None:
        """Times every layout and micro-batch on the link, then the best few at each batch again."""
        recipe, store = self.recipe, self.work / f"profile_{link}.jsonl"
        store.unlink(missing_ok=True)  # what it costs is measured with it
        last = recipe.batches[-1]
        tool = [str(ROOT / "tools/profile_layouts.py"), "--store", str(store), "--steps", "5"]
        tool += ["--global-batch-size", str(last), "--max-micro-batch", str(min(last, 8))]
        log = self.work / f"profile_{link}"
        seconds = pair.run([*tool, *self.timing_flags], log)
        records = [json.loads(line) for line in store.read_text().splitlines()]
        for c, batches in Profile.of_records(records).contenders(recipe.batches):
            fixed = f"{c.layout},micro_batch={c.micro_batch_size}"
            own = ["--fix", fixed, "--batches", ",".join(map(str, batches))]
            seconds += pair.run([*tool, *own, *self.timing_flags], log)
        records = [json.loads(line) for line in store.read_text().splitlines()]
        self.known(link)["profile"] = {"seconds": round(seconds, 1), "records": records}
        self.write()

    def take_clock(self, link: str) -> None:
        """Times what all runs had, or would have had, on a link in turn, if some of it is new."""
        ways = needed(self.result, self.recipe, link)
        if not set(ways) - clock_of(self.known(link)).keys():
            return
        request, output = self.work / f"clock_{link}.json", self.work / f"timed_{link}.json"
        request.write_text(json.dumps({"ways": ways, "output": str(output)}))
        command = ["-m", "bench.time_to_loss.clock", str(request), *self.timing_flags]
        before = _kept(origin())
        with nodes.two_nodes(float(link)) as pair:
            pair.run(command, self.work / f"clock_{link}")
        self.known(link)["clock"] = {"ways": json.loads(output.read_text()), **before}
        self.write()

    def train(self, pair: nodes.Nodes, seed: int, link: str, policy: str) -> None:
        """Trains with one policy and keeps what came of it."""
        store = self.work / f"profile_{link}.jsonl"
        records = self.known(link)["profile"]["records"]
        store.write_text("".join(json.dumps(record) + "\n" for record in records))
        own = flags_of(policy, self.recipe, self.profile(link), str(store))
        at = self.work / "run"
        shutil.rmtree(at, ignore_errors=True)
        command = [TRAINER, *self.flags, *own, "--seed", str(seed), "--run-dir", str(at)]
        before = _kept(origin())
        wall_s = round(pair.run(command, self.work / policy), 1)
        run = {"policy": policy, "link": link, "seed": seed, "flags": own, "wall_s": wall_s}
        self.result["runs"].append({**run, **before, **account(at)})
        self.write()
        shutil.rmtree(at)
        loss = self.result["runs"][-1]["evaluations"][-1][2]
        print(f"{policy}, link {link}, seed {seed}: {wall_s} s, loss {loss:.4f}", flush=True)

    def warm_up(self, pair: nodes.Nodes, seed: int, link: str) -> None:
        """One step, so that no policy is the one that makes the index of the samples."""
        own = self.recipe.flags(self.profile(link).best(self.recipe.first_batch))
        at = self.work / "warm_up"
        command = [TRAINER, *self.flags, *own, "--seed", str(seed), "--exit-interval", "1"]
        pair.run([*command, "--run-dir", str(at)], at)
        shutil.rmtree(at)

    def run(self) -> None:
        """Everything that is left."""
        warm: set[int] = set()
        for seed in self.args.seeds:
            for link in self.args.links:
                if not (policies := self.left(seed, link)):
                    continue
                with nodes.two_nodes(float(link)) as pair:
                    known = self.known(link)
                    known["measured_mbit_per_s"].append(pair.measure_link())
                    if "profile" not in known:
                        self.take_profile(pair, link)
                    if seed not in warm:
                        self.warm_up(pair, seed, link)
                        warm.add(seed)
                    for policy in policies:
                        self.train(pair, seed, link, policy)
        for link in self.args.links:
            self.take_clock(link)


def _kept(before: dict[str, Any]) -> dict[str, Any]:
    return {k: before[k] for k in ("date", "commit", "load_average")}


def account(folder: Path) -> dict[str, Any]:
    """Curves, changes and costs of a finished run, small enough to keep.

    The clock begins when the trainer has its flags and counts everything but the evaluations: from
    the building of the model, the controller's setting up with it, over steps and decisions to
    changes of the layout.
    """
    run = read_run(folder)
    evaluations = clocked(run.records)
    steps, moves, decisions = run.steps, run.of("switch"), run.of("decision")
    some = steps[:: -(-len(steps) // _POINTS)]
    ways, speeds, samples, seconds = [], {}, 0, 0.0
    for r in steps:
        names = ("layout", "micro_batch_size", "global_batch_size")
        way = dict(zip(("layout", "micro_batch", "batch"), (r[name] for name in names)))
        if not ways or not way.items() <= ways[-1].items():
            ways.append({"samples": samples, "seconds": round(seconds, 3), **way})
        speeds.setdefault(tuple(way.items()), []).append(r["seconds"])
        samples, seconds = r["consumed_samples"], r["clock"]
    return {
        "seconds": round(steps[-1]["clock"], 4),
        "set_up_s": round(steps[0]["clock"] - steps[0]["seconds"], 4),
        "paused_s": round(sum(r["outcome"]["pause_s"] for r in moves), 4),
        "deciding_s": round(sum(r["seconds"] for r in decisions), 4),
        "steps": len(steps),
        "evaluations": evaluations,
        "training": {
            "samples": [r["consumed_samples"] for r in some],
            "loss": [round(r["losses"]["lm loss"], 4) for r in some],
            "phi": [(r.get("noise") or {}).get("phi_samples") for r in some],
        },
        "ways": ways,
        "speeds": [
            {**dict(way), "steps": len(some), "median_s": round(statistics.median(some), 5)}
            for way, some in speeds.items()
        ],
        "moves": [
            {
                **{k: r[k] for k in ("iteration", "consumed_samples", "start", "to")},
                "kind": r["outcome"]["kind"],
                "pause_s": round(r["outcome"]["pause_s"], 4),
            }
            for r in moves
        ],
        "decisions": [
            {
                "iteration": r["iteration"],
                "samples": r["consumed_samples"],
                "kind": r["decision"]["kind"],
                "reason": r["decision"]["reason"],
            }
            for r in decisions
        ],
    }


def clocked(records: Sequence[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """Gives steps their `clock`; returns the evaluations as (samples, clock, loss).

    An evaluation lasts from the record of the step before it to its own; that is taken off.
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
            evaluations.append((r["consumed_samples"], round(step["clock"], 4), loss))
    return evaluations


def main() -> None:
    """Measures what is left, prints and draws."""
    p = arguments(__doc__, "time_to_loss_real.json")
    p.add_argument("--quick", action="store_true", help="a tiny model, for another --output")
    p.add_argument("--links", nargs="+", default=list(LINKS), help="nominal Mbit/s; 0: no limit")
    p.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    p.add_argument("--policies", nargs="+", help="default: all")
    p.add_argument("--lr", type=float, default=5e-4, help="at the first batch")
    p.add_argument("--targets", type=int, default=5)
    p.add_argument("--data-path", help="prefix of an indexed data set; default: made")
    p.add_argument("--draw", action="store_true", help="tables and figure of --output, no more")
    args = p.parse_args()
    if args.draw:
        print(report(json.loads(args.output.read_text()), args.targets, args.output))
        return
    nodes.require()
    measurement = Measurement(args)
    measurement.run()
    print(report(measurement.result, args.targets, args.output))


if __name__ == "__main__":
    main()
