"""Checks on this machine what tests cannot: the product on its GPUs, with their libraries.

copus accept --output accept.json

It takes at most eight minutes with one GPU and 45 with several; no GPU has run it yet.
It trains small models on the sources of Python's standard library, in a folder of its own. Each
check has a time limit and gives one line of JSON, the versions first. A check that is not done when
all time is over is left out, and says so. Send the file, whatever it says: docs/gpus.md.
Exit codes: 0 nothing failed, 1 a check failed, 2 wrong usage, 130 stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from copus_ext.extras.accept import many, one
from copus_ext.extras.accept.finding import Check, Failed, Finding, OutOfTime, Skipped
from copus_ext.extras.accept.runs import SIZES, Bench
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.gpus import check_torch_build
from megatron.trainer.common.outside import parse_json
from megatron.trainer.common.program import CommandParser, ending_at_interrupts

_NAME = "copus accept"
CHECKS = (
    Check("implementations", "layers in bf16, and runs that repeat", 1, 200, one.implementations),
    Check("arithmetic", "changes of layout in one process", 1, 100, one.arithmetic),
    Check("noise", "squares of gradients by hooks", 1, 230, one.noise),
    Check("resume", "a stop and a new process", 1, 180, one.resume),
    Check("memory", "peaks as the planner predicts them", 1, 230, one.memory),
    Check("out_of_memory", "the launch after a full GPU", 1, 200, one.out_of_memory),
    Check("throughput", "what the controller costs", 1, 230, one.throughput),
    Check("moves", "two rounds of changes of layout", 2, 1500, many.moves),
    Check("moves_of_experts", "two rounds of a mixture", 2, 900, many.moves_of_experts),
    Check("recovery", "a rank is lost", 2, 500, many.recovery),
    Check("checkpoints", "each layout loads those of all", 2, 900, many.checkpoints),
    Check("noise_of_layouts", "squares in three layouts", 2, 400, many.noise_of_layouts),
    Check("moves_when_full", "changes with a tenth free", 2, 1500, many.moves_when_full),
    Check("communicators", "NCCL's, made early or late", 2, 400, many.communicators),
    Check("speeds", "time and memory of layouts", 2, 800, many.speeds),
)
"""Faults come first, figures last: what time does not suffice for is left out."""
_MINUTES = {True: 8.0, False: 45.0}
"""By whether there is one rank, on GPUs; a CPU has no limit as a whole."""
_LOOK = """
import json, sys
from importlib import metadata
import torch
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
names = ("torch", "megatron-core", "transformer-engine", "apex", "numpy", "triton")
from megatron.trainer.common.optional import have_transformer_engine
print(json.dumps({
    "versions": {"python": sys.version.split()[0], **{name: version(name) for name in names},
                 "cuda": torch.version.cuda, "hip": torch.version.hip,
                 "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None},
    "gpus": [{"name": g.name, "memory_mib": g.total_memory >> 20} for g in gpus],
    "has_engine": have_transformer_engine(),
}))
"""
"""What a child says of this machine, so that this process makes no context on a GPU."""


def parser() -> argparse.ArgumentParser:
    p = CommandParser(prog=_NAME, description=(__doc__ or "").splitlines()[0])
    p.add_argument("--output", type=Path, metavar="FILE", help="file with a line for each check")
    p.add_argument("--checks", metavar="NAME,...", help="only these; --list names all")
    p.add_argument("--list", action="store_true", help="name the checks and end")
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    p.add_argument(
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="ranks: 1, 2, 4 or 8; default: the most that the GPUs suffice for, or 2 on a CPU",
    )
    p.add_argument(
        "--size", choices=("auto", *SIZES), default="auto", help="of models; small on a CPU"
    )
    p.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="for all checks; default: 8 with one GPU, 45 with several, none on a CPU",
    )
    p.add_argument(
        "--megatron-lm", type=Path, metavar="FOLDER", help="a checkout to compare speeds with"
    )
    p.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs there")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Ctrl-C and SIGTERM end what it has started, too."""
    return ending_at_interrupts(_NAME, functools.partial(_run, argv), sigterm=True)


def _run(argv: Sequence[str] | None) -> int:
    args = parser().parse_args(argv)
    if args.list:
        for check in CHECKS:
            print(f"{check.name:18}{check.what}")
        return 0
    chosen = _chosen(args)
    machine = _machine()
    with _folder(args.keep) as folder:
        bench = _bench(args, machine, folder)
        first = {"check": "environment", **machine, "device": bench.device, "ranks": bench.ranks}
        file = _File(args.output)
        file.add(
            {
                **first,
                "size": bench.size,
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }
        )
        print(
            f"{bench.ranks} ranks on {_hardware(machine, bench)}; models: {bench.size}", flush=True
        )
        findings = []
        minutes = args.minutes or _default_minutes(bench)
        end_s = time.monotonic() + 60 * minutes
        for check in chosen:
            started = time.monotonic()
            finding = carry_out(check, bench, end_s)
            seconds = round(time.monotonic() - started, 1)
            findings.append(finding)
            row = {"check": check.name, "verdict": finding.verdict, "seconds": seconds}
            file.add({**row, "line": finding.line, **finding.numbers})
            print(f"{finding.verdict:8}{check.name:18}{seconds:6.1f} s  {finding.line}", flush=True)
        counts = {v: sum(f.verdict == v for f in findings) for v in ("passed", "failed", "skipped")}
        print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + file.place)
        return 1 if counts["failed"] else 0


