"""Is the noise scale right? Every estimator against per-sample gradients by brute force.

    python -m bench.noise_accuracy

Trains a tiny GPT on this Python's own sources, then holds its weights still and

1. takes the gradient of every sample of the data set by itself (steps of one sample), which gives
   |G|^2 and tr(Sigma) of this population exactly;
2. takes steps of 16 samples over the same samples on several ranks with each estimator, and
   compares the means of their one-step estimates with the truth, in standard errors;
3. draws runs of 60 steps from those estimates, smooths each as a run does, and counts how often
   the 95 % interval holds the true noise scale;
4. measures one batch under every layout of four ranks.

Writes docs/results/noise_accuracy.json. About 15 minutes on 2 cores.
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

from bench.support import arguments, launch, make_dataset, origin, read_run, write

SEQ_LENGTH = 32
MODEL = f"""--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length {SEQ_LENGTH}
--max-position-embeddings {SEQ_LENGTH} --swiglu --normalization RMSNorm --disable-bias-linear
--position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0
--hidden-dropout 0 --tokenizer-type ByteLevelTokenizer --split 100,0,0 --eval-iters 0
--log-interval 100 --pad-vocab-for-tensor-parallel-size 4"""
STILL = "--lr 1e-30 --min-lr 0 --weight-decay 0 --no-load-optim --finetune"
BATCH = 16
# Estimator, ranks, micro-batch size.
ESTIMATORS = [
    ("micro", 1, 1),
    ("micro", 2, 2),
    ("micro", 2, 4),
    ("rank", 2, 2),
    ("rank", 4, 1),
    ("half", 1, 2),
    ("half", 2, 2),
]
LAYOUTS = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 2, 2), (1, 4, 1), (2, 2, 1)]


def worker(kind: str, output: Path, flags: list[str]) -> None:
    """One training run on the ranks of this launch; `truth` adds up gradients by itself."""
    from megatron.training.resilience.env_checks import set_process_defaults

    set_process_defaults()
    import torch

    from copus_ext.controller.flags import CopusConfig
    from copus_ext.controller.gns_callback import GradientNoiseCallback
    from copus_ext.gns.hooks import group_of
    from megatron.training.config.arguments import parse_args, resolve
    from megatron.training.train.callbacks import Callback, CallbackContext
    from megatron.training.train.pretrain import pretrain

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
    world = int(os.environ.get("WORLD_SIZE", "1"))
    truth = GroundTruth()
    callbacks: list[Callback] = []
    if kind == "truth":
        callbacks = [truth]
    elif kind != "train":
        callbacks = [GradientNoiseCallback(CopusConfig(copus=True, copus_gns_estimator=kind))]
    pretrain(resolve(parse_args(flags), world), callbacks)
    if kind == "truth":
        output.write_text(json.dumps(truth.result()))


class Bench:
    """Launches the runs in one scratch directory, over one data set and from one checkpoint."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.weights, self.number = scratch, scratch / "weights", 0
        self.data = make_dataset(scratch / "data")

    def run(self, kind: str, ranks: int, flags: str) -> tuple[list[dict[str, Any]], Path]:
        """Step records of one run, and the file its worker may have written."""
        self.number += 1
        run_dir, output = self.scratch / f"run{self.number}", self.scratch / f"{self.number}.json"
        print(f"-- {kind} on {ranks} ranks: {flags}", flush=True)
        places = ["--data-path", self.data, "--data-cache-path", self.scratch / "cache"]
        own = [*MODEL.split(), *flags.split(), *places, "--run-dir", run_dir]
        launch(ranks, "-m", "bench.noise_accuracy", "--worker", kind, output, *own)
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


def judge(steps: list[dict[str, Any]], truth: dict[str, float]) -> dict[str, Any]:
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
        low, high = interval.low or 0.0, interval.high or math.inf
        held += low <= phi <= high
    return {"held": held / runs, "bounded": bounded / runs, "runs": runs}


def layouts(bench: Bench) -> dict[str, float]:
    """Largest relative difference of any squared norm between layouts of four ranks."""
    reference, worst = None, {"small": 0.0, "big": 0.0}
    for tp, pp, vpp in LAYOUTS:
        more = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}"
        more += " --num-layers 8" + (
            f" --num-virtual-stages-per-pipeline-rank {vpp}" if vpp > 1 else ""
        )
        flags = f"{more} --lr 1e-3 --train-iters 3 --micro-batch-size 1 --global-batch-size {BATCH}"
        steps, _ = bench.run("micro", 4, flags)
        squares = [step["noise"]["squares"] for step in steps]
        reference = reference or squares
        for now, first in zip(squares, reference):
            for size in worst:
                differences = [abs(now[size][n] / first[size][n] - 1) for n in first[size]]
                worst[size] = max(worst[size], *differences)
    return {"layouts": len(LAYOUTS), **worst}


def main() -> None:
    """Measures, prints and writes."""
    parser = arguments(__doc__, "noise_accuracy.json")
    parser.add_argument("--samples", type=int, default=12_800)
    parser.add_argument("--train-steps", type=int, default=400)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(Path(scratch))
        bench.train(args.train_steps)
        _, file = bench.still("truth", 1, batch=1, mbs=1, samples=args.samples)
        exact = json.loads(file.read_text())
        truth = {k: exact[k]["attention"] + exact[k]["mlp"] for k in ("g2", "v")}
        rows = []
        for kind, ranks, mbs in ESTIMATORS:
            steps, _ = bench.still(kind, ranks, batch=BATCH, mbs=mbs, samples=args.samples)
            row = {"estimator": kind, "replicas": ranks, "micro_batch_size": mbs}
            rows.append({**row, **judge(steps, truth)})
            print(json.dumps(rows[-1]), flush=True)
        across = layouts(bench)
    result = {
        "what": "one-step estimates of |G|^2 and tr(Sigma) against per-sample gradients",
        "global_batch_size": BATCH,
        "truth": {**truth, "phi_samples": truth["v"] / truth["g2"], "samples": exact["samples"]},
        "phi_by_group": {n: exact["v"][n] / exact["g2"][n] for n in exact["g2"]},
        "estimators": rows,
        "largest_relative_difference_between_layouts": across,
        **origin(),
    }
    write(args.output, result)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    else:
        main()
