"""What the benchmarks share: command lines, launches, jobs stepped by hand, medians, results."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
TRAINER = str(ROOT / "pretrain_gpt.py")

QUICKSTART_MODEL = """--num-layers 8 --hidden-size 256 --ffn-hidden-size 1024
--num-attention-heads 8 --seq-length 128 --max-position-embeddings 128 --swiglu
--normalization RMSNorm --position-embedding-type rope --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
--use-distributed-optimizer --tokenizer-type ByteLevelTokenizer --eval-iters 0"""
"""The GPT of about 8M parameters that most measurements on CPU ranks train."""


def arguments(doc: str | None, output: str = "") -> argparse.ArgumentParser:
    """A command line with the flags that most benchmarks have."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    if output:
        parser.add_argument("--output", type=Path, default=RESULTS / output)
    return parser


def write(path: Path, result: dict[str, Any], *, hide: Sequence[str] = ()) -> None:
    """Writes a result as JSON and prints it without the long parts that `hide` names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=None if hide else 1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k not in hide}, indent=1))


@contextlib.contextmanager
def figure(path: Path, rows: int = 1, columns: int = 1, **layout: Any) -> Iterator[Any]:
    """Axes of a figure that is saved at the end, the same bytes for the same data."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "copus"
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn, axes = pyplot.subplots(rows, columns, layout="constrained", **layout)
    yield axes
    drawn.savefig(path, metadata={"Date": None})
    pyplot.close(drawn)


def origin() -> dict[str, Any]:
    """When, with which code and packages, and on how busy a machine a result was made."""
    from megatron.core import package_info

    commit = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    versions = {name: version(name) for name in ("torch", "numpy")}
    return {
        "nproc": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": subprocess.run(commit, capture_output=True, text=True).stdout.strip(),
        "python": sys.version.split()[0],
        "versions": {**versions, "megatron-core": package_info.__version__},
    }


def torchrun(ranks: int, *command: str | Path) -> list[str]:
    """The command line that starts a Python program on some ranks of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(ranks), *map(str, command)]


def launch(ranks: int, *command: str | Path) -> str:
    """Runs a Python program on some ranks and returns its output.

    Raises:
        SystemExit: with the program's errors, if it fails.
    """
    done = subprocess.run(torchrun(ranks, *command), cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def make_dataset(prefix: Path) -> str:
    """Indexes this Python's standard library below `prefix`; returns the data set's prefix."""
    tool = [sys.executable, str(ROOT / "tools/preprocess_data.py"), "--python-stdlib"]
    words = [*tool, "--output-prefix", str(prefix), "--append-eod"]
    subprocess.run(words, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return f"{prefix}_text_document"


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of results that grows, without a line that a kill cut short."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a finished run wrote."""

    records: list[dict[str, Any]]
    """All of its metrics."""
    steps: list[dict[str, Any]]
    """With the `layout` and the `seconds` of each."""
    evaluations: list[dict[str, Any]]
    """Those on held-out data."""
    journal: list[dict[str, Any]]
    """Empty without a controller."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The journal's records of a kind."""
        return [record for record in self.journal if record["kind"] == kind]


def read_run(folder: Path) -> RunRecord:
    """The record of a finished run from its directory."""
    from copus_ext.controller.decision_log import NAME, read_journal
    from megatron.trainer.logging.metrics import read_metrics

    journal = list(read_journal(folder / NAME)) if (folder / NAME).exists() else []
    relayouts = [r for r in journal if r["kind"] == "relayout" and r["outcome"]["kind"] == "moved"]
    came = {r["iteration"]: r["to"] for r in relayouts}
    records = list(read_metrics(folder))
    steps, layout = [], next(r["layout"] for r in records if r["kind"] == "run.start")
    for r in records:
        if r["kind"] == "step":
            r |= {"layout": layout, "seconds": r["elapsed_per_iteration_ms"] / 1000}
            steps.append(r)
            layout = came.get(r["iteration"], layout)
    evaluations = [r for r in records if r["kind"] == "eval" and r["split"] == "valid"]
    return RunRecord(records=records, steps=steps, evaluations=evaluations, journal=journal)


@contextlib.contextmanager
def open_job(flags: list[str]) -> Iterator[Any]:
    """A job with record and data, as `pretrain` makes it, without callbacks; one per rank."""
    from megatron.trainer.resilience.env_checks import check_environment, set_process_defaults

    set_process_defaults()
    check_environment()
    import torch

    from megatron.trainer.checkpoint.resume import merge_resume_config
    from megatron.trainer.common.device import use_device
    from megatron.trainer.common.train_state import TrainState
    from megatron.trainer.config.arguments import parse_args, resolve
    from megatron.trainer.data.tokenizer import build_tokenizer
    from megatron.trainer.distributed.process_groups import init_distributed
    from megatron.trainer.train.build import build_job, tear_down
    from megatron.trainer.train.callbacks import Callbacks
    from megatron.trainer.train.job import RunServices
    from megatron.trainer.train.pretrain import tokenizer_flags
    from megatron.trainer.train.run_directory import hold_run, open_run

    torch.set_num_threads(1)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    config = resolve(parse_args(flags), int(os.environ["WORLD_SIZE"]))
    with use_device(
        config.runtime.device,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        backend=config.parallel.distributed_backend,
    ) as device:
        init_distributed(device, timeout_minutes=10)
        tokenizer = build_tokenizer(**tokenizer_flags(config))
        config = merge_resume_config(config, None, vocab_size=tokenizer.vocab_size)
        state = TrainState()
        with hold_run(config) as run, open_run(config, run, None, state) as tracker:
            services = RunServices(tracker=tracker)
            job = build_job(config, None, state, tokenizer, device, Callbacks(()), services)
            yield job
            tear_down(job)
        torch.distributed.destroy_process_group()


