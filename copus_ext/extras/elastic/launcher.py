"""The flags of an elastic launch, and what starts and runs its ranks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from copus_ext.extras.elastic.environment import (
    COPY_INTERVAL,
    COPY_INTERVAL_VARIABLE,
    PIPE_VARIABLE,
    RESIZE_VARIABLE,
)
from copus_ext.launch.launchers import Launcher, Runner
from megatron.trainer.common.errors import UsageError

_MAX_COPY_INTERVAL = 1 << 20


class Elastic:
    flag = "--elastic"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add(
            "--elastic",
            action="store_true",
            help="go on without restart when ranks or nodes are lost, and take them in again; each "
            "rank keeps its state and that of a rank on another node in memory",
        )
        words = f"with --elastic: steps between copies ({COPY_INTERVAL})"
        add("--copy-interval", type=int, help=words)
        words = "with --elastic: run where the run asks for another number of ranks"
        add("--resize-command", help=words)

    def launcher(self, given: argparse.Namespace) -> Launcher | None:
        if not given.elastic:
            for flag in ("copy_interval", "resize_command"):
                if getattr(given, flag) is not None:
                    raise UsageError(f"--{flag.replace('_', '-')} needs --elastic")
            return None
        interval = COPY_INTERVAL if given.copy_interval is None else given.copy_interval
        if not 1 <= interval <= _MAX_COPY_INTERVAL:
            raise UsageError(
                f"--copy-interval {interval} must be between 1 and {_MAX_COPY_INTERVAL}"
            )
        environment = {COPY_INTERVAL_VARIABLE: str(interval)}
        if given.resize_command is not None:
            environment[RESIZE_VARIABLE] = given.resize_command
        return Launcher(
            module="copus_ext.extras.elastic.node", folder="elastic", environment=environment
        )

    def runner(self, environment: Mapping[str, str]) -> Runner | None:
        if PIPE_VARIABLE not in environment:
            return None
        from copus_ext.extras.elastic.run import run_elastic

        return run_elastic
