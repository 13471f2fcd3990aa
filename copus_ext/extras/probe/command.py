"""Times the links between all pairs of nodes, and writes a cluster file.

srun --ntasks-per-node 1 copus probe-links --cluster h100-80g:64 --output cluster.json

Start it on every node, with srun or torchrun; of several processes on a node the first one probes.
Every round pairs all nodes, so that n nodes take n - 1 rounds, and a few once more where a single
link looks slow. OUTPUT.rounds.json keeps each finished round, and --resume goes on with it. Slow
links and nodes are named.
Exit codes: 0 done, 1 something is slow and --strict was given, or the first node has gone, 2 wrong
usage, 3 links gave no answer (no cluster file), 5 a file cannot be read or written, 130 stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from copus_ext.cost_model.cluster_spec import ClusterSpec, here, preset
from copus_ext.cost_model.spec_file import SpecError, quantity
from copus_ext.extras.probe import session
from copus_ext.extras.probe.findings import find, table
from copus_ext.extras.probe.record import LinkRecord, cluster_text
from copus_ext.extras.probe.session import Place, Settings, Silence
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.optional import require
from megatron.trainer.common.output_file import write_output
from megatron.trainer.common.program import CommandParser, other_command, tell

_NAME = "copus probe-links"
_SIZES = {
    "gloo": "8,4KiB,64KiB,1MiB,4MiB,16MiB",
    "nccl": "8,4KiB,64KiB,1MiB,16MiB,64MiB,256MiB",
}
_MAX_BYTES = 1 << 32
_LEAVE_S = 5.0


class Stopped(BaseException):
    """A signal asks for the end."""


def parser() -> argparse.ArgumentParser:
    p = CommandParser(
        prog=_NAME,
        description=(__doc__ or "").splitlines()[0],
    )
    p.add_argument("--output", type=Path, required=True, metavar="FILE", help="cluster file")
    p.add_argument(
        "--cluster",
        default="here",
        help="GPUs and links inside nodes: KIND:GPUS such as h100-80g:64, a JSON file, or here",
    )
    p.add_argument("--backend", choices=("auto", *_SIZES), default="auto")
    p.add_argument(
        "--sizes", help="message sizes, such as 8,64KiB,16MiB; the first gives the latency"
    )
    p.add_argument(
        "--repeats", type=int, default=7, help="messages of each size; the median counts"
    )
    p.add_argument("--pair-seconds", type=float, default=4.0, help="limit for a pair")
    p.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        help="seconds without an answer before a link is given up",
    )
    p.add_argument(
        "--expect",
        metavar="RATE",
        help="expected bandwidth, such as 25GB/s; below half of it a link is slow",
    )
    p.add_argument("--strict", action="store_true", help="exit with 1 if something is slow")
    p.add_argument("--resume", action="store_true", help="resume an interrupted probe")
    p.add_argument("--every-rank", action="store_true", help="count every process as a node")
    return p


def settings_of(args: argparse.Namespace) -> Settings:
    """How links are to be timed.

    Raises:
        UsageError: a flag has a value that cannot be.
    """
    backend = args.backend
    if backend == "auto":
        import torch

        backend = "nccl" if torch.cuda.is_available() else "gloo"
    text = args.sizes or _SIZES[backend]
    try:
        sizes = [quantity(part) for part in text.split(",")]
    except SpecError as error:
        raise UsageError(f"--sizes {text}: {error}") from error
    whole = all(size == int(size) and 1 <= size <= _MAX_BYTES for size in sizes)
    if not whole or len(sizes) < 2 or sizes != sorted(set(sizes)):
        raise UsageError(f"--sizes {text}: give 2 or more that grow, from 1 to 4GiB")
    for flag in ("repeats", "pair_seconds", "timeout"):
        if not 0 < getattr(args, flag) <= 86400:
            name = flag.replace("_", "-")
            raise UsageError(f"--{name} {getattr(args, flag)} must be above 0 and at most 86400")
    return Settings(
        backend=backend,
        sizes=tuple(int(size) for size in sizes),
        repeats=args.repeats,
        pair_s=args.pair_seconds,
        timeout_s=args.timeout,
    )


def base_of(text: str) -> ClusterSpec:
    """GPUs and links inside nodes.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        if text == "here":
            return here()
        return ClusterSpec.load(Path(text)) if text.endswith(".json") else preset(text)
    except (SpecError, UnicodeDecodeError) as error:
        raise UsageError(str(error)) from error


def expected_of(text: str | None) -> float | None:
    """Bandwidth that every link should have.

    Raises:
        UsageError: it is none.
    """
    try:
        if text is None or (rate := quantity(text)) > 0:
            return None if text is None else rate
    except SpecError:
        pass
    raise UsageError(f"--expect {text}: write a bandwidth such as 25GB/s or 200Gb/s")


