"""Is the noise scale right, and is it the same under every layout?

    python -m bench.noise accuracy      # 15 minutes on two cores
    python -m bench.noise layouts       # 20 minutes

* accuracy: a tiny GPT is trained on Python's own sources, and its weights are then held still.
  Steps of one sample give the gradient of every sample of the data set, and so |G|^2 and tr(Sigma)
  exactly. Steps of 16 samples over the same samples, on several ranks with each estimator, give
  one-step estimates, whose means are compared with the truth in standard errors. Runs of 60 steps
  drawn from those estimates are smoothed as a run does: how often does the 95 % interval hold the
  true noise scale? Last, one batch is measured under every layout of four ranks. Writes
  noise_accuracy.json.
* layouts: the quickstart's model is trained twice on two ranks with `--copus`, with data and with
  pipeline parallelism. The curves of the noise scale must lie on one another. Writes
  noise_layouts.json.

Results go to docs/results.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.support import (
    QUICKSTART_MODEL,
    RESULTS,
    TRAINER,
    arguments,
    launch,
    make_dataset,
    origin,
    read_run,
    write,
)

MODEL = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --swiglu --normalization RMSNorm --disable-bias-linear
--position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0
--hidden-dropout 0 --tokenizer-type ByteLevelTokenizer --split 100,0,0 --eval-iters 0
--log-interval 100 --pad-vocab-for-tensor-parallel-size 4"""
STILL = "--lr 1e-30 --min-lr 0 --weight-decay 0 --no-load-optim --finetune"
BATCH = 16
ESTIMATORS = (
    *(("micro", 1, 1), ("micro", 2, 2), ("micro", 2, 4)),
    *(("rank", 2, 2), ("rank", 4, 1), ("half", 1, 2), ("half", 2, 2)),
)
"""Estimator, ranks, micro-batch size."""
LAYOUTS = ((1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 2, 2), (1, 4, 1), (2, 2, 1))
"""tp, pp, vpp."""
LONG_RUN = f"""{QUICKSTART_MODEL} --micro-batch-size 4 --global-batch-size {BATCH} --lr 2e-3
--min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 --split 95,4,1 --log-interval 50
--copus"""
Steps = list[dict[str, Any]]


def worker(kind: str, output: Path, flags: list[str]) -> None:
    """One training run on the ranks of this launch; `truth` adds up gradients by itself."""
    from megatron.trainer.resilience.env_checks import set_process_defaults

    set_process_defaults()
    import torch

    from copus_ext.controller.flags import CopusConfig
    from copus_ext.controller.gns_callback import GradientNoiseCallback
    from copus_ext.gns.hooks import group_of
    from megatron.trainer.config.arguments import parse_args, resolve
    from megatron.trainer.train.callbacks import Callback, CallbackContext
    from megatron.trainer.train.pretrain import pretrain

    class GroundTruth(Callback):
        """Adds up the gradients of single samples, and their squares, in double precision."""

        def __init__(self) -> None:
            self.count, self.total, self.squares = 0, {}, {}

        def on_grads_ready(self, context: CallbackContext) -> None:
            model = context.model[0]
            while hasattr(model, "module"):
                model = model.module
            groups: dict[str, list[torch.Tensor]] = {}
            for name, param in model.named_parameters():
                groups.setdefault(group_of(name, param), []).append(param.main_grad.view(-1))
            for name, parts in groups.items():
                gradient = torch.cat(parts).double()
                self.total[name] = self.total.get(name, 0) + gradient
                self.squares[name] = self.squares.get(name, 0.0) + gradient.square().sum().item()
            self.count += 1

        def result(self) -> dict[str, Any]:
            """|G|^2 and tr(Sigma) of the samples seen, by parameter group."""
            g2 = {n: (t / self.count).square().sum().item() for n, t in self.total.items()}
            v = {n: self.squares[n] / self.count - g2[n] for n in g2}
            return {"samples": self.count, "g2": g2, "v": v}

    torch.set_num_threads(1)
    truth = GroundTruth()
    callbacks: list[Callback] = []
    if kind == "truth":
        callbacks = [truth]
    elif kind != "train":
        callbacks = [GradientNoiseCallback(CopusConfig(copus=True, copus_gns_estimator=kind))]
    pretrain(resolve(parse_args(flags), int(os.environ.get("WORLD_SIZE", "1"))), callbacks)
    if kind == "truth":
        output.write_text(json.dumps(truth.result()))


