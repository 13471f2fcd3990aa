"""The command line: a parser made from the configuration dataclasses, and `resolve` to `Config`."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.extras import as_given, extras, settled
from megatron.trainer.common.program import with_hint
from megatron.trainer.config import GROUPS, Config, ModelConfig, MoeConfig
from megatron.trainer.config.batch_schedule import BatchSchedule
from megatron.trainer.config.derive import derive
from megatron.trainer.config.draft import Draft, Environment
from megatron.trainer.config.fields import OptionSpec, option_specs
from megatron.trainer.config.flag_names import nearest_flag, settings_of_files
from megatron.trainer.config.known_flags import (
    KnownFlag,
    known_flags,
    notes_of,
    of_forks,
    refused_beginnings,
)
from megatron.trainer.config.logging import profile_problems
from megatron.trainer.config.training import AUTO

TITLES = {
    "model": "model shape",
    "moe": "mixture of experts",
    "kernels": "implementation and fused kernels",
    "batch": "batch and length",
    "optim": "learning rate and optimizer",
    "precision": "precision",
    "parallel": "parallelism",
    "recompute": "activation recomputation",
    "data": "data and tokenizer",
    "checkpoint": "checkpoint",
    "logging": "logging",
    "runtime": "runtime",
    **{extra.name: extra.title for extra in extras()},
}
"""Name of a group of flags -> its title in `--help`."""

_TOO_FEW = ("argument", "arguments")
"""How argparse's complaint about missing values ends."""
_TOO_MANY = "ignored explicit argument"
"""What argparse says of a switch that is given a value."""


class Parser(argparse.ArgumentParser):
    """Raises instead of leaving the process, so that one place prints problems and picks the
    exit code."""

    def error(self, message: str) -> NoReturn:
        text = with_hint(self, message).removeprefix("argument ")
        if text.endswith(_TOO_FEW):
            text += "; give as many"
        elif _TOO_MANY in text:
            text = text.replace(_TOO_MANY, "it takes no value; remove")
        raise UsageError(text)


def add_checkpoint_flags(p: Any) -> None:
    """Flags of a command that reads a checkpoint: which one, and whether it may be unverified."""
    p.add_argument("--ckpt-step", type=int, metavar="N", help="iteration; default: the latest one")
    words = "accept a checkpoint of COPUS without its manifest; damage is not detected then"
    p.add_argument("--ckpt-trust-unverified", action="store_true", help=words)


