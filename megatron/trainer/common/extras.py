"""Extras: abilities beside the core, each in a folder of its own. The core never imports one.

An extra is a package with a module `extra` whose `EXTRA` names what it adds: flags, checks, a part
in each step, limits of layouts, costs for the planner, commands. The folders of `PACKAGES` are
searched, and so is the entry point group `copus.extras` of installed packages. Without its folder
an extra is gone, and the rest works on. `docs/decisions/071` says why.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

PACKAGES = ("megatron.trainer.extras", "copus_ext.extras")
"""Where the folders of extras lie: those that the plain trainer needs, and those of `--copus`."""
ENTRY_POINTS = "copus.extras"
"""Group of entry points `name = package.of.the.extra` in other distributions."""


@dataclass(frozen=True, kw_only=True)
class Extra:
    """What one extra adds. Everything but the name is optional.

    A reference is `module:attribute`, its module counted from the package of the extra. It is
    imported only when it is needed, so that an extra that a run does not use costs nothing.
    """

    title: str
    """What it is for, in a few words; the heading of its flags in `--help`."""
    flags: str | None = None
    """Reference to a frozen dataclass with fields made by `option`. Its values are
    `config.extras[name]`, and `config.flat()` holds them by field name."""
    check: str | None = None
    """Reference to a function (draft, environment) that notes problems of the flags, after the
    layout and the kernels of the core are derived."""
    optimizers: tuple[str, ...] = ()
    """Further values of `--optimizer`, which megatron-core builds. The extra's flags that its
    `OptimizerConfig` has fields for go there."""
    in_groups: Mapping[str, str] = field(default_factory=dict)
    """Flags of these optimizers, by field name, whose value comes back with a checkpoint because
    the optimizer keeps it in its parameter groups: the key there."""
    feature: str | None = None
    """Reference to a function (config, model, groups) -> `StepFeature` or None, which is called for
    every layout of the run."""
    layout_problems: str | None = None
    """Reference to a function (arguments, layout) -> list of sentences: why a layout cannot have
    the extra with these flags. Arguments are by field name; torch must not be needed."""
    batch_problems: str | None = None
    """Reference to a function (arguments, layout, micro_batch_size, global_batch_size) -> list of
    sentences: why a layout cannot cut a batch so."""
    schedule_problems: str | None = None
    """Reference to a function (arguments, layout) -> list of sentences: why a launch on a layout
    refuses the batches that the extra plans for a run. Of stored flags, without torch. Only what
    a launch must keep counts."""
    segment: str | None = None
    """Reference to a function (config) -> the `Segment` that the run is in, or None where the extra
    does not divide it."""
    as_given: str | None = None
    """Reference to a function (stored, now) -> the flags of a checkpoint by field name as its first
    launch gave them, for a program with the flags `now`. Without torch."""
    settle: str | None = None
    """Reference to a function (config, stored) -> configuration: once flags are resolved, with
    None, and once what they go on from is known, with the `Stored` checkpoint or None. UsageError
    where the two do not go together."""
    run_data: str | None = None
    """Reference to a function (config, tokenizer, pin_memory=) -> `RunData` in place of that of the
    core, or None. All ranks call it."""
    unpriced: tuple[str, ...] = ()
    """Flags that change the time or memory of a step and that `cost_terms` leaves out, by field
    name."""
    suggests: Mapping[str, Any] = field(default_factory=dict)
    """Flags, by field name, of which a plan says what they would save, and which it never takes.
    They must change neither the memory nor what is legal."""
    planned: str | None = None
    """Reference to a function (arguments) -> flags by field name that the planner keeps, empty
    where the extra is off: numbers that `cost_terms`, `layout_problems` and `batch_problems` read,
    and `transformer_impl` where a launch needs a certain one. UsageError for values that no launch
    takes. None: all numbers among its flags, where one is not its default."""
    cost_terms: str | None = None
    """Reference to a function (candidates) -> `CostTerms`, which the planner calls where it
    keeps a flag of the extra. Candidates have the columns of `ConfigBatch`
    (`copus_ext.cost_model.rows`), each [n] or a scalar, and in `extras` those of its flags. No
    torch."""
    step_period: str | None = None
    """Reference to a function (arguments) -> steps after which its work repeats. The time of a step
    is judged by the mean of so many."""
    controller_problems: str | None = None
    """Reference to a function (arguments, moves) -> list of sentences: why `--copus` cannot read
    the gradients of such a run or, with `moves`, compare its layouts."""
    model_format: str | None = None
    """Reference to a class without arguments, a `ModelFormat` of
    `megatron.trainer.checkpoint.formats`: what checkpoints are converted from and to."""
    plan_commands: Mapping[str, str] = field(default_factory=dict)
    """Commands of `copus plan`: name -> reference to a class without arguments, a `PlanCommand` of
    `copus_ext.planner.commands`. No torch."""
    launcher: str | None = None
    """Reference to a class without arguments, a `LauncherKind` of `copus_ext.launch.launchers`:
    what the supervisor starts ranks with in place of torch's launcher."""
    relaunch: str | None = None
    """Reference to a class without arguments, a `RelaunchSchedule` of `copus_ext.reshard.relaunch`:
    what becomes of flags that name several layouts where a run starts again. No torch."""
    sinks: str | None = None
    """Reference to a function (config, run_dir) -> the log sinks (`Sink` of
    `megatron.trainer.logging.tracker`) that its flags ask for. Rank 0 calls it."""
    callbacks: str | None = None
    """Reference to a function (config, controller) -> callbacks of a run besides the controller,
    which is None without `--copus`. UsageError where the two do not go together."""
    commands: Mapping[str, str] = field(default_factory=dict)
    """Sub-commands of `copus`: name -> module with a `main`, counted from the package."""
    policies: Mapping[str, str] = field(default_factory=dict)
    """Further values of `--copus-policy`: name -> reference to a `Policy` of
    `copus_ext.goodput.policies`."""
    needs: tuple[str, ...] = ()
    """Names of other extras whose modules it imports. Where one is missing, this one is, too."""
    package: str = ""
    """Filled in when the extra is found."""

    @property
    def name(self) -> str:
        return self.package.rpartition(".")[2]

    def get(self, what: str) -> Any:
        """The object that a reference leads to; None where the extra has none.

        Args:
            what: name of the field with the reference.
        """
        reference = getattr(self, what)
        return None if reference is None else self.load(reference)

    def load(self, reference: str) -> Any:
        """The object that `module:attribute` leads to."""
        module, attribute = reference.split(":")
        return getattr(importlib.import_module(f"{self.package}.{module}"), attribute)


