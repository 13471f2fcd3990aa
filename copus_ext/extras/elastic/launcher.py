"""The flags of an elastic launch, and what starts and runs its ranks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from copus_ext.extras.elastic import environment as named
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
        words = f"with --elastic: steps between copies ({named.COPY_INTERVAL})"
        add("--copy-interval", type=int, help=words)
        add("--resize-command", help="with --elastic: run where the run asks for other ranks")

    def launcher(self, given: argparse.Namespace) -> Launcher | None:
        if not given.elastic:
            for flag in ("copy_interval", "resize_command"):
                if getattr(given, flag) is not None:
                    raise UsageError(f"--{flag.replace('_', '-')} needs --elastic")
            return None
        interval = named.COPY_INTERVAL if given.copy_interval is None else given.copy_interval
        if not 1 <= interval <= _MAX_COPY_INTERVAL:
            raise UsageError(f"--copy-interval {interval} must be from 1 to {_MAX_COPY_INTERVAL}")
        environment = {named.COPY_INTERVAL_VARIABLE: str(interval)}
        if given.resize_command is not None:
            environment[named.RESIZE_VARIABLE] = given.resize_command
        return Launcher(
            module="copus_ext.extras.elastic.node", folder="elastic", environment=environment
        )

    def runner(self, environment: Mapping[str, str]) -> Runner | None:
        if named.PIPE_VARIABLE not in environment:
            return None
        from copus_ext.extras.elastic.run import run_elastic

        return run_elastic
