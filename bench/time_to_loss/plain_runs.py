"""Does `--copus` make a plain Megatron-style run of 60 to 500 steps end worse?

    python -m bench.time_to_loss.plain_runs [--only NAME,NAME]   trains what is missing
    python -m bench.time_to_loss.plain_runs --summary            figures from the file

Twelve runs of `pretrain_gpt.py` on two CPU ranks of this machine, as users start them: other
models, first batches, lengths and schedules of the learning rate, on the sources of Python. Each is
trained as it is and with `--copus` behind its flags, on the same samples with the same seed. A run
counts as no worse if its last held-out loss is within 0.3 % of the plain one's, or if it has that
loss no later. Nothing was tuned on them.

It needs two cores and nothing else running, and takes 25 minutes. Every line of the results file is
one run; a killed command goes on where it was.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.support import (
    QUICKSTART_MODEL,
    RESULTS,
    TRAINER,
    arguments,
    interval_of_few,
    launch,
    make_dataset,
    origin,
    read_jsonl,
    read_run,
)
from bench.time_to_loss.real_clock import S4, account, append
from bench.time_to_loss.results import FILE as OUTPUT
from bench.time_to_loss.results import save

FILE = "time_to_loss_plain_runs.jsonl"
EVALUATIONS, EVAL_SAMPLES = 20, 256
"""Held-out losses of a run, and samples of each."""
EQUAL = 1.003
"""Loss over the plain run's up to which a run is no worse."""
SEED = 11
_MEDIUM = " ".join(QUICKSTART_MODEL.split()).replace("--eval-iters 0", "").strip()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run as a user starts it."""

    name: str
    batch: int
    steps: int
    lr: float
    schedule: str = "--lr-decay-style cosine"
    """Flags."""
    warmup: float = 0.05
    """Part of the samples."""
    model: str = S4.model
    """Flags."""
    more: str = ""
    """Flags, such as a layout."""
    micro_batch: int = 2

    @property
    def samples(self) -> int:
        return self.batch * self.steps

    def flags(self, seed: int = SEED) -> list[str]:
        """All but data and directories."""
        return [
            *self.model.split(),
            *("--split", "95,5,0", "--adam-beta2", "0.95", "--log-interval", "100"),
            *("--micro-batch-size", str(self.micro_batch)),
            *("--global-batch-size", str(self.batch)),
            *("--train-samples", str(self.samples)),
            *("--lr", f"{self.lr:g}", "--min-lr", f"{0.1 * self.lr:g}"),
            *("--lr-warmup-samples", str(int(self.warmup * self.samples))),
            *self.schedule.split(),
            *("--eval-iters", str(max(EVAL_SAMPLES // self.batch, 1))),
            *("--eval-interval", str(self.steps // EVALUATIONS)),
            *("--seed", str(seed)),
            *self.more.split(),
        ]


CASES = (
    Case(name="short cosine", batch=32, steps=60, lr=4e-3),
    Case(name="small batch", batch=8, steps=240, lr=2e-3),
    Case(name="linear", batch=64, steps=120, lr=5.6e-3, schedule="--lr-decay-style linear"),
    Case(
        name="WSD",
        batch=16,
        steps=500,
        lr=2.8e-3,
        schedule="--lr-decay-style WSD --lr-wsd-decay-samples 1600 --lr-wsd-decay-style linear",
    ),
    Case(name="large batch", batch=128, steps=60, lr=8e-3, warmup=0.1, micro_batch=16),
    Case(
        name="constant",
        batch=32,
        steps=480,
        lr=2e-3,
        schedule="--lr-decay-style constant",
        warmup=0.0,
    ),
    Case(
        name="inverse root",
        batch=4,
        steps=500,
        lr=1.4e-3,
        schedule="--lr-decay-style inverse-square-root",
        warmup=0.1,
    ),
    Case(
        name="two stages",
        batch=32,
        steps=200,
        lr=4e-3,
        more="--num-layers 4 --pipeline-model-parallel-size 2",
    ),
    Case(name="8M parameters", batch=8, steps=120, lr=1e-3, model=_MEDIUM, micro_batch=4),
    Case(
        name="8M, linear",
        batch=16,
        steps=60,
        lr=1.4e-3,
        schedule="--lr-decay-style linear",
        model=_MEDIUM,
        micro_batch=4,
    ),
    Case(
        name="8M, two tensor ranks",
        batch=4,
        steps=240,
        lr=7e-4,
        model=_MEDIUM,
        more="--tensor-model-parallel-size 2",
    ),
    Case(name="large batch of 8M", batch=64, steps=60, lr=2e-3, model=_MEDIUM, micro_batch=4),
)


def train(case: Case, work: Path, *, copus: bool) -> dict[str, Any]:
    """A run's curve of (samples, seconds, held-out loss), its changes and its seconds."""
    before = {k: v for k, v in origin().items() if k in ("date", "commit", "load_average")}
    data = work / "stdlib_text_document"
    if not data.with_suffix(".idx").exists():
        make_dataset(work / "stdlib")
    with tempfile.TemporaryDirectory(dir=work) as at:
        places = ["--data-path", data, "--data-cache-path", work / "cache", "--run-dir", at]
        flags = [*case.flags(), *(["--copus"] if copus else [])]
        launch(2, TRAINER, *flags, *places)
        found = account(read_run(Path(at)))
    kept = {k: found[k] for k in ("loss", "seconds", "steps", "curve", "ways")}
    return {"name": case.name, "copus": copus, **kept, "case": asdict(case), **before}


