"""Launches of four CPU ranks that lose ranks and nodes, as `rank.py` plans it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.trainer.logging.metrics import read_metrics
from tests.helpers import processes
from tests.helpers.launch import ROOT, free_port

PROGRAM = Path(__file__).with_name("rank.py")
COPY_INTERVAL = 10
MODEL = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 12 --lr 1e-3
--tokenizer-type ByteLevelTokenizer --swiglu --normalization RMSNorm
--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
--hidden-dropout 0 --attention-dropout 0 --eval-iters 1 --eval-interval 20 --log-interval 1
--pad-vocab-for-tensor-parallel-size 4 --use-distributed-optimizer --save-interval 25"""
"""All flags but the layout, the number of steps and the data."""


def start_node(
    folder: Path,
    nodes: Sequence[int],
    node: int,
    layout: str,
    steps: int,
    *,
    data: str,
    mark: str,
    elastic: bool = True,
    copy_interval: int = COPY_INTERVAL,
    python: Path | str = sys.executable,
    device: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """The supervisor of one node; `data` is the prefix of the data set, `device` the variables of
    ranks that are not on a CPU."""
    link = folder / "data"
    if not link.is_symlink():
        link.symlink_to(Path(data).parent)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COPUS_KILL_PLAN": str(folder / "plan.json")}
    env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"CUDA_VISIBLE_DEVICES": ""} if device is None else device
    env[processes.MARK] = mark
    own = ["--restart-wait", "0", "--node-timeout-s", "10", "--node-rank", str(node)]
    own += ["--nproc-per-node", str(nodes[node]), "--nnodes", str(len(nodes))]
    own += ["--elastic", "--copy-interval", str(copy_interval)] if elastic else []
    if len(nodes) > 1:
        port = folder / "port"
        if not port.exists():
            port.write_text(str(free_port()))
        own += ["--rdzv-endpoint", f"127.0.0.1:{port.read_text()}"]
    flags = [*MODEL.split(), *layout.split(), "--train-iters", str(steps)]
    flags += ["--save", "run", "--data-path", f"data/{Path(data).name}"]
    command = [str(python), "-m", "copus_ext.launch.supervisor", *own, "--"]
    command += [str(PROGRAM), *flags]
    with (folder / f"log{node}").open("ab") as log:
        return subprocess.Popen(
            command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True
        )


def start(
    folder: Path, nodes: Sequence[int], layout: str, steps: int, **how: Any
) -> list[subprocess.Popen[bytes]]:
    """A supervisor for every node; see `start_node`."""
    return [start_node(folder, nodes, i, layout, steps, **how) for i in range(len(nodes))]


def wait(children: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> list[int | None]:
    """Exit codes; None for one that hangs."""
    deadline_s = time.monotonic() + timeout_s
    codes: list[int | None] = []
    for child in children:
        try:
            codes.append(child.wait(max(deadline_s - time.monotonic(), 0.1)))
        except subprocess.TimeoutExpired:
            codes.append(None)
    return codes


def account(folder: Path, steps: int, reference: dict[int, float]) -> dict[str, Any]:
    """What the record says: samples lost or doubled, and the largest difference of a loss."""
    rows = [r for r in read_metrics(folder / "run") if r["kind"] == "step"]
    count = Counter(r["iteration"] for r in rows)
    wrong = [r for r in rows if r["consumed_samples"] != 12 * r["iteration"]]
    missing = [i for i in range(1, steps + 1) if count[i] != 1]
    worst = max(
        (abs(r["losses"]["lm loss"] / reference[r["iteration"]] - 1) for r in rows), default=0.0
    )
    return {
        "last_step": max(count, default=0),
        "samples_lost": 12 * len(missing) + 12 * len(wrong),
        "largest_loss_difference": worst,
    }


def is_done(folder: Path, steps: int) -> bool:
    try:
        rows = read_metrics(folder / "run")
    except FileNotFoundError:
        return False
    return any(r["kind"] == "step" and r["iteration"] == steps for r in rows)
