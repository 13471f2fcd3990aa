"""Does `--kfac` end lower than Adam alone in the trainer, at equal samples and equal time?

    python -m bench.kfac

Two CPU ranks run `pretrain_gpt.py` as it is, with the model, samples and held-out losses of S4
(`real_clock.py`) and no link between them. Both have the warm-up that S4 found best for Adam, and
each the best of some rates on seed 0. Seeds 1 to 3 are compared, in turn. A run of equal time has
as many samples fewer as a step takes longer, and its whole schedule on them. Shorter and shorter
runs then say when K-FAC reaches Adam's last loss. Every line of kfac_trainer.jsonl is a run; a
killed command goes on where it was. Writes docs/results/kfac_trainer.json in 25 minutes. It needs
a core per rank and nothing else running.
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
MAX_RATE = 3
"""Powers of 2 over the first rate of S4, at which the search ends."""
SHORTER = (2 / 3, 1 / 2, 1 / 3, 1 / 6)
"""Shares of the samples that are tried for Adam's last loss."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of the trainer."""

    spec: Spec
    kfac: bool
    share: float = 1.0
    """Of the samples of S4, in whole intervals of evaluation."""

    @property
    def key(self) -> str:
        return f"{'kfac' if self.kfac else 'adam'} {self.spec.key} share {self.share:g}"


class Runs:
    """Finished runs, in a file that grows."""

    def __init__(self, path: Path, work: Path) -> None:
        self._path, self._work = path, work
        self._rows = {row["key"]: row for row in read_jsonl(path)}

    def row(self, run: Run) -> dict[str, Any]:
        """Loss and seconds of a step of a run, which is trained if it is missing."""
        if run.key not in self._rows:
            row = {"key": run.key, **self._trained(run), "spec": asdict(run)}
            real_clock.append(self._path, row)
            print(f"{run.key}: {row['loss']:.4f}, {row['step_s']:.4f} s a step", flush=True)
            self._rows[run.key] = row
        return self._rows[run.key]

    def _trained(self, run: Run) -> dict[str, float]:
        interval, evaluations = S4.samples // S4.evaluations, round(run.share * S4.evaluations)
        s = replace(S4, samples=evaluations * interval, evaluations=evaluations)
        flags = [*flags_of(s, run.spec), *["--kfac"] * run.kfac]
        data = self._work / "stdlib_text_document"
        if not data.with_suffix(".idx").exists():
            make_dataset(self._work / "stdlib")
        with tempfile.TemporaryDirectory(dir=self._work) as at:
            places = ["--data-cache-path", self._work / "cache", "--run-dir", at]
            launch(2, TRAINER, *flags, "--data-path", data, *places)
            record = read_run(Path(at))
        loss = record.evaluations[-1]["losses"]["lm loss"]
        step_s = statistics.fmean(step["seconds"] for step in record.steps[1:])
        return {"loss": round(loss, 5), "step_s": step_s}


def tuned(runs: Runs, own: Spec, *, kfac: bool) -> Spec:
    """The best rate, from Adam's of S4 on."""

    def loss(rate: int) -> float:
        return runs.row(Run(spec=replace(own, rate=rate), kfac=kfac))["loss"]

    best = min((own.rate, own.rate + 1), key=loss)
    stride = 1 if best > own.rate else -1
    while abs(best + stride) <= MAX_RATE and loss(best + stride) < loss(best):
        best += stride
    return replace(own, rate=best)


def of_seeds(runs: Runs, spec: Spec, *, kfac: bool, share: float = 1.0) -> dict[str, Any]:
    """Losses and seconds of a step of the compared seeds."""
    every = [Run(spec=replace(spec, seed=seed), kfac=kfac, share=share) for seed in SEEDS]
    rows = [runs.row(run) for run in every]
    losses = [row["loss"] for row in rows]
    step_s = statistics.median(row["step_s"] for row in rows)
    return {"losses": losses, "mean": statistics.fmean(losses), "step_s": step_s}


def same_loss(runs: Runs, spec: Spec, adam: dict[str, Any], first: dict[str, Any]) -> float | None:
    """The part of Adam's time after which K-FAC has Adam's last loss.

    Returns:
        By straight lines between whole runs; None if one of all samples does not reach it, or the
        shortest still does.
    """
    parts, losses = [first["step_s"] / adam["step_s"]], [first["mean"]]
    for share in SHORTER:
        if losses[-1] > adam["mean"]:
            break
        row = of_seeds(runs, spec, kfac=True, share=share)
        parts.append(share * row["step_s"] / adam["step_s"])
        losses.append(row["mean"])
    if not losses[-1] > adam["mean"] >= losses[0]:
        return None
    return float(np.interp(adam["mean"], losses[-2:], parts[-2:]))


def main() -> None:
    args = arguments(__doc__, "kfac_trainer.json").parse_args()
    before, first = origin(), replace(real_clock.best_static(S4, BATCH), seed=TUNING_SEED)
    with tempfile.TemporaryDirectory(prefix="kfac-") as work:
        runs = Runs(args.output.with_suffix(".jsonl"), Path(work))
        own, spec = (tuned(runs, first, kfac=kfac) for kfac in (False, True))
        for seed in SEEDS:  # in turn, as the machine may change
            runs.row(Run(spec=replace(own, seed=seed), kfac=False))
            runs.row(Run(spec=replace(spec, seed=seed), kfac=True))
        adam, same = of_seeds(runs, own, kfac=False), of_seeds(runs, spec, kfac=True)
        # Down to whole intervals of evaluation; another timing finds the same runs, too.
        longer = same["step_s"] / adam["step_s"]
        share = math.floor(S4.evaluations / longer) / S4.evaluations
        short = of_seeds(runs, spec, kfac=True, share=share)
        time_to_adams_loss = same_loss(runs, spec, adam, same)
    result = {
        "what": "--kfac against Adam in the trainer: S4's model on two CPU ranks",
        "batch": BATCH,
        "rate": {"adam": own.rate, "kfac": spec.rate},
        "step_over_adam": longer,
        "adam": adam,
        "kfac_at_equal_samples": same,
        "kfac_at_equal_time": {"share": share, **short},
        "time_to_adams_loss": time_to_adams_loss,
        "less_at_equal_samples": adam["mean"] - same["mean"],
        "less_at_equal_time": adam["mean"] - short["mean"],
        **before,
    }
    write(args.output, result)


if __name__ == "__main__":
    main()
