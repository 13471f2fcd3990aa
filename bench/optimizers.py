"""Do `--optimizer muon` and `--kfac` end lower than Adam, at equal samples and equal time?

    PYTHONPATH=$PWD:$(python -m tests.newest_core.prepare) python -m bench.optimizers

Two CPU ranks run `pretrain_gpt.py` as it is, with the model, samples and held-out losses of S4
(`real_clock.py`) and no link between them. All have the warm-up that S4 found best for Adam, and
each the best of some rates on seed 0. Seeds 1 to 3 are compared. Then the steps of all three are
timed in turn. A run of equal time has as many samples fewer as a step takes longer, and its whole
schedule on them. Shorter and shorter runs say when Adam's last loss is reached. Every line of
optimizers.jsonl is a run; a killed command goes on where it was. Writes
docs/results/optimizers.json in 45 minutes. Losses are the same on a busy machine; the steps need a
core per rank and nothing else running.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.support import (
    TRAINER,
    arguments,
    launch,
    make_dataset,
    origin,
    read_jsonl,
    read_run,
    write,
)
from bench.time_to_loss import real_clock
from bench.time_to_loss.real_clock import S4, Spec, flags_of

BATCH, SEEDS, TUNING_SEED = 32, (1, 2, 3), 0
FLAGS = {
    "adam": "",
    "kfac": "--kfac",
    # Updates of about Adam's size, and no rounding to bf16, which is slow on CPU.
    "muon": "--optimizer muon --muon-extra-scale-factor 0.2 --muon-fp32-matmul-prec high",
}
MAX_RATE = 3
"""Powers of 2 over the first rate of S4, at which the search ends."""
SHORTER = (2 / 3, 1 / 2, 1 / 3, 1 / 6)
"""Shares of the samples that are tried for Adam's last loss."""
ROUNDS, TIMED = 3, 1 / 6
"""Times that the steps of each are timed, and the share of the samples of such a run."""


@dataclass(frozen=True, kw_only=True)
class Run:
    spec: Spec
    optimizer: str
    share: float = 1.0
    """Of the samples of S4, in whole intervals of evaluation."""

    @property
    def key(self) -> str:
        return f"{self.optimizer} {self.spec.key} share {self.share:g}"


class Runs:
    """Finished runs, in a file that grows."""

    def __init__(self, path: Path, work: Path) -> None:
        self._path, self._work = path, work
        self._rows = {row["key"]: row for row in read_jsonl(path)}

    def loss(self, run: Run) -> float:
        """Last held-out loss of a run, which is trained if it is missing."""
        if run.key not in self._rows:
            row = {"key": run.key, "loss": self.trained(run)[0], "spec": asdict(run)}
            real_clock.append(self._path, row)
            print(f"{run.key}: {row['loss']:.4f}", flush=True)
            self._rows[run.key] = row
        return self._rows[run.key]["loss"]

    def trained(self, run: Run) -> tuple[float, float]:
        """Last held-out loss, and seconds of a step in the mean."""
        interval, evaluations = S4.samples // S4.evaluations, round(run.share * S4.evaluations)
        s = replace(S4, samples=evaluations * interval, evaluations=evaluations)
        flags = [*flags_of(s, run.spec), *FLAGS[run.optimizer].split()]
        data = self._work / "stdlib_text_document"
        if not data.with_suffix(".idx").exists():
            make_dataset(self._work / "stdlib")
        with tempfile.TemporaryDirectory(dir=self._work) as at:
            places = ["--data-cache-path", self._work / "cache", "--run-dir", at]
            launch(2, TRAINER, *flags, "--data-path", data, *places)
            record = read_run(Path(at))
        loss = record.evaluations[-1]["losses"]["lm loss"]
        step_s = statistics.fmean(step["seconds"] for step in record.steps[1:])
        return round(loss, 5), step_s