@dataclass(frozen=True, kw_only=True)
class CostTerms:
    """What an extra adds to a training step on each rank: [n] candidates, or scalars."""

    parameter_bytes: Any = 0.0
    """Bytes that a rank keeps for each parameter that it holds."""
    layer_bytes: Any = 0.0
    """Bytes that a rank keeps for each of its layers."""
    layer_products: tuple[tuple[Any, Any, Any, Any], ...] = ()
    """Products of matrices that a rank computes for each of its layers after the backward passes:
    how many in the mean of the steps, and their rows, columns and inner length."""
    sent_parameter_bytes: Any = 0.0
    """Bytes that go once round the replicas for each parameter that a rank holds, besides the
    gradients; the mean of the steps."""
    sent_layer_bytes: Any = 0.0
    """The same for each layer of a rank."""
    message_row_bytes: Any = 0.0
    """Bytes of a token's row in a message between stages, in place of those of its numbers; 0:
    these."""
    message_moved_bytes: Any = 0.0
    """Bytes that a rank moves through its memory for each number of a message, to write it and to
    read it; of 2-byte elements."""
    message_kernels: Any = 0.0
    """Kernels that a rank starts to write and to read a message."""


@functools.cache
def extras() -> tuple[Extra, ...]:
    """All extras that are there, in the order of their names."""
    found = _with_folders()
    while left := [e for e in found if not {*e.needs} <= {other.name for other in found}]:
        found = [extra for extra in found if extra not in left]
    return tuple(found)