def step_of_loop(job: Any, reporter: Any) -> None:
    """One step as `loop.train` takes it, without evaluation and saving."""
    from megatron.trainer.train.step import train_step

    sizes = {"global_batch_size": job.global_batch_size, "micro_batch_size": job.micro_batch_size}
    job.fire("on_train_step_start", **sizes)
    info, _ = train_step(job)
    losses = {"lm loss": info.loss}
    skipped = not info.updated
    job.fire(
        "on_train_step_end",
        step=info,
        loss_dict=losses,
        grad_norm=info.grad_norm,
        skipped_iter=skipped,
    )
    reporter.record(info)


def balanced_rows(
    sides: Mapping[str, Callable[[], dict[str, float]]], count: int
) -> list[dict[str, dict[str, float]]]:
    """Rows of four blocks of steps, of two sides in the order A, B, B, A, so that drift cancels.

    Returns:
        For each row and side the mean of its two blocks, clock by clock.
    """
    first, second = sides
    for take in sides.values():
        take()
    rows = []
    for _ in range(count):
        blocks = [(name, sides[name]()) for name in (first, second, second, first)]
        own = {side: [b for name, b in blocks if name == side] for side in sides}
        rows.append(
            {s: {c: statistics.fmean(b[c] for b in x) for c in x[0]} for s, x in own.items()}
        )
    return rows


def block(step: Callable[[], None], num_steps: int) -> dict[str, float]:
    """Wall and CPU seconds per step of one block."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(num_steps):
        step()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"wall_s": wall / num_steps, "cpu_s": cpu / num_steps}


def ratio_summary(
    rows: list[dict[str, dict[str, float]]], clock: str, *, of: str, to: str
) -> dict[str, float]:
    """Median of side `of` over side `to`, its 95 % interval (order statistics), the quartiles."""
    ratios = sorted(row[of][clock] / row[to][clock] for row in rows)
    low, middle, high = statistics.quantiles(ratios, n=4)
    num = len(ratios)
    # The largest k with P(Binomial(n, 1/2) < k) <= 2.5 %: the median lies between the k-th smallest
    # and the k-th largest with at least 95 %.
    below = [sum(math.comb(num, i) for i in range(k)) / 2**num for k in range(num // 2 + 1)]
    rank = max((k for k in range(1, num // 2 + 1) if below[k] <= 0.025), default=1)
    return {
        "median_ratio": middle,
        "median_low_95": ratios[rank - 1],
        "median_high_95": ratios[num - rank],
        "quartile_1": low,
        "quartile_3": high,
        **{f"{s}_{clock}": statistics.median(r[s][clock] for r in rows) for s in (of, to)},
    }


def interval(
    values: Sequence[Any],
    figure: Callable[[Sequence[Any]], float],
    by: Sequence[Callable[[Any], Any]] = (),
) -> list[float]:
    """A 95 % interval of a figure by drawing anew what gave its values.

    Args:
        values: that the figure is of.
        figure: of some of them, in any order.
        by: what each came from, the outer one first. Clusters and seeds: clusters are drawn, and
            within each of those its seeds, each with all of its values. Empty: values are drawn.
    """
    import numpy as np

    rng = np.random.default_rng(0)

    def drawn(some: Sequence[Any], keys: Sequence[Callable[[Any], Any]]) -> list[Any]:
        if not keys:
            return list(some)
        groups: dict[Any, list[Any]] = {}
        for value in some:
            groups.setdefault(keys[0](value), []).append(value)
        each = list(groups.values())
        chosen = rng.integers(0, len(each), len(each))
        return [value for i in chosen for value in drawn(each[i], keys[1:])]

    if not by:
        values, by = list(enumerate(values)), [lambda pair: pair[0]]
        plain, figure = figure, lambda some: plain([value for _, value in some])
    found = [figure(drawn(values, by)) for _ in range(2000)]
    return [float(x) for x in np.percentile(found, [2.5, 97.5])]


_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""97.5 % quantiles of Student's t by number of values."""


def interval_of_few(
    values: Sequence[Any], figure: Callable[[Sequence[Any]], float]
) -> list[float] | None:
    """A 95 % interval of a mean of a few values, by Student's t; None for one.

    Drawing so few anew would give no more than their range, which is too narrow. From six on it is
    `interval`.

    Args:
        values: that the figure is of, such as seeds.
        figure: a mean over some of them.
    """
    each = [figure([value]) for value in values]
    if len(each) < 2:
        return None
    if len(each) not in _STUDENT:
        return interval(values, figure)
    half = _STUDENT[len(each)] * statistics.stdev(each) / math.sqrt(len(each))
    middle = statistics.fmean(each)
    return [middle - half, middle + half]