def tuned(runs: Runs, own: Spec, optimizer: str) -> Spec:
    """The best rate, from Adam's of S4 on."""

    def loss(rate: int) -> float:
        return runs.loss(Run(spec=replace(own, rate=rate), optimizer=optimizer))

    best = min((own.rate, own.rate + 1), key=loss)
    stride = 1 if best > own.rate else -1
    while abs(best + stride) <= MAX_RATE and loss(best + stride) < loss(best):
        best += stride
    return replace(own, rate=best)


def of_seeds(runs: Runs, spec: Spec, optimizer: str, share: float = 1.0) -> dict[str, Any]:
    """Losses of the compared seeds."""
    specs = [replace(spec, seed=seed) for seed in SEEDS]
    losses = [runs.loss(Run(spec=one, optimizer=optimizer, share=share)) for one in specs]
    return {"losses": losses, "mean": statistics.fmean(losses)}


def timed(runs: Runs, specs: dict[str, Spec]) -> dict[str, float]:
    """Seconds of a step of each, the median of some runs in turn."""
    found: dict[str, list[float]] = {name: [] for name in specs}
    for _ in range(ROUNDS):
        for name, spec in specs.items():
            found[name].append(runs.trained(Run(spec=spec, optimizer=name, share=TIMED))[1])
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def same_loss(
    runs: Runs, spec: Spec, optimizer: str, adam: float, first: float, longer: float
) -> float | None:
    """The part of Adam's time after which another has Adam's last loss.

    Returns:
        By straight lines between whole runs; None if one of all samples does not reach it, or the
        shortest still does.
    """
    parts, losses = [longer], [first]
    for share in SHORTER:
        if losses[-1] > adam:
            break
        parts.append(share * longer)
        losses.append(of_seeds(runs, spec, optimizer, share)["mean"])
    if not losses[-1] > adam >= losses[0]:
        return None
    return float(np.interp(adam, losses[-2:], parts[-2:]))


def compared(
    runs: Runs, spec: Spec, optimizer: str, adam: dict[str, Any], longer: float
) -> dict[str, Any]:
    """One optimizer beside Adam; a step of it takes `longer` times as long."""
    same = of_seeds(runs, spec, optimizer)
    # Down to whole intervals of evaluation; another timing finds the same runs, too.
    share = min(math.floor(S4.evaluations / longer) / S4.evaluations, 1.0)
    short = of_seeds(runs, spec, optimizer, share)
    return {
        "rate": spec.rate,
        "step_over_adam": longer,
        "at_equal_samples": same,
        "at_equal_time": {"share": share, **short},
        "less_at_equal_samples": adam["mean"] - same["mean"],
        "less_at_equal_time": adam["mean"] - short["mean"],
        "time_to_adams_loss": same_loss(runs, spec, optimizer, adam["mean"], same["mean"], longer),
    }


def main() -> None:
    args = arguments(__doc__, "optimizers.json").parse_args()
    first = replace(real_clock.best_static(S4, BATCH), seed=TUNING_SEED)
    with tempfile.TemporaryDirectory(prefix="optimizers-") as work:
        runs = Runs(args.output.with_suffix(".jsonl"), Path(work))
        specs = {name: tuned(runs, first, name) for name in FLAGS}
        for name, spec in specs.items():
            of_seeds(runs, spec, name)
        before = origin()
        step_s = timed(runs, specs)
        adam = of_seeds(runs, specs["adam"], "adam")
        others = {
            name: compared(runs, specs[name], name, adam, step_s[name] / step_s["adam"])
            for name in FLAGS
            if name != "adam"
        }
    result = {
        "what": "K-FAC and Muon against Adam in the trainer: S4's model on two CPU ranks",
        "batch": BATCH,
        "flags": FLAGS,
        "step_s": step_s,
        "adam": {"rate": specs["adam"].rate, **adam},
        **others,
        **before,
    }
    write(args.output, result)


if __name__ == "__main__":
    main()
