"""Does the planner order layouts whose ranks share samples, on this machine?

    flock /tmp/ranks.lock python -m bench.planner_context_here

Two CPU ranks train a small GPT at two lengths of samples. Every layout of tensor, context (both
exchanges), pipeline and data parallelism with micro-batches of 1 and 2 is timed at one batch. The
planner orders them from the constants that ship alone, which were fitted at 128 tokens without
context parallelism, and with the times of two of each length known, which it has proposed. These
are left out of errors and order, and of `regret_of_others`. A configuration counts with the least
of its rounds, minutes apart, as other programs only ever slow it down. Writes
docs/results/planner_context_here.json in some minutes a round; `--again` of a result and `--rounds
0` predict its times anew. It needs a core per rank and nothing else running.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.planner_clusters import choice_of_others
from bench.rounds import Times, of_rounds
from bench.support import ROOT, arguments, launch, origin, write
from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.planner import validation
from copus_ext.planner.profile import Timing, read_profile

MODEL = """--num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 8
--group-query-attention --num-query-groups 4 --swiglu --normalization RMSNorm
--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
--attention-dropout 0 --hidden-dropout 0 --use-distributed-optimizer --tokenizer-type NullTokenizer
--vocab-size 255 --mock-data --eval-iters 0 --lr 1e-3 --train-iters 100000 --micro-batch-size 1
--global-batch-size 8"""
LENGTHS = (512, 2048)
_APART = 0.03
"""Times closer than this have no order that a measurement can tell."""


def profile(length: int, store: Path, args: argparse.Namespace) -> None:
    """Times every layout of a length."""
    tool = [ROOT / "tools/profile_layouts.py", "--store", store, "--largest", "vpp=1,cp=8"]
    tool += ["--max-micro-batch", "2", "--steps", str(args.steps), "--batches", "8"]
    tool += ["--global-batch-size", "8", "--cp-comm-type", "all_gather,a2a"]
    sizes = ["--seq-length", str(length), "--max-position-embeddings", str(length)]
    launch(args.ranks, *tool, "--", *MODEL.split(), *sizes)


def measure(args: argparse.Namespace) -> Times:
    """One round."""
    found: Times = {}
    for length in LENGTHS:
        with tempfile.TemporaryDirectory() as scratch:
            store = Path(scratch) / "times.jsonl"
            profile(length, store, args)
            machine, timings = read_profile(store)
            found[str(length)] = {
                "model": machine["model"],
                "times": [t.to_json() for t in timings],
            }
    return found


def runs_of(found: Times, ranks: int) -> list[validation.MeasuredRun]:
    """The times as a table, a group for each length."""
    return [
        validation.MeasuredRun(
            group=f"{length} tokens",
            model=ModelSpec.from_json(one["model"]),
            cluster=preset(f"cpu:{ranks}"),
            configuration=t.configuration,
            step_s=t.step_s,
            out_of_memory=False,
            peak_bytes=None,
        )
        for length, one in found.items()
        for t in map(Timing.from_json, one["times"])
    ]


def tau_apart(runs: list[validation.MeasuredRun], predictions: Any, at: list[int]) -> float | None:
    """Kendall's tau over pairs of a group whose times are apart, of runs that were not known."""
    agree = total = 0
    for i, j in itertools.combinations([i for i in at if not predictions.known[i]], 2):
        one, other = (float(runs[k].step_s or 1.0) for k in (i, j))
        if abs(one / other - 1) > _APART:
            total += 1
            same = (one < other) == (predictions.step_s[i] < predictions.step_s[j])
            agree += 1 if same else -1
    return agree / total if total else None


def judged(runs: list[validation.MeasuredRun], known: int) -> dict[str, Any]:
    """Error, order and choice of each length."""
    found = validation.predict(runs, num_known=known)
    result = validation.judge(runs, found)
    others = choice_of_others(runs, found)
    for (name, at), lost in zip(validation.groups(runs).items(), others, strict=True):
        result["groups"][name]["regret_of_others"] = lost
        result["groups"][name]["kendall_tau_apart"] = tau_apart(runs, found, at)
        result["groups"][name]["predicted"] = {
            str(runs[i].configuration): [float(found.step_s[i]), runs[i].step_s] for i in at
        }
    return result["groups"]


def main() -> None:
    """Measures, predicts, prints and writes."""
    parser = arguments(__doc__, "planner_context_here.json")
    parser.add_argument("--steps", type=int, default=7, help="timed steps of a configuration")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="how often to time all")
    words = "take the rounds of these results, too"
    parser.add_argument("--again", type=Path, nargs="*", default=[], help=words)
    args = parser.parse_args()
    before, rounds = origin(), []
    for path in args.again:
        record = json.loads(path.read_text())
        rounds += record["measured"]
        args.ranks = record["ranks"]
    rounds += [measure(args) for _ in range(args.rounds)]
    found = of_rounds(rounds, min)
    runs = runs_of(found, args.ranks)
    result = {
        "what": "order of layouts with context parallelism on CPU ranks, measured and predicted",
        "ranks": args.ranks,
        "rounds": len(rounds),
        "constants_alone": judged(runs, 0),
        "two_known": judged(runs, 2),
        **before,
        "measured": rounds,
    }
    taus = [g["kendall_tau"] for g in result["two_known"].values()]
    result["mean_tau_with_two_known"] = float(np.mean(taus))
    write(args.output, result, hide=["measured"])


if __name__ == "__main__":
    main()