def _reader(spec: OptionSpec) -> Callable[[str], Any]:
    """What argparse calls with each value; argparse itself checks the choices."""

    def read(text: str) -> Any:
        try:
            return dataclasses.replace(spec, choices=None).read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def build_parser(
    extra_groups: Mapping[str, type] | None = None, *, prog: str | None = None
) -> Parser:
    """Makes the parser of all implemented flags.

    Absent flags leave no attribute behind; `parse_args` fills in the defaults.

    Args:
        extra_groups: title -> dataclass with `option` fields, for flags of other packages.
        prog: name in the usage line; None takes that of the process.
    """
    parser = Parser(
        prog=prog,
        description="Pre-train a GPT on megatron-core with the flags of Megatron-LM.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    groups = {TITLES[name]: group for name, group in GROUPS.items()} | dict(extra_groups or {})
    for title, group in groups.items():
        section = parser.add_argument_group(title)
        for spec in option_specs(group):
            if spec.in_file is None:
                _add_option(section, spec)
    return parser


def _add_option(section: Any, spec: OptionSpec) -> None:
    text = spec.help.replace("%", "%%")
    settings: dict[str, Any] = {"dest": spec.dest, "default": argparse.SUPPRESS}
    if spec.kind is bool:
        settings["action"] = "store_false" if spec.default else "store_true"
        turns_off = spec.default and not text.startswith("Accepted")
        settings["help"] = f"Turn off: {text[:1].lower()}{text[1:]}" if turns_off else text
    else:
        settings |= {"type": _reader(spec), "choices": spec.choices, "nargs": spec.nargs}
        shown = spec.default not in (None, ()) and "Default" not in text
        required = " Required." if spec.required else ""
        settings["help"] = f"{text}{required}" + (f" Default: {spec.default}." if shown else "")
        if spec.choices is None:
            settings["metavar"] = {int: "N", float: "X", str: "TEXT"}[spec.kind]
            settings["metavar"] += f"|{spec.word}" if spec.word else ""
    section.add_argument(*spec.strings, **settings)


def parse_args(
    argv: Sequence[str] | None = None,
    extra_groups: Mapping[str, type] | None = None,
    *,
    prog: str | None = None,
) -> argparse.Namespace:
    """Reads a command line.

    Args:
        argv: arguments without the program name; None takes those of the process.
        extra_groups: title -> dataclass with `option` fields, for flags of other packages.
        prog: name in the usage line; None takes that of the process.

    Returns:
        One attribute per flag, named as in Megatron-LM, with the default where the flag is absent;
        and `explicit_flags` (frozenset of the names given) and `ignored_flags` (tuple of option
        strings without effect).

    Raises:
        UsageError: an unknown flag, a refused flag or a value of the wrong kind.
    """
    parser, known = _parser_of_all(tuple((extra_groups or {}).items()), prog), known_flags()
    found, rest = parser.parse_known_args(argv)
    given = vars(found)
    asked = {known[n]: given.pop(n) for n in list(given) if n in known}
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    names = {s for action in shown for s in action.option_strings if s != "-h"} | set(known)
    groups = [*GROUPS.values(), *(extra_groups or {}).values()]
    if problems := [*_refusals(asked), *_unknown(rest, names, settings_of_files(groups))]:
        raise UsageError("\n".join(problems))
    ignored = tuple(flag.name for flag, value in asked.items() if _has_a_say(flag, value))

    values: dict[str, Any] = {}
    for spec in (spec for group in groups for spec in option_specs(group)):
        value = given.get(spec.dest, spec.default)
        values[spec.dest] = tuple(value) if isinstance(value, list) else value
    return argparse.Namespace(
        **values,
        explicit_flags=frozenset(given),
        ignored_flags=ignored,
    )


@functools.cache
def _parser_of_all(groups: tuple[tuple[str, type], ...], prog: str | None) -> Parser:
    """Makes the parser of implemented and known flags, once: that takes longer than to parse."""
    parser = build_parser(dict(groups), prog=prog)
    section = parser.add_argument_group("known")
    for flag in known_flags().values():
        settings: dict[str, Any] = {"action": "append_const", "const": flag.name}
        if flag.nargs != 0:
            settings = {"nargs": flag.nargs, "choices": flag.choices}
        section.add_argument(flag.name, dest=flag.name, help=argparse.SUPPRESS, **settings)
    return parser


def _values(flag: KnownFlag, value: Any) -> list[str]:
    if flag.nargs == 0 or value is None:
        return []
    return value if isinstance(value, list) else [value]


def _has_a_say(flag: KnownFlag, value: Any) -> bool:
    """Whether a flag asks for something that it does not get."""
    return flag.asks_for_something(_values(flag, value))


def _refusals(given: Mapping[KnownFlag, Any]) -> list[str]:
    """One line for each flag that would change the result."""
    return [
        " ".join([flag.name, *_values(flag, value)]) + f" is refused: {flag.refusal}"
        for flag, value in given.items()
        if flag.refusal is not None and _has_a_say(flag, value)
    ]


def _unknown(rest: Sequence[str], names: Collection[str], in_files: Mapping[str, str]) -> list[str]:
    """One line for each unknown flag; a word before all flags is not a value of one.

    Args:
        in_files: flag -> what to write for a setting that stands in a file.
    """
    flags = [word.split("=", 1)[0] for word in rest if _is_flag(word)]
    if rest and not flags:
        return [f"unexpected argument {rest[0]!r}; every value follows a --flag, remove it"]
    lines = []
    for flag in dict.fromkeys(flags):
        family = next(
            (why for start, why in refused_beginnings().items() if flag.startswith(start)), None
        )
        if family is not None:
            kin = [name for name in names if name.split("-")[:3] == flag.split("-")[:3]]
            near = nearest_flag(flag, kin)
            hint = f"did you mean {near}? If not, " if near else ""
            lines.append(f"{flag} is refused: {hint}{family}")
            continue
        if flag in in_files:
            lines.append(f"{flag} is not a flag; {in_files[flag]}")
            continue
        near = nearest_flag(flag, names)
        fix = f"did you mean {near}?" if near else "remove it"
        if (instead := of_forks().get(flag.replace("_", "-").lower())) is not None:
            fix = f"write {instead}"
        lines.append(f"unknown flag {flag}; {fix}")
    return lines


def _is_flag(word: str) -> bool:
    """Whether a word that no known flag took is a flag, and not a value such as -1 or -1e-3."""
    if not word.startswith("-"):
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


def resolve(
    args: argparse.Namespace,
    world_size: int,
    *,
    cuda_available: bool = False,
    transformer_engine_available: bool = False,
    apex_available: bool = False,
) -> Config:
    """Turns parsed flags into the configuration of a run: derives, converts to samples, checks.

    Args:
        args: from `parse_args`.
        cuda_available: whether this machine has a GPU.

    Returns:
        A configuration without open values. What was derived against the flags is listed in
        `runtime.notes`.

    Raises:
        UsageError: one line per problem, the most basic ones first.
    """
    environment = Environment(
        world_size=world_size,
        cuda=cuda_available,
        transformer_engine=transformer_engine_available,
        apex=apex_available,
    )
    names = {f.name for group in GROUPS.values() for f in dataclasses.fields(group)}
    given = {name: value for name, value in vars(args).items() if name in names}
    draft = Draft(values=given, explicit=args.explicit_flags & names)
    draft.require(world_size >= 1, f"world size {world_size} must be at least 1; start a rank")
    for name, flag in _required():
        draft.require(draft[name] is not None, f"{flag} is required; give it")
    draft.require(
        draft["global_batch_size"] != AUTO,
        f"--global-batch-size {AUTO} is chosen where a run with --copus begins; give a number, "
        "such as `copus plan` names",
    )
    draft.stop_if_problems()
    derive(draft, environment)
    for problem in profile_problems(draft.values):
        draft.problem(problem)
    draft.stop_if_problems()
    draft.values["ignored_flags"] = args.ignored_flags
    draft.values["notes"] = (*notes_of(args.ignored_flags), *draft.notes)
    config = Config.from_flat(draft.values, draft.explicit)
    BatchSchedule.of(config)
    return settled(config)


def _required() -> list[tuple[str, str]]:
    specs = [spec for group in GROUPS.values() for spec in option_specs(group)]
    return [(spec.dest, spec.strings[0]) for spec in specs if spec.required]


def with_checkpoint_args(args: argparse.Namespace, stored: Mapping[str, Any]) -> argparse.Namespace:
    """Fills in the model shape and the tokenizer from a checkpoint (`--use-checkpoint-args`).

    Args:
        args: from `parse_args`; flags given on the command line keep their value.
        stored: `Config.flat()` of the run that wrote the checkpoint, or the flags of Megatron-LM,
            where None says that a flag was not given.

    Returns:
        New arguments for `resolve`.
    """
    shape = {f.name for group in (ModelConfig, MoeConfig) for f in dataclasses.fields(group)}
    shape -= {"add_position_embedding"}
    tokenizer = {n for n in vars(args) if n.startswith(("tokenizer_", "tiktoken_"))}
    tokenizer |= {"vocab_file", "merge_file", "legacy_tokenizer"}
    values = dict(vars(args))
    stored = as_given(stored, values)
    for name in (shape | tokenizer) - args.explicit_flags:
        if stored.get(name) is not None and name in values:
            value = stored[name]
            values[name] = tuple(value) if isinstance(value, list) else value
    return argparse.Namespace(**values)
