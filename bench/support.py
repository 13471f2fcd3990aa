"""What the benchmarks share: the model, timed blocks, medians, and where a number is from."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"

QUICKSTART_MODEL = """--num-layers 8 --hidden-size 256 --ffn-hidden-size 1024
--num-attention-heads 8 --seq-length 128 --max-position-embeddings 128 --swiglu
--normalization RMSNorm --position-embedding-type rope --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
--use-distributed-optimizer --tokenizer-type ByteLevelTokenizer --eval-iters 0"""
"""The GPT of about 8M parameters that scripts/quickstart.sh trains."""


def block(step: Callable[[], None], num_steps: int) -> dict[str, float]:
    """Wall and CPU seconds per step of one block."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(num_steps):
        step()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"wall_s": wall / num_steps, "cpu_s": cpu / num_steps}


def mean(blocks: list[dict[str, float]]) -> dict[str, float]:
    """The mean of some blocks, clock by clock."""
    return {clock: statistics.fmean(b[clock] for b in blocks) for clock in blocks[0]}


def ratio_summary(
    rows: list[dict[str, dict[str, float]]], clock: str, *, of: str, to: str
) -> dict[str, float]:
    """Median of side `of` over side `to` over the rows, its 95 % interval (order statistics,
    binomial) and the quartiles."""
    ratios = sorted(row[of][clock] / row[to][clock] for row in rows)
    low, middle, high = statistics.quantiles(ratios, n=4)
    num = len(ratios)
    # The largest k with P(Binomial(n, 1/2) < k) <= 2.5 %: the median lies between the k-th smallest
    # and the k-th largest with at least 95 %.
    rank = max(
        (k for k in range(1, num // 2 + 1) if _binomial_below(k, num) <= 0.025),
        default=1,
    )
    return {
        "median_ratio": middle,
        "median_low_95": ratios[rank - 1],
        "median_high_95": ratios[num - rank],
        "quartile_1": low,
        "quartile_3": high,
        **{f"{s}_{clock}": statistics.median(r[s][clock] for r in rows) for s in (of, to)},
    }


def _binomial_below(k: int, num: int) -> float:
    return sum(math.comb(num, i) for i in range(k)) / 2**num


def origin() -> dict[str, Any]:
    """When, with which code and packages, and on how busy a machine a result was made."""
    commit = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return {
        "nproc": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": subprocess.run(commit, capture_output=True, text=True).stdout.strip(),
        "python": sys.version.split()[0],
        "versions": {name: version(name) for name in ("torch", "megatron-core", "numpy")},
    }


def open_source() -> None:
    """Lets a benchmark import the packages of this repository; one thread per rank."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(ROOT))


def torchrun(ranks: int, *command: str | Path) -> list[str]:
    """The command line that starts a Python program on some ranks of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(ranks), *map(str, command)]


def reset_peak() -> None:
    """Lets the peak of resident memory begin at what is resident now, where the kernel allows."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss() -> int:
    """Most bytes resident since the process began or `reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
