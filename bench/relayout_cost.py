"""What does a change of layout cost, in the same processes and by a restart?

    python -m bench.relayout_cost changes restarts [--size 40M]

One job trains on the ranks and changes its layout at a step boundary of `pretrain`.

* changes: every ordered pair of layouts, with the seconds of each phase. After each, the same bytes
  travel over bare gloo.
* restarts: every ordered pair both ways in turn, in the same processes, and by save, new processes,
  load and one step.

Each section replaces its own part of docs/results/relayout_cost.json; `--launcher usual` belongs to
relayout_cost_usual.json. It needs a core per rank and nothing else running.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.support import (
    ROOT,
    TRAINER,
    arguments,
    make_dataset,
    origin,
    ratio_summary,
    step_of_loop,
    torchrun,
)
from copus_ext.reshard.inprocess import InProcessResharder
from copus_ext.reshard.plan import BYTES_PER_ELEMENT, ReshardPlan
from copus_ext.reshard.trainer_host import TrainerHost, plan_of
from copus_ext.reshard.transfer import BUCKET_BYTES, WINDOW
from megatron.trainer.common.collectives import all_gather_object, broadcast_from_rank0
from megatron.trainer.common.step_settings import Request
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.layout import Layout
from megatron.trainer.logging.metrics import read_metrics
from megatron.trainer.resilience.env_checks import set_process_defaults
from megatron.trainer.train.callbacks import Callback, CallbackContext
from megatron.trainer.train.pretrain import pretrain
from megatron.trainer.train.reporting import Reporter
from tests.helpers.walks import walk

Rows = list[dict[str, Any]]
COMMON = """--seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4
--lr 1e-4 --tokenizer-type NullTokenizer --swiglu --normalization RMSNorm
--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
--hidden-dropout 0 --attention-dropout 0 --use-distributed-optimizer --eval-iters 0
--log-interval 100000 --train-samples 100000 --device cpu"""
SIZES = {
    "tiny": """--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
--vocab-size 511""",
    "8M": """--num-layers 8 --hidden-size 256 --ffn-hidden-size 1024 --num-attention-heads 8
--vocab-size 383""",
    "20M": """--num-layers 8 --hidden-size 384 --ffn-hidden-size 1024 --num-attention-heads 8
--vocab-size 8191""",
    "40M": """--num-layers 12 --hidden-size 512 --ffn-hidden-size 1088 --num-attention-heads 8
--vocab-size 8191""",
}
LAYOUTS = [Layout(dp=2), Layout(pp=2), Layout(tp=2)]
"""What is changed between."""
_USUAL_START = """import megatron.core, runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")"""
"""Starts a program as a trainer does that takes no care: megatron-core is imported as it is, and
torch's compiler with it, for kernels that nobody uses without a GPU."""
_OF_A_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