def carry_out(check: Check, bench: Bench, end_s: float = math.inf) -> Finding:
    """One check within its time.

    Args:
        check: which.
        bench: where.
        end_s: of all checks, on the monotonic clock. One that is not done by then is left out.
    """
    if bench.ranks < check.min_ranks:
        line = f"needs {check.min_ranks} ranks, there is {bench.ranks}"
        return Finding(verdict="skipped", line=line)
    limit_s = check.limit_s * (1 if bench.device == "cuda" else 4)
    bench.deadline_s = min(time.monotonic() + limit_s, end_s)
    late = Finding(verdict="skipped", line="the time for all checks is over; --minutes gives more")
    if bench.deadline_s < time.monotonic():
        return late
    try:
        return check.run(bench)
    except Skipped as reason:
        return Finding(verdict="skipped", line=str(reason))
    except OutOfTime as error:
        if bench.deadline_s == end_s:
            return late
        return Finding(verdict="failed", line=str(error), numbers={"output": error.tail})
    except Failed as error:
        return Finding(verdict="failed", line=str(error), numbers={"output": error.tail})
    except (OSError, LookupError, ValueError, ArithmeticError) as error:
        # A file or a number that a run should have left is not there.
        return Finding(verdict="failed", line=f"{type(error).__name__}: {error}")


def _default_minutes(bench: Bench) -> float:
    return _MINUTES[bench.ranks == 1] if bench.device == "cuda" else math.inf


def _chosen(args: argparse.Namespace) -> list[Check]:
    known = {check.name: check for check in CHECKS}
    names = args.checks.split(",") if args.checks else list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"--checks {unknown[0]} is unknown; there are {', '.join(known)}")
    if args.minutes is not None and args.minutes <= 0:
        raise UsageError(f"--minutes {args.minutes:g} must be above 0")
    return [known[name] for name in names]


def _machine() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True)
    if done.returncode:
        line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UsageError(f"torch or Transformer Engine does not start here: {line}")
    return parse_json(done.stdout.strip().splitlines()[-1])


def _bench(args: argparse.Namespace, machine: dict[str, Any], folder: Path) -> Bench:
    count = len(machine["gpus"])
    check_torch_build(args.device, found=count)
    device = args.device if args.device != "auto" else ("cuda" if count else "cpu")
    if device == "cuda" and not count:
        raise UsageError("--device cuda: torch sees no GPU; give --device cpu")
    ranks = args.nproc_per_node or (most_ranks(count) if device == "cuda" else 2)
    if ranks < 1 or (device == "cuda" and ranks > count):
        raise UsageError(f"--nproc-per-node {ranks} must be from 1 to {count} GPUs")
    if ranks != most_ranks(ranks):
        raise UsageError(f"--nproc-per-node {ranks}: checks have layouts of 1, 2, 4 and 8 ranks")
    if args.megatron_lm is not None and not (args.megatron_lm / "pretrain_gpt.py").is_file():
        raise UsageError(f"--megatron-lm {args.megatron_lm} has no pretrain_gpt.py")
    size = args.size if args.size != "auto" else ("full" if device == "cuda" else "small")
    return Bench(
        folder=folder,
        device=device,
        ranks=ranks,
        size=size,
        megatron_lm=args.megatron_lm and args.megatron_lm.absolute(),
        has_engine=device == "cuda" and machine["has_engine"],
    )


def most_ranks(count: int) -> int:
    """The most of so many ranks for which the checks have layouts and batches."""
    return max((ranks for ranks in (1, 2, 4, 8) if ranks <= count), default=1)


def _hardware(machine: dict[str, Any], bench: Bench) -> str:
    names = {gpu["name"] for gpu in machine["gpus"]} if bench.device == "cuda" else set()
    return ", ".join(sorted(names)) or f"{os.cpu_count()} CPU cores"


@contextlib.contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is None:
        with tempfile.TemporaryDirectory(prefix="copus-accept-") as folder:
            yield Path(folder)
        return
    if kept.exists() and any(kept.iterdir()):
        raise UsageError(f"--keep {kept} is not empty; name a new folder")
    kept.mkdir(parents=True, exist_ok=True)
    yield kept.absolute()


class _File:
    """The file of results: each line is there as soon as its check has ended."""

    def __init__(self, output: Path | None) -> None:
        self._path = output
        if output is not None:
            try:
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_text("")
            except OSError as error:
                raise UsageError(
                    f"--output {output} cannot be written: {error.strerror}"
                ) from error

    def add(self, row: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    @property
    def place(self) -> str:
        return "" if self._path is None else f"; written to {self._path}"


if __name__ == "__main__":
    sys.exit(main())