def say(line: str) -> None:
    tell(_NAME, line)


def lead(args: argparse.Namespace, store: Any, place: Place) -> int:
    """The first node's part; returns the exit code."""
    settings, base = settings_of(args), base_of(args.cluster)
    expected = expected_of(args.expect)
    ranks, hosts = session.gather(store, place.world_size, args.timeout)
    if len(hosts) < 2:
        raise UsageError(
            f"all {place.world_size} processes run on 1 node, which has no link to another; start "
            "on 2 nodes or more, or give --every-rank to time the links between processes"
        )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    path = args.output.with_name(f"{args.output.name}.rounds.json")
    how = {"backend": settings.backend, "sizes": list(settings.sizes)}
    record = LinkRecord(path, hosts, how)
    if args.resume and path.with_suffix(".jsonl").exists() and not path.exists():
        say(f"note: {path.with_suffix('.jsonl')} is of an earlier version; the probe starts again")
    record.begin(resume=args.resume)
    rounds = session.without(session.tournament(len(hosts)), record.pairs)
    max_s = len(rounds) * settings.max_s
    say(f"{len(hosts)} nodes, {settings.backend}, {len(rounds)} rounds, {max_s:.0f} s at most")
    session.announce(store, ranks, settings)
    leads = session.Lead(store=store, settings=settings, place=place, record=record, say=say)
    try:
        lost = leads.time_all(rounds, expected=expected)
    finally:
        # Also after a signal: what is known is kept and shown.
        record.flush()
        lines = show(record, expected)
    for host in lost:
        say(f"error: {host} has gone or hangs; the probe ends here")
    if lost or record.silent:
        for (a, b), why in sorted(record.silent.items()):
            say(f"error: no answer between {hosts[a]} and {hosts[b]}: {why}")
        say(
            f"error: {args.output} is not written, as links are missing; mend them (or name the "
            f"network's device in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME), then go on with "
            f"--resume: {path} keeps the others"
        )
        return 3
    write_output(args.output, cluster_text(record.cluster(base)))
    record.done()
    print(
        f"{args.output}: links of {len(hosts)} nodes, for --cluster of {other_command('plan.py')}"
    )
    return 1 if lines and args.strict else 0


def show(record: LinkRecord, expected: float | None) -> tuple[str, ...]:
    """Prints what is known and what is slow; returns the lines on the latter."""
    speeds, delays = record.matrices()
    print(table(speeds, delays, record.hosts))
    if record.duplex < 1:
        print(f"while a link is used both ways, {100 * record.duplex:.0f} % of it is left each way")
    found = find(speeds, delays, record.hosts, expected=expected)
    for line in found.lines:
        print(f"warning: {line}")
    sys.stdout.flush()
    return found.lines


def probe(args: argparse.Namespace) -> int:
    """Finds the others and does this process's part; returns the exit code."""
    from copus_ext.launch.rank_side import adopt_srun

    require("scipy", extra="fit", what="probe-links")
    adopt_srun()
    place = session.place_of(os.environ, every_rank=args.every_rank)
    store = session.find_store(args.timeout)
    session.introduce(store, place)
    if place.rank:
        session.take_part(store, place, 2 * args.timeout)
        return 0
    leave_s = _LEAVE_S
    try:
        return lead(args, store, place)
    except Stopped:
        leave_s = 1.0
        raise
    finally:
        with contextlib.suppress(Exception):
            session.dismiss(store, place.world_size, leave_s)


def _stop(number: int, _frame: Any) -> NoReturn:
    for one in _SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    raise Stopped(number)


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(argv: list[str] | None = None) -> int:
    """Probes; returns the exit code, or ends the process with it if something hangs."""
    code = answer(parser().parse_args(argv))
    if threading.active_count() > 1:
        # A thread hangs in a link that gives no answer.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def answer(args: argparse.Namespace) -> int:
    """Probes, and turns problems into one line and an exit code."""
    for number in _SIGNALS:
        signal.signal(number, _stop)
    leads = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    try:
        return probe(args)
    except Stopped as stop:
        if leads:
            say("stopped; what was finished is kept, go on with --resume")
        return 128 + stop.args[0]
    except (UsageError, SpecError) as error:
        say(f"error: {error}")
        return 2
    except OSError as error:
        say(f"error: {error}")
        return 5
    except (Silence, RuntimeError) as error:
        # The store of a first node that has gone answers nothing.
        say(f"error: {error}" if leads else "error: the first node has gone")
        return 3 if leads else 1


if __name__ == "__main__":
    sys.exit(main())