class Bench:
    """Launches the runs in one scratch directory, over one data set and from one checkpoint."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.weights, self.number = scratch, scratch / "weights", 0
        self.data = make_dataset(scratch / "data")

    def run(self, kind: str, ranks: int, flags: str) -> tuple[Steps, Path]:
        """Step records of one run, and the file its worker may have written."""
        self.number += 1
        run_dir, output = self.scratch / f"run{self.number}", self.scratch / f"{self.number}.json"
        print(f"-- {kind} on {ranks} ranks: {flags}", flush=True)
        places = ["--data-path", self.data, "--data-cache-path", self.scratch / "cache"]
        own = [*MODEL.split(), *flags.split(), *places, "--run-dir", run_dir]
        launch(ranks, "-m", "bench.noise", "--worker", kind, output, *own)
        return read_run(run_dir).steps, output

    def train(self, steps: int) -> None:
        """Trains a while, so that the noise is no longer small."""
        flags = f"--micro-batch-size 4 --global-batch-size {BATCH} --lr 2e-3 --min-lr 2e-3"
        saving = f"--save {self.weights} --save-interval {steps}"
        self.run("train", 2, f"{flags} --train-iters {steps} {saving}")

    def still(self, kind: str, ranks: int, *, batch: int, mbs: int, samples: int) -> Any:
        """Steps over the first samples of the data set with weights that do not move."""
        flags = f"{STILL} --load {self.weights} --train-samples {samples}"
        flags += f" --global-batch-size {batch} --micro-batch-size {mbs}"
        return self.run(kind, ranks, flags)


def judge(steps: Steps, truth: dict[str, float]) -> dict[str, Any]:
    """Bias of the one-step estimates in standard errors, and coverage of the interval."""
    pairs = [step["noise"]["step"]["layers"] for step in steps if step["noise"]["measured"]]
    result: dict[str, Any] = {"steps": len(pairs)}
    for name, field in (("g2", "grad_norm_sq"), ("v", "grad_variance_trace")):
        values = [pair[field] for pair in pairs]
        error = statistics.stdev(values) / math.sqrt(len(values))
        result[name] = {
            "mean_over_truth": statistics.fmean(values) / truth[name],
            "bias_in_standard_errors": (statistics.fmean(values) - truth[name]) / error,
            "one_step_relative_sd": statistics.stdev(values) / truth[name],
        }
    result["coverage"] = coverage(pairs, truth["v"] / truth["g2"])
    return result


def coverage(pairs: list[dict[str, float]], phi: float, *, runs: int = 4000, steps: int = 60):
    """How often the interval holds phi after `steps` measurements drawn from `pairs`."""
    from copus_ext.gns.estimators import Estimate
    from copus_ext.gns.smoothing import Smoothed

    rng = np.random.default_rng(1)
    held = bounded = 0
    for _ in range(runs):
        state = Smoothed()
        for i in rng.integers(len(pairs), size=steps):
            state = state.update(Estimate(**pairs[i]), tokens=1.0, half_life=20.0)
        interval = state.interval()
        bounded += interval.high is not None
        held += (interval.low or 0.0) <= phi <= (interval.high or math.inf)
    return {"held": held / runs, "bounded": bounded / runs, "runs": runs}


def across_layouts(bench: Bench) -> dict[str, float]:
    """Largest relative difference of any squared norm between layouts of four ranks."""
    reference, worst = None, {"small": 0.0, "big": 0.0}
    for tp, pp, vpp in LAYOUTS:
        more = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}"
        more += f" --num-virtual-stages-per-pipeline-rank {vpp}" if vpp > 1 else ""
        flags = f"{more} --num-layers 8 --lr 1e-3 --train-iters 3 --micro-batch-size 1"
        steps, _ = bench.run("micro", 4, f"{flags} --global-batch-size {BATCH}")
        squares = [step["noise"]["squares"] for step in steps]
        reference = reference or squares
        for now, first in zip(squares, reference):
            for size in worst:
                differences = [abs(now[size][n] / first[size][n] - 1) for n in first[size]]
                worst[size] = max(worst[size], *differences)
    return {"layouts": len(LAYOUTS), **worst}


def accuracy(scratch: Path, samples: int, train_steps: int) -> dict[str, Any]:
    """Every estimator against gradients of single samples."""
    bench = Bench(scratch)
    bench.train(train_steps)
    _, file = bench.still("truth", 1, batch=1, mbs=1, samples=samples)
    exact = json.loads(file.read_text())
    truth = {k: exact[k]["attention"] + exact[k]["mlp"] for k in ("g2", "v")}
    rows = []
    for kind, ranks, mbs in ESTIMATORS:
        steps, _ = bench.still(kind, ranks, batch=BATCH, mbs=mbs, samples=samples)
        row = {"estimator": kind, "replicas": ranks, "micro_batch_size": mbs}
        rows.append({**row, **judge(steps, truth)})
        print(json.dumps(rows[-1]), flush=True)
    return {
        "what": "one-step estimates of |G|^2 and tr(Sigma) against per-sample gradients",
        "global_batch_size": BATCH,
        "truth": {**truth, "phi_samples": truth["v"] / truth["g2"], "samples": exact["samples"]},
        "phi_by_group": {n: exact["v"][n] / exact["g2"][n] for n in exact["g2"]},
        "estimators": rows,
        "largest_relative_difference_between_layouts": across_layouts(bench),
    }


def curve(steps: Steps) -> dict[str, list[Any]]:
    """The columns of a run that the comparison needs."""
    noise = [r["noise"] for r in steps]
    return {
        "samples": [r["consumed_samples"] for r in steps],
        "loss": [round(r["losses"]["lm loss"], 5) for r in steps],
        **{
            k: [n[k] and float(f"{n[k]:.6g}") for n in noise]
            for k in ("phi_samples", "low_samples", "high_samples")
        },
    }


def compare(a: dict[str, list[Any]], b: dict[str, list[Any]]) -> dict[str, float]:
    """How far apart the curves of two layouts are, against the width of their band."""
    columns = a["phi_samples"], b["phi_samples"], a["low_samples"], a["high_samples"]
    rows = [
        (abs(math.log(x / y)), math.log(high / low))
        for x, y, low, high in zip(*columns)
        if x and y and low and high
    ]
    assert rows, "no step had a bounded interval"
    gaps = sorted(gap for gap, _ in rows)
    return {
        "steps_compared": len(rows),
        "median_relative_difference": math.expm1(gaps[len(gaps) // 2]),
        "largest_relative_difference": math.expm1(gaps[-1]),
        "largest_share_of_band": max(gap / width for gap, width in rows),
    }


def layouts(scratch: Path, steps: int) -> dict[str, Any]:
    places = ["--data-path", make_dataset(scratch / "data"), "--data-cache-path", scratch / "cache"]
    curves = {}
    for name, pp in (("DP 2", "1"), ("PP 2", "2")):
        own = ["--pipeline-model-parallel-size", pp, "--run-dir", scratch / pp]
        launch(2, TRAINER, *LONG_RUN.split(), *places, "--train-iters", str(steps), *own)
        curves[name] = curve(read_run(scratch / pp).steps)
    return {
        "what": "noise scale per step of one run under two layouts",
        "comparison": compare(*curves.values()),
        "global_batch_size": BATCH,
        "ranks": 2,
        "curves": curves,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("part", choices=("accuracy", "layouts"))
    parser.add_argument("--output", type=Path, help="instead of the file in docs/results")
    parser.add_argument("--samples", type=int, default=12_800, help="accuracy: of the data set")
    parser.add_argument("--train-steps", type=int, default=400, help="accuracy: before it")
    parser.add_argument("--steps", type=int, default=850, help="layouts: of each run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if args.part == "accuracy":
            result = accuracy(Path(name), args.samples, args.train_steps)
        else:
            result = layouts(Path(name), args.steps)
    output = args.output or RESULTS / f"noise_{args.part}.json"
    write(output, {**result, **origin()}, hide=["curves"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    else:
        main()
