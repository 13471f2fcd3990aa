"""Launchers that extras bring in place of torch's: their launches go on when ranks or nodes are
lost, and take in those that come."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.extras import extras_with

if TYPE_CHECKING:
    from megatron.trainer.checkpoint.load import Stored
    from megatron.trainer.resilience.exit_status import RunOutcome
    from megatron.trainer.train.callbacks import Callback


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """What starts the ranks of each node."""

    module: str
    """Run as `python -m`; it hands its words to `copus_ext.launch.workers.main`."""
    folder: str
    """Name of a folder in `control` of the run's directory, where the launchers of all nodes
    agree: `Launch.shared` is one in it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for the launcher and its ranks."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a rank begins to train with, once or several times."""

    flags: Sequence[str]
    stored: Stored | None = None
    """State to go on from; None as the flags say."""
    callbacks: Sequence[Callback] = ()
    """Besides those of the flags, after them."""
    on_exit: Callable[[RunOutcome], None] | None = None
    """Told how the run ends; None for the supervisor."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """For the record of the start."""


Train = Callable[[Start], int]
"""Trains in the world that the environment describes; returns the exit code."""
Runner = Callable[[Sequence[str], Train], int]
"""Runs a rank: flags as the user gave them, and how it trains; returns the exit code."""


class LauncherKind(Protocol):
    """How an extra starts ranks. Making it imports no torch."""

    flag: str
    """Flag of the supervisor that asks for it."""

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Adds `flag` and others to the command line of the supervisor."""
        ...

    def launcher(self, given: argparse.Namespace) -> Launcher | None:
        """What the parsed flags ask for; None where it is not this one.

        Raises:
            UsageError: one line with the flag and the fix.
        """
        ...

    def runner(self, environment: Mapping[str, str]) -> Runner | None:
        """What runs this rank; None where another launcher has started it."""
        ...


def launcher_kinds() -> list[LauncherKind]:
    """Those of all extras that are there."""
    return [kind() for _, kind in extras_with("launcher")]


def launcher_of(given: argparse.Namespace) -> Launcher | None:
    """The launcher that the parsed flags of a supervisor ask for; None for torch's.

    Raises:
        UsageError: as `LauncherKind.launcher`, or two are asked for.
    """
    found = {kind.flag: one for kind in launcher_kinds() if (one := kind.launcher(given))}
    if len(found) > 1:
        raise UsageError(f"{' and '.join(found)} exclude each other; drop one")
    return next(iter(found.values()), None)


def runner_of(environment: Mapping[str, str]) -> Runner | None:
    """What runs this rank; None where torch's launcher, or none, has started it."""
    made = (kind.runner(environment) for kind in launcher_kinds())
    return next((one for one in made if one is not None), None)