def reset_peak() -> None:
    """Lets the peak of resident memory begin at what is resident now, where the kernel allows."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss() -> int:
    """Most bytes resident since the process began or `reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def bytes_between(plan: ReshardPlan) -> list[list[int]]:
    """By sending and receiving rank, the bytes of a change."""
    world = len(plan.source)
    table = [[0] * world for _ in range(world)]
    for piece in plan.ops:
        if piece.source_rank != piece.target_rank:
            size = piece.numel * BYTES_PER_ELEMENT
            table[piece.source_rank][piece.target_rank] += size
    return table


def exchange(group: Any, table: list[list[int]]) -> float:
    """Sends so many bytes from one tensor to another in messages and windows of the size that a
    change has; seconds on this rank."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    bucket = BUCKET_BYTES[str(dist.get_backend(group))] // 4
    out = torch.ones(max(table[rank]) // 4)
    incoming = torch.ones(max(row[rank] for row in table) // 4)
    dist.barrier(group=group)
    begin = time.perf_counter()
    for shift in range(1, world):
        to, come_from = (rank + shift) % world, (rank - shift) % world
        sends = deque(out[: table[rank][to] // 4].split(bucket) if table[rank][to] else ())
        size = table[come_from][rank] // 4
        receives = deque(incoming[:size].split(bucket) if size else ())
        works: tuple[deque[Any], deque[Any]] = (deque(), deque())
        while sends or receives or any(works):
            while receives and len(works[0]) < WINDOW:
                works[0].append(dist.irecv(receives.popleft(), group=group, group_src=come_from))
            while sends and len(works[1]) < WINDOW:
                works[1].append(dist.isend(sends.popleft(), group=group, group_dst=to))
            for waiting in works:
                if waiting:
                    waiting.popleft().wait()
    return time.perf_counter() - begin


class Measuring(Callback):
    """Hands the job over at the end of the first step, and ends the run after the next one."""

    def __init__(self, act: Callable[[Any, InProcessResharder], None]) -> None:
        self.act, self.is_done = act, False

    def on_setup_start(self, context: CallbackContext) -> None:
        self.mover, self.is_asked = InProcessResharder(), False

    def on_train_step_end(self, context: CallbackContext) -> Request | None:
        if not self.is_asked:
            self.is_asked = True
            return Request(kind="change", reason="measurement", move=self._begin)
        return Request(kind="stop", reason="measured") if self.is_done else None

    def on_train_end(self, context: CallbackContext) -> None:
        self.mover.close()

    def _begin(self, job: Any) -> None:
        self.act(job, self.mover)
        self.is_done = True


class Bench:
    """One job, and the ways to another layout."""

    def __init__(
        self, job: Any, mover: InProcessResharder, *, flags: list[str], launcher: str, folder: Path
    ) -> None:
        self.job, self.mover, self.flags, self.launcher = job, mover, flags, launcher
        self.folder, self.reporter = folder, Reporter(job)
        self.rows: list[dict[str, Any]] = []

    def step(self) -> float:
        dist.barrier()
        begin = time.perf_counter()
        step_of_loop(self.job, self.reporter)
        return time.perf_counter() - begin

    def note(self, kind: str, start: Layout, to: Layout, **fields: Any) -> None:
        """Keeps a row, and says so."""
        self.rows.append({"kind": kind, "from": str(start), "to": str(to), **fields})
        if dist.get_rank() == 0:
            text = f"{kind} {start} -> {to}: {fields['pause_s']:.3f} s"
            print(text, file=sys.__stdout__, flush=True)

    def change(self, to: Layout, *, compare: bool = False, **fields: Any) -> None:
        """Changes in the same processes, then takes two steps."""
        job, start = self.job, self.job.config.layout
        plan = plan_of(job.config, to)
        reset_peak()
        self.step()
        step_peak = peak_rss()
        reset_peak()
        dist.barrier()
        outcome = self.mover.move(TrainerHost(job), to, job.state.settings)
        if outcome.kind != "moved":
            raise RuntimeError(f"{start} -> {to}: {outcome.reason}")
        peaks = all_gather_object((peak_rss(), step_peak))
        if compare:
            seconds = exchange(self.mover._group, bytes_between(plan))
            fields["gloo_s"] = max(all_gather_object(seconds))
        self.step()
        fields |= {name: getattr(outcome, name) for name in ("wire_bytes", "minimum_bytes")}
        fields["state_bytes"] = BYTES_PER_ELEMENT * sum(r.numel for own in plan.target for r in own)
        fields["peak_rss"], fields["step_peak_rss"] = map(max, zip(*peaks))
        fields |= {"step_s": self.step(), "phases": outcome.phases}
        self.note("change", start, to, pause_s=outcome.pause_s, **fields)

    def save(self) -> float:
        job = self.job
        dist.barrier()
        begin = time.monotonic()
        job.checkpointer.save(job.model, job.optimizer, job.scheduler, job.state)
        return time.monotonic() - begin

    def restart(self, to: Layout, **fields: Any) -> None:
        """Saves, and takes one step under another layout in new processes; this job stays as it
        is. That the old processes end is not counted."""
        start = self.job.config.layout
        dist.barrier()
        begin = time.monotonic()
        save_s = self.save()
        found = None
        if dist.get_rank() == 0:
            loaded, started, stepped = self._launch(to)
            found = {
                "save": save_s,
                "start and check": started - begin - save_s,
                "build and load": loaded - started,
                "data and first step": stepped - loaded,
            }
        parts = broadcast_from_rank0(found)
        self.step()
        self.note("restart", start, to, pause_s=sum(parts.values()), phases=parts, **fields)

    def _launch(self, to: Layout) -> tuple[float, float, float]:
        """Runs the trainer for one step in new processes.

        Returns:
            When it had loaded, when it had opened its record, and when it had taken the step.
        """
        run_dir = Path(tempfile.mkdtemp(dir=self.folder))
        root = self.job.config.checkpoint.save
        own = [*self.flags, "--load", root, "--run-dir", run_dir, "--exit-interval", 1]
        own += ["--tensor-model-parallel-size", to.tp, "--pipeline-model-parallel-size", to.pp]
        own += ["--sequence-parallel"] if to.tp > 1 else []
        program = [TRAINER, *map(str, own)]
        if self.launcher == "usual":
            program = ["--no-python", sys.executable, "-c", _USUAL_START, *program]
        env = {k: v for k, v in os.environ.items() if not k.startswith(_OF_A_LAUNCH)}
        loaded = 0.0
        with (run_dir / "errors").open("w") as errors:
            how = {"cwd": ROOT, "env": env, "text": True, "stderr": errors}
            child = subprocess.Popen(torchrun(2, *program), stdout=subprocess.PIPE, **how)
            for line in child.stdout or ():
                if line.startswith("loaded "):
                    loaded = time.monotonic()
        if child.wait():
            raise RuntimeError((run_dir / "errors").read_text()[-3000:])
        records = list(read_metrics(run_dir))
        shutil.rmtree(run_dir)
        at = {r["kind"]: r["m"] for r in records if r["kind"] in ("run.start", "step")}
        return loaded, at["run.start"], at["step"]

    def go_to(self, layout: Layout) -> None:
        if self.job.config.layout != layout:
            self.mover.move(TrainerHost(self.job), layout, self.job.state.settings)
            self.step()

    def all_changes(self, repeats: int) -> None:
        """Every ordered pair in the same processes, and bare gloo after each."""
        for repeat in range(repeats):
            for to in walk(LAYOUTS)[1:]:
                self.change(to, compare=True, repeat=repeat)

    def all_restarts(self, repeats: int) -> None:
        """Every ordered pair both ways, alternating."""
        for repeat in range(repeats):
            for i, a in enumerate(LAYOUTS):
                for b in LAYOUTS[i + 1 :]:
                    self.go_to(a)
                    self.step()
                    self.change(b, repeat=repeat)
                    for to in (a, b):
                        self.restart(to, repeat=repeat)
                    self.change(a, repeat=repeat)


def by_pair(rows: Rows) -> dict[str, Rows]:
    """The rows of each ordered pair of layouts."""
    pairs: dict[str, Rows] = {}
    for row in rows:
        pairs.setdefault(f"{row['from']} -> {row['to']}", []).append(row)
    return pairs


def medians(rows: Rows) -> dict[str, Any]:
    """Medians of the numbers of some rows, phase by phase."""
    names = [k for k, v in rows[0].items() if isinstance(v, int | float) and k != "repeat"]
    phases = {p: statistics.median(r["phases"][p] for r in rows) for p in rows[0]["phases"]}
    numbers = {name: statistics.median(r[name] for r in rows) for name in names}
    pauses = [r["pause_s"] for r in rows]
    return {**numbers, "pause_range_s": [min(pauses), max(pauses)], "phases": phases}


def summary_of_changes(rows: Rows) -> dict[str, Any]:
    """Bytes against the least possible, and the transfer against bare gloo, without and with the
    copies of what stays on a rank."""

    def against_gloo(*phases: str) -> dict[str, float]:
        sides = [
            {
                "gloo": {"rate": r["wire_bytes"] / r["gloo_s"]},
                "transfer": {"rate": r["wire_bytes"] / sum(r["phases"][p] for p in phases)},
            }
            for r in rows
        ]
        return ratio_summary(sides, "rate", of="transfer", to="gloo")

    bandwidth = against_gloo("transfer")
    worst = max(r["wire_bytes"] / r["minimum_bytes"] for r in rows)
    return {
        "pairs": {pair: medians(some) for pair, some in by_pair(rows).items()},
        "bandwidth": bandwidth,
        "bandwidth_with_copies": against_gloo("copy", "transfer"),
        "state_bytes": rows[0]["state_bytes"],
        "worst_bytes_ratio": worst,
        "worst_peak_over_step_peak": max(r["peak_rss"] / r["step_peak_rss"] for r in rows),
    }


def summary_of_restarts(rows: Rows) -> dict[str, Any]:
    """How many times longer the job stands still when it is restarted.

    `ratio` compares the pause with the time from the save to the first step of the new processes,
    less a usual step.
    """
    by_kind = {
        kind: by_pair([row for row in rows if row["kind"] == kind])
        for kind in ("change", "restart")
    }
    steps: dict[str, list[float]] = {}
    for row in rows:
        if "step_s" in row:
            steps.setdefault(row["to"], []).append(row["step_s"])
    usual = {layout: statistics.median(some) for layout, some in steps.items()}
    sides = []
    for pair in by_kind["restart"]:
        for change, restart in zip(by_kind["change"][pair], by_kind["restart"][pair], strict=True):
            usual_s = usual[change["to"]]
            both = {"change": change["pause_s"], "restart": restart["pause_s"] - usual_s}
            sides.append({name: {"pause_s": s} for name, s in both.items()})
    ratio = ratio_summary(sides, "pause_s", of="restart", to="change")
    pairs = {
        kind: {pair: medians(some) for pair, some in of.items()} for kind, of in by_kind.items()
    }
    return {
        "pairs": pairs,
        "usual_step_s": usual,
        "ratio": ratio,
    }


SECTIONS = {"changes": summary_of_changes, "restarts": summary_of_restarts}


def worker(section: str, output: Path, count: int, launcher: str, flags: list[str]) -> None:
    """Runs one section on this rank; rank 0 writes its rows."""
    set_process_defaults()
    torch.set_num_threads(1)
    folder = output.parent / section
    folder.mkdir(exist_ok=True)
    places = ["--save", folder / "checkpoints", "--run-dir", folder / "run"]
    # Only the last two checkpoints stay.
    places += ["--save-interval", 10**9, "--save-retain-interval", 10**9]

    def act(job: Any, mover: InProcessResharder) -> None:
        bench = Bench(job, mover, flags=flags, launcher=launcher, folder=folder)
        {"changes": bench.all_changes, "restarts": bench.all_restarts}[section](count)
        if dist.get_rank() == 0:
            output.write_text(json.dumps(bench.rows))

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        config = resolve(parse_args([*flags, *map(str, places)]), int(os.environ["WORLD_SIZE"]))
        pretrain(config, [Measuring(act)])


def main() -> None:
    p = arguments(__doc__, "relayout_cost.json")
    p.add_argument("sections", nargs="+", choices=SECTIONS)
    p.add_argument("--size", choices=SIZES, default="20M", help="parameters of the model")
    p.add_argument("--repeats", type=int, default=5, help="of every ordered pair")
    usual = "of new processes; usual: megatron-core is imported as it is"
    p.add_argument("--launcher", choices=("torchrun", "usual"), default="torchrun", help=usual)
    args = p.parse_args()
    for section in args.sections:
        how = {"repeats": args.repeats, "launcher": args.launcher, **origin()}
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "rows.json"
            words = [section, output, args.repeats, args.launcher, *COMMON.split()]
            words += [
                *SIZES[args.size].split(),
                "--data-path",
                make_dataset(output.with_name("data")),
            ]
            command = torchrun(2, "-m", "bench.relayout_cost", "--worker", *words)
            if subprocess.run(command, cwd=ROOT).returncode:
                raise SystemExit(f"{section} failed")
            rows = json.loads(output.read_text())
        found, place = SECTIONS[section](rows), f"{args.size}, 2 ranks"
        result = json.loads(args.output.read_text()) if args.output.exists() else {}
        result.setdefault("what", "seconds and bytes of changes of layout; see bench/relayout_cost")
        result.setdefault(section, {})[place] = {**found, **how, "rows": rows}
        args.output.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps({section: {place: {**found, "pairs": "..."}}}, indent=1), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5], sys.argv[6:])
    else:
        main()