def left_out() -> list[tuple[Extra, list[str]]]:
    """Each extra that has its folder and is no part of `extras`, and the missing ones it needs."""
    there = {extra.name for extra in extras()}
    found = [extra for extra in _with_folders() if extra.name not in there]
    return [(extra, sorted({*extra.needs} - there)) for extra in found]


def extras_with(what: str) -> list[tuple[Extra, Any]]:
    """Each extra that has a reference, with what that leads to.

    Args:
        what: name of the field with the reference.
    """
    return [(extra, extra.get(what)) for extra in extras() if getattr(extra, what) is not None]


def plan_commands() -> dict[str, Any]:
    """The classes of all `plan_commands` of the extras, by name."""
    return {
        name: extra.load(reference)
        for extra in extras()
        for name, reference in extra.plan_commands.items()
    }


def problems_of(what: str, arguments: Mapping[str, Any], *values: Any) -> list[str]:
    """All sentences of a field `..._problems` of the extras.

    Args:
        what: which field.
        arguments: flags by field name, as derived or as stored.
        values: what the functions take besides.
    """
    return [line for _, find in extras_with(what) for line in find(arguments, *values)]


def as_given(stored: Mapping[str, Any], now: Mapping[str, Any]) -> Mapping[str, Any]:
    """The flags of a checkpoint by field name, as its first launch gave them.

    Args:
        stored: as the checkpoint holds them.
        now: those of the program that reads them.
    """
    for _, given in extras_with("as_given"):
        stored = given(stored, now)
    return stored


def settled(config: Any, stored: Any = None) -> Any:
    """The configuration after what extras make of it; see `Extra.settle`.

    Args:
        stored: the checkpoint that the run goes on from, or None.

    Raises:
        UsageError: the two do not go together.
    """
    for _, settle in extras_with("settle"):
        config = settle(config, stored)
    return config


def step_period(arguments: Mapping[str, Any]) -> int:
    """Steps after which the work of a step repeats: of one in so many that may take longer."""
    return math.lcm(*(period(arguments) for _, period in extras_with("step_period")))


def defaults_of(extra: Extra) -> dict[str, Any]:
    """The flags of an extra by field name, each with its default."""
    flags = extra.get("flags")
    return {} if flags is None else {f.name: f.default for f in fields(flags)}


def without_extras(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of the core alone, by field name, and no optimizer of an extra."""
    own = {name for extra in extras() for name in defaults_of(extra)}
    if any(arguments.get("optimizer") in extra.optimizers for extra in extras()):
        own.add("optimizer")
    return {name: value for name, value in arguments.items() if name not in own}


def _with_folders() -> list[Extra]:
    packages = dict.fromkeys([*_folders(PACKAGES), *_installed()])
    return sorted((_read(package) for package in packages), key=lambda extra: extra.name)


def _folders(packages: Iterable[str]) -> Iterable[str]:
    for package in packages:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for place in (spec.submodule_search_locations or ()) if spec else ():
            for module in sorted(Path(place).glob("*/extra.py")):
                yield f"{package}.{module.parent.name}"


def _installed() -> Iterable[str]:
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            importlib.import_module(f"{point.value}.extra")
        except Exception as error:
            # Of another distribution: its fault must not end every command.
            logger.warning("the installed extra %s is left out: %s", point.name, error)
            continue
        yield point.value


def _read(package: str) -> Extra:
    found = importlib.import_module(f"{package}.extra").EXTRA
    return Extra(**{**vars(found), "package": package})
