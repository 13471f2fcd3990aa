"""torch's launcher for the ranks of one launch on one node: a process of its own, which dies with
the supervisor and takes the ranks along. Says in a file how they ended.

python -m copus_ext.launch.ranks --launch NAME ... -- PROGRAM FLAGS
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from copus_ext.launch.cause import Failure, first_line, root_of, shortened, told_apart
from copus_ext.launch.say import say
from copus_ext.launch.workers import REPORT, end_launch
from megatron.training.checkpoint.files import write_atomically
from megatron.training.common.control import SUPERVISOR_VARIABLE
from megatron.training.resilience.env_checks import no_collection

_LEFT_ALONE = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Schedulers send these to every process of a job; ranks and supervisor answer them."""
_PARENT_LOOK_S = 0.2


def main(argv: list[str]) -> int:
    """Runs the ranks of this node to their end.

    Returns:
        0, or the code of the rank that failed first, 128 + N after signal N.
    """
    at = argv.index("--")
    options, command = _parser().parse_args(argv[:at]), argv[at + 1 :]
    _end_with(options.parent, options.launch)
    for number in _LEFT_ALONE:
        # A function: what is ignored would stay ignored in the ranks.
        signal.signal(number, _pass)
    failures = _run(options, command)
    failure = root_of(failures)
    code = 0 if failure is None else failure.exit_code or 1
    report = {"code": code, "failure": None if failure is None else failure.to_json()}
    write_atomically(Path(options.folder) / REPORT, json.dumps(report))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--launch", required=True, help="name of the launch")
    parser.add_argument("--node", type=int, required=True, help="number of this node")
    parser.add_argument("--nodes", type=int, required=True, help="nodes that take part")
    parser.add_argument("--position", type=int, required=True, help="of this node among those")
    parser.add_argument("--processes", type=int, required=True, help="ranks on this node")
    parser.add_argument("--endpoint", required=True, help="host:port of the first node")
    parser.add_argument("--folder", required=True, help="for the report and for errors of ranks")
    parser.add_argument("--parent", type=int, required=True, help="the supervisor's process id")
    return parser


def _run(options: argparse.Namespace, command: list[str]) -> list[Failure]:
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with no_collection():
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # It tells each end in its own words, also those that are no failures; the supervisor says it.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    # Ranks go by the order of nodes under the static backend; alone a node needs no fixed port.
    is_alone = options.nodes == 1
    config = LaunchConfig(
        min_nodes=options.nodes,
        max_nodes=options.nodes,
        nproc_per_node=options.processes,
        run_id=options.launch,
        rdzv_backend="c10d" if is_alone else "static",
        rdzv_endpoint="127.0.0.1:0" if is_alone else options.endpoint,
        rdzv_configs={} if is_alone else {"rank": options.position},
        local_addr="127.0.0.1" if is_alone else None,
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGINT",
        logs_specs=DefaultLogsSpecs(log_dir=options.folder),
    )
    try:
        elastic_launch(config, sys.executable)("-u", *command)
    except ChildFailedError as error:
        failures, hung = told_apart([_failure(rank, one) for rank, one in error.failures.items()])
        for one in hung:
            say(f"rank {one.rank} hung: it did not answer SIGTERM when another had failed")
        return failures
    except SignalException as error:
        return [_own(-int(error.sigval), "")]
    except Exception as error:  # no rendezvous, no port, no program: torch raises many kinds
        return [_own(1, f"{type(error).__name__}: {error}")]
    return []


def _failure(rank: int, failure: Any) -> Failure:
    """Of a rank, with the error that it left in torch's form."""
    error, text, seconds = "", "", float(failure.timestamp)
    if isinstance(failure.message, dict):
        more = failure.message.get("extraInfo") or {}
        error, text = str(failure.message.get("message", "")), str(more.get("py_callstack", ""))
        if isinstance(more.get("time"), float):
            seconds = more["time"]
    return Failure(
        rank=rank,
        host=platform.node()[:500],
        code=failure.exitcode,
        time_s=seconds,
        error=first_line(error),
        traceback=shortened(text),
    )


def _own(code: int, error: str) -> Failure:
    host, now = platform.node()[:500], time.time()
    return Failure(rank=-1, host=host, code=code, time_s=now, error=first_line(error))


def _end_with(parent: int, launch: str) -> None:
    """Ends the launch when the supervisor has gone, however it went."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_LOOK_S)
        end_launch(launch, os.environ.get(SUPERVISOR_VARIABLE, ""))
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _pass(number: int, frame: Any) -> None:
    """Does nothing."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