def compared(plain: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """One case: losses at equal samples and when the first of both ends, and the time to the plain
    run's last loss, all over those of the plain run.

    Args:
        plain: row of the run without a controller.
        ours: row of the one with it.
    """
    curve = np.array(ours["curve"], dtype=float)
    seconds, losses = curve[:, 1], curve[:, 2]
    there = next((i for i, loss in enumerate(losses) if loss <= plain["loss"]), None)
    reached = None
    if there is not None:
        i = max(there, 1)
        reached = float(np.interp(-plain["loss"], -losses[i - 1 : i + 1], seconds[i - 1 : i + 1]))
    ends = min(plain["seconds"], ours["seconds"])
    theirs = np.array(plain["curve"], dtype=float)
    at_equal_time = float(
        np.interp(ends, seconds, losses) / np.interp(ends, theirs[:, 1], theirs[:, 2])
    )
    same_samples = ours["loss"] / plain["loss"]
    time_to = None if reached is None else reached / plain["seconds"]
    return {
        "name": plain["name"],
        "loss_at_equal_samples": same_samples,
        "loss_at_equal_time": at_equal_time,
        "time_to_its_loss": time_to,
        "time": ours["seconds"] / plain["seconds"],
        "batches": [way["batch"] for way in ours["ways"]],
        "is_no_worse": same_samples <= EQUAL or (time_to is not None and time_to <= 1.0),
    }


def summarise(rows: list[dict[str, Any]], output: Path) -> None:
    """Prints the figures of all complete cases, and writes them if none is missing.

    Raises:
        SystemExit: one is.
    """
    by = {(row["name"], row["copus"]): row for row in rows}
    found = [compared(by[c.name, False], by[c.name, True]) for c in CASES if (c.name, True) in by]
    for x in found:
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in x.items()}))
    if missing := [c.name for c in CASES if (c.name, True) not in by]:
        raise SystemExit(f"not trained yet: {', '.join(missing)}")
    score = [min(x["loss_at_equal_samples"], x["time_to_its_loss"] or np.inf) for x in found]
    result = {
        "worst": max(score),
        "mean": float(np.mean(score)),
        "mean_interval": interval_of_few(score, lambda some: float(np.mean(some))),
        "no_worse": sum(x["is_no_worse"] for x in found),
        "runs": len(found),
        "seeds": [SEED],
        "command": "python -m bench.time_to_loss.plain_runs",
        "commits": sorted({row["commit"] for row in rows}),
        "date": max(row["date"] for row in rows),
        "rows": found,
    }
    print(json.dumps({k: v for k, v in result.items() if k != "rows"}))
    save(output, {"plain_runs": result})


def main() -> None:
    p = arguments(__doc__, FILE)
    p.add_argument("--only", default="", help="names of cases, separated by commas")
    p.add_argument("--summary", action="store_true", help="figures from the file, no runs")
    args = p.parse_args()
    if not args.summary:
        wanted = [c for c in CASES if not args.only or c.name in args.only.split(",")]
        with tempfile.TemporaryDirectory(prefix="plain-runs-") as work:
            for case in wanted:
                for copus in (False, True):
                    done = {(r["name"], r["copus"]) for r in read_jsonl(args.output)}
                    if (case.name, copus) not in done:
                        row = train(case, Path(work), copus=copus)
                        append(args.output, row)
                        batches = [way["batch"] for way in row["ways"]]
                        print(
                            f"{case.name}, {copus=}: {row['loss']:.4f} in {row['seconds']} s, "
                            f"batches {batches}",
                            flush=True,
                        )
    if args.summary or not args.only:
        summarise(read_jsonl(args.output), RESULTS / OUTPUT)


if __name__ == "__main__":
    main()
